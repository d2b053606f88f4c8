// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/no_nccl.cpp: what a backend between GPUs says in a build without NCCL.
#ifndef MOE_HAS_NCCL
#include "examples/moe/cuda/run_device.hpp"

template <class Quant, class Experts>
moe_tool::JobResult moe_tool::run_over_nccl(Job const& job) {
  throw moe::Error(moe::ErrorCode::unsupported,
                   moe::text("--backend ", job.options.backend,
                             " on --device cuda: this program was built without NCCL. Install NCCL (nccl.h "
                             "and libnccl, where the CUDA toolkit is) and configure again, or use --device host"));
}
template moe_tool::JobResult moe_tool::run_over_nccl<moe::quantization::None, moe::experts::CudaReference>(Job const&);
template moe_tool::JobResult moe_tool::run_over_nccl<moe::quantization::None, moe::experts::HopperContiguous>(Job const&);
template moe_tool::JobResult moe_tool::run_over_nccl<moe::quantization::Fp8Block<>, moe::experts::HopperContiguous>(Job const&);
#endif
