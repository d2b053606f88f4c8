// SPDX-License-Identifier: Apache-2.0
// tests/unit/routing_simulator_test.cpp: every strategy's shape, determinism in (seed, layer, step, global row), the registry.
#include "moe/routing/simulator.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "moe/core/contract/concepts.hpp"

namespace {

using namespace moe;
using namespace moe::routing;
static_assert(Router<Simulator>);

struct Result {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<double> share;  // of all slots, per expert
};
Result simulate(SimulatorParams const& p, std::int64_t rows, std::int64_t valid = -1) {
  Result r{std::vector<std::int32_t>(static_cast<std::size_t>(rows * p.topk)), std::vector<float>(static_cast<std::size_t>(rows * p.topk)),
           std::vector<double>(static_cast<std::size_t>(p.num_experts))};
  Simulator(p).select(RouteArgs<float>{.logits = make_rows<dynamic, float const>(nullptr, rows, p.num_experts),
                                       .num_valid_rows = valid < 0 ? rows : valid,
                                       .topk_ids = make_rows(r.ids.data(), rows, p.topk),
                                       .topk_weights = make_rows(r.weights.data(), rows, p.topk)});
  for (std::int32_t id : r.ids) {
    if (id >= 0) r.share[static_cast<std::size_t>(id)] += 1.0 / static_cast<double>(r.ids.size());
  }
  return r;
}
SimulatorParams params(std::string strategy) {
  SimulatorParams p;
  p.strategy = std::move(strategy);
  p.num_experts = 30;
  p.topk = 4;
  p.seed = 42;
  p.num_ranks = 4;  // 8, 8, 7, 7 experts
  p.rank = 2;       // 16 … 22
  p.hot_expert = 5;
  return p;
}
constexpr std::int64_t kRows = 4000;

TEST(Simulator, R20_EveryStrategyIsDeterministicAndDistinct) {
  for (std::string const strategy :
       {"uniform_random", "normal_routing", "balanced", "zipf", "hot_expert", "hot_rank", "one_rank", "empty_rank"}) {
    SimulatorParams p = params(strategy);
    Result const a = simulate(p, 64);
    EXPECT_EQ(simulate(p, 64).ids, a.ids) << strategy;
    for (std::int64_t t = 0; t < 64; ++t) {
      std::set<std::int32_t> const row(a.ids.begin() + t * 4, a.ids.begin() + t * 4 + 4);
      EXPECT_EQ(row.size(), 4U) << strategy;
      EXPECT_TRUE(*row.begin() >= 0 && *row.rbegin() < 30) << strategy;
      EXPECT_NEAR(std::accumulate(a.weights.begin() + t * 4, a.weights.begin() + t * 4 + 4, 0.0), 1.0, 1e-6);
    }
    p.first_row = 10;  // another rank that holds rows 10 … gets the same routing for them
    Result const part = simulate(p, 20);
    EXPECT_TRUE(std::equal(part.ids.begin(), part.ids.end(), a.ids.begin() + 40)) << strategy;
    if (strategy == "balanced") continue;
    p = params(strategy);
    p.seed = 43;
    EXPECT_NE(simulate(p, 64).ids, a.ids) << strategy;
    p = params(strategy);
    p.layer = 1;
    EXPECT_NE(simulate(p, 64).ids, a.ids) << strategy;
    p = params(strategy);
    p.step = 1;
    EXPECT_NE(simulate(p, 64).ids, a.ids) << strategy;
  }
}

TEST(Simulator, R20_UnknownNameListsTheValidOnes) {
  try {
    Simulator const s(params("fancy"));
    FAIL();
  } catch (Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::argument);
    EXPECT_EQ(e.message(),
              "routing strategy 'fancy' is unknown; valid: balanced, empty_rank, hot_expert, hot_rank, normal_routing, one_rank, replay, "
              "uniform_random, zipf");
  }
}

TEST(Simulator, NewStrategiesRegisterByNameOnce) {
  auto& registry = SimulatorRegistry::instance();
  registry.add("first_k", [](SimulatorParams const& p, std::int64_t, std::int32_t* ids, float* weights) {
    for (int j = 0; j < p.topk; ++j) {
      ids[j] = j;
      weights[j] = 1.0F;
    }
  });
  EXPECT_EQ(simulate(params("first_k"), 1).ids, (std::vector<std::int32_t>{0, 1, 2, 3}));
  EXPECT_NE(registry.names().find("first_k"), std::string::npos);
  EXPECT_THROW(registry.add("first_k", nullptr), Error);
  EXPECT_THROW(registry.add("zipf", nullptr), Error);
}

