// SPDX-License-Identifier: Apache-2.0
// examples/moe/serve_sim/mpi_ranks.hpp: the ranks of mpirun: each runs an expert-parallel layer on its tokens, and weights move between
// them.
#pragma once

#include <memory>

#include "examples/moe/serve_sim/serve_sim.hpp"
#include "moe/comm/mpi.hpp"

namespace moe_tool::serve_sim {

/// Collective. E_CONFIG if the expert slots do not divide over the ranks; E_UNSUPPORTED for background moves if MPI has no thread support.
std::unique_ptr<Ranks> make_mpi_ranks(moe::comm::Mpi& world, Options const& options, Routing const& routing);

}  // namespace moe_tool::serve_sim
