// SPDX-License-Identifier: Apache-2.0
// tests/mpi/eplb_runtime_test.cpp: experts move under runners that serve, over every host backend of the registry; what happens when a move
// fails; static placements from a file.
// moe-ranks: 2 3 4
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "../expect_error.hpp"
#include "../temporary_directory.hpp"
#include "eplb_serving.hpp"
#include "moe/backends/window/host/high_throughput.hpp"
#include "moe/backends/window/host/low_latency.hpp"
#include "moe/backends/window/host/one_sided.hpp"
#include "moe/backends/window/host/pplx.hpp"
#include "moe/backends/window/host/two_sided.hpp"
#include "moe/eplb/files.hpp"

int wanted_thread_level() { return MPI_THREAD_MULTIPLE; }

namespace {

using namespace moe_test;
using moe::ErrorCode;
using None = moe::quantization::None;
using Reference = moe::experts::Reference<float>;
using OverComm = moe::backends::AllToAllV<moe::comm::Mpi>;
using Model = Serving<None, OverComm, Reference>;

bool register_backends() {
  hana::for_each(moe::registry::all_host_backends, [](auto type) {
    using Backend = typename decltype(type)::type;
    static_assert(moe::registry::CompositionOf<RegistryConfig, None, Backend, Reference>::kLegal);
    register_serving<None, Backend, Reference>(__FILE__, __LINE__);
  });
  return true;
}
[[maybe_unused]] bool const registered = register_backends();

Model::Balancer::Params params(ServingRanks& ranks, MoveMode mode) {
  return {.maps = Model::initial(ranks, 1), .options = {.window = 2, .step_interval = 4}, .mode = mode};
}

// The last rank cannot send or receive: no rank commits that layer, all report it in the same step, and the old map serves on.
TEST(RuntimeBalancer, MoveThatFailsOnOneRankIsNotCommittedOnAny) {
  for (MoveMode mode : {MoveMode::pause, MoveMode::stepwise, MoveMode::background}) {
    ServingRanks ranks(MPI_COMM_WORLD, 1000);
    bool const fails = ranks.rank() == ranks.size() - 1;
    Model plain(ranks, 1), model(ranks, 1, params(ranks, mode));
    ranks.weights.fails = fails;
    int failed_at = -1;
    for (int step = 0; step < 400; ++step) {
      ASSERT_EQ(model.forward(step), plain.forward(step)) << name(mode) << ", step " << step;
      try {
        EXPECT_TRUE(model.step().committed_layers.empty()) << name(mode);
      } catch (moe::Error const& e) {
        EXPECT_EQ(failed_at, -1) << "one error: " << e.what();
        failed_at = step;
        if (fails) {
          EXPECT_EQ(e.code(), ErrorCode::capacity) << e.what();
        } else {
          EXPECT_TRUE(e.code() == ErrorCode::peer || e.code() == ErrorCode::timeout) << e.what();
        }
      }
      if (failed_at >= 0 && step > failed_at + 8) break;
      std::this_thread::sleep_for(std::chrono::milliseconds(model.balancer().pending() ? 5 : 0));
    }
    auto const steps = ranks.group.all_gather(static_cast<std::uint64_t>(failed_at));
    EXPECT_GE(failed_at, 0);
    for (std::uint64_t s : steps) EXPECT_EQ(s, steps[0]) << name(mode) << ": the step of the error";
    EXPECT_TRUE(model.balancer().disabled());
    EXPECT_EQ(model.balancer().maps(), Model::initial(ranks, 1)) << name(mode);
    EXPECT_EQ(model.wrong_slot(model.balancer().maps()), "") << name(mode);
    expect_error(ErrorCode::config, "window", [&] {
      auto bad = params(ranks, mode);
      bad.options.window = 0;
      Model(ranks, 1, bad);
    });
  }
}

// B20: maps that one run has reached are those of the next from its start, or after one move; they stay.
TEST(RuntimeBalancer, StaticPlacementFromAFile) {
  ServingRanks ranks;
  TemporaryDirectory directory;
  Model plain(ranks, 3);
  auto run = [&](Model& model, bool moves) {
    for (int step = 0; step < 12; ++step) {
      expect_close_rows(model.forward(step), plain.forward(step), {}, "against no load balancing");
      EXPECT_TRUE(moves || !model.step().triggered) << step;
      if (moves) model.step();
    }
  };
  Model balanced(ranks, 3, params(ranks, MoveMode::pause));
  run(balanced, true);
  ExpertMaps const reached = balanced.balancer().maps();
  ASSERT_NE(reached, Model::initial(ranks, 1));
  moe::eplb::save_maps(directory / "maps.json", {{"main", reached}});

  ExpertMaps const loaded = moe::eplb::load_maps(directory / "maps.json", "main", kServingLayers, kServingExperts, reached.num_physical());
  EXPECT_EQ(loaded, reached);
  auto fixed = params(ranks, MoveMode::pause);
  fixed.options.never_rearrange = true;
  auto at_start = fixed;
  at_start.maps = loaded;
  Model first(ranks, 3, at_start), moved(ranks, 3, fixed);
  moved.balancer().move_to(loaded);
  for (Model* model : {&first, &moved}) {
    EXPECT_EQ(model->wrong_slot(reached), "");
    run(*model, false);
    EXPECT_EQ(model->balancer().maps(), reached);
  }
}

// B10, and what a step counts: a dummy step on one rank enters no window, and all ranks trigger in the same step.
TEST(RuntimeBalancer, CountsWhatTheRouterChose) {
  ServingRanks ranks;
  auto p = params(ranks, MoveMode::pause);
  p.options = {.window = 3, .step_interval = 1000, .log_interval = 1};
  Model model(ranks, 3, p);
  for (int step = 0; step < 3; ++step) {
    model.forward(step);
    auto const report = model.step({.is_dummy = step == 1 && ranks.rank() == 1, .log_stats = true}).reports;
    ASSERT_EQ(report.size(), 1U);
    for (int l = 0; l < kServingLayers; ++l) {
      auto const row = report[0].rank_tokens.row(l);
      EXPECT_EQ(std::accumulate(row.begin(), row.end(), std::int64_t{0}), 3 * kServingTokens * (ranks.size() - (step == 1 ? 1 : 0)));
    }
  }
  auto const load = model.balancer().global_load();
  for (int l = 0; l < kServingLayers; ++l) {
    EXPECT_EQ(std::accumulate(load.row(l).begin(), load.row(l).end(), 0.0), 3.0 * kServingTokens * (3 * ranks.size() - 1));
  }
}

}  // namespace
