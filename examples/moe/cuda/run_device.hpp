// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/run_device.hpp: the definition of run_device. The layer around the kernels is plain host C++: each *.cpp here
// instantiates a few compositions, each *.cu the kernels that they call, so that they compile side by side.
#pragma once

#include "examples/moe/cuda/run_device_block.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"

namespace moe_tool {

template <class Quant, class Experts>
JobResult run_device(Job const& job) {
  choose_device(job);
  TpGroup tp(job);
  moe::comm::Self<moe::space::cuda> self;
  return run_device_block<Quant, moe::backends::NoExpertParallel<moe::space::cuda>, Experts>(job, self, tp);
}

}  // namespace moe_tool
