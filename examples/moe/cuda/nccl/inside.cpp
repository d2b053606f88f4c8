// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/inside.cpp: the device oracle that routes inside, over the backends that gather rows.
#include "examples/moe/cuda/nccl/run_over_nccl.hpp"

template moe_tool::JobResult moe_tool::run_over_nccl<moe::quantization::None, moe::experts::Monolithic<moe::experts::CudaReference>>(
    Job const&);
