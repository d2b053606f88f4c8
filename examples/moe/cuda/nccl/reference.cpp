// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/reference.cpp: the device oracle, expert-parallel over NCCL.
#include "examples/moe/cuda/nccl/run_over_nccl.hpp"

template moe_tool::JobResult moe_tool::run_over_nccl<moe::quantization::None, moe::experts::CudaReference>(Job const&);
