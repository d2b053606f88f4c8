// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/hopper_w4a8.cpp: the Hopper experts with 4-bit weights and e4m3 activations.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::Mxfp4Fp8<>, moe::experts::HopperW4A8>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int4Fp8<32>, moe::experts::HopperW4A8>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int4Fp8<64>, moe::experts::HopperW4A8>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int4Fp8<128>, moe::experts::HopperW4A8>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int4Fp8<32, true>, moe::experts::HopperW4A8>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int4Fp8<64, true>, moe::experts::HopperW4A8>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Int4Fp8<128, true>, moe::experts::HopperW4A8>(Job const&);
