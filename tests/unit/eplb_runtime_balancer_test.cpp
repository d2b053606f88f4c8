// SPDX-License-Identifier: Apache-2.0
// tests/unit/eplb_runtime_balancer_test.cpp: one rank's load balancing step by step, the balance that it reaches on a skewed trace, and the
// errors of docs/semantics/eplb.md §11, row by row.
#include "moe/eplb/runtime_balancer.hpp"

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <fstream>
#include <limits>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "expect_error.hpp"
#include "moe/comm/self.hpp"
#include "moe/eplb/files.hpp"
#include "moe/eplb/recovery.hpp"
#include "moe/routing/simulator.hpp"
#include "temporary_directory.hpp"
#include "tests/mpi/eplb_harness.hpp"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using moe::text;
using moe::comm::Self;
using moe::eplb::BalancerOptions;
using moe::eplb::MoveMode;
using moe::eplb::RuntimeStep;
using moe::eplb::SelfGroup;

/// What a layer or a runner gets to know.
struct CountsChanges {
  int changed = 0;
  void weights_changed(moe::HostStream) { ++changed; }
};

constexpr int kLayers = 3, kExperts = 5, kSlots = 7;
using OneRank = moe::eplb::RuntimeBalancer<Self<>, SelfGroup>;

/// One rank whose experts move between its expert slots.
struct OneRankModel {
  explicit OneRankModel(MoveMode mode, BalancerOptions const& options = {.window = 2, .step_interval = 2})
      : weights(kLayers, kSlots, 64),
        maps((weights.load(random_maps(kLayers, kExperts, kSlots, 5), 0), random_maps(kLayers, kExperts, kSlots, 5))),
        balancer(self, group, weights.tensors(), {.maps = maps, .options = options, .mode = mode}),
        layers(kLayers) {}
  void attach() {
    for (int l = 0; l < kLayers; ++l) balancer.attach(l, layers[static_cast<std::size_t>(l)]);
  }
  /// What routers do: every expert of layer l gets tokens, expert `hot` many.
  void count(int hot) {
    for (int l = 0; l < kLayers; ++l) {
      for (int s = 0; s < kSlots; ++s) {
        balancer.load(l).load_counter[s] += balancer.maps().physical_to_logical()(l, s) == hot ? 100 : 1;
      }
    }
  }
  Self<> self;
  SelfGroup group;
  PatternWeights weights;
  ExpertMaps maps;
  OneRank balancer;
  std::vector<CountsChanges> layers;
};

