// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/windows_hopper_fp8_batched.cpp: the Hopper experts with fp8 blocks over windows between GPUs, batched format.
#include "examples/moe/cuda/nccl/run_over_nccl_window.hpp"

template moe_tool::JobResult
moe_tool::run_over_nccl_window<moe::quantization::Fp8Block<>, moe::experts::HopperMasked, moe::ActivationFormat::batched>(Job const&);
