// SPDX-License-Identifier: Apache-2.0
// tests/mpi/eplb_runtime_parts_test.cpp: experts move under runners whose batches are split into halves or chunks, against whole batches
// without load balancing; a row is counted once, however its batch is split.
// moe-ranks: 2
#include <gtest/gtest.h>

#include "eplb_serving.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"

int wanted_thread_level() { return MPI_THREAD_MULTIPLE; }

namespace {

using namespace moe_test;
using None = moe::quantization::None;
using Reference = moe::experts::Reference<float>;
using OverComm = moe::backends::AllToAllV<moe::comm::Mpi>;
using Gather = moe::backends::AllGatherReduceScatter<moe::comm::Mpi>;
using LowLatency = moe::backends::LowLatency<moe::comm::MpiShared>;
using HighThroughput = moe::backends::HighThroughput<moe::comm::MpiShared>;

struct InHalves : moe::RunnerDefaults {
  using DualBatch = moe::runner::dual_batch::Halves;
};
struct InChunks : moe::RunnerDefaults {
  using Chunking = moe::runner::chunking::Lockstep;
};
struct InHalvesOfChunks : InHalves {
  using Chunking = moe::runner::chunking::Lockstep;
};

/// topk: at which the bits do not depend on the maps.
template <class Backend, class Parts>
void register_parts(int line, char const* name, int calls, int topk, MoveMode mode) {
  register_serving<None, Backend, Reference, Parts>(
      __FILE__, line, {.topk = {topk}, .modes = {mode}, .moves = 2, .bits = true, .experts_calls = calls * kServingLayers}, name);
}
bool register_all() {
  register_parts<OverComm, InHalves>(__LINE__, "ExpertsMoveUnderHalves", 2, 1, MoveMode::pause);
  register_parts<LowLatency, InHalves>(__LINE__, "ExpertsMoveUnderHalves", 2, 3, MoveMode::background);
  register_parts<HighThroughput, InHalves>(__LINE__, "ExpertsMoveUnderHalves", 2, 1, MoveMode::stepwise);
  register_parts<Gather, InChunks>(__LINE__, "ExpertsMoveUnderChunks", 2, 1, MoveMode::pause);
  register_parts<LowLatency, InChunks>(__LINE__, "ExpertsMoveUnderChunks", 2, 3, MoveMode::background);
  register_parts<OverComm, InHalvesOfChunks>(__LINE__, "ExpertsMoveUnderHalvesOfChunks", 4, 1, MoveMode::stepwise);
  return true;
}
[[maybe_unused]] bool const registered = register_all();

template <class Parts>
void counts_each_row_once() {
  using Model = Serving<None, OverComm, Reference, Parts>;
  ServingRanks ranks;
  Model model(ranks, 3, {.maps = Model::initial(ranks, 1), .options = {.window = 3, .step_interval = 1000}, .mode = MoveMode::pause});
  for (int step = 0; step < 3; ++step) {
    model.forward(step);
    model.step();
  }
  auto const load = model.balancer().global_load();
  for (int l = 0; l < kServingLayers; ++l) {
    EXPECT_EQ(std::accumulate(load.row(l).begin(), load.row(l).end(), 0.0), 3.0 * 3 * kServingTokens * ranks.size());
  }
}
TEST(RuntimeBalancer, CountsARowOfHalvesAndChunksOnce) {
  counts_each_row_once<InHalves>();
  counts_each_row_once<InChunks>();
  counts_each_row_once<InHalvesOfChunks>();
}

}  // namespace
