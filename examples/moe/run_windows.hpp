// SPDX-License-Identifier: Apache-2.0
// examples/moe/run_windows.hpp: the definition of run_windows. Each windows_*.cpp instantiates it for one scheme and format, so that they
// compile side by side.
#pragma once

#include "examples/moe/run_block.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"

namespace moe_tool {

template <class Quant, moe::ActivationFormat Format>
JobResult run_windows(Job const& job) {
  constexpr auto backends = boost::hana::filter(moe::registry::window_backends,
                                                [](auto type) { return boost::hana::bool_c<decltype(type)::type::kFormat == Format>; });
  return run_named<Quant>(job, backends, moe::registry::host_experts);
}

}  // namespace moe_tool
