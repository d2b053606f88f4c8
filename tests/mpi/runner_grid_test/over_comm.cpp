// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_grid_test/over_comm.cpp: grids of the backends over a communicator, and of the one that moves no rows, also with experts
// that route inside.
#include "harness.hpp"

namespace {
using moe_test::grid::register_grids;
namespace registry = moe::registry;
[[maybe_unused]] bool const routed = register_grids(registry::host_backends, registry::host_experts, __FILE__, __LINE__);
[[maybe_unused]] bool const inside = register_grids(registry::host_backends, registry::host_experts_inside, __FILE__, __LINE__);
}  // namespace
