// SPDX-License-Identifier: Apache-2.0
// examples/moe/run_host.hpp: the definition of run_host. Each host_*.cpp instantiates it for a few schemes, so that they compile side by
// side.
#pragma once

#include "examples/moe/run_block.hpp"

namespace moe_tool {

template <class Quant>
JobResult run_host(Job const& job) {
  return run_named<Quant>(job, moe::registry::host_backends, moe::registry::host_experts);
}

}  // namespace moe_tool
