// SPDX-License-Identifier: Apache-2.0
// tests/unit/routing_permutation_test.cpp: the order of slots by expert (examples of docs/semantics/experts.md §5) and the launch shapes of
// the routing kernel.
#include "moe/routing/route.hpp"

#include <gtest/gtest.h>

#include <sstream>
#include <vector>

namespace {

using namespace moe;
using namespace moe::routing;
using Ids = std::vector<std::int32_t>;

struct Permuted {
  std::vector<std::int64_t> offsets;
  Ids counts, sorted, inverse;
};
Permuted permute(Ids const& ids, int slots, int k, int experts, int alignment, Ids const& map = {}, int shared = 0,
                 std::int64_t valid = -1) {
  auto const rows = static_cast<std::int64_t>(ids.size()) / slots;
  int locals = map.empty() ? experts : 0;
  for (std::int32_t l : map) locals = std::max(locals, l + 1);
  auto const n = static_cast<std::size_t>(locals) + static_cast<std::size_t>(shared);
  Permuted r{std::vector<std::int64_t>(n + 1, -9), Ids(n, -9),
             Ids(static_cast<std::size_t>(permutation_rows(rows, slots, locals + shared, alignment)), -9), Ids(ids.size(), -9)};
  Permutation const p{.num_local_experts = locals,
                      .num_local_shared = shared,
                      .expert_map = map.empty() ? nullptr : map.data(),
                      .row_alignment = alignment,
                      .expert_offsets = r.offsets.data(),
                      .expert_num_tokens = r.counts.data(),
                      .sorted_slots = r.sorted.data(),
                      .inverse = r.inverse.data()};
  validate(p, rows, slots, experts, slots - k);
  permute_slots(make_rows(ids.data(), rows, slots), k, experts, valid < 0 ? rows : valid, p);
  return r;
}
Ids const kIds{2, 0, 1, 2, 2, 0, -1, 2};

TEST(Permutation, TheExample) {
  Permuted const p = permute(kIds, 2, 2, 3, 1);
  EXPECT_EQ(p.offsets, (std::vector<std::int64_t>{0, 2, 3, 7}));
  EXPECT_EQ(p.counts, (Ids{2, 1, 4}));
  EXPECT_EQ(Ids(p.sorted.begin(), p.sorted.begin() + 7), (Ids{1, 5, 2, 0, 3, 4, 7}));
  EXPECT_EQ(p.inverse, (Ids{3, 0, 2, 4, 5, 1, -1, 6}));
}
TEST(Permutation, AlignedExampleFillsGapsWithTheSlotCount) {
  Permuted const p = permute(kIds, 2, 2, 3, 4);
  EXPECT_EQ(p.offsets, (std::vector<std::int64_t>{0, 4, 8, 12}));
  EXPECT_EQ(Ids(p.sorted.begin(), p.sorted.begin() + 12), (Ids{1, 5, 8, 8, 2, 8, 8, 8, 0, 3, 4, 7}));
  EXPECT_EQ(p.inverse, (Ids{8, 0, 4, 9, 10, 1, -1, 11}));
}
TEST(Permutation, OnlyLocalExpertsAndValidRows) {
  Permuted const p = permute(kIds, 2, 2, 3, 1, {-1, 0, 1});
  EXPECT_EQ(p.offsets, (std::vector<std::int64_t>{0, 1, 5}));
  EXPECT_EQ(p.inverse, (Ids{1, -1, 0, 2, 3, -1, -1, 4}));
  EXPECT_EQ(permute(kIds, 2, 2, 3, 1, {}, 0, 2).inverse, (Ids{2, 0, 1, 3, -1, -1, -1, -1}));
  EXPECT_EQ(permute(kIds, 2, 2, 3, 1, {}, 0, 0).offsets, (std::vector<std::int64_t>{0, 0, 0, 0}));
}
TEST(Permutation, FusedSharedExpertsComeLast) {
  Ids const ids{1, 0, 3, -1, 1, 3};  // [2, 3]: two routed columns, one fused
  EXPECT_EQ(permute(ids, 3, 2, 3, 1, {}, 1).inverse, (Ids{1, 0, 3, -1, 2, 4}));
  EXPECT_EQ(permute(ids, 3, 2, 3, 1, {}, 0).inverse, (Ids{1, 0, -1, -1, 2, -1}));
}
TEST(Permutation, ZeroExpertsHaveNoRow) { EXPECT_EQ(permute({4, 1}, 2, 2, 3, 1).inverse, (Ids{-1, 0})); }
TEST(Permutation, Capacity) {
  EXPECT_EQ(permutation_rows(4, 2, 3, 4), 8 + 3 * 3);
  EXPECT_EQ(permutation_rows(1, 2, 100, 4), 2 + 2 * 3);
  std::int64_t offset = 0;
  std::int32_t word = 0;
  Permutation p{.num_local_experts = 8, .expert_offsets = &offset, .sorted_slots = &word, .inverse = &word};
  EXPECT_THROW(validate(p, std::int64_t{1} << 30, 2, 8, 0), Error);
  EXPECT_THROW(validate(p, 4, 2, 9, 0), Error);  // 8 of 9 experts without a map
  p.row_alignment = 0;
  EXPECT_THROW(validate(p, 4, 2, 8, 0), Error);
}

TEST(RoutingTuning, ShapesFollowTheRows) {
  RoutingCapacity const h200{{132, 132, 120, 120, 112}};
  RoutingCapacity const whole{{132, 132, 128, 128, 128}};  // groups of multiprocessors that hold whole clusters
  RoutingCapacity const a100{{108, 0, 0, 0, 0}};
  auto const shape = [](std::int64_t rows, RoutingCapacity const& device, int logits = 256) {
    return choose_routing_tuning(rows, logits, device, true);
  };
  EXPECT_EQ(shape(1, h200), (RoutingTuning{1, 8, 1, GridBarrier::none}));
  EXPECT_EQ(shape(16, h200), (RoutingTuning{1, 16, 1, GridBarrier::none}));
  EXPECT_EQ(shape(17, h200), (RoutingTuning{4, 8, 4, GridBarrier::cluster}));
  EXPECT_EQ(shape(128, h200), (RoutingTuning{16, 8, 16, GridBarrier::cluster}));
  EXPECT_EQ(shape(128, a100), (RoutingTuning{16, 8, 1, GridBarrier::cooperative}));
  EXPECT_EQ(shape(512, h200), (RoutingTuning{64, 8, 8, GridBarrier::cooperative}));
  EXPECT_EQ(shape(4096, h200), (RoutingTuning{128, 32, 1, GridBarrier::cooperative}));
  EXPECT_EQ(shape(4096, whole), (RoutingTuning{128, 32, 4, GridBarrier::cooperative}));  // eight blocks would need wider counts
  EXPECT_EQ(shape(2048, whole), (RoutingTuning{128, 16, 8, GridBarrier::cooperative}));
  EXPECT_EQ(shape(100000, h200), (RoutingTuning{132, 32, 1, GridBarrier::cooperative}));
  EXPECT_EQ(shape(100000, h200, 1024).warps, 16);  // more registers per thread
  EXPECT_EQ(choose_routing_tuning(4096, 256, h200, false), (RoutingTuning{512, 8, 1, GridBarrier::none}));
  std::ostringstream out;
  out << shape(128, h200);
  EXPECT_EQ(out.str(), "RoutingTuning{blocks 16, warps 8, cluster 16, barrier cluster}");
}

}  // namespace
