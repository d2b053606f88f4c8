// SPDX-License-Identifier: Apache-2.0
// examples/moe/grid.cpp: the coordinates of a rank in the grid, and the MPI communicators of its groups.
#include "examples/moe/grid.hpp"

#include <mpi.h>

#include <string_view>

#include "moe/models/registry.hpp"
#include "moe/runner/dual_batch.hpp"

namespace moe_tool {

using moe::Error;
using moe::ErrorCode;
using moe::text;

namespace {

/// E_CONFIG unless the sizes multiply to the number of ranks.
int data_parallel_size(JobOptions const& o, int ranks) {
  std::int64_t const others = std::int64_t{o.tp} * o.pcp;
  std::int64_t const dp = o.dp > 0 ? o.dp : ranks % others == 0 ? ranks / others : 1;
  if (dp * others != ranks) {
    throw Error(ErrorCode::config, text("--tp ", o.tp, ", --dp ", dp, " and --pcp ", o.pcp, " make ", dp * others, " ranks, and there are ",
                                        ranks, ". Fix: mpirun -n ", dp * others));
  }
  return static_cast<int>(dp);
}

moe::BackendFacts backend_facts(JobOptions const& o) {
  moe::BackendFacts facts = moe::registry::backend_facts(o.backend);
  if (o.sequence_parallel && !facts.sequence_parallel) {
    throw Error(ErrorCode::config, text("--sequence-parallel: ", o.backend, " expects the same rows on all ranks of a TP group"));
  }
  if (o.dual_batch == "on" && !facts.asynchronous) {
    constexpr std::string_view kOfTheCompiler = "moe: ";  // main() begins a line with it, too
    throw Error(ErrorCode::config, text(std::string_view(moe::rules::DualBatchNeedsHalves::kSentence).substr(kOfTheCompiler.size())));
  }
  facts.sequence_parallel = o.sequence_parallel;
  return facts;
}

void split(std::optional<moe::comm::Mpi>& group, int color, int rank, std::int64_t timeout_ms) {
  MPI_Comm part = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, color, rank, &part);
  group.emplace(part, moe::comm::Mpi::Params{.timeout_ms = timeout_ms, .statistics = true});
  MPI_Comm_free(&part);
}

}  // namespace

moe::MoeParallel place_in_grid(JobOptions const& o, moe::comm::Mpi const& world) {
  int const dp = data_parallel_size(o, world.size());
  moe::MoeParallel const place = moe::flatten({.tp_size = o.tp,
                                               .tp_rank = world.rank() % o.tp,
                                               .pcp_size = o.pcp,
                                               .pcp_rank = world.rank() / o.tp % o.pcp,
                                               .dp_size = dp,
                                               .dp_rank = world.rank() / o.tp / o.pcp,
                                               .enable_expert_parallel = o.expert_parallel == "on",
                                               .backend = backend_facts(o)});
  if (o.sequence_parallel && !place.use_sp_moe()) {
    throw Error(ErrorCode::config, text("--sequence-parallel needs --expert-parallel on, --tp and --dp above 1; they are ",
                                        o.expert_parallel, ", ", o.tp, " and ", dp));
  }
  if (char const* const conflict = moe::runner::parallel_conflict(place)) {
    throw Error(ErrorCode::config, text("--backend ", o.backend, ": ", conflict));
  }
  return place;
}

GridGroups::GridGroups(Job& job, std::int64_t timeout_ms) {
  split(tp_, job.comm->rank() / job.moe.tp_size, job.comm->rank(), timeout_ms);
  split(tokens_, job.moe.tp_rank, job.comm->rank(), timeout_ms);
  job.tp_group = &*tp_;
  job.tokens_group = &*tokens_;
}

}  // namespace moe_tool
