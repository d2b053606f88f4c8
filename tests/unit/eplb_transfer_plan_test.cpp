// SPDX-License-Identifier: Apache-2.0
// tests/unit/eplb_transfer_plan_test.cpp: flows, rounds and the move itself, simulated for all ranks in one process (cases B6-B8, B24).
#include "moe/eplb/transfer_plan.hpp"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "expect_error.hpp"

namespace {

using moe::ErrorCode;
using moe::eplb::Flow;
using moe::eplb::plan_flows;
using moe::eplb::plan_rank;
using moe::eplb::RankPlan;
using moe::eplb::SlotCopy;
using moe_test::expect_error;
using Map = std::vector<std::int32_t>;

TEST(TransferPlan, B6_Example) {
  Map const before{0, 1, 2, 3, 0, 1};
  Map const after{3, 1, 0, 0, 0, 2};
  std::vector<Flow> const flows{{0, 0, 0, 1, 2}, {2, 1, 2, 2, 5}, {3, 1, 3, 0, 0}};
  EXPECT_EQ(plan_flows(before, after, 4, 3), flows);

  RankPlan const zero = plan_rank(before, after, 4, 3, 0);
  EXPECT_EQ(zero.receives, (std::vector<Flow>{flows[2]}));
  EXPECT_EQ(zero.sends, (std::vector<Flow>{flows[0]}));
  EXPECT_EQ(zero.commits, (Map{0}));
  EXPECT_TRUE(zero.duplicates.empty());
  RankPlan const one = plan_rank(before, after, 4, 3, 1);
  EXPECT_EQ(one.receives, (std::vector<Flow>{flows[0]}));
  EXPECT_EQ(one.sends, (std::vector<Flow>{flows[1], flows[2]}));
  EXPECT_EQ(one.duplicates, (std::vector<SlotCopy>{{0, 2, 3}}));
  EXPECT_EQ(one.commits, (Map{2, 3}));
  RankPlan const two = plan_rank(before, after, 4, 3, 2);
  EXPECT_EQ(two.receives, (std::vector<Flow>{flows[1]}));
  EXPECT_TRUE(two.sends.empty()) << "with two senders and one receiver, the first sends";
  EXPECT_EQ(two.commits, (Map{5}));
}

TEST(TransferPlan, LocalCopyBeatsReceiving) {
  RankPlan const plan = plan_rank(Map{0, 1, 2, 0}, Map{1, 0, 2, 1}, 3, 2, 0);
  EXPECT_EQ(plan.local_copies, (std::vector<SlotCopy>{{1, 1, 0}, {0, 0, 1}}));
  EXPECT_TRUE(plan.receives.empty());
}

TEST(TransferPlan, SendersShareTheReceivers) {
  // Expert 0 on ranks 0 and 1, needed by ranks 2..6: q = 2, remainder 1 to sender 0.
  Map const before{0, 0, 1, 1, 1, 1, 1};
  Map const after{0, 0, 0, 0, 0, 0, 0};
  std::vector<std::pair<int, int>> pairs;
  for (Flow const& f : plan_flows(before, after, 2, 7)) pairs.emplace_back(f.source_rank, f.destination_rank);
  EXPECT_EQ(pairs, (std::vector<std::pair<int, int>>{{0, 2}, {0, 3}, {1, 4}, {1, 5}, {0, 6}}));
}

TEST(TransferPlan, SenderOnTheReceiversNodeIsPreferred) {
  Map const before{0, 1, 1, 0, 1, 1};  // expert 0 on rank 0 (node 0) and rank 3 (node 1)
  Map const after{0, 0, 1, 0, 0, 0};
  std::vector<std::pair<int, int>> pairs;
  for (Flow const& f : plan_flows(before, after, 2, 6, {.node_of_rank = {0, 0, 0, 1, 1, 1}})) {
    pairs.emplace_back(f.source_rank, f.destination_rank);
  }
  EXPECT_EQ(pairs, (std::vector<std::pair<int, int>>{{0, 1}, {3, 4}, {3, 5}}));
}

TEST(TransferPlan, B8_IdentityMovesNothing) {
  Map const map{3, 1, 0, 0, 0, 2};
  EXPECT_TRUE(plan_flows(map, map, 4, 3).empty());
  for (int r = 0; r < 3; ++r) EXPECT_TRUE(plan_rank(map, map, 4, 3, r).empty());
  EXPECT_TRUE(moe::eplb::schedule_rounds({}, 3).empty());
}

TEST(TransferPlan, BadArguments) {
  expect_error(ErrorCode::argument, "maps of 4 and 6 expert slots", [] { plan_flows(Map{0, 1, 2, 3}, Map{0, 1, 2, 3, 0, 1}, 4, 2); });
  expect_error(ErrorCode::argument, "on 3 ranks", [] { plan_flows(Map{0, 1, 2, 3}, Map{0, 1, 2, 3}, 4, 3); });
  expect_error(ErrorCode::argument, "expert 4 at physical id 1 is out of range [0, 4)", [] { plan_flows(Map{0, 1}, Map{0, 4}, 4, 2); });
  expect_error(ErrorCode::argument, "expert 2 for physical id 1 is on no rank", [] { plan_flows(Map{0, 1}, Map{0, 2}, 4, 2); });
  expect_error(ErrorCode::argument, "rank 2 is out of range", [] { plan_rank(Map{0, 1}, Map{1, 0}, 2, 2, 2); });
}

// Old and new maps in which every expert appears.
struct Maps {
  int num_logical;
  int num_ranks;
  Map before;
  Map after;
};

Map random_map(int num_logical, int num_slots) {
  std::mt19937 random(*rc::gen::arbitrary<std::uint32_t>());
  Map map(static_cast<std::size_t>(num_slots));
  std::iota(map.begin(), map.begin() + num_logical, 0);
  for (std::size_t i = static_cast<std::size_t>(num_logical); i < map.size(); ++i) {
    map[i] = static_cast<std::int32_t>(random() % static_cast<unsigned>(num_logical));
  }
  std::shuffle(map.begin(), map.end(), random);
  return map;
}

Maps any_maps() {
  int const ranks = *rc::gen::inRange(1, 9);
  int const slots = ranks * *rc::gen::inRange(1, 8);
  int const experts = *rc::gen::inRange(1, slots + 1);
  return {experts, ranks, random_map(experts, slots), random_map(experts, slots)};
}

// One expert's weights: several tensors, sizes like w13, w2, scales and biases, filled with (layer, expert, tensor).
using Weights = std::vector<std::vector<int>>;
Weights weights_of(int layer, int expert) {
  Weights out;
  for (std::size_t size : {8, 4, 2, 1, 3}) out.emplace_back(size, layer * 1'000'000 + expert * 100 + static_cast<int>(out.size()));
  return out;
}

RC_GTEST_PROP(TransferPlan, B7_EveryExpertSlotHoldsItsExpertAfterTheMove, ()) {
  Maps const m = any_maps();
  int const layer = *rc::gen::inRange(0, 61);
  int const slots_per_rank = static_cast<int>(m.before.size()) / m.num_ranks;
  std::vector<Weights> weights;  // of all ranks, by physical id
  weights.reserve(m.before.size());
  for (std::int32_t e : m.before) weights.push_back(weights_of(layer, e));
  // The spare memory: one buffer of L expert slots per rank, addressed by local id.
  std::vector<std::vector<Weights>> buffer(static_cast<std::size_t>(m.num_ranks),
                                           std::vector<Weights>(static_cast<std::size_t>(slots_per_rank)));
  auto const spare = [&](int slot) -> Weights& {
    return buffer.at(static_cast<std::size_t>(slot / slots_per_rank)).at(static_cast<std::size_t>(slot % slots_per_rank));
  };
  std::vector<RankPlan> plans;
  plans.reserve(static_cast<std::size_t>(m.num_ranks));
  for (int r = 0; r < m.num_ranks; ++r) plans.push_back(plan_rank(m.before, m.after, m.num_logical, m.num_ranks, r));
  // Ranks advance in any order; a rank commits as soon as its own sends and receives are done, while others may not have begun.
  std::map<std::pair<int, int>, Weights> wire;
  std::mt19937 order(*rc::gen::arbitrary<std::uint32_t>());
  std::vector<int> stage(plans.size(), 0);
  while (std::any_of(stage.begin(), stage.end(), [](int s) { return s < 5; })) {
    std::size_t const r = order() % plans.size();
    RankPlan const& plan = plans[r];
    auto const arrived = [&](Flow const& f) { return wire.contains({f.destination_rank, f.expert}); };
    switch (stage[r]) {
      case 0:
        for (SlotCopy const& c : plan.local_copies) spare(c.destination_slot) = weights[static_cast<std::size_t>(c.source_slot)];
        break;
      case 1:
        for (Flow const& f : plan.sends) wire[{f.destination_rank, f.expert}] = weights[static_cast<std::size_t>(f.source_slot)];
        break;
      case 2:
        if (!std::all_of(plan.receives.begin(), plan.receives.end(), arrived)) continue;
        for (Flow const& f : plan.receives) spare(f.destination_slot) = wire.at({f.destination_rank, f.expert});
        break;
      case 3:
        for (SlotCopy const& c : plan.duplicates) spare(c.destination_slot) = spare(c.source_slot);
        break;
      case 4:
        for (std::int32_t slot : plan.commits) weights[static_cast<std::size_t>(slot)] = spare(slot);
        break;
      default: continue;
    }
    ++stage[r];
  }
  for (RankPlan const& plan : plans) RC_ASSERT(plan.commits.size() <= static_cast<std::size_t>(slots_per_rank));
  for (std::size_t slot = 0; slot < weights.size(); ++slot) RC_ASSERT(weights[slot] == weights_of(layer, m.after[slot]));
}

RC_GTEST_PROP(TransferPlan, B24_SendsOfAllRanksAreTheReceivesOfAllRanks, ()) {
  Maps const m = any_maps();
  std::vector<int> nodes;
  if (*rc::gen::arbitrary<bool>()) {
    for (int r = 0; r < m.num_ranks; ++r) nodes.push_back(*rc::gen::inRange(0, 3));
  }
  std::set<std::vector<int>> sent, received;
  for (int r = 0; r < m.num_ranks; ++r) {
    RankPlan const plan = plan_rank(m.before, m.after, m.num_logical, m.num_ranks, r, {nodes});
    auto const key = [](Flow const& f) {
      return std::vector<int>{f.expert, f.source_rank, f.source_slot, f.destination_rank, f.destination_slot};
    };
    for (Flow const& f : plan.sends) RC_ASSERT(f.source_rank == r && sent.insert(key(f)).second);
    for (Flow const& f : plan.receives) RC_ASSERT(f.destination_rank == r && received.insert(key(f)).second);
    std::set<int> experts;
    for (Flow const& f : plan.receives) {
      RC_ASSERT(experts.insert(f.expert).second);
      RC_ASSERT(m.before[static_cast<std::size_t>(f.source_slot)] == f.expert);
      RC_ASSERT(m.after[static_cast<std::size_t>(f.destination_slot)] == f.expert);
      RC_ASSERT(f.source_rank != r);
    }
  }
  RC_ASSERT(sent == received);
}

RC_GTEST_PROP(TransferPlan, TransferRoundsHaveOnePeerEachWayAndAreAsFewAsPossible, ()) {
  Maps const m = any_maps();
  auto const flows = plan_flows(m.before, m.after, m.num_logical, m.num_ranks);
  auto const rounds = moe::eplb::schedule_rounds(flows, m.num_ranks);
  std::map<int, std::set<int>> to, from;
  for (Flow const& f : flows) {
    to[f.source_rank].insert(f.destination_rank);
    from[f.destination_rank].insert(f.source_rank);
  }
  std::size_t most = 0;
  for (auto const& [rank, peers] : to) most = std::max(most, peers.size());
  for (auto const& [rank, peers] : from) most = std::max(most, peers.size());
  RC_ASSERT(rounds.size() == most);
  std::size_t scheduled = 0;
  for (auto const& round : rounds) {
    std::set<int> senders, receivers;
    RC_ASSERT(!round.empty());
    for (auto const& message : round) {
      RC_ASSERT(senders.insert(message.source_rank).second);
      RC_ASSERT(receivers.insert(message.destination_rank).second);
      for (Flow const& f : message.flows) {
        RC_ASSERT(f.source_rank == message.source_rank && f.destination_rank == message.destination_rank);
        ++scheduled;
      }
    }
  }
  RC_ASSERT(scheduled == flows.size());
}

}  // namespace
