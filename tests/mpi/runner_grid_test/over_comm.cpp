// SPDX-License-Identifier: Apache-2.0
// tests/mpi/runner_grid_test/over_comm.cpp: grids of the backends over a communicator, and of the one that moves no rows.
#include "harness.hpp"

namespace {
[[maybe_unused]] bool const registered = moe_test::grid::register_grids(moe::registry::host_backends, __FILE__, __LINE__);
}
