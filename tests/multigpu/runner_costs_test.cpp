// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/runner_costs_test.cpp: what a forward between GPUs must not do on the host where ranks state their rows: wait for the
// device or for a rank, and allocate. Blocks on grids with and without sums of NCCL, and in chunks.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/nccl_symmetric.hpp"
#include "runner_grid_ranks.hpp"

namespace moe_test {
/// expect_enqueues_only() of tests/gpu/forward_costs.cuh.
void expect_call_enqueues_only(cudaStream_t stream, char const* name, std::function<void()> const& forward, bool calls_nccl);
}  // namespace moe_test

namespace {

using namespace moe_test::grid;
using Local = backends::NoExpertParallel<Cuda>;
using LowLatency = backends::LowLatency<comm::NcclSymmetric>;

/// Every rank holds its own stream for a while, as often as the others. calls_nccl: a forward sums over its TP group, or restores the rows
/// of sequence parallel ranks.
template <class Backend>
void enqueues_only(Grid const& g, SharedOutput shared, bool calls_nccl) {
  Model const m{.form = {false, false, shared}, .hidden = kWideHidden};
  Rank<Backend> rank(g, m, true);
  std::string const name = text(Backend::kName, ", tp ", g.tp, ", dp ", g.dp);
  SCOPED_TRACE(name);
  runner::ReductionPlan const& plan = rank.runner.reductions();
  EXPECT_EQ(plan.final || plan.routed_early || plan.shared_early || rank.moe.use_sp_moe(), calls_nccl);
  std::vector<float> const x = bf16_numbers(70 + rank.moe.dp_rank, 4 * m.hidden), want = rank.forward(x);
  Rowset rows(x, m.hidden);
  MPI_Barrier(MPI_COMM_WORLD);
  moe_test::expect_call_enqueues_only(
      rank.stream, name.c_str(), [&] { rank.runner.forward(rows.x(), rows.y(), {}, rank.stream); }, calls_nccl);
  finish(rank.runner, rank.tp, rank.stream);
  EXPECT_EQ(rows.result(), want);
  MPI_Barrier(MPI_COMM_WORLD);
}
TEST(RunnerCosts, GridsThatStateTheirRowsEnqueueOnly) {
  enqueues_only<LowLatency>({1, world_size(), 1, true}, SharedOutput::complete, false);
  enqueues_only<Local>({world_size(), 1, 1, true}, SharedOutput::partial, true);
}

struct ChunkParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Chunking = runner::chunking::Lockstep;
};

/// Three passes of two rows; a rank with fewer rows brings none to the last ones.
TEST(RunnerCosts, ChunksOfStatedRowsEnqueueOnly) {
  using R = Runner<LayerOf<LowLatency>, ChunkParts>;
  Model const m{.form = {false, false, SharedOutput::none}, .hidden = kWideHidden};
  Nccl& comm = *group({"ep", 0});
  ExpertPlacement const placement(kExperts, world_size());
  Store const store = experts_of<Store>(m, placement, world_rank(), 0, 1);
  OnDevice weights;
  typename R::Params p{.layer = {.shape = {.hidden = m.hidden, .intermediate = kIntermediate, .num_experts = kExperts, .topk = kTopK},
                                 .max_tokens_per_rank = 2,
                                 .placement = placement,
                                 .router = {.num_experts = kExperts, .topk = kTopK}}};
  p.gate.weight = make_rows(weights.as(p.gate.weight.data_handle(), bf16_numbers(1, kExperts * m.hidden)), kExperts, m.hidden);
  for (ChunkMode mode : {ChunkMode::exact, ChunkMode::min_one}) {
    p.chunking = {.mode = mode, .most_rows = 6};
    R runner(comm, store.view(), p);
    CudaStream stream;
    Rowset rows(bf16_numbers(90 + world_rank(), (6 - 2 * (world_rank() % 3)) * m.hidden), m.hidden);
    auto const forward = [&] { runner.forward(rows.x(), rows.y(), {}, stream); };
    forward();
    finish(runner, &comm, stream);
    std::vector<float> const want = rows.result();
    MPI_Barrier(MPI_COMM_WORLD);
    std::string const name = text("chunks over low_latency, mode ", static_cast<int>(mode));
    moe_test::expect_call_enqueues_only(stream, name.c_str(), forward, false);
    finish(runner, &comm, stream);
    EXPECT_EQ(rows.result(), want);
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

}  // namespace
