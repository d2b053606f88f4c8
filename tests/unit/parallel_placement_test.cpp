// SPDX-License-Identifier: Apache-2.0
// tests/unit/parallel_placement_test.cpp: who owns which expert (cases P4, P5, P6, P14 and the rules for round-robin and resizing).
#include "moe/parallel/placement.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

#include "expect_error.hpp"

namespace {

using moe::ErrorCode;
using moe::ExpertPlacement;
using moe::PlacementStrategy;
using moe_test::expect_error;
using Ids = std::vector<std::int32_t>;

Ids owned(ExpertPlacement const& placement, int rank) {
  auto const ids = placement.local_to_physical(rank);
  return Ids(ids.begin(), ids.end());
}

TEST(Placement, P4_PartitionAndSizes) {
  for (int experts : {1, 3, 8, 10, 60, 64, 128, 160, 256, 384}) {
    for (int ranks : {1, 2, 3, 4, 8, 16}) {
      for (auto strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
        ExpertPlacement const placement(experts, ranks, strategy, true);
        ASSERT_EQ(placement.num_physical(), experts);
        ASSERT_EQ(placement.ep_size(), ranks);
        std::vector<int> seen(static_cast<std::size_t>(experts), 0);
        int total = 0;
        for (int r = 0; r < ranks; ++r) {
          ASSERT_EQ(placement.num_local(r), experts / ranks + (r < experts % ranks ? 1 : 0));
          total += placement.num_local(r);
          Ids const map = placement.expert_map(r);
          int local_count = 0;
          for (int p = 0; p < experts; ++p) {
            auto const i = static_cast<std::size_t>(p);
            if (map[i] < 0) continue;
            ++seen[i];
            ++local_count;
            ASSERT_EQ(placement.owner(p), r);
            ASSERT_EQ(placement.local(p), map[i]);
            ASSERT_EQ(placement.local_to_physical(r)[static_cast<std::size_t>(map[i])], p);
          }
          ASSERT_EQ(local_count, placement.num_local(r));
        }
        ASSERT_EQ(total, experts);
        ASSERT_TRUE(std::all_of(seen.begin(), seen.end(), [](int n) { return n == 1; }));
        ASSERT_EQ(placement.max_num_local(), (experts + ranks - 1) / ranks);
        ASSERT_EQ(placement.is_even(), experts % ranks == 0);
        ASSERT_EQ(placement.needs_map(), ranks > 1);
      }
    }
  }
}

TEST(Placement, TablesOfEightAndTen) {
  ExpertPlacement const linear8(8, 2), robin8(8, 2, PlacementStrategy::round_robin), linear10(10, 4);
  EXPECT_EQ(owned(linear8, 0), (Ids{0, 1, 2, 3}));
  EXPECT_EQ(owned(linear8, 1), (Ids{4, 5, 6, 7}));
  EXPECT_EQ(owned(robin8, 0), (Ids{0, 2, 4, 6}));
  EXPECT_EQ(owned(robin8, 1), (Ids{1, 3, 5, 7}));
  EXPECT_EQ(owned(linear10, 0), (Ids{0, 1, 2}));
  EXPECT_EQ(owned(linear10, 1), (Ids{3, 4, 5}));
  EXPECT_EQ(owned(linear10, 2), (Ids{6, 7}));
  EXPECT_EQ(owned(linear10, 3), (Ids{8, 9}));
  EXPECT_EQ(linear10.expert_map(2), (Ids{-1, -1, -1, -1, -1, -1, 0, 1, -1, -1}));
  EXPECT_TRUE(linear10.is_identity_order());
}

TEST(Placement, P5_RoundRobinTenOnFour) {
  ExpertPlacement const placement(10, 4, PlacementStrategy::round_robin);
  EXPECT_EQ(owned(placement, 0), (Ids{0, 4, 8}));
  EXPECT_EQ(owned(placement, 1), (Ids{1, 5, 9}));
  EXPECT_EQ(owned(placement, 2), (Ids{2, 6}));
  EXPECT_EQ(owned(placement, 3), (Ids{3, 7}));
  EXPECT_EQ(placement.expert_map(2), (Ids{-1, -1, 0, -1, -1, -1, 1, -1, -1, -1}));
  Ids const order = placement.placement_order();
  EXPECT_EQ(order, (Ids{0, 3, 6, 8, 1, 4, 7, 9, 2, 5}));
  EXPECT_EQ(placement.inverse_placement_order(), (Ids{0, 4, 8, 1, 5, 9, 2, 6, 3, 7}));
  for (std::size_t g = 0; g < order.size(); ++g) {
    EXPECT_EQ(placement.inverse_placement_order()[static_cast<std::size_t>(order[g])], static_cast<std::int32_t>(g));
  }
  EXPECT_FALSE(placement.is_identity_order());
  EXPECT_EQ(placement.even_slot_ids(true), (Ids{0, 3, 6, 9, 1, 4, 7, 10, 2, 5}));
  expect_error(ErrorCode::unsupported, "E % R", [&] { placement.even_slot_ids(false); });
}

TEST(Placement, P6_MoreRanksThanExperts) {
  expect_error(ErrorCode::config, "more ranks than experts", [] { ExpertPlacement(3, 4); });
  for (auto strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
    ExpertPlacement const placement(3, 4, strategy, true);
    for (int r = 0; r < 3; ++r) EXPECT_EQ(owned(placement, r), (Ids{r}));
    EXPECT_EQ(placement.num_local(3), 0);
    EXPECT_EQ(placement.expert_map(3), (Ids{-1, -1, -1}));
    EXPECT_EQ(placement.report(3), "rank 3: 0 experts");
  }
}

TEST(Placement, P14_ExpertMask) {
  EXPECT_EQ(ExpertPlacement(8, 2).expert_mask(1, 1), (Ids{0, 0, 0, 0, 1, 1, 1, 1, 1, 0}));
  EXPECT_EQ(ExpertPlacement(3, 4, PlacementStrategy::linear, true).expert_mask(3), (Ids{0, 0, 0, 0}));
  expect_error(ErrorCode::argument, "num_fused_shared", [] { ExpertPlacement(8, 2).expert_mask(1, -1); });
}

TEST(Placement, P7_BadSizesAndNames) {
  expect_error(ErrorCode::config, "num_experts must be at least 1, is 0", [] { ExpertPlacement(0, 1); });
  expect_error(ErrorCode::config, "ep_size must be at least 1, is 0", [] { ExpertPlacement(8, 0); });
  expect_error(ErrorCode::config, "unsupported expert placement strategy \"zigzag\"", [] { moe::parse_placement_strategy("zigzag"); });
  EXPECT_EQ(moe::parse_placement_strategy("linear"), PlacementStrategy::linear);
  EXPECT_EQ(moe::parse_placement_strategy("round_robin"), PlacementStrategy::round_robin);
  expect_error(ErrorCode::argument, "rank 2 is out of range [0, 2)", [] { ExpertPlacement(8, 2).expert_map(2); });
  expect_error(ErrorCode::argument, "rank -1 is out of range", [] { ExpertPlacement(8, 2).num_local(-1); });
}

TEST(Placement, CustomPhysicalToLogical) {
  Ids const p2l{3, 1, 0, 0, 0, 2};
  auto const placement = ExpertPlacement::from_physical_to_logical(p2l, 4, 3);
  EXPECT_EQ(placement.num_physical(), 6);
  EXPECT_EQ(placement.num_logical(), 4);
  EXPECT_EQ(placement.physical_to_logical(), p2l);
  EXPECT_EQ(placement.logical(5), 2);
  EXPECT_EQ(owned(placement, 2), (Ids{4, 5}));
  expect_error(ErrorCode::config, "P must be divisible by ep_size", [&] { ExpertPlacement::from_physical_to_logical(p2l, 4, 4); });
  expect_error(ErrorCode::argument, "logical expert 3 at physical id 0 is out of range [0, 3)",
               [&] { ExpertPlacement::from_physical_to_logical(p2l, 3, 3); });
  expect_error(ErrorCode::argument, "logical expert 4 has no physical expert",
               [&] { ExpertPlacement::from_physical_to_logical(p2l, 5, 3); });
}

TEST(Placement, ReportFoldsRuns) {
  EXPECT_EQ(ExpertPlacement(10, 4, PlacementStrategy::round_robin).report(0), "rank 0: 3 experts: 0->0, 1->4, 2->8");
  EXPECT_EQ(ExpertPlacement(8, 2).report(), "rank 0: 4 experts: 0-3->0-3\nrank 1: 4 experts: 0-3->4-7\n");
}

TEST(Placement, ResizeReturnsTheChanges) {
  ExpertPlacement placement(8, 2);
  auto const changes = placement.update(4);
  EXPECT_EQ(placement, ExpertPlacement(8, 4));
  EXPECT_EQ(changes, (std::vector<moe::OwnerChange>{{2, 0, 1}, {3, 0, 1}, {4, 1, 2}, {5, 1, 2}, {6, 1, 3}, {7, 1, 3}}));
  expect_error(ErrorCode::state, "2 dispatch handles", [&] { placement.update(2, 2); });
  expect_error(ErrorCode::config, "more ranks than experts", [&] { placement.update(9); });
  EXPECT_EQ(placement, ExpertPlacement(8, 4));
  EXPECT_TRUE(placement.update(4).empty());
}

TEST(Placement, P7_RoundRobinWhereItDoesNotApply) {
  moe::PlacementRequest request{.strategy = PlacementStrategy::round_robin, .num_expert_group = 4};
  EXPECT_EQ(moe::choose_placement(request).strategy, PlacementStrategy::round_robin);
  EXPECT_TRUE(moe::choose_placement(request).reason.empty());
  EXPECT_EQ(moe::choose_placement({}).strategy, PlacementStrategy::linear);

  int warnings = 0;
  auto const falls_back = [&](moe::PlacementRequest bad, std::string const& part) {
    auto const choice = moe::choose_placement(bad);
    EXPECT_EQ(choice.strategy, PlacementStrategy::linear);
    EXPECT_NE(choice.reason.find(part), std::string::npos) << choice.reason;
    warnings += choice.warn ? 1 : 0;
    bad.strict = true;
    expect_error(ErrorCode::config, part, [&] { moe::choose_placement(bad); });
  };
  auto bad = request;
  bad.num_expert_group = 1;
  falls_back(bad, "num_expert_group is 1");
  bad = request;
  bad.num_redundant_experts = 4;
  falls_back(bad, "num_redundant_experts is 4");
  bad = request;
  bad.enable_eplb = true;
  falls_back(bad, "EPLB is on");
  bad = request;
  bad.backend_translates_ids = false;
  falls_back(bad, "does not translate expert ids");
  EXPECT_EQ(warnings, 1) << "one warning per process";
}

// Fused shared experts: every rank has its own copies behind its routed experts, and the routed ids stay.
TEST(Placement, WithShared) {
  for (PlacementStrategy strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
    ExpertPlacement const routed(10, 4, strategy), all = routed.with_shared(2);
    EXPECT_EQ(all.num_physical(), 18);
    EXPECT_EQ(all.num_logical(), 12);
    EXPECT_EQ(all.num_locals(), (std::vector<std::int32_t>{5, 5, 4, 4}));
    for (int p = 0; p < 10; ++p) EXPECT_EQ(std::pair(all.owner(p), all.local(p)), std::pair(routed.owner(p), routed.local(p)));
    for (int r = 0; r < 4; ++r) {
      for (int i = 0; i < 2; ++i) {
        int const p = 10 + 2 * r + i;
        EXPECT_EQ(all.owner(p), r);
        EXPECT_EQ(all.local(p), routed.num_local(r) + i);
        EXPECT_EQ(all.logical(p), 10 + i);
        EXPECT_EQ(all.local_to_physical(r)[static_cast<std::size_t>(all.local(p))], p);
      }
    }
    EXPECT_EQ(routed.with_shared(0), routed);
  }
}

}  // namespace
