// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/run_device.hpp: one composition of the CUDA space. The layer around the kernels is plain host C++: each *.cpp here
// instantiates a few compositions, each *.cu the kernels that they call, so that they compile side by side.
#pragma once

#include "examples/moe/run_block.hpp"
#include "moe/backends/collective/no_expert_parallel_cuda.hpp"

namespace moe_tool {

template <class Quant, class Experts>
JobResult run_device(Job const& job) {
  moe::comm::Self<moe::space::cuda> self;
  return run_block<Quant, moe::backends::NoExpertParallel<moe::space::cuda>, Experts>(job, self);
}

/// The same with the backend that the job names, over NCCL. Collective. E_UNSUPPORTED in a build without NCCL. Each of cuda/nccl/*.cpp
/// instantiates it for one scheme.
template <class Quant, class Experts>
JobResult run_over_nccl(Job const& job);

}  // namespace moe_tool
