// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/layer_batched_arrivals_test.cu: LowLatency and HopperMasked in one schedule give the bits of the same layer without it,
// with rows in bf16 and in e4m3 with scales: random rounds, skew, no tokens, one token, rows in pieces, calls that wait in the dispatch
// beside calls that do not, masks, a captured graph, a rank that gives up, a rank that stays away.
// moe-ranks: 1 2 4
#include <gtest/gtest.h>
#include <mpi.h>

#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "tests/multigpu/arrivals_subject.cuh"

namespace {

using namespace moe_test::arrivals;

using InBf16 = Pair<None, backends::LowLatency<Window>, experts::HopperMasked>;
using InFp8 = Pair<Fp8, backends::LowLatency<Window>, experts::HopperMasked>;

template <class P>
struct LayerBatchedArrivals : testing::Test {};
using Pairs = testing::Types<InBf16, InFp8>;
TYPED_TEST_SUITE(LayerBatchedArrivals, Pairs);

template <class P>
void give_the_bits_of_the_unfused_layer(Sizes const& sizes, unsigned rounds) {
  Subject<P> s(sizes);
  int const most[] = {sizes.max_tokens, 1, std::min(40, sizes.max_tokens), 0, std::min(200, sizes.max_tokens)};
  for (unsigned round = 0; round < rounds; ++round) {
    ASSERT_EQ(s.round(round, pattern_of(round), most[round % 5]), "")
        << "round " << round << ", hidden " << sizes.hidden << ", " << sizes.max_tokens << " tokens at most, expected rows "
        << sizes.expected_rows;
  }
  EXPECT_GT(s.norm(), 0.0);
}

TYPED_TEST(LayerBatchedArrivals, GivesTheBitsOfTheUnfusedLayer) { give_the_bits_of_the_unfused_layer<TypeParam>({}, 70); }

TYPED_TEST(LayerBatchedArrivals, GivesTheSameBitsInRandomRounds) { give_the_same_bits_in_random_rounds<Subject<TypeParam>>(); }

/// 1104 columns: the last group is short. 7168 columns of few tokens travel in up to 14 pieces each.
TYPED_TEST(LayerBatchedArrivals, HoldsForOtherTilesAndWidths) {
  for (int rows : {4, 60, 160}) give_the_bits_of_the_unfused_layer<TypeParam>({.expected_rows = rows}, 14);
  give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 1104}, 14);
  give_the_bits_of_the_unfused_layer<TypeParam>({.hidden = 7168, .max_tokens = 16}, 70);
}

/// Batches that hold one row of each rank.
TYPED_TEST(LayerBatchedArrivals, HoldsForOneToken) { give_the_bits_of_the_unfused_layer<TypeParam>({.max_tokens = 1}, 35); }

/// Many short rounds on end, compared at the last: a count that is off by one in any round stays off.
TYPED_TEST(LayerBatchedArrivals, CountsOverManyRounds) {
  Subject<TypeParam> s({.max_tokens = 40});
  for (unsigned seed = 0; seed < 20; ++seed) {
    s.bring(seed, pattern_of(seed), 40);
    for (int i = 0; i < 100; ++i) s.forward_fused();
    s.forward_plain();
    ASSERT_EQ(s.difference(), "") << "seed " << seed;
    ASSERT_EQ(s.fused_error(), "");
  }
}

/// Exchanges that count no rows: their experts start when all rows are there.
TYPED_TEST(LayerBatchedArrivals, WaitsInTheDispatchWithMasksAndOneRowARank) {
  give_the_bits_of_the_unfused_layer<TypeParam>({.masks = true}, 14);
  give_the_bits_of_the_unfused_layer<TypeParam>({.deduplicate = true}, 14);
}

/// Each rank takes another way to its rows in each round: late, waited for in the dispatch, in two halves.
TYPED_TEST(LayerBatchedArrivals, MixesCallsThatWaitInTheDispatch) {
  Subject<TypeParam> s;
  auto& exchange = s.fused().exchange();
  auto& kernel = s.fused().kernel();
  for (unsigned round = 0; round < 30; ++round) {
    s.bring(round, pattern_of(round), 200);
    s.forward_plain();
    unsigned const way = (round + static_cast<unsigned>(s.rank())) % 3;
    if (way == 0) {
      auto const tokens = exchange.prepare_arriving(s.routed(), s.stream());
      kernel.apply(tokens, exchange.expert_output(), exchange.arrivals(), s.stream());
    } else if (way == 1) {
      auto const tokens = exchange.prepare(s.routed(), s.stream());
      kernel.apply(tokens, exchange.expert_output(), s.stream());
    } else {
      exchange.prepare_send(s.routed(), s.stream());
      auto const tokens = exchange.prepare_receive(s.stream());
      kernel.apply(tokens, exchange.expert_output(), s.stream());
    }
    exchange.finalize(s.fused_output(), s.stream());
    ASSERT_EQ(s.difference(), "") << "round " << round;
    ASSERT_EQ(s.fused_error(), "");
  }
}

TYPED_TEST(LayerBatchedArrivals, FollowsAGraph) {
  Subject<TypeParam> s;
  s.bring_all(1, Pattern::uniform, 100);
  s.forward_fused();
  ASSERT_EQ(s.fused_error(), "");
  CudaGraph const graph(s.stream(), [&] {
    for (int i = 0; i < 3; ++i) s.forward_fused();
  });
  for (unsigned seed = 2; seed < 14; ++seed) {
    s.bring_all(seed, pattern_of(seed), 100);
    s.forward_plain();
    graph.launch(s.stream());
    ASSERT_EQ(s.difference(), "") << "seed " << seed;
    ASSERT_EQ(s.fused_error(), "");
    if (seed % 3 == 0) s.forward_fused();
  }
}

/// Before its dispatch, and after it: then its peers' rows may still be on their way when it gives up.
TYPED_TEST(LayerBatchedArrivals, EndsARoundThatARankAbandons) {
  Subject<TypeParam> s;
  if (s.size() == 1) GTEST_SKIP() << "one rank has no peers";
  for (unsigned seed = 0; seed < 6; ++seed) {
    s.bring_all(seed, Pattern::uniform, 100);
    if (s.rank() == s.size() - 1) {
      if (seed % 2 == 1) s.fused().exchange().prepare_arriving(s.routed(), s.stream());
      s.fused().abandon(s.stream());
      s.fused_error();
    } else {
      s.forward_fused();
      EXPECT_NE(s.fused_error().find(text("rank ", s.size() - 1)), std::string::npos);
    }
    for (unsigned more = 10; more < 13; ++more) {
      s.bring_all(seed + more, Pattern::uniform, 100);
      s.forward_plain();
      s.forward_fused();
      ASSERT_EQ(s.difference(), "") << "seed " << seed << " + " << more;
      ASSERT_EQ(s.fused_error(), "");
    }
  }
}

/// Last: they end their groups.
TEST(LayerBatchedArrivalsEnd, NamesARankThatStaysAway) { name_a_rank_that_stays_away<InBf16>(); }
TEST(LayerBatchedArrivalsEnd, NamesARankThatStaysAwayInFp8) { name_a_rank_that_stays_away<InFp8>(); }

}  // namespace
