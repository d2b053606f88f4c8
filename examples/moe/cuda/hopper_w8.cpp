// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/hopper_w8.cpp: the Hopper experts with 8-bit weights alone.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int8PerChannel, moe::experts::HopperW8A16>(Job const&);
