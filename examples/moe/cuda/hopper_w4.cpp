// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/hopper_w4.cpp: the Hopper experts with 4-bit weights.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::Mxfp4W4A16<>, moe::experts::HopperW4A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Nvfp4W4A16, moe::experts::HopperW4A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int4Group128, moe::experts::HopperW4A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::WNa16<4, 32>, moe::experts::HopperW4A16>(Job const&);
