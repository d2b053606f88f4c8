// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_grid_test/windows_batched.cpp: grids of the backends over windows that deliver batches by expert.
#include "harness.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"

namespace {
constexpr auto backends = boost::hana::filter(moe::registry::window_backends, [](auto type) {
  return boost::hana::bool_c<decltype(type)::type::kFormat == moe::ActivationFormat::batched>;
});
[[maybe_unused]] bool const registered = moe_test::grid::register_grids(backends, moe::registry::host_experts, __FILE__, __LINE__);
}  // namespace
