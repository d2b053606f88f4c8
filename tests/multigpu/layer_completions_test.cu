// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/layer_completions_test.cu: HighThroughput and HopperContiguous with the combine beside the experts, alone and with the
// dispatch, too, give the bits of the same layer without it, with rows in bf16 and in e4m3 with scales: random rounds, skew, no tokens, an
// overflow, captured graphs, a rank that gives up, a rank that stays away.
// moe-ranks: 1 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "tests/multigpu/arrivals_subject.cuh"

namespace {

using namespace moe_test::arrivals;

using InBf16 = Pair<None, backends::HighThroughput<Window>, experts::HopperContiguous>;
using InFp8 = Pair<Fp8, backends::HighThroughput<Window>, experts::HopperContiguous>;

/// A pair and the configuration of its fused layer.
template <class P, class Config>
struct Schedule {
  using Subject = moe_test::arrivals::Subject<P, Config>;
};

template <class S>
struct LayerCompletions : testing::Test {};
using Schedules = testing::Types<Schedule<InBf16, Completing>, Schedule<InFp8, Completing>, Schedule<InBf16, Both>, Schedule<InFp8, Both>>;
TYPED_TEST_SUITE(LayerCompletions, Schedules);

template <class S>
void give_the_bits_of_the_unfused_layer(Sizes const& sizes, unsigned rounds) {
  typename S::Subject s(sizes);
  constexpr int kMost[] = {kMaxTokens, 1, 40, 0, 200};
  for (unsigned round = 0; round < rounds; ++round) {
    ASSERT_EQ(s.round(round, pattern_of(round), kMost[round % 5]), "")
        << "round " << round << ", hidden " << sizes.hidden << ", expected rows " << sizes.expected_rows << ", " << sizes.column_blocks
        << " column blocks";
  }
  EXPECT_GT(s.norm(), 0.0);
}

TYPED_TEST(LayerCompletions, GivesTheBitsOfTheUnfusedLayer) { give_the_bits_of_the_unfused_layer<TypeParam>({}, 70); }

TYPED_TEST(LayerCompletions, GivesTheSameBitsInRandomRounds) { give_the_same_bits_in_random_rounds<typename TypeParam::Subject>(); }

/// 1152 and 1104 columns: the last block is narrower than the others, and in fp8 the last group of 1104 is short.
TYPED_TEST(LayerCompletions, HoldsForOtherTilesWidthsAndBlocks) {
  for (int rows : {4, 16, 60}) give_the_bits_of_the_unfused_layer<TypeParam>({.expected_rows = rows}, 14);
  for (int blocks : {1, 2, 3, 8}) give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 2048, .column_blocks = blocks}, 14);
  give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 1152}, 14);
  give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 1152, .expected_rows = 16, .column_blocks = 2}, 14);
  give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 1104}, 14);
}

TYPED_TEST(LayerCompletions, FollowsAGraph) {
  typename TypeParam::Subject s;
  s.bring_all(1, Pattern::uniform, 300);
  s.forward_fused();
  ASSERT_EQ(s.fused_error(), "");
  for (int calls : {3, 1}) {  // both parities in one graph, then one parity again and again
    CudaGraph const graph(s.stream(), [&] {
      for (int i = 0; i < calls; ++i) s.forward_fused();
    });
    for (unsigned seed = 2; seed < 8; ++seed) {
      s.bring_all(seed, seed % 2 == 0 ? Pattern::gaps : Pattern::uniform, 300);
      s.forward_plain();
      graph.launch(s.stream());
      ASSERT_EQ(s.difference(), "") << "seed " << seed << ", " << calls << " calls";
      ASSERT_EQ(s.fused_error(), "");
    }
  }
}

TYPED_TEST(LayerCompletions, FillsAndOverflowsTheCapacity) { fill_and_overflow_the_capacity<typename TypeParam::Subject>(); }

TYPED_TEST(LayerCompletions, HoldsOneRowInRoomForOne) { hold_one_row_in_room_for_one<typename TypeParam::Subject>(); }

TYPED_TEST(LayerCompletions, EndsARoundThatARankAbandons) { end_a_round_that_a_rank_abandons<typename TypeParam::Subject>(); }

/// The layer's exchange and kernel, one call after the other, without completions(): the combine follows the experts. Ranks choose
/// independently.
TYPED_TEST(LayerCompletions, ARankMayLeaveTheScheduleInAnyRound) {
  typename TypeParam::Subject s;
  for (unsigned seed = 0; seed < 12; ++seed) {
    s.bring_all(seed, seed % 2 == 0 ? Pattern::gaps : Pattern::uniform, 200);
    s.forward_plain();
    if ((seed + static_cast<unsigned>(s.rank())) % 3 == 0) {
      s.clear_fused_output();
      auto& exchange = s.fused().exchange();
      auto const tokens = exchange.prepare(s.routed(), s.stream());
      if constexpr (facts::arrives<std::remove_cvref_t<decltype(exchange)>>()) {
        s.fused().kernel().apply(tokens, exchange.expert_output(), exchange.arrivals(), s.stream());
      } else {
        s.fused().kernel().apply(tokens, exchange.expert_output(), s.stream());
      }
      exchange.finalize(s.fused_output(), s.stream());
    } else {
      s.forward_fused();
    }
    ASSERT_EQ(s.difference(), "") << "seed " << seed;
    ASSERT_EQ(s.fused_error(), "");
  }
}

/// Last: they end their groups.
TEST(LayerCompletionsEnd, NamesARankThatStaysAway) { name_a_rank_that_stays_away<InBf16, Completing>(); }
TEST(LayerCompletionsEnd, NamesARankThatStaysAwayInFp8) { name_a_rank_that_stays_away<InFp8, Completing>(); }
TEST(LayerCompletionsEnd, NamesARankThatStaysAwayFromBoth) { name_a_rank_that_stays_away<InFp8, Both>(); }

}  // namespace