TEST(RuntimeBalancer, WeightsMapsAndLayersChangeTogether) {
  for (MoveMode mode : {MoveMode::pause, MoveMode::stepwise, MoveMode::background}) {
    OneRankModel m(mode);
    m.attach();
    std::int32_t const* const table = m.balancer.mapping(1).logical_to_physical;
    std::vector<int> changed(kLayers, 0);
    int finished = 0;
    for (int step = 0; step < 2000 && finished < 4; ++step) {
      m.count(finished % kExperts);
      RuntimeStep const done = m.balancer.step();
      for (int l : done.committed_layers) ++changed[static_cast<std::size_t>(l)];
      if (mode == MoveMode::pause) {
        EXPECT_EQ(done.triggered, done.finished);
      }
      if (mode == MoveMode::stepwise) {
        EXPECT_LE(done.committed_layers.size(), 1U);
      }
      for (int l = 0; l < kLayers; ++l) EXPECT_EQ(m.layers[static_cast<std::size_t>(l)].changed, changed[static_cast<std::size_t>(l)]);
      EXPECT_EQ(m.weights.check(m.balancer.maps(), 0), "") << name(mode) << ", step " << step;
      auto const published = m.balancer.maps().logical_to_physical().row(1);
      EXPECT_TRUE(std::equal(published.begin(), published.end(), table)) << "at the same address";
      finished += done.finished ? 1 : 0;
      if (m.balancer.pending()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    EXPECT_EQ(finished, 4) << name(mode);
    EXPECT_GT(changed[0] + changed[1] + changed[2], 0) << name(mode);
    if (mode == MoveMode::pause) {
      EXPECT_EQ(m.balancer.maps().replica_count()(2, 3), kSlots - kExperts + 1)
          << "the hot expert of the last window has all spare expert slots";
    }
  }
}

TEST(RuntimeBalancer, WrongCalls) {
  OneRankModel m(MoveMode::stepwise);
  expect_error(ErrorCode::state, "no layer is attached to the weights of layer 0", [&] { m.balancer.step(); });
  expect_error(ErrorCode::argument, "layer 3 is out of range [0, 3)", [&] { m.balancer.attach(3, m.layers[0]); });
  expect_error(ErrorCode::argument, "layer -1 is out of range [0, 3)", [&] { m.balancer.placement(-1); });
  m.attach();
  m.count(1);
  EXPECT_TRUE(m.balancer.step().triggered);
  ASSERT_TRUE(m.balancer.pending());
  expect_error(ErrorCode::state, "a rearrangement is pending already", [&] { m.balancer.move_to(m.maps); });
  EXPECT_FALSE(m.balancer.disabled());
  m.balancer.stop();
  expect_error(ErrorCode::argument, "new maps of [3, 8]", [&] { m.balancer.move_to(random_maps(kLayers, kExperts, kSlots + 1, 1)); });
  EXPECT_TRUE(m.balancer.disabled());
  EXPECT_EQ(m.weights.check(m.balancer.maps(), 0), "");
  m.count(1);
  EXPECT_FALSE(m.balancer.step().triggered) << "steps go on";
}

// One counter of every step, read where the routers write it; the newest step's counts may come a step later.
TEST(StepLoads, OldestFirstAndDummiesAreDropped) {
  moe::eplb::MapTables<> tables(ExpertMaps::initial(1, 2, 0));
  moe::eplb::StepLoads<moe::space::host> loads(tables);
  Table<std::int32_t> load(1, 2);
  tables.load_counter(0)[0] = 3;
  loads.end_step(false, {});
  EXPECT_EQ(tables.load_counter(0)[0], 0);
  EXPECT_FALSE(loads.take(load, 1)) << "the newest may still run";
  tables.load_counter(0)[1] = 4;
  loads.end_step(true, {});
  expect_error(ErrorCode::state, "two steps' counts wait", [&] { loads.end_step(false, {}); });
  EXPECT_TRUE(loads.take(load, 0));
  EXPECT_EQ(load.flat(), (std::vector<std::int32_t>{3, 0}));
  EXPECT_FALSE(loads.take(load, 0)) << "a dummy";
  EXPECT_EQ(load.flat(), (std::vector<std::int32_t>{3, 0}));
}

/// Slots of one step of a zipf(1.2) trace as routers map and count them: rows of every rank, each layer's experts in another order.
Table<std::int32_t> trace_step(ExpertMaps const& maps, int ranks, std::int64_t step) {
  constexpr int kTopK = 8;
  constexpr std::int64_t kRows = 80;
  Table<std::int32_t> load(maps.num_layers(), maps.num_physical());
  std::vector<std::int32_t> ids(kTopK);
  std::vector<float> weights(kTopK);
  for (int l = 0; l < maps.num_layers(); ++l) {
    moe::routing::SimulatorParams p{.strategy = "zipf", .num_experts = maps.num_logical(), .topk = kTopK, .layer = l, .zipf_exponent = 1.2};
    p.step = step;
    for (int rank = 0; rank < ranks; ++rank) {
      moe::routing::ExpertMapping const mapping{.num_experts = maps.num_logical(),
                                                .num_physical = maps.num_physical(),
                                                .max_replicas = maps.max_replicas(),
                                                .logical_to_physical = maps.logical_to_physical().row(l).data(),
                                                .replica_count = maps.replica_count().row(l).data(),
                                                .source_rank = rank,
                                                .ep_size = ranks};
      for (std::int64_t t = 0; t < kRows; ++t) {
        moe::routing::detail::simulate_zipf(p, rank * kRows + t, ids.data(), weights.data());
        for (int j = 0; j < kTopK; ++j) {
          std::int32_t const e = (ids[static_cast<std::size_t>(j)] * 37 + 11 * l) % maps.num_logical();
          ++load(l, moe::routing::map_expert(mapping, e, t, j, kTopK));
        }
      }
    }
  }
  return load;
}

// Measured on the steps after the rearrangement, not predicted from those before it.
TEST(RuntimeBalancer, ZipfTraceWith32ReplicasIsBalanced) {
  for (auto [experts, ranks] : {std::pair{256, 8}, {128, 4}}) {
    moe::eplb::Balancer balancer({.window = 2, .step_interval = 8, .log_interval = 1});
    balancer.add_model("main", ExpertMaps::initial(2, experts, 32), ranks);
    SelfGroup group;
    std::vector<double> measured;
    for (std::int64_t step = 0; step < 5; ++step) {
      balancer.load_pass(0) = trace_step(balancer.maps(0), ranks, step);
      auto const out = balancer.step({.log_stats = true}, group);
      measured.push_back(out.reports[0].balancedness);
      if (out.rearrange) {
        auto const next = balancer.propose(0, {.num_ranks = ranks}, group);
        EXPECT_GE(next.balancedness_after, 0.9) << experts << " experts on " << ranks << " ranks, predicted";
        balancer.commit(0, next.maps);
      }
    }
    EXPECT_LT(measured[0], 0.85) << "the trace is skewed";
    for (std::size_t step = 2; step < measured.size(); ++step) {
      EXPECT_GE(measured[step], 0.9) << experts << " experts on " << ranks << " ranks, step " << step;
    }
  }
}

// ---- docs/semantics/eplb.md §11, row by row.

/// Rank 0 of two, whose peer answers alike but for what `words` adds to its words; it never sends weights.
struct TwoRanks : Self<> {
  int size() const { return 2; }
  void all_gather(void const* in, std::int64_t n, void* out, moe::HostStream) {
    for (int r = 0; r < 2; ++r) std::memcpy(static_cast<char*>(out) + r * n, in, static_cast<std::size_t>(n));
  }
  void all_gather_v(void const*, std::int64_t, void*, std::int64_t const*, std::int64_t const*, moe::HostStream) {}
  void all_to_all_v(void const*, std::int64_t const*, std::int64_t const*, void*, std::int64_t const*, std::int64_t const*,
                    moe::HostStream) {
    throw moe::TransportError(ErrorCode::timeout, 0, 1, "exchange", 7, "not there within 20 ms");
  }
};
static_assert(moe::Communicator<TwoRanks>);
struct TwoRankGroup {
  std::uint64_t differs = 0;
  static constexpr int size() { return 2; }
  static void all_reduce_sum(std::span<std::int64_t>) {}
  std::vector<std::uint64_t> all_gather(std::uint64_t word) const { return {word, word + differs}; }
};
using TwoRankBalancer = moe::eplb::RuntimeBalancer<TwoRanks, TwoRankGroup>;

TEST(EplbErrors, Sizes) {
  TwoRanks comm;
  TwoRankGroup group;
  PatternWeights weights(kLayers, 4, 32);
  auto const make = [&](int slots, BalancerOptions const& options) {
    TwoRankBalancer(comm, group, weights.tensors(), {.maps = ExpertMaps::initial(kLayers, kExperts, slots - kExperts), .options = options});
  };
  expect_error(ErrorCode::config, "P must be divisible by ep_size: P = 7, ep_size = 2", [&] { make(7, {}); });
  expect_error(ErrorCode::config, "num_redundant", [&] { make(4, {}); });
  expect_error(ErrorCode::config, "eplb window must be greater than 0, is 0", [&] { make(8, {.window = 0}); });
  expect_error(ErrorCode::config, "eplb step_interval must be greater than 0, is -1", [&] { make(8, {.step_interval = -1}); });
  expect_error(ErrorCode::argument, "expert maps of 2 layers for the weights of 3",
               [&] { TwoRankBalancer(comm, group, weights.tensors(), {.maps = ExpertMaps::initial(2, kExperts, 3)}); });
  SelfGroup alone;
  expect_error(ErrorCode::argument, "the group has 1 ranks, the communicator of the weights 2", [&] {
    moe::eplb::RuntimeBalancer<TwoRanks, SelfGroup>(comm, alone, weights.tensors(), {.maps = ExpertMaps::initial(kLayers, kExperts, 3)});
  });
}

TEST(EplbErrors, InvalidMapNamesLayerAndPhysicalId) {
  auto const map = [](std::vector<std::vector<std::int32_t>> const& rows) { ExpertMaps(Table<std::int32_t>(rows), 3); };
  expect_error(ErrorCode::argument, "physical id 2", [&] { map({{0, 1, 2, 0}, {0, 1, 3, 2}}); });
  expect_error(ErrorCode::argument, "layer 1", [&] { map({{0, 1, 2, 0}, {0, 1, 3, 2}}); });
  expect_error(ErrorCode::argument, "expert 2 has no expert slot in layer 0", [&] { map({{0, 1, 0, 1}}); });
}

TEST(EplbErrors, LoadThatIsNotANumber) {
  for (double bad : {std::numeric_limits<double>::quiet_NaN(), -1.0, std::numeric_limits<double>::infinity()}) {
    Table<double> load(1, 4, 2.0);
    load(0, 3) = bad;
    expect_error(ErrorCode::argument, "expert 3", [&] { moe::eplb::propose(ExpertMaps::initial(1, 4, 2), load, {.num_ranks = 2}); });
  }
  OneRankModel m(MoveMode::pause);
  m.attach();
  m.balancer.load(1).load_counter[4] = -3;
  expect_error(ErrorCode::argument, "load of physical expert 4 in layer 1 must be at least 0, is -3", [&] { m.balancer.step(); });
}

TEST(EplbErrors, RanksThatDiffer) {
  TwoRanks comm;
  TwoRankGroup group;
  PatternWeights weights(1, 3, 32);
  ExpertMaps const maps = ExpertMaps::initial(1, 4, 2);
  TwoRankBalancer balancer(comm, group, weights.tensors(), {.maps = maps, .options = {.step_interval = 1}, .mode = MoveMode::pause});
  CountsChanges layer;
  balancer.attach(0, layer);
  group.differs = 1;
  expect_error(ErrorCode::mismatch, "ranks disagree about the EPLB step: rank 0 has 0, rank 1 has 1", [&] { balancer.step(); });
  EXPECT_TRUE(balancer.disabled());
  EXPECT_EQ(balancer.maps(), maps);
}

TEST(EplbErrors, ShutdownWhileAMoveIsPending) {
  for (MoveMode mode : {MoveMode::stepwise, MoveMode::background}) {
    OneRankModel m(mode);
    m.attach();
    int commits = 0;
    while (commits == 0) {
      m.count(4);
      commits += static_cast<int>(m.balancer.step().committed_layers.size());
    }
    m.balancer.stop();
    EXPECT_FALSE(m.balancer.pending());
    EXPECT_EQ(m.weights.check(m.balancer.maps(), 0), "") << "committed layers are new, the others old";
    EXPECT_NE(m.balancer.maps(), m.maps);
  }
}

TEST(EplbErrors, ArraysThatCannotMove) {
  std::vector<float> data(64);
  using Extents = cuda::std::dextents<std::int64_t, 3>;
  cuda::std::mdspan<float, Extents, cuda::std::layout_stride> const view(
      data.data(), cuda::std::layout_stride::mapping<Extents>(Extents(2, 4, 4), cuda::std::array<std::int64_t, 3>{32, 2, 8}));
  expect_error(ErrorCode::unsupported, "EPLB cannot move w13: dimension 2 has stride 8, expected 1",
               [&] { moe::eplb::expert_tensor("w13", view); });

  Self<> self;
  SelfGroup group;
  auto const make = [&](moe::eplb::ExpertTensor const& tensor) {
    OneRank(self, group, {{tensor}}, {.maps = ExpertMaps::initial(1, 2, 0)});
  };
  expect_error(ErrorCode::argument, "layer 0, w2: null, 2 expert slots of 8 bytes", [&] { make({"w2", nullptr, 2, 8, 8}); });
  expect_error(ErrorCode::argument, "layer 0, w2: 1 expert slots of 8 bytes, 8 apart; 2 expert slots are needed",
               [&] { make({"w2", reinterpret_cast<std::byte*>(data.data()), 1, 8, 8}); });
}

// The wait for a weight fails: error with layer, expert and peer; nothing is committed, and the layers are told nothing.
TEST(EplbErrors, TransferDeadline) {
  for (MoveMode mode : {MoveMode::pause, MoveMode::stepwise}) {
    TwoRanks comm;
    TwoRankGroup group;
    PatternWeights weights(1, 3, 32);
    ExpertMaps const maps = ExpertMaps::initial(1, 4, 2);
    weights.load(maps, 0);
    TwoRankBalancer balancer(comm, group, weights.tensors(), {.maps = maps, .options = {.step_interval = 1}, .mode = mode});
    CountsChanges layer;
    balancer.attach(0, layer);
    balancer.load(0).load_counter[3] = 1000;  // expert 3, on rank 1: rank 0 gets a replica
    expect_error(ErrorCode::timeout, "weights of layer 0, expert 3 from rank 1", [&] { balancer.step(); });
    EXPECT_TRUE(balancer.disabled());
    EXPECT_EQ(balancer.maps(), maps);
    EXPECT_EQ(weights.check(maps, 0), "");
    EXPECT_EQ(layer.changed, 0);
    EXPECT_FALSE(balancer.step().triggered);
  }
}

TEST(EplbErrors, StaticMapFile) {
  TemporaryDirectory directory;
  auto const path = directory / "maps.json";
  ExpertMaps const maps = random_maps(kLayers, kExperts, kSlots, 9);
  moe::eplb::save_maps(path, {{"main", maps}});
  EXPECT_EQ(moe::eplb::load_maps(path, "main", kLayers, kExperts, kSlots), maps);
  expect_error(ErrorCode::argument, "the model needs [4, 7]", [&] { moe::eplb::load_maps(path, "main", 4, kExperts, kSlots); });
  expect_error(ErrorCode::argument, "the model needs [3, 8]", [&] { moe::eplb::load_maps(path, "main", kLayers, kExperts, 8); });
  expect_error(ErrorCode::argument, "num_logical is 5, the model has 6", [&] { moe::eplb::load_maps(path, "main", kLayers, 6, kSlots); });
  std::ofstream(path) << R"({"models":{"main":{"physical_to_logical":[[0,1,0]]}}})";
  expect_error(ErrorCode::argument, "expert 2 has no expert slot in layer 0", [&] { moe::eplb::load_maps(path, "main", 1, 3, 3); });
  std::ofstream(path) << R"({"models":{"main":{"physical_to_logical":[[0,1,9]]}}})";
  expect_error(ErrorCode::argument, "physical id 2", [&] { moe::eplb::load_maps(path, "main", 1, 2, 3); });
}

}  // namespace
