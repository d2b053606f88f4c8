// SPDX-License-Identifier: Apache-2.0
// tests/unit/eplb_recovery_test.cpp: dead ranks and elastic scaling (cases B16, B17, B18).
#include "moe/eplb/elastic.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "expect_error.hpp"
#include "moe/eplb/recovery.hpp"

namespace {

using moe::ErrorCode;
using moe::eplb::ElasticOperation;
using moe::eplb::ElasticRole;
using moe::eplb::ElasticSizes;
using moe::eplb::ElasticState;
using moe::eplb::ExpertMaps;
using moe::eplb::Reload;
using moe::eplb::Table;
using moe_test::expect_error;
using Ids = std::vector<std::int32_t>;

ExpertMaps maps_of(Ids const& slots, int logical) { return ExpertMaps(Table<std::int32_t>(std::vector<Ids>{slots}), logical); }
Ids row(Table<std::int32_t> const& table) { return {table.row(0).begin(), table.row(0).end()}; }

TEST(Recovery, B18_ReplicasTakeOver) {
  // Rank 1 held second copies only: no expert is missing.
  auto const fine = moe::eplb::recover(maps_of({0, 1, 0, 1, 2, 3}, 4), std::vector<int>{1}, 3);
  EXPECT_TRUE(fine.reloads.empty());
  EXPECT_EQ(row(fine.maps.physical_to_logical()), (Ids{0, 1, -1, -1, 2, 3}));
  EXPECT_EQ(row(fine.maps.replica_count()), (Ids{1, 1, 1, 1}));

  // Experts 2 and 3 die with rank 1. Expert 0 has most copies (3), then 0 and 1 have two: 0 again. The expert slots come from rank 0 first,
  // then from rank 2.
  auto const remapped = moe::eplb::recover(maps_of({0, 1, 0, 2, 3, 2, 0, 1, 4}, 5), std::vector<int>{1}, 3);
  EXPECT_EQ(remapped.reloads, (std::vector<Reload>{{0, 2, 0}, {0, 3, 6}}));
  EXPECT_EQ(row(remapped.maps.physical_to_logical()), (Ids{2, 1, 0, -1, -1, -1, 3, 1, 4}));
  EXPECT_EQ(remapped.maps.num_physical(), 9) << "shapes stay: graphs and devices keep their addresses";
}

/// The first of two survivors; the other one holds what `other` says.
struct TwoSurvivors {
  std::vector<std::int64_t> other;
  static constexpr int size() { return 2; }
  void all_reduce_sum(std::span<std::int64_t> values) const {
    for (std::size_t i = 0; i < values.size(); ++i) values[i] += other[i];
  }
  std::vector<std::uint64_t> all_gather(std::uint64_t word) const { return {word, word}; }
};

TEST(Recovery, B18_MapsOfTheSurvivorsGroup) {
  // Rank 1 of three died while the survivors' maps were one commit apart: each holds what its own map says.
  ExpertMaps const mine = maps_of({0, 1, 0, 2, 3, 2, 0, 1, 4}, 5);
  TwoSurvivors group{{0, 0, 0, 1, 1, 4}};
  auto const held = moe::eplb::gather_held(group, 0, mine, 0, 3);
  EXPECT_EQ(row(held), (Ids{0, 1, 0, 1, 1, 4}));
  auto const recovery = moe::eplb::recover_held(held, 5, 2);
  // Expert 2 takes an expert slot of expert 1, which has three; then 0 and 1 have two, and only rank 0 has expert 0.
  EXPECT_EQ(recovery.maps, maps_of({3, 2, 0, 1, 1, 4}, 5));
  EXPECT_EQ(recovery.reloads, (std::vector<Reload>{{0, 2, 1}, {0, 3, 0}}));
  std::vector<Ids> loaded;
  EXPECT_EQ(moe::eplb::reload_experts(recovery, 0, 3, [&](int l, int e, int s) { loaded.push_back({l, e, s}); }), 2);
  EXPECT_EQ(loaded, (std::vector<Ids>{{0, 2, 1}, {0, 3, 0}}));
  EXPECT_EQ(moe::eplb::reload_experts(recovery, 1, 3, [](int, int, int) { FAIL(); }), 0);
  expect_error(ErrorCode::peer, "insufficient redundancy: 1 experts have no expert slot in layer 0 on 2 ranks",
               [&] { moe::eplb::recover_held(held, 7, 2); });
  expect_error(ErrorCode::argument, "do not divide", [&] { moe::eplb::recover_held(held, 5, 4); });
}

TEST(Recovery, B18_InsufficientRedundancy) {
  expect_error(ErrorCode::peer, "insufficient redundancy: 2 experts have no expert slot in layer 0 after losing 1 of 2 ranks",
               [] { moe::eplb::recover(maps_of({0, 1, 2, 3}, 4), std::vector<int>{1}, 2); });
  expect_error(ErrorCode::peer, "insufficient redundancy: 1 experts",
               [] { moe::eplb::recover(maps_of({0, 0, 1, 2}, 3), std::vector<int>{1}, 2); });
  expect_error(ErrorCode::peer, "insufficient redundancy", [] { moe::eplb::recover(maps_of({0, 1}, 2), std::vector<int>{0, 1}, 2); });
  expect_error(ErrorCode::argument, "dead rank 2 is out of range [0, 2)",
               [] { moe::eplb::recover(maps_of({0, 1}, 2), std::vector<int>{2}, 2); });
}

TEST(Recovery, DeadDpRankTakesItsEpRanks) {
  EXPECT_EQ(moe::eplb::ep_ranks_of_dp_rank(2, 4, 1), (std::vector<int>{8, 9, 10, 11}));
  EXPECT_EQ(moe::eplb::ep_ranks_of_dp_rank(1, 2, 2), (std::vector<int>{4, 5, 6, 7}));
}

RC_GTEST_PROP(Recovery, B18_EveryExpertHasALiveReplicaOrTheErrorIsRight, ()) {
  int const ranks = *rc::gen::inRange(2, 8);
  int const per_rank = *rc::gen::inRange(1, 6);
  int const experts = *rc::gen::inRange(1, ranks * per_rank + 1);
  std::mt19937 random(*rc::gen::arbitrary<std::uint32_t>());
  Ids slots(static_cast<std::size_t>(ranks * per_rank));
  for (std::size_t i = 0; i < slots.size(); ++i) slots[i] = static_cast<std::int32_t>(i) % experts;
  std::shuffle(slots.begin(), slots.end(), random);
  std::vector<int> dead;
  for (int r = 0; r < ranks; ++r) {
    if (random() % 4 == 0) dead.push_back(r);
  }
  int const live_slots = (ranks - static_cast<int>(dead.size())) * per_rank;
  try {
    auto const recovery = moe::eplb::recover(maps_of(slots, experts), dead, ranks);
    RC_ASSERT(live_slots >= experts);
    Ids const after = row(recovery.maps.physical_to_logical());
    for (std::size_t s = 0; s < after.size(); ++s) {
      bool const is_dead = std::count(dead.begin(), dead.end(), static_cast<int>(s) / per_rank) > 0;
      RC_ASSERT((after[s] == -1) == is_dead);
      bool const reloaded = std::any_of(recovery.reloads.begin(), recovery.reloads.end(),
                                        [&](Reload const& r) { return r.slot == static_cast<std::int32_t>(s) && r.expert == after[s]; });
      RC_ASSERT(is_dead || after[s] == slots[s] || reloaded);  // only reloaded expert slots change
    }
  } catch (moe::Error const& error) {
    RC_ASSERT(error.code() == ErrorCode::peer);
    RC_ASSERT(live_slots < experts);
  }
}

TEST(Elastic, B16_Sizes) {
  EXPECT_EQ(moe::eplb::elastic_sizes(8, 3, 8), (ElasticSizes{8, 24, 16}));
  EXPECT_EQ(moe::eplb::elastic_sizes(8, 3, 3), (ElasticSizes{3, 9, 1}));
  expect_error(ErrorCode::config, "not enough expert slots: 1 ranks of 4 expert slots for 8 experts: need >= 2 ranks",
               [] { moe::eplb::elastic_sizes(8, 4, 1); });
  expect_error(ErrorCode::config, "need >= 3 ranks", [] { moe::eplb::elastic_sizes(9, 4, 2); });
  expect_error(ErrorCode::config, "scaling needs", [] { moe::eplb::elastic_sizes(8, 4, 0); });
}

// Moves every layer's weights as the plan says and checks every expert slot of every rank that stays or joins.
void scale(int ranks, std::vector<int> const& leaving, int joining, int slots_per_rank, int experts) {
  std::mt19937 random(7);
  Table<double> load(2, experts);
  for (double& v : load.flat()) v = static_cast<double>(random() % 1000);
  ExpertMaps const current = ExpertMaps::initial(2, experts, ranks * slots_per_rank - experts);
  auto const plan = moe::eplb::plan_elastic(current, ranks, leaving, joining, load);
  int const new_ranks = ranks - static_cast<int>(leaving.size()) + joining;
  ASSERT_EQ(plan.sizes.num_ranks, new_ranks);
  ASSERT_EQ(plan.maps.num_physical(), new_ranks * slots_per_rank);
  for (int layer = 0; layer < 2; ++layer) {
    std::vector<int> weights(plan.old_map.row(layer).begin(), plan.old_map.row(layer).end());
    std::map<std::pair<int, int>, int> wire;
    std::vector<moe::eplb::RankPlan> plans;
    plans.reserve(static_cast<std::size_t>(plan.num_union_ranks));
    for (int r = 0; r < plan.num_union_ranks; ++r) plans.push_back(plan.transfer(layer, r));
    for (auto const& p : plans) {
      for (auto const& f : p.sends) wire[{f.destination_rank, f.expert}] = weights[static_cast<std::size_t>(f.source_slot)];
    }
    for (int r = 0; r < plan.num_union_ranks; ++r) {
      auto const& p = plans[static_cast<std::size_t>(r)];
      std::map<int, int> buffer;
      for (auto const& c : p.local_copies) buffer[c.destination_slot] = weights[static_cast<std::size_t>(c.source_slot)];
      for (auto const& f : p.receives) buffer[f.destination_slot] = wire.at({r, f.expert});
      for (auto const& c : p.duplicates) buffer[c.destination_slot] = buffer.at(c.source_slot);
      for (int slot : p.commits) weights[static_cast<std::size_t>(slot)] = buffer.at(slot);
      if (r < ranks && plan.rank_map[static_cast<std::size_t>(r)] == -1) {
        EXPECT_TRUE(p.receives.empty() && p.commits.empty()) << "a leaving rank only sends";
      }
      if (r >= ranks) {
        EXPECT_TRUE(p.sends.empty() && p.local_copies.empty()) << "a joining rank only receives";
      }
    }
    for (int r = 0; r < new_ranks; ++r) {
      for (int l = 0; l < slots_per_rank; ++l) {
        int const at = plan.union_rank_of_new[static_cast<std::size_t>(r)] * slots_per_rank + l;
        EXPECT_EQ(weights[static_cast<std::size_t>(at)], plan.maps.physical_to_logical()(layer, r * slots_per_rank + l));
      }
    }
  }
}

TEST(Elastic, B16_ScaleUpAndDown) {
  scale(4, {}, 4, 4, 12);
  scale(8, {4, 5, 6, 7}, 0, 4, 16);
  scale(4, {1}, 0, 4, 12);
  scale(4, {0, 2}, 3, 4, 12);
  ExpertMaps const two = ExpertMaps::initial(1, 8, 0);
  expect_error(ErrorCode::config, "not enough expert slots",
               [&] { moe::eplb::plan_elastic(two, 2, std::vector<int>{1}, 0, Table<double>(1, 8, 1.0)); });
  expect_error(ErrorCode::argument, "leaving rank 2 is out of range",
               [&] { moe::eplb::plan_elastic(two, 2, std::vector<int>{2}, 1, Table<double>(1, 8, 1.0)); });
  expect_error(ErrorCode::config, "a rank that stays",
               [&] { moe::eplb::plan_elastic(two, 2, std::vector<int>{0, 1}, 2, Table<double>(1, 8, 1.0)); });
}

TEST(Elastic, RankMapsAndParameterSources) {
  auto const plan = moe::eplb::plan_elastic(ExpertMaps::initial(1, 6, 0), 3, std::vector<int>{1}, 3, Table<double>(1, 6, 1.0));
  EXPECT_EQ(plan.rank_map, (std::vector<int>{0, -1, 1}));
  EXPECT_EQ(plan.union_rank_of_new, (std::vector<int>{0, 2, 3, 4, 5}));
  EXPECT_EQ(plan.parameter_source, (std::vector<int>{-1, -1, 0, 2, 0}));
}

TEST(Elastic, B17_FailureBeforeCommitRollsBack) {
  ElasticOperation operation;
  EXPECT_TRUE(operation.forward_allowed());
  operation.begin(ElasticRole::existing);
  EXPECT_EQ(operation.state(), ElasticState::preparing);
  expect_error(ErrorCode::state, "scaling in progress", [&] { operation.begin(ElasticRole::existing); });
  operation.advance(ElasticState::ready);
  EXPECT_TRUE(operation.forward_allowed()) << "serving continues until the commit";
  operation.roll_back();
  EXPECT_EQ(operation.state(), ElasticState::idle);
  EXPECT_TRUE(operation.forward_allowed());

  operation.begin(ElasticRole::existing);
  expect_error(ErrorCode::state, "scaling cannot go from preparing to committed", [&] { operation.advance(ElasticState::committed); });
  operation.advance(ElasticState::ready);
  operation.advance(ElasticState::committed);
  EXPECT_FALSE(operation.forward_allowed());
  expect_error(ErrorCode::state, "the group cannot go on", [&] { operation.roll_back(); });
  operation.advance(ElasticState::rebalancing);
  EXPECT_FALSE(operation.forward_allowed());
  operation.advance(ElasticState::complete);
  EXPECT_TRUE(operation.forward_allowed());
  EXPECT_FALSE(operation.in_progress());
  operation.begin(ElasticRole::leaving);
  EXPECT_EQ(operation.state(), ElasticState::ready);
  operation.advance(ElasticState::drained);
  expect_error(ErrorCode::state, "in state drained", [&] { operation.roll_back(); });
  operation.advance(ElasticState::exited);

  ElasticOperation joining(ElasticRole::joining);
  EXPECT_FALSE(joining.forward_allowed());
  joining.begin(ElasticRole::joining);
  for (auto state : {ElasticState::committed, ElasticState::rebalancing, ElasticState::complete}) {
    EXPECT_FALSE(joining.forward_allowed());
    joining.advance(state);
  }
  EXPECT_TRUE(joining.forward_allowed());
}

}  // namespace
