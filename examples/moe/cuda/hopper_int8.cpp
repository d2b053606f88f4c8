// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/hopper_int8.cpp: the Hopper experts in int8.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int8PerToken, moe::experts::HopperContiguous>(Job const&);
