// SPDX-License-Identifier: Apache-2.0
// tests/mpi/window_exchange_test.cpp: each window exchange moves every token to its experts and back, for any rank count.
// moe-ranks: 1 2 3 4 5 8
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>

#include "moe/quantization/fp8_group128.hpp"
#include "window_harness.hpp"

namespace {

using namespace moe_test;
using moe::PlacementStrategy;

template <class Case>
class WindowExchange : public testing::Test {
 protected:
  Comm comm{MPI_COMM_WORLD, {.timeout_ms = 30'000}};
  int rank() const { return comm.rank(); }
  /// A number of experts that all exchanges accept.
  int experts(int per_rank) const { return per_rank * comm.size(); }
};
using Cases = testing::Types<LowLatencyCase, DeduplicatedCase, HighThroughputCase, OneSidedCase, TwoSidedCase, PplxCase>;
TYPED_TEST_SUITE(WindowExchange, Cases, CaseNames);

TYPED_TEST(WindowExchange, T1_RandomRowsAndIds) {
  for (PlacementStrategy strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
    int const experts = this->experts(4);
    WindowHarness<TypeParam> h(this->comm, {.hidden = 40, .num_experts = experts, .k = 4, .max_tokens = 13, .strategy = strategy});
    for (int round = 0; round < 20 && !this->HasFatalFailure(); ++round) {
      auto const rows = random_rows(this->rank(), round, 13);
      h.check(random_batch<float>(this->rank(), round, rows, 40, 4, experts), moe::text("round ", round));
    }
  }
}

TYPED_TEST(WindowExchange, T1_NarrowElementsAndFixedWidth) {
  int const experts = this->experts(2);
  WindowHarness<TypeParam, moe::bf16> h(this->comm, {.hidden = 24, .num_experts = experts, .k = 2});
  h.check(random_batch<moe::bf16>(this->rank(), 1, 5, 24, 2, experts));
  WindowHarness<TypeParam, moe::f16, moe::quantization::None, float, Config<moe::f16, 24>> fixed(
      this->comm, {.hidden = 24, .num_experts = experts, .k = 2});
  fixed.check(random_batch<moe::f16>(this->rank(), 2, 7, 24, 2, experts));
}

TYPED_TEST(WindowExchange, T2_ZeroTokensAndNoExperts) {
  int const experts = this->experts(2);
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  auto batch = [&](std::int64_t rows) { return random_batch<float>(this->rank(), 4, rows, 16, 2, experts); };
  for (int empty = 0; empty < this->comm.size(); ++empty) h.check(batch(this->rank() == empty ? 0 : 5), "one rank has none");
  h.check(batch(0), "no rank has any");
  auto none = batch(8);
  std::fill(none.ids.begin(), none.ids.end(), moe::kNoExpert);
  h.check(this->rank() == 0 ? none : batch(3), "one rank has tokens without experts");
}

TYPED_TEST(WindowExchange, T2_AllIdsAreNone) {
  int const experts = this->experts(2);
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  auto none = random_batch<float>(this->rank(), 4, 8, 16, 2, experts);
  std::fill(none.ids.begin(), none.ids.end(), moe::kNoExpert);
  EXPECT_EQ(h.forward(none), std::vector<float>(8 * 16, 0.0F));
  EXPECT_EQ(h.slots(), 0);
}

TYPED_TEST(WindowExchange, T3_OneRankTakesAllOrNone) {
  int const experts = this->experts(3);
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 3});
  expect_one_rank_takes_all_or_none(h, this->rank(), this->comm.size(), experts);
}

TYPED_TEST(WindowExchange, T3_T19_AllSlotsOnOneExpert) {
  int const experts = this->experts(1);
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = std::min(3, experts)});
  expect_one_expert_takes_all(h, this->rank(), 8, std::min(3, experts), experts);
}

TYPED_TEST(WindowExchange, T5_WidthsAndTopK) {
  int const experts = this->experts(2);
  for (std::int64_t hidden : {1, 7, 128, 512, 2048, 2880, 7168, 8192}) {
    WindowHarness<TypeParam> h(this->comm, {.hidden = hidden, .num_experts = experts, .k = 2, .max_tokens = 3});
    h.check(random_batch<float>(this->rank(), 6, 3 - this->rank() % 2, hidden, 2, experts), moe::text("hidden ", hidden));
  }
  for (int k : {1, 2, 4, 6, 8, 10, 16, 32}) {
    int const many = this->experts(32);
    WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = many, .k = k});
    h.check(random_batch<float>(this->rank(), 7, 8, 16, k, many), moe::text("topk ", k));
  }
}

