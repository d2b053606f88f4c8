// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/hopper_fp8.cpp: the Hopper experts with fp8 blocks, whose codes travel, expert-parallel over NCCL.
#include "examples/moe/cuda/nccl/run_over_nccl.hpp"

template moe_tool::JobResult moe_tool::run_over_nccl<moe::quantization::Fp8Block<>, moe::experts::HopperContiguous>(Job const&);
