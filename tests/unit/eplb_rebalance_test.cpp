// SPDX-License-Identifier: Apache-2.0
// tests/unit/eplb_rebalance_test.cpp: maps, packing, replication and what is proposed (cases B1-B5, B12, B19, B20).
#include "moe/eplb/rebalance.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "moe/eplb/balancedness.hpp"
#include "moe/eplb/files.hpp"
#include "moe/eplb/propose.hpp"
#include "temporary_directory.hpp"

namespace {

using moe::ErrorCode;
using moe::eplb::Arithmetic;
using moe::eplb::balancedness;
using moe::eplb::ExpertMaps;
using moe::eplb::LayerSlots;
using moe::eplb::Policy;
using moe::eplb::rank_loads;
using moe::eplb::rebalance;
using moe::eplb::Table;
using moe::eplb::Topology;
using moe_test::expect_error;
using Ids = std::vector<std::int32_t>;
using Loads = std::vector<std::vector<double>>;

Ids row(Table<std::int32_t> const& table, int layer = 0) { return {table.row(layer).begin(), table.row(layer).end()}; }
Ids replicas(ExpertMaps const& maps, int layer, int expert) {
  auto const slots = maps.replicas_of(layer, expert);
  return {slots.begin(), slots.end()};
}
void expect_ranks(ExpertMaps const& maps, int layer, std::vector<double> const& load, std::vector<double> const& expected) {
  auto const got = rank_loads(maps, layer, load, static_cast<int>(expected.size()));
  for (std::size_t r = 0; r < expected.size(); ++r) EXPECT_NEAR(got[r], expected[r], 0.01) << "rank " << r;
}

TEST(Rebalance, B1_WorkedExample) {
  Loads const loads{{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86}, {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}};
  for (auto arithmetic : {Arithmetic::float32, Arithmetic::float64}) {
    ExpertMaps const maps =
        rebalance(Table<double>(loads), {.num_physical = 16, .num_groups = 4, .num_nodes = 2, .num_ranks = 8}, arithmetic);
    EXPECT_EQ(row(maps.physical_to_logical(), 0), (Ids{5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1}));
    EXPECT_EQ(row(maps.physical_to_logical(), 1), (Ids{7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1}));
    EXPECT_EQ(row(maps.replica_count(), 0), (Ids{1, 2, 1, 1, 2, 2, 1, 1, 1, 1, 2, 1}));
    EXPECT_EQ(row(maps.replica_count(), 1), (Ids{1, 2, 1, 1, 1, 2, 2, 1, 2, 1, 1, 1}));
    expect_ranks(maps, 0, loads[0], {121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152});
    expect_ranks(maps, 1, loads[1], {173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5});
    EXPECT_NEAR(balancedness(rank_loads(maps, 0, loads[0], 8)), .828, .0005);
    EXPECT_NEAR(balancedness(rank_loads(maps, 1, loads[1], 8)), .805, .0005);
  }
}

TEST(Rebalance, B1_B3_SmallExamples) {
  auto const plan = [](std::vector<double> const& load, int physical, int ranks) {
    return rebalance(Table<double>(Loads{load}), {.num_physical = physical, .num_ranks = ranks});
  };
  std::vector<double> const skewed{100, 20, 30, 50};
  ExpertMaps const a = plan(skewed, 6, 3);
  EXPECT_EQ(row(a.physical_to_logical()), (Ids{3, 1, 0, 0, 0, 2}));
  EXPECT_EQ(row(a.replica_count()), (Ids{3, 1, 1, 1}));
  EXPECT_EQ(replicas(a, 0, 0), (Ids{2, 4, 3}));
  expect_ranks(a, 0, skewed, {70, 66.67, 63.33});

  std::vector<double> const eight{60, 10, 10, 20, 30, 30, 20, 20};
  ExpertMaps const b = plan(eight, 8, 4);
  EXPECT_EQ(row(b.physical_to_logical()), (Ids{0, 2, 4, 7, 5, 1, 3, 6}));
  expect_ranks(b, 0, eight, {70, 50, 40, 40});

  std::vector<double> const hot{300, 10, 10, 10};
  ExpertMaps const c = plan(hot, 8, 4);
  EXPECT_EQ(row(c.physical_to_logical()), (Ids{0, 0, 0, 1, 0, 2, 0, 3}));
  EXPECT_EQ(row(c.replica_count()), (Ids{5, 1, 1, 1}));
  expect_ranks(c, 0, hot, {120, 70, 70, 70});

  ExpertMaps const d = plan({10, 10, 10, 10}, 6, 2);
  EXPECT_EQ(row(d.physical_to_logical()), (Ids{2, 0, 0, 3, 1, 1}));
  expect_ranks(d, 0, {10, 10, 10, 10}, {20, 20});

  EXPECT_EQ(row(plan({0, 0, 0, 0}, 6, 2).physical_to_logical()), (Ids{0, 1, 2, 3, 0, 0}));
}

Table<double> random_load(int layers, int experts, unsigned seed) {
  std::mt19937 random(seed);
  std::lognormal_distribution<double> tokens(5.0, 1.0);
  Table<double> load(layers, experts);
  for (double& v : load.flat()) v = std::floor(tokens(random));
  return load;
}

// Every expert appears, all views describe one mapping, and rank loads are at most the mean plus the largest replica.
void expect_valid(ExpertMaps const& maps, Table<double> const& load, Topology const& topology) {
  ASSERT_EQ(maps.num_physical(), topology.num_physical);
  ASSERT_NO_THROW(ExpertMaps(maps.physical_to_logical(), maps.replica_index(), load.cols()));
  ASSERT_NO_THROW(moe::eplb::check_views(maps, maps.logical_to_physical(), maps.replica_count()));
  for (int layer = 0; layer < load.rows(); ++layer) {
    double largest = 0;
    for (int e = 0; e < load.cols(); ++e) largest = std::max(largest, load(layer, e) / maps.replica_count()(layer, e));
    auto const effective = moe::eplb::effective_topology(topology, load.cols()).first;
    auto const ranks = rank_loads(maps, layer, load.row(layer), topology.num_ranks);
    if (effective.num_nodes == 1) {
      double const mean = std::accumulate(ranks.begin(), ranks.end(), 0.0) / static_cast<double>(ranks.size());
      EXPECT_LE(*std::max_element(ranks.begin(), ranks.end()), (mean + largest) * (1 + 1e-5)) << "layer " << layer;
      continue;
    }
    // With nodes the packing is within each node, and so is the bound.
    std::size_t const per_node = ranks.size() / static_cast<std::size_t>(effective.num_nodes);
    for (std::size_t first = 0; first < ranks.size(); first += per_node) {
      auto const begin = ranks.begin() + static_cast<std::ptrdiff_t>(first);
      auto const end = begin + static_cast<std::ptrdiff_t>(per_node);
      double const mean = std::accumulate(begin, end, 0.0) / static_cast<double>(per_node);
      EXPECT_LE(*std::max_element(begin, end), (mean + largest) * (1 + 1e-5)) << "layer " << layer;
    }
  }
}

TEST(Rebalance, B2_RandomLoads) {
  unsigned seed = 1;
  double planned = 0;
  double unplanned = 0;
  for (int experts : {8, 60, 128, 256, 384}) {
    for (int ranks : {2, 4, 8, 16}) {
      for (int redundant : {0, ranks, 32}) {
        if ((experts + redundant) % ranks != 0) continue;
        for (int nodes : {1, 2}) {
          Table<double> const load = random_load(3, experts, seed++);
          Topology const topology{.num_physical = experts + redundant, .num_groups = 4, .num_nodes = nodes, .num_ranks = ranks};
          ExpertMaps const maps = rebalance(load, topology);
          expect_valid(maps, load, topology);
          planned += balancedness(rank_loads(maps, load, ranks));
          unplanned += balancedness(rank_loads(ExpertMaps::initial(3, experts, redundant), load, ranks));
        }
      }
    }
  }
  EXPECT_GT(planned, unplanned);
}

RC_GTEST_PROP(Rebalance, B2_AnyTopologyGivesAValidMapAndTheSameOneTwice, ()) {
  int const ranks = *rc::gen::inRange(1, 13);
  int const per_rank = *rc::gen::inRange(1, 9);
  int const experts = *rc::gen::inRange(1, ranks * per_rank + 1);
  Topology const topology{
      .num_physical = ranks * per_rank, .num_groups = *rc::gen::inRange(1, 9), .num_nodes = *rc::gen::inRange(1, 5), .num_ranks = ranks};
  Table<double> load(2, experts);
  for (double& v : load.flat()) v = *rc::gen::inRange(0, 50);
  auto const arithmetic = *rc::gen::element(Arithmetic::float32, Arithmetic::float64);
  ExpertMaps const maps = rebalance(load, topology, arithmetic);
  expect_valid(maps, load, topology);
  RC_ASSERT(!testing::Test::HasFailure());
  RC_ASSERT(rebalance(load, topology, arithmetic) == maps);
  RC_ASSERT(rebalance(load, topology, arithmetic).hash() == maps.hash());
  for (int layer = 0; layer < 2; ++layer) {  // layers are independent
    std::vector<std::vector<double>> alone{{load.row(layer).begin(), load.row(layer).end()}};
    RC_ASSERT(row(rebalance(Table<double>(alone), topology, arithmetic).physical_to_logical()) == row(maps.physical_to_logical(), layer));
  }
}

TEST(Rebalance, B4_SizesThatDoNotDivide) {
  auto const effective = [](int groups, int nodes, int ranks, int experts) {
    return moe::eplb::effective_topology({.num_physical = 48, .num_groups = groups, .num_nodes = nodes, .num_ranks = ranks}, experts);
  };
  EXPECT_EQ(effective(8, 3, 6, 48).second, Policy::global) << "groups do not divide over the nodes";
  EXPECT_EQ(effective(8, 3, 6, 48).first.num_groups, 1);
  EXPECT_EQ(effective(8, 5, 6, 48).first.num_nodes, 1) << "ranks do not divide over the nodes";
  EXPECT_EQ(effective(8, 5, 6, 48).second, Policy::hierarchical);
  EXPECT_EQ(effective(7, 1, 6, 48).first.num_groups, 1) << "groups do not divide the experts";
  EXPECT_EQ(effective(8, 2, 6, 48).second, Policy::hierarchical);

  Table<double> const load = random_load(2, 48, 3);
  EXPECT_EQ(rebalance(load, {.num_physical = 48, .num_groups = 8, .num_nodes = 3, .num_ranks = 6}),
            rebalance(load, {.num_physical = 48, .num_groups = 1, .num_nodes = 1, .num_ranks = 6}));
}

// 2^24 and 2^24 + 1 are one float: without a statement to the contrary the larger load gets the spare slot.
TEST(Rebalance, B3_LoadsAreComparedInDouble) {
  Table<double> const load(Loads{{16777216, 16777217}});
  Topology const topology{.num_physical = 3, .num_ranks = 1};
  EXPECT_EQ(rebalance(load, topology).replica_count()(0, 1), 2);
  EXPECT_EQ(rebalance(load, topology, Arithmetic::float32).replica_count()(0, 0), 2);
}

TEST(Rebalance, Errors) {
  auto const plan = [](std::vector<double> const& load, Topology const& topology) { rebalance(Table<double>(Loads{load}), topology); };
  Topology const good{.num_physical = 4, .num_ranks = 2};
  expect_error(ErrorCode::argument, "load of expert 1 in layer 0 must be finite and at least 0, is -1", [&] { plan({1, -1}, good); });
  expect_error(ErrorCode::argument, "load of expert 0", [&] { plan({std::numeric_limits<double>::quiet_NaN(), 1}, good); });
  expect_error(ErrorCode::argument, "load of expert 1", [&] { plan({1, std::numeric_limits<double>::infinity()}, good); });
  auto const plan32 = [&](std::vector<double> const& load) { rebalance(Table<double>(Loads{load}), good, moe::eplb::Arithmetic::float32); };
  expect_error(ErrorCode::argument, "load of expert 1 in layer 0 must be at most 1.70141e+38 (float32, 2 experts), is 1e+308",
               [&] { plan32({1, 1e308}); });
  double const bound = double{std::numeric_limits<float>::max()} / 2;
  plan32({bound, bound});
  plan({1, 8e307}, good);
  expect_error(ErrorCode::argument, "(float64, 2 experts)", [&] { plan({1, 1e308}, good); });
  expect_error(ErrorCode::argument, "num_physical: 5 is not a multiple of num_ranks 2",
               [&] { plan({1, 1}, {.num_physical = 5, .num_ranks = 2}); });
  expect_error(ErrorCode::argument, "num_physical: 2 is below 3, the number of logical experts",
               [&] { plan({1, 1, 1}, {.num_physical = 2, .num_ranks = 2}); });
  expect_error(ErrorCode::argument, "num_ranks must be at least 1", [&] { plan({1}, {.num_physical = 2, .num_ranks = 0}); });
  expect_error(ErrorCode::argument, "num_nodes must be at least 1",
               [&] { plan({1}, {.num_physical = 2, .num_nodes = 0, .num_ranks = 1}); });
}

TEST(Balancedness, B5_Example) {
  EXPECT_NEAR(balancedness(Table<double>(Loads{{30, 10}, {10, 30}})), 2.0 / 3.0, 1e-12);
  EXPECT_EQ(balancedness(Table<double>(Loads{{0, 0}, {0, 0}})), 1.0);
  EXPECT_EQ(balancedness(Table<double>()), 1.0);
  EXPECT_EQ(balancedness(std::vector<double>{30, 10}), 20.0 / 30.0);
}

TEST(Maps, InitialMap) {
  ExpertMaps const maps = ExpertMaps::initial(2, 4, 6);
  EXPECT_EQ(row(maps.physical_to_logical(), 1), (Ids{0, 1, 2, 3, 0, 1, 2, 3, 0, 1}));
  EXPECT_EQ(row(maps.replica_count()), (Ids{3, 3, 2, 2}));
  EXPECT_EQ(replicas(maps, 0, 0), (Ids{0, 4, 8, -1, -1, -1, -1}));
  expect_error(ErrorCode::config, "num_redundant_experts must be at least 0, is -1", [] { ExpertMaps::initial(1, 4, -1); });
  expect_error(ErrorCode::capacity, "gives more than 2^31 - 1 expert slots", [] { ExpertMaps::initial(1, 4, 0x7fffffff); });
  expect_error(ErrorCode::capacity, "exceeds 2^31 - 1 entries a layer", [] { ExpertMaps::initial(1, 4096, 1 << 20); });
}

TEST(Maps, B19_InvalidMaps) {
  auto const make = [](Ids const& map, int logical) {
    return ExpertMaps(Table<std::int32_t>(std::vector<Ids>{{0, 1, 2, 0}, map}), logical);
  };
  expect_error(ErrorCode::argument, "expert 3 in layer 1, physical id 2 is out of range [0, 3)", [&] { make({0, 1, 3, 0}, 3); });
  expect_error(ErrorCode::argument, "expert -1 in layer 1, physical id 0 is out of range", [&] { make({-1, 1, 2, 0}, 3); });
  expect_error(ErrorCode::argument, "expert 2 has no expert slot in layer 1", [&] { make({0, 1, 1, 0}, 3); });
  expect_error(ErrorCode::argument, "4 expert slots for 5 experts", [&] { make({0, 1, 2, 0}, 5); });

  ExpertMaps const maps = make({0, 1, 2, 1}, 3);
  auto l2p = maps.logical_to_physical();
  auto counts = maps.replica_count();
  EXPECT_NO_THROW(moe::eplb::check_views(maps, l2p, counts));
  counts(1, 1) = 1;
  expect_error(ErrorCode::argument, "replica_count of expert 1 in layer 1 is 1", [&] { moe::eplb::check_views(maps, l2p, counts); });
  l2p(1, 3) = 3;
  l2p(1, 2) = 1;  // expert 1 lists physical ids 3 and 1 in another order: still valid
  EXPECT_NO_THROW(moe::eplb::check_views(maps, l2p, maps.replica_count()));
  l2p(1, 4) = 7;
  expect_error(ErrorCode::argument, "does not list exactly its physical ids",
               [&] { moe::eplb::check_views(maps, l2p, maps.replica_count()); });

  Table<std::int32_t> const two(std::vector<std::vector<std::int32_t>>{{0, 1}});
  expect_error(ErrorCode::argument, "replica is [0, 0], physical_to_logical [1, 2]", [&] { ExpertMaps(two, Table<std::int32_t>{}, 2); });
  expect_error(ErrorCode::argument, "replica is [1, 1], physical_to_logical [1, 2]",
               [&] { ExpertMaps(two, Table<std::int32_t>(1, 1), 2); });

  std::vector<std::uint64_t> const hashes{maps.hash(), maps.hash(), make({0, 1, 2, 0}, 3).hash()};
  expect_error(ErrorCode::mismatch, "expert maps differ", [&] { moe::eplb::check_same_maps(hashes); });
  EXPECT_NO_THROW(moe::eplb::check_same_maps(std::vector<std::uint64_t>{maps.hash(), make({0, 1, 2, 1}, 3).hash()}));
}

TEST(Propose, B12_PreserveExpertSlots) {
  LayerSlots const kept = moe::eplb::preserve_slots(Ids{4, 7, 2}, {{7, 9, 4}, {1, 0, 2}}, 1);
  EXPECT_EQ(kept, (LayerSlots{{4, 7, 9}, {2, 1, 0}}));
}

RC_GTEST_PROP(Propose, B12_PreservedExpertSlotsMoveOnlyInsideRanks, ()) {
  int const ranks = *rc::gen::inRange(1, 5);
  int const per_rank = *rc::gen::inRange(1, 7);
  auto const slots = static_cast<std::size_t>(ranks) * static_cast<std::size_t>(per_rank);
  auto const ids = *rc::gen::container<Ids>(2 * slots, rc::gen::inRange(0, 8));
  Ids const before(ids.begin(), ids.begin() + ranks * per_rank);
  LayerSlots next{{ids.begin() + ranks * per_rank, ids.end()}, Ids(before.size())};
  std::iota(next.replica.begin(), next.replica.end(), 0);
  LayerSlots const kept = moe::eplb::preserve_slots(before, next, ranks);
  for (int r = 0; r < ranks; ++r) {
    std::vector<std::pair<int, int>> a, b;
    for (int s = r * per_rank; s < (r + 1) * per_rank; ++s) {
      auto const i = static_cast<std::size_t>(s);
      a.emplace_back(next.expert[i], next.replica[i]);
      b.emplace_back(kept.expert[i], kept.replica[i]);
    }
    std::sort(a.begin(), a.end());
    std::sort(b.begin(), b.end());
    RC_ASSERT(a == b);
    // The number of expert slots that stay is the size of the multisets' intersection.
    int shared = 0, stay = 0;
    for (int e = 0; e < 8; ++e) {
      auto const count = [&](Ids const& v) { return std::count(v.begin() + r * per_rank, v.begin() + (r + 1) * per_rank, e); };
      shared += static_cast<int>(std::min(count(before), count(next.expert)));
    }
    for (int s = r * per_rank; s < (r + 1) * per_rank; ++s) {
      stay += before[static_cast<std::size_t>(s)] == kept.expert[static_cast<std::size_t>(s)] ? 1 : 0;
    }
    RC_ASSERT(stay == shared);
  }
}

TEST(Propose, SpreadsReplicasOverRanks) {
  // Expert 0 takes five of eight expert slots on four ranks: one rank must hold it twice, no rank three times.
  ExpertMaps const current = ExpertMaps::initial(1, 4, 4);
  Table<double> const load(Loads{{300, 10, 10, 10}});
  auto const proposal = moe::eplb::propose(current, load, {.num_ranks = 4},
                                           {.arithmetic = Arithmetic::float64, .keep_slots = false, .spread_replicas = true});
  Ids const spread = row(proposal.maps.physical_to_logical());
  for (int r = 0; r < 4; ++r) {
    auto const copies = std::count(spread.begin() + 2 * r, spread.begin() + 2 * r + 2, 0);
    EXPECT_TRUE(copies == 1 || copies == 2) << "rank " << r;
  }
  // Two copies of expert 0 fit on two ranks.
  LayerSlots slots{{0, 0, 1, 2}, {0, 1, 0, 0}};
  moe::eplb::spread_replicas(slots, std::vector<double>{10, 4, 6}, std::vector<std::int32_t>{2, 1, 1}, 2, 1);
  EXPECT_EQ(slots, (LayerSlots{{1, 0, 0, 2}, {0, 1, 0, 0}})) << "both exchanges leave 11 and 9: the lower physical id";
}

TEST(Propose, KeepsWhatNeedNotChange) {
  ExpertMaps const current = ExpertMaps::initial(3, 8, 4);
  Table<double> load = random_load(3, 8, 5);
  for (double& v : load.row(1)) v = 0;
  auto const proposal = moe::eplb::propose(current, load, {.num_ranks = 4});
  EXPECT_EQ(proposal.changed_layers, (Ids{0, 2})) << "a layer without load keeps its map";
  EXPECT_EQ(row(proposal.maps.physical_to_logical(), 1), row(current.physical_to_logical(), 1));
  EXPECT_GT(proposal.balancedness_after, proposal.balancedness_before);
  EXPECT_GT(proposal.moved_slots, 0);
  auto const again = moe::eplb::propose(proposal.maps, load, {.num_ranks = 4});
  EXPECT_TRUE(again.changed_layers.empty()) << "the same load asks for no further moves";
  EXPECT_EQ(again.maps, proposal.maps);
  auto const reluctant = moe::eplb::propose(current, load, {.num_ranks = 4}, {.min_gain = 1.0});
  EXPECT_TRUE(reluctant.changed_layers.empty());
  EXPECT_EQ(reluctant.maps, current);
  EXPECT_EQ(reluctant.balancedness_after, reluctant.balancedness_before);
  expect_error(ErrorCode::argument, "load is [3, 8], the maps are of [2, 8]",
               [&] { moe::eplb::propose(ExpertMaps::initial(2, 8, 4), load, {.num_ranks = 4}); });
}

class EplbFiles : public testing::Test {
 protected:
  void write(std::string const& contents) { std::ofstream(path_) << contents; }
  moe_test::TemporaryDirectory directory_;
  std::filesystem::path path_ = directory_ / "file.json";
};

TEST_F(EplbFiles, B20_MapsSavedOnOneRunLoadInTheNext) {
  ExpertMaps const maps = rebalance(random_load(4, 60, 9), {.num_physical = 64, .num_ranks = 8});
  std::string const key = moe::eplb::stage_key("main", 1);
  EXPECT_EQ(key, "main/stage1");
  moe::eplb::save_maps(path_, {{key, maps}});
  EXPECT_EQ(moe::eplb::load_maps(path_, key, 4, 60, 64), maps);
  expect_error(ErrorCode::argument, "maps are of [4, 64], the model needs [5, 64]", [&] { moe::eplb::load_maps(path_, key, 5, 60, 64); });
  expect_error(ErrorCode::argument, "the model needs [4, 72]", [&] { moe::eplb::load_maps(path_, key, 4, 60, 72); });
  expect_error(ErrorCode::argument, "num_logical is 60, the model has 61", [&] { moe::eplb::load_maps(path_, key, 4, 61, 64); });
  expect_error(ErrorCode::argument, "no maps of model \"draft\"", [&] { moe::eplb::load_maps(path_, "draft", 4, 60, 64); });
  expect_error(ErrorCode::argument, "cannot read", [&] { moe::eplb::load_maps(path_ / "absent", key, 4, 60, 64); });
  expect_error(ErrorCode::argument, "cannot read", [&] { moe::eplb::read_load(path_.parent_path()); });
  expect_error(ErrorCode::argument, "cannot write", [&] { moe::eplb::save_maps(path_ / "below_a_file", {{key, maps}}); });
  expect_error(ErrorCode::argument, ": No such file or directory",
               [&] { moe::eplb::save_maps(directory_ / "absent" / "file.json", {{key, maps}}); });
}

TEST_F(EplbFiles, OtherFormatsAndVersionsAreRefused) {
  auto const load_maps = [&] { moe::eplb::load_maps(path_, "a", 1, 2, 2); };
  std::string const maps = R"("models":{"a":{"physical_to_logical":[[1,0]]}}})";
  write("{" + maps);
  load_maps();
  write(R"({"format":"moe-eplb-maps","version":2,)" + maps);
  expect_error(ErrorCode::argument, "version is 2, expected 1", load_maps);
  write(R"({"format":"moe-eplb-load","version":1,)" + maps);
  expect_error(ErrorCode::argument, "format is \"moe-eplb-load\", expected \"moe-eplb-maps\"", load_maps);
  write(R"({"format":3,"models":{"a":{"load":[[1,2]]}}})");
  expect_error(ErrorCode::argument, "format is 3, expected \"moe-eplb-load\"", [&] { moe::eplb::read_load(path_); });
  write(R"({"models":{"a":{"num_logical":"2","physical_to_logical":[[1,0]]}}})");
  expect_error(ErrorCode::argument, "num_logical is \"2\", the model has 2", load_maps);
  write("[[1e400]]");
  expect_error(ErrorCode::argument, "is not valid JSON: number overflow parsing '1e400'", [&] { moe::eplb::read_load(path_); });
}

TEST_F(EplbFiles, LoadsInEveryAcceptedForm) {
  Table<std::int64_t> counted(2, 3);
  for (int i = 0; i < 6; ++i) counted.flat()[static_cast<std::size_t>(i)] = (std::int64_t{1} << 40) + i;
  moe::eplb::save_load(path_, {{"main", counted}});
  Table<double> const loaded = moe::eplb::read_load(path_);
  EXPECT_EQ(loaded(1, 2), std::pow(2.0, 40) + 5);
  expect_error(ErrorCode::argument, "no load of model \"draft\"; known: main", [&] { moe::eplb::read_load(path_, "draft"); });
  for (std::string const contents : {"[[1,2],[3,4.5]]", R"({"weight":[[1,2],[3,4.5]]})", R"({"load":[[1,2],[3,4.5]]})"}) {
    write(contents);
    EXPECT_EQ(moe::eplb::read_load(path_)(1, 1), 4.5) << contents;
  }
  std::vector<std::pair<std::string, std::string>> const bad{{"[[1,2],[3]]", "layer 1 has 1 entries, layer 0 has 2"},
                                                             {"[[1,\"x\"]]", "layer 0, entry 1 must be a number"},
                                                             {"[]", "must be a non-empty array"},
                                                             {"[[]]", "layer 0 must be a non-empty array"},
                                                             {"[1,2]", "layer 0 must be a non-empty array"},
                                                             {"{\"weight\":", "is not valid JSON"},
                                                             {"{}", "holds no load"},
                                                             {"3", "must hold an object or an array"},
                                                             {R"({"models":{"a":3}})", "model \"a\" has no load"}};
  for (auto const& [contents, part] : bad) {
    write(contents);
    expect_error(ErrorCode::argument, part, [&] { moe::eplb::read_load(path_); });
  }
}

}  // namespace