// T6: rows arrive as the scheme quantised them, bit for bit; T16: by source rank, then by token.
TYPED_TEST(WindowExchange, T6_T16_QuantisedRowsArriveUnchanged) {
  using Fp8 = moe::quantization::Fp8Group<>;
  using Harness = WindowHarness<TypeParam, float, Fp8>;
  constexpr std::int64_t kHidden = 300;
  int const experts = this->experts(3);
  Harness h(this->comm, {.hidden = kHidden, .num_experts = experts, .k = 2});
  auto batch = [&](int rank) { return random_batch<float>(rank, 8, 4 + rank % 3, kHidden, 2, experts, false); };
  auto const mine = batch(this->rank());
  auto const tokens = h.exchange().prepare(mine.tokens(), {});
  std::vector<Fp8::Payload<float>> codes(static_cast<std::size_t>(Fp8::payload_cols(kHidden)));
  std::vector<Fp8::Scale> scales(static_cast<std::size_t>(Fp8::scale_cols(kHidden)));
  auto expect_row = [&](auto const* row, auto const* row_scales, Batch<float> const& b, std::int64_t t) {
    Fp8{}.quantize_row<float>(b.x.data() + t * kHidden, kHidden, codes.data(), scales.data());
    EXPECT_EQ(std::memcmp(row, codes.data(), codes.size() * sizeof(codes[0])), 0);
    EXPECT_EQ(std::memcmp(row_scales, scales.data(), scales.size() * sizeof(scales[0])), 0);
  };
  auto local = [&](int id) { return id >= 0 && h.placement().owner(id) == this->rank() ? h.placement().local(id) : -1; };
  if constexpr (Harness::kBatched) {
    std::vector<std::int64_t> next(static_cast<std::size_t>(tokens.rows.extent(0)), 0);
    for (int r = 0; r < this->comm.size(); ++r) {
      auto const b = batch(r);
      for (std::int64_t t = 0; t < b.rows; ++t) {
        std::array<int, 2> const e{local(b.ids[static_cast<std::size_t>(t) * 2]), local(b.ids[static_cast<std::size_t>(t) * 2 + 1])};
        for (std::size_t j = 0; j < 2; ++j) {
          if (e[j] < 0 || (j == 1 && e[0] == e[1])) continue;
          std::int64_t const i = next[static_cast<std::size_t>(e[j])]++;
          expect_row(moe::row_ptr(tokens.rows, e[j], i), moe::row_ptr(tokens.scales, e[j], i), b, t);
        }
      }
    }
    for (std::size_t e = 0; e < next.size(); ++e) EXPECT_EQ(tokens.expert_num_tokens(static_cast<std::int64_t>(e)), next[e]);
  } else {
    std::int64_t row = 0;
    for (int r = 0; r < this->comm.size(); ++r) {
      auto const b = batch(r);
      for (std::int64_t t = 0; t < b.rows; ++t) {
        std::array<int, 2> const e{local(b.ids[static_cast<std::size_t>(t) * 2]), local(b.ids[static_cast<std::size_t>(t) * 2 + 1])};
        if (e[0] < 0 && e[1] < 0) continue;
        while (row < tokens.rows.extent(0) && tokens.topk_ids(row, 0) < 0 && tokens.topk_ids(row, 1) < 0) ++row;  // empty rows
        ASSERT_LT(row, tokens.rows.extent(0));
        expect_row(moe::row_ptr(tokens.rows, row), moe::row_ptr(tokens.scales, row), b, t);
        for (std::size_t j = 0; j < 2; ++j) {
          EXPECT_EQ(tokens.topk_ids(row, static_cast<std::int64_t>(j)), e[j]);
          EXPECT_EQ(tokens.topk_weights(row, static_cast<std::int64_t>(j)), b.weights[static_cast<std::size_t>(t) * 2 + j]);
        }
        ++row;
      }
    }
    for (; row < tokens.rows.extent(0); ++row) EXPECT_TRUE(tokens.topk_ids(row, 0) < 0 && tokens.topk_ids(row, 1) < 0);
  }
  h.run_experts(tokens, h.exchange().expert_output());
  std::vector<float> out(mine.x.size());
  h.exchange().finalize(h.view(out, mine), {});
}