TEST(Simulator, Shapes) {
  for (double share : simulate(params("uniform_random"), kRows).share) EXPECT_NEAR(share, 1.0 / 30, 0.006);
  Result const balanced = simulate(params("balanced"), 30);
  for (double share : balanced.share) EXPECT_DOUBLE_EQ(std::round(share * 30), 1.0);
  EXPECT_EQ(balanced.ids[5], 5);
  Result const zipf = simulate(params("zipf"), kRows);
  EXPECT_GT(zipf.share[0], 1.5 * zipf.share[3]);
  EXPECT_GT(zipf.share[1], 3.0 * zipf.share[29]);
  SimulatorParams p = params("hot_expert");
  p.hot_fraction = 0.6;  // and by chance in 4 / 30 of the others
  EXPECT_NEAR(simulate(p, kRows).share[5] * 4, 0.6 + 0.4 * 4 / 30, 0.03);
  p.hot_fraction = 1.0;
  EXPECT_DOUBLE_EQ(std::round(simulate(p, kRows).share[5] * 4 * 1e6) / 1e6, 1.0);
  p = params("hot_rank");
  p.hot_fraction = 1.0;
  Result const hot = simulate(p, 100);
  for (std::size_t t = 0; t < 100; ++t) {
    EXPECT_TRUE(std::any_of(hot.ids.begin() + static_cast<long>(t) * 4, hot.ids.begin() + static_cast<long>(t) * 4 + 4,
                            [](std::int32_t id) { return id >= 16 && id < 23; }));
  }
  for (std::int32_t id : simulate(params("one_rank"), 100).ids) EXPECT_TRUE(id >= 16 && id < 23);
  for (std::int32_t id : simulate(params("empty_rank"), 100).ids) EXPECT_FALSE(id >= 16 && id < 23);
  Result const normal = simulate(params("normal_routing"), kRows);
  EXPECT_GT(normal.share[15], 2.0 * normal.share[1]);
}

TEST(Simulator, WithReplacementAndPadding) {
  SimulatorParams p = params("uniform_random");
  p.num_experts = 4;
  p.num_ranks = 1;
  p.rank = 0;
  p.hot_expert = 0;
  p.with_replacement = true;
  Result const r = simulate(p, 100, 90);
  bool repeats = false;
  for (std::size_t t = 0; t < 90; ++t) repeats = repeats || r.ids[4 * t] == r.ids[4 * t + 1];
  EXPECT_TRUE(repeats);
  for (std::size_t i = 360; i < 400; ++i) EXPECT_EQ(r.ids[i], -1);
}

TEST(Simulator, ReplayGivesTheRecordBack) {
  RoutingRecord const record{2, {4, 5, 6, 7, -1, 0}, {.1F, .9F, .2F, .8F, 0.0F, 1.0F}};
  SimulatorParams p = params("replay");
  p.topk = 2;
  p.record = &record;
  p.first_row = 1;
  Result const r = simulate(p, 2);
  EXPECT_EQ(r.ids, (std::vector<std::int32_t>{6, 7, -1, 0}));
  EXPECT_EQ(r.weights, (std::vector<float>{.2F, .8F, 0.0F, 1.0F}));
  EXPECT_THROW(simulate(p, 3), Error);
  p.num_experts = 6;
  p.rank = 0;
  EXPECT_THROW(Simulator{p}, Error);  // id 7
  p.record = nullptr;
  EXPECT_THROW(Simulator{p}, Error);
}

TEST(Simulator, ImpossibleSizes) {
  SimulatorParams p = params("one_rank");
  p.topk = 8;
  EXPECT_THROW(Simulator{p}, Error);  // rank 2 owns 7
  p = params("empty_rank");
  p.num_experts = 4;
  p.hot_expert = 0;
  EXPECT_THROW(Simulator{p}, Error);
  p = params("uniform_random");
  p.topk = 31;
  EXPECT_THROW(Simulator{p}, Error);
}

}  // namespace
