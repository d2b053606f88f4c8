// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/windows_hopper_16bit_standard.cpp: the Hopper experts in bf16 over windows between GPUs, standard format.
#include "examples/moe/cuda/nccl/run_over_nccl_window.hpp"

template moe_tool::JobResult
moe_tool::run_over_nccl_window<moe::quantization::None, moe::experts::HopperContiguous, moe::ActivationFormat::standard>(Job const&);
