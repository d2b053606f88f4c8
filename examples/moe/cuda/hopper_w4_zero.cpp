// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/hopper_w4_zero.cpp: the Hopper experts with int4 weights in groups of 64, or with zero points.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::WNa16<4, 64>, moe::experts::HopperW4A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::WNa16<4, 32, true>, moe::experts::HopperW4A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::WNa16<4, 64, true>, moe::experts::HopperW4A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::WNa16<4, 128, true>, moe::experts::HopperW4A16>(Job const&);
