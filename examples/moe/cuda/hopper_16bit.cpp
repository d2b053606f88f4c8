// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/hopper_16bit.cpp: the Hopper experts in bf16.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::None, moe::experts::HopperContiguous>(Job const&);
