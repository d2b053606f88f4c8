// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/layer_arrivals_test.cu: HighThroughput and HopperContiguous in one schedule give the bits of the same layer without it,
// with rows in bf16 and in e4m3 with scales: random rounds, skew, no tokens, an overflow, a captured graph, a rank that gives up, a rank
// that stays away.
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

template <class P>
struct LayerArrivals : testing::Test {};
using Pairs = testing::Types<InBf16, InFp8>;
TYPED_TEST_SUITE(LayerArrivals, Pairs);

template <class P>
void give_the_bits_of_the_unfused_layer(Sizes const& sizes, unsigned rounds) {
  Subject<P> s(sizes);
  constexpr int kMost[] = {kMaxTokens, 1, 40, 0, 200};
  for (unsigned round = 0; round < rounds; ++round) {
    ASSERT_EQ(s.round(round, pattern_of(round), kMost[round % 5]), "")
        << "round " << round << ", hidden " << sizes.hidden << ", expected rows " << sizes.expected_rows;
  }
  EXPECT_GT(s.norm(), 0.0);
}

TYPED_TEST(LayerArrivals, GivesTheBitsOfTheUnfusedLayer) { give_the_bits_of_the_unfused_layer<TypeParam>({}, 60); }

TYPED_TEST(LayerArrivals, GivesTheSameBitsInRandomRounds) { give_the_same_bits_in_random_rounds<Subject<TypeParam>>(); }

/// Tiles whose rows the products gather. 9 groups of 128: the copy engine cannot store their scales; 1104 columns: the last group is short.
TYPED_TEST(LayerArrivals, HoldsForOtherTilesAndWidths) {
  for (int rows : {4, 16, 60}) give_the_bits_of_the_unfused_layer<TypeParam>({.expected_rows = rows}, 12);
  give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 1152}, 12);
  give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 1152, .expected_rows = 16}, 12);
  give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 1104}, 12);
}

TYPED_TEST(LayerArrivals, FollowsAGraph) {
  Subject<TypeParam> s;
  s.bring_all(1, Pattern::uniform, 300);
  s.forward_fused();
  ASSERT_EQ(s.fused_error(), "");
  CudaGraph const graph(s.stream(), [&] {
    for (int i = 0; i < 3; ++i) s.forward_fused();
  });
  for (unsigned seed = 2; seed < 8; ++seed) {
    s.bring_all(seed, seed % 2 == 0 ? Pattern::gaps : Pattern::uniform, 300);
    s.forward_plain();
    graph.launch(s.stream());
    ASSERT_EQ(s.difference(), "") << "seed " << seed;
    ASSERT_EQ(s.fused_error(), "");
  }
}

TYPED_TEST(LayerArrivals, FillsAndOverflowsTheCapacity) { fill_and_overflow_the_capacity<Subject<TypeParam>>(); }

TYPED_TEST(LayerArrivals, HoldsOneRowInRoomForOne) { hold_one_row_in_room_for_one<Subject<TypeParam>>(); }

TYPED_TEST(LayerArrivals, EndsARoundThatARankAbandons) { end_a_round_that_a_rank_abandons<Subject<TypeParam>>(); }

/// Last: they end their groups.
TEST(LayerArrivalsEnd, NamesARankThatStaysAway) { name_a_rank_that_stays_away<InBf16>(); }
TEST(LayerArrivalsEnd, NamesARankThatStaysAwayInFp8) { name_a_rank_that_stays_away<InFp8>(); }

}  // namespace