// T15: a token goes to the owner of one of its experts, and its other id belongs to another rank. The receiver gets local ids or -1: no id
// of another rank looks like one of its own experts, on the rank whose first expert is 0 as on the others.
TYPED_TEST(WindowExchange, T15_IdsOfOtherRanksHitNoOwnedExpert) {
  using Harness = WindowHarness<TypeParam>;
  int const experts = this->experts(2);
  Batch<float> mine(std::int64_t{experts} * experts, 8, 2);  // every pair of different experts, and every expert beside -1
  std::fill(mine.x.begin(), mine.x.end(), 1.0F);
  std::fill(mine.weights.begin(), mine.weights.end(), 0.5F);
  for (int i = 0; i < experts * experts; ++i) {
    mine.ids[2 * static_cast<std::size_t>(i)] = i / experts;
    mine.ids[2 * static_cast<std::size_t>(i) + 1] = i / experts == i % experts ? moe::kNoExpert : i % experts;
  }
  for (PlacementStrategy strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
    Harness h(this->comm, {.hidden = 8, .num_experts = experts, .k = 2, .max_tokens = mine.rows, .strategy = strategy});
    auto local = [&](int id) { return id >= 0 && h.placement().owner(id) == this->rank() ? h.placement().local(id) : moe::kNoExpert; };
    using Ids = std::array<std::int32_t, 2>;
    std::vector<Ids> expected, got;
    std::vector<std::int64_t> chosen(static_cast<std::size_t>(experts / this->comm.size()), 0);
    for (std::size_t t = 0; t < mine.ids.size(); t += 2) {
      Ids const ids{local(mine.ids[t]), local(mine.ids[t + 1])};
      for (int id : ids) {
        if (id >= 0) chosen[static_cast<std::size_t>(id)] += this->comm.size();
      }
      if (ids[0] >= 0 || ids[1] >= 0) expected.insert(expected.end(), static_cast<std::size_t>(this->comm.size()), ids);
    }
    auto const tokens = h.exchange().prepare(mine.tokens(), {});
    if constexpr (Harness::kBatched) {
      for (std::size_t e = 0; e < chosen.size(); ++e) EXPECT_EQ(tokens.expert_num_tokens(static_cast<std::int64_t>(e)), chosen[e]) << e;
    } else {
      for (std::int64_t row = 0; row < tokens.rows.extent(0); ++row) {
        Ids const ids{tokens.topk_ids(row, 0), tokens.topk_ids(row, 1)};
        if (ids != Ids{moe::kNoExpert, moe::kNoExpert}) got.push_back(ids);  // else an empty row
      }
      std::sort(expected.begin(), expected.end());
      std::sort(got.begin(), got.end());
      EXPECT_EQ(got, expected);
    }
    h.run_experts(tokens, h.exchange().expert_output());
    std::vector<float> out(mine.x.size());
    h.exchange().finalize(h.view(out, mine), {});
    h.compare(out, mine);
  }
}

