// SPDX-License-Identifier: Apache-2.0
// examples/moe/run_host.hpp: the definitions of run_host, run_sample and run_inside. Each host_*.cpp instantiates them for a few schemes,
// so that they compile side by side.
#pragma once

#include "examples/moe/run_block.hpp"

namespace moe_tool {

template <class Quant>
JobResult run_host(Job const& job) {
  return run_named<Quant>(job, moe::registry::host_backends, moe::registry::host_experts);
}

template <class Quant>
JobResult run_sample(Job const& job) {
  return run_named<Quant>(job, moe::registry::sample_backends, moe::registry::host_experts);
}

template <class Quant>
JobResult run_inside(Job const& job) {
  return run_named<Quant>(job, moe::registry::host_backends, moe::registry::host_experts_inside);
}

}  // namespace moe_tool
