// SPDX-License-Identifier: Apache-2.0
// examples/moe/grid.hpp: the grid of ranks that --tp, --dp, --pcp and --expert-parallel ask for, and its groups.
#pragma once

#include <optional>

#include "examples/moe/job.hpp"

namespace moe_tool {

/// This rank's coordinates. E_CONFIG, with the rule's sentence, for a grid that does not have the program's ranks, and for a grid or a dual
/// batch that the backend cannot serve.
moe::MoeParallel place_in_grid(JobOptions const& options, moe::comm::Mpi const& world);

/// The communicators of a rank's groups, and the job's pointers to them.
class GridGroups {
 public:
  /// Collective over the job's communicator.
  GridGroups(Job& job, std::int64_t timeout_ms);

 private:
  std::optional<moe::comm::Mpi> tp_;
  std::optional<moe::comm::Mpi> tokens_;
};

}  // namespace moe_tool
