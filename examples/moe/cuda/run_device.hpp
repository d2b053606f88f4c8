// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/run_device.hpp: the definition of run_device. The layer around the kernels is plain host C++: each *.cpp here
// instantiates a few compositions, each *.cu the kernels that they call, so that they compile side by side.
#pragma once

#include "examples/moe/cuda/instances.hpp"
#include "examples/moe/run_block.hpp"
#include "moe/backends/collective/no_expert_parallel_cuda.hpp"

namespace moe_tool {

template <class Quant, class Experts>
JobResult run_device(Job const& job) {
  choose_device(job);
  moe::comm::Self<moe::space::cuda> self;
  return run_block<Quant, moe::backends::NoExpertParallel<moe::space::cuda>, Experts>(job, self);
}

}  // namespace moe_tool