// Invariant 2: every slot that was sent has work on exactly one rank (batched: once per expert that a token names).
TYPED_TEST(WindowExchange, SlotsAreConserved) {
  int const experts = this->experts(3);
  int const k = std::min(4, experts);
  WindowHarness<TypeParam> h(this->comm, {.hidden = 8, .num_experts = experts, .k = k});
  for (int round = 0; round < 10; ++round) {
    auto b = random_batch<float>(this->rank(), round, random_rows(this->rank(), round, 8), 8, k, experts);
    for (std::size_t i = 0; i < b.ids.size(); ++i) {  // no id twice in a row
      if (b.ids[i] >= 0) b.ids[i] = static_cast<std::int32_t>((static_cast<std::size_t>(round) + i) % static_cast<std::size_t>(experts));
    }
    h.check(b);
    std::array<long long, 2> slots{h.slots(), std::count_if(b.ids.begin(), b.ids.end(), [](int id) { return id >= 0; })};
    MPI_Allreduce(MPI_IN_PLACE, slots.data(), 2, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(slots[0], slots[1]);
  }
}

// T7: the reuse rule. Ranks are delayed before each half; MOE_WINDOW_ROUNDS asks for more rounds.
TYPED_TEST(WindowExchange, T7_RandomDelays) {
  char const* const wanted = std::getenv("MOE_WINDOW_ROUNDS");
  int const rounds = wanted == nullptr ? 300 : std::atoi(wanted);
  int const experts = this->experts(2);
  int const k = std::min(3, experts);
  WindowHarness<TypeParam> h(this->comm, {.hidden = 12, .num_experts = experts, .k = k, .max_tokens = 6});
  std::mt19937 gen(static_cast<unsigned>(this->rank()) + 99);
  for (int round = 0; round < rounds && !this->HasFatalFailure(); ++round) {
    auto const b = random_batch<float>(this->rank(), round, random_rows(this->rank(), round, 6), 12, k, experts);
    auto const out = h.forward(b, [&] {
      if (gen() % 24 == 0) usleep(gen() % 1500);
    });
    h.compare(out, b, moe::text("round ", round));
  }
}

// T13: the router weight on the input. Batched: once, before quantisation, top-k 1 only. Standard: the experts' work, any top-k.
TYPED_TEST(WindowExchange, T13_WeightOnInput) {
  using H = WindowHarness<TypeParam>;
  int const experts = this->experts(2);
  if constexpr (H::kBatched) {
    H h(this->comm, {.hidden = 8, .num_experts = experts, .k = 1, .on_input = true});
    h.check(random_batch<float>(this->rank(), 9, 8, 8, 1, experts));
    std::string const message =
        expect_error(moe::ErrorCode::argument, [&] { H(this->comm, {.hidden = 8, .num_experts = experts, .k = 2, .on_input = true}); });
    EXPECT_EQ(message, "apply_router_weight_on_input requires topk == 1");
  } else {
    for (int k : {1, 2}) {
      H h(this->comm, {.hidden = 8, .num_experts = experts, .k = k, .on_input = true});
      h.check(random_batch<float>(this->rank(), 9, 8, 8, k, experts));
    }
  }
}

TYPED_TEST(WindowExchange, T20_ExpertsThatDoNotDivide) {
  for (int experts : {2, 3, 5, 7, 10}) {  // fewer experts than ranks, too: then some ranks compute nothing
    if (std::is_same_v<TypeParam, PplxCase> && experts % this->comm.size() != 0) {
      expect_error(moe::ErrorCode::unsupported,
                   [&] { WindowHarness<TypeParam>(this->comm, {.hidden = 16, .num_experts = experts, .k = 2}); });
      continue;
    }
    WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
    h.check(random_batch<float>(this->rank(), 10, 8, 16, 2, experts), moe::text(experts, " experts"));
  }
}

// Ranks that hold the same tokens share the sends, and each of them gets all results.
TEST(Pplx, RanksOfOneGroupShareTheirTokens) {
  Comm comm(MPI_COMM_WORLD, {.timeout_ms = 30'000});
  using H = WindowHarness<PplxCase>;
  int const experts = 2 * comm.size();
  for (int dp : {1, 2, 4}) {
    H::Setup setup{.hidden = 16, .num_experts = experts, .k = 2};
    setup.params.dp_size = dp;
    if (comm.size() % dp != 0) {
      expect_error(moe::ErrorCode::config, [&] { H(comm, setup); });
      continue;
    }
    H h(comm, setup);
    EXPECT_EQ(h.exchange().max_rows(), 8 * comm.size() / dp);
    int const group = comm.rank() / dp;
    for (int round = 0; round < 10; ++round) {
      h.check(random_batch<float>(group, round, random_rows(group, round, 8), 16, 2, experts), moe::text("dp_size ", dp));
    }
    if (dp > 1) {
      auto const b = random_batch<float>(0, 1, comm.rank() == 1 ? 3 : 4, 16, 2, experts);
      std::string const message = expect_error(moe::ErrorCode::mismatch, [&] { h.exchange().prepare(b.tokens(), {}); });
      EXPECT_EQ(message.find("rank 1 brings 3 rows, rank 0 of its group 4"), 0U) << message;
      h.check(random_batch<float>(group, 3, 5, 16, 2, experts), "next call");
    }
  }
}

TYPED_TEST(WindowExchange, T22_RoundNumbersWrap) {
  int const experts = this->experts(2);
  WindowHarness<TypeParam> h(this->comm, {.hidden = 8, .num_experts = experts, .k = 2});
  for (std::uint32_t before : {0x7fffffffU, 0xffffffffU}) {
    h.exchange().preset_round(before - 4);
    for (int round = 0; round < 8 && !this->HasFatalFailure(); ++round) {
      h.check(random_batch<float>(this->rank(), round, random_rows(this->rank(), round, 8), 8, 2, experts), moe::text("round ", round));
    }
  }
}

TYPED_TEST(WindowExchange, T23_SameBitsEachTime) {
  int const experts = this->experts(4);
  WindowHarness<TypeParam> h(this->comm, {.hidden = 200, .num_experts = experts, .k = 4});
  auto const b = random_batch<float>(this->rank(), 12, 8 - this->rank() % 2, 200, 4, experts, false);
  auto const first = h.forward(b);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(h.forward(b), first) << i;
}

}  // namespace
