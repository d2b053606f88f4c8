// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/hopper_w8.cpp: the Hopper experts with 8-bit weights.
#include "examples/moe/cuda/run_device.hpp"

namespace quantization = moe::quantization;

template moe_tool::JobResult moe_tool::run_device<quantization::Int8PerChannel, moe::experts::HopperW8A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<quantization::Fp8PerChannel<>, moe::experts::HopperW8A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<quantization::Mxfp8W8A16<>, moe::experts::HopperW8A16>(Job const&);
template moe_tool::JobResult moe_tool::run_device<quantization::Mxfp8<>, moe::experts::HopperW8A16>(Job const&);
