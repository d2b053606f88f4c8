// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/hopper_fp8.cpp: the Hopper experts in the fp8 schemes.
#include "examples/moe/cuda/run_device.hpp"

template moe_tool::JobResult moe_tool::run_device<moe::quantization::Fp8PerTensor<>, moe::experts::HopperContiguous>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Fp8PerToken<>, moe::experts::HopperContiguous>(Job const&);
template moe_tool::JobResult moe_tool::run_device<moe::quantization::Fp8Block<>, moe::experts::HopperContiguous>(Job const&);
