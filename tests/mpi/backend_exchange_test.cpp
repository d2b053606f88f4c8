// SPDX-License-Identifier: Apache-2.0
// tests/mpi/backend_exchange_test.cpp: each host backend moves every token to its experts and back, for any rank count.
// moe-ranks: 1 2 3 4 5
#include <array>
#include <cstring>

#include "exchange_harness.hpp"
#include "moe/quantization/fp8_group128.hpp"

namespace {

using namespace moe_test;
using moe::PlacementStrategy;

template <class Backend>
class Exchanges : public testing::Test {
 protected:
  Comm comm{MPI_COMM_WORLD, {.timeout_ms = 30'000}};
  int rank() const { return comm.rank(); }
};
struct Names {
  template <class Backend>
  static std::string GetName(int) {
    return Backend::kName;
  }
};
using Backends = testing::Types<NaiveBackend, GatherBackend, AllToAllBackend>;
TYPED_TEST_SUITE(Exchanges, Backends, Names);

TYPED_TEST(Exchanges, T1_IdentityExpertsRandomRowsAndIds) {
  for (PlacementStrategy strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
    Harness<TypeParam> h(this->comm, {.hidden = 40, .num_experts = 11, .k = 4, .max_tokens = 13, .strategy = strategy});
    for (int round = 0; round < 30; ++round) {
      auto const rows = random_rows(this->rank(), round, 13);
      h.check(random_batch<float>(this->rank(), round, rows, 40, 4, 11), moe::text("round ", round));
    }
  }
}

TYPED_TEST(Exchanges, T1_NarrowElementsAndFixedWidth) {
  Harness<TypeParam, moe::bf16> h(this->comm, {.hidden = 24, .num_experts = 8, .k = 2});
  h.check(random_batch<moe::bf16>(this->rank(), 1, 5, 24, 2, 8));
  Harness<TypeParam, moe::f16, moe::quantization::None, float, Config<moe::f16, 24>> fixed(this->comm,
                                                                                           {.hidden = 24, .num_experts = 8, .k = 2});
  fixed.check(random_batch<moe::f16>(this->rank(), 2, 7, 24, 2, 8));
}

// Experts that write narrow rows: with one expert per token, only the expert rounds.
TYPED_TEST(Exchanges, T1_NarrowExpertOutput) {
  Harness<TypeParam, moe::bf16, moe::quantization::None, moe::bf16> h(this->comm, {.hidden = 24, .num_experts = 8, .k = 1});
  h.check(random_batch<moe::bf16>(this->rank(), 3, 6, 24, 1, 8));
}

TYPED_TEST(Exchanges, T2_G1_G2_P16_ZeroTokensAndNoExperts) {
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = 6, .k = 2});
  auto batch = [&](std::int64_t rows) { return random_batch<float>(this->rank(), 4, rows, 16, 2, 6); };
  for (int empty = 0; empty < this->comm.size(); ++empty) h.check(batch(this->rank() == empty ? 0 : 5), "one rank has none");
  h.check(batch(0), "no rank has any");
  auto none = batch(8);
  std::fill(none.ids.begin(), none.ids.end(), moe::kNoExpert);
  auto const out = h.forward(this->rank() == 0 ? none : batch(3));
  if (this->rank() == 0) {
    EXPECT_EQ(out, std::vector<float>(8 * 16, 0.0F));
  }
  EXPECT_EQ(h.forward(none), std::vector<float>(8 * 16, 0.0F));
}

TYPED_TEST(Exchanges, T3_OneRankTakesAllOrNone) {
  int const experts = 3 * this->comm.size() + 1;
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 3});
  expect_one_rank_takes_all_or_none(h, this->rank(), this->comm.size(), experts);
}

TYPED_TEST(Exchanges, T3_T19_AllSlotsOnOneExpert) {
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = 5, .k = 3});
  expect_one_expert_takes_all(h, this->rank(), 4, 3, 5);
}

TYPED_TEST(Exchanges, P6_MoreRanksThanExperts) {
  int const ranks = this->comm.size();
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = std::max(1, ranks - 1), .k = 1});
  h.check(random_batch<float>(this->rank(), 9, 6, 16, 1, std::max(1, ranks - 1)), "the last rank has no expert");
  if (ranks > 1 && this->rank() == ranks - 1) {
    EXPECT_EQ(h.placement().num_local(this->rank()), 0);
    EXPECT_EQ(h.slots(), 0);
  }
}

TYPED_TEST(Exchanges, T5_WidthsAndTopK) {
  for (std::int64_t hidden : {1, 7, 128, 512, 2048, 2560, 2880, 3072, 4096, 5120, 6144, 7168, 8192}) {
    Harness<TypeParam> h(this->comm, {.hidden = hidden, .num_experts = 9, .k = 2, .max_tokens = 3});
    h.check(random_batch<float>(this->rank(), 6, 3 - this->rank() % 2, hidden, 2, 9), moe::text("hidden ", hidden));
  }
  for (int k : {1, 2, 4, 6, 8, 10, 16, 32}) {
    Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = 37, .k = k});
    h.check(random_batch<float>(this->rank(), 7, 8, 16, k, 37), moe::text("topk ", k));
  }
}

// T6 and T16: rows arrive as the scheme quantised them, bit for bit, by source rank and then by token.
TYPED_TEST(Exchanges, T6_T16_QuantisedRowsArriveUnchanged) {
  using Fp8 = moe::quantization::Fp8Group<>;
  constexpr std::int64_t kHidden = 300;
  Harness<TypeParam, float, Fp8> h(this->comm, {.hidden = kHidden, .num_experts = 9, .k = 2});
  auto batch = [&](int rank) { return random_batch<float>(rank, 8, 4 + rank % 3, kHidden, 2, 9, false); };
  auto const mine = batch(this->rank());
  auto const tokens = h.exchange().prepare(mine.tokens(), {});
  std::vector<Fp8::Payload<float>> codes(static_cast<std::size_t>(Fp8::payload_cols(kHidden)));
  std::vector<Fp8::Scale> scales(static_cast<std::size_t>(Fp8::scale_cols(kHidden)));
  std::int64_t row = 0;
  for (int r = 0; r < this->comm.size(); ++r) {
    auto const b = batch(r);
    for (std::int64_t t = 0; t < b.rows; ++t) {
      std::array<std::int32_t, 2> local{};
      bool here = false;
      for (std::size_t j = 0; j < 2; ++j) {
        int const id = b.ids[static_cast<std::size_t>(t) * 2 + j];
        bool const owned = id >= 0 && h.placement().owner(id) == this->rank();
        local[j] = owned ? h.placement().local(id) : -1;
        here = here || owned;
      }
      if (!here && std::is_same_v<TypeParam, AllToAllBackend>) continue;
      ASSERT_LT(row, tokens.rows.extent(0));
      Fp8{}.quantize_row<float>(b.x.data() + t * kHidden, kHidden, codes.data(), scales.data());
      EXPECT_EQ(std::memcmp(moe::row_ptr(tokens.rows, row), codes.data(), codes.size() * sizeof(codes[0])), 0) << row;
      EXPECT_EQ(std::memcmp(moe::row_ptr(tokens.scales, row), scales.data(), scales.size() * sizeof(scales[0])), 0) << row;
      for (std::int64_t j = 0; j < 2; ++j) {
        EXPECT_EQ(tokens.topk_ids(row, j), local[static_cast<std::size_t>(j)]);
        EXPECT_EQ(tokens.topk_weights(row, j), b.weights[static_cast<std::size_t>(t * 2 + j)]);
      }
      ++row;
    }
  }
  EXPECT_EQ(row, tokens.rows.extent(0));
  h.run_experts(tokens);
  std::vector<float> out(mine.x.size());
  h.exchange().finalize(moe::make_rows(out.data(), mine.rows, kHidden), {});
}

// Invariant 2: every slot that was sent has work on exactly one rank.
TYPED_TEST(Exchanges, SlotsAreConserved) {
  Harness<TypeParam> h(this->comm, {.hidden = 8, .num_experts = 13, .k = 4});
  for (int round = 0; round < 20; ++round) {
    auto const b = random_batch<float>(this->rank(), round, random_rows(this->rank(), round, 8), 8, 4, 13);
    h.check(b);
    std::array<long long, 2> slots{h.slots(), std::count_if(b.ids.begin(), b.ids.end(), [](int id) { return id >= 0; })};
    MPI_Allreduce(MPI_IN_PLACE, slots.data(), 2, MPI_LONG_LONG, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_EQ(slots[0], slots[1]);
  }
}

// T7 for the host: many rounds with unequal row counts and delayed ranks.
TYPED_TEST(Exchanges, T7_ThousandRounds) {
  Harness<TypeParam> h(this->comm, {.hidden = 12, .num_experts = 10, .k = 3, .max_tokens = 6});
  std::mt19937 gen(static_cast<unsigned>(this->rank()) + 99);
  for (int round = 0; round < 1000 && !this->HasFatalFailure(); ++round) {
    if (gen() % 64 == 0) usleep(gen() % 2000);
    h.check(random_batch<float>(this->rank(), round, random_rows(this->rank(), round, 6), 12, 3, 10), moe::text("round ", round));
  }
}

// In standard format the experts apply the router weight on the input, exactly once: any topk, any backend.
TYPED_TEST(Exchanges, T13_WeightsArriveWithTheirSlots) {
  for (int k : {1, 2}) {
    Harness<TypeParam> h(this->comm, {.hidden = 8, .num_experts = 6, .k = k});
    h.check(random_batch<float>(this->rank(), 9, 8, 8, k, 6));
  }
}

TYPED_TEST(Exchanges, T20_ExpertsThatDoNotDivide) {
  for (int experts : {1, 2, 3, 5, 7, 10}) {  // fewer experts than ranks, too: then some ranks compute nothing
    for (PlacementStrategy strategy : {PlacementStrategy::linear, PlacementStrategy::round_robin}) {
      Harness<TypeParam> h(this->comm, {.hidden = 8, .num_experts = experts, .k = 1, .strategy = strategy});
      h.check(random_batch<float>(this->rank(), experts, 8, 8, 1, experts), moe::text(experts, " experts"));
    }
  }
}

TYPED_TEST(Exchanges, CustomPlacementWithReplicas) {
  int const per_rank = 3;
  int const physical = per_rank * this->comm.size();
  std::vector<std::int32_t> map(static_cast<std::size_t>(physical));
  for (int p = 0; p < physical; ++p) map[static_cast<std::size_t>(p)] = (p * 5 + 1) % 3;
  for (int e = 0; e < 3; ++e) map[static_cast<std::size_t>(e)] = 2 - e;  // each logical expert has a slot
  auto const placement = moe::ExpertPlacement::from_physical_to_logical(map, 3, this->comm.size());
  Harness<TypeParam> h(this->comm, {.hidden = 8, .num_experts = physical, .k = 2, .placement = placement});
  h.check(random_batch<float>(this->rank(), 10, 8, 8, 2, physical));
}

// Rows of a wider array in, rows of a wider array out; the gaps between rows are not touched.
TYPED_TEST(Exchanges, StridedRows) {
  Harness<TypeParam> h(this->comm, {.hidden = 8, .num_experts = 6, .k = 2});
  auto const b = random_batch<float>(this->rank(), 11, 5, 8, 2, 6);
  std::vector<float> x(5 * 20, 1e30F), out(5 * 20, -5.0F), weights(5 * 7, 1e30F);
  std::vector<std::int32_t> ids(5 * 7, 1);
  for (std::size_t t = 0; t < 5; ++t) {
    std::copy_n(b.x.data() + t * 8, 8, x.data() + t * 20);
    std::copy_n(b.ids.data() + t * 2, 2, ids.data() + t * 7);
    std::copy_n(b.weights.data() + t * 2, 2, weights.data() + t * 7);
  }
  auto const tokens = h.exchange().prepare({moe::make_strided_rows(static_cast<float const*>(x.data()), 5, 8, 20),
                                            moe::make_strided_rows(static_cast<std::int32_t const*>(ids.data()), 5, 2, 7),
                                            moe::make_strided_rows(static_cast<float const*>(weights.data()), 5, 2, 7)},
                                           {});
  h.run_experts(tokens);
  h.exchange().finalize(moe::make_strided_rows(out.data(), 5, 8, 20), {});
  for (std::size_t i = 0; i < out.size(); ++i) {
    auto const t = static_cast<std::int64_t>(i / 20), c = static_cast<std::int64_t>(i % 20);
    ASSERT_EQ(out[i], c < 8 ? b.expected(t, c, 6) : -5.0F) << i;
  }
}

// T23: the same bits each time, and the same bits from every backend, because all add in rank order.
TEST(ExchangesTogether, T23_BackendsAgreeBitForBit) {
  Comm comm(MPI_COMM_WORLD, {.timeout_ms = 30'000});
  auto const b = random_batch<float>(comm.rank(), 12, 8 - comm.rank() % 2, 600, 6, 16, false);
  Harness<NaiveBackend> naive(comm, {.hidden = 600, .num_experts = 16, .k = 6});
  Harness<GatherBackend> gather(comm, {.hidden = 600, .num_experts = 16, .k = 6});
  Harness<AllToAllBackend> all_to_all(comm, {.hidden = 600, .num_experts = 16, .k = 6});
  auto const first = naive.forward(b);
  for (int i = 0; i < 20; ++i) {
    ASSERT_EQ(naive.forward(b), first) << i;
    ASSERT_EQ(gather.forward(b), first) << i;
    ASSERT_EQ(all_to_all.forward(b), first) << i;
  }
  // The order is that of the ranks: partial sums of each rank's experts, added from rank 0 up.
  auto const& placement = naive.placement();
  for (std::int64_t t = 0; t < b.rows; ++t) {
    for (std::int64_t h = 0; h < 600; ++h) {
      float sum = 0;
      for (int r = 0; r < comm.size(); ++r) {
        float weight = 0;
        for (std::int64_t j = 0; j < 6; ++j) {
          int const id = b.ids[static_cast<std::size_t>(t * 6 + j)];
          if (id >= 0 && placement.owner(id) == r) weight += b.weights[static_cast<std::size_t>(t * 6 + j)] * factor(id);
        }
        sum += weight * b.x[static_cast<std::size_t>(t * 600 + h)];
      }
      ASSERT_EQ(first[static_cast<std::size_t>(t * 600 + h)], sum);
    }
  }
}

// Two layers over one communicator, used in turn, do not disturb each other.
TYPED_TEST(Exchanges, T8_TwoLayersInterleaved) {
  Harness<TypeParam> a(this->comm, {.hidden = 8, .num_experts = 6, .k = 2});
  Harness<TypeParam> b(this->comm, {.hidden = 24, .num_experts = 9, .k = 3});
  auto const x = random_batch<float>(this->rank(), 13, 4, 8, 2, 6);
  auto const y = random_batch<float>(this->rank(), 14, 6, 24, 3, 9);
  auto const ta = a.exchange().prepare(x.tokens(), {});
  auto const tb = b.exchange().prepare(y.tokens(), {});
  a.run_experts(ta);
  b.run_experts(tb);
  std::vector<float> oa(x.x.size()), ob(y.x.size());
  a.exchange().finalize(moe::make_rows(oa.data(), 4, 8), {});
  b.exchange().finalize(moe::make_rows(ob.data(), 6, 24), {});
  for (std::size_t i = 0; i < oa.size(); ++i)
    ASSERT_EQ(oa[i], x.expected(static_cast<std::int64_t>(i) / 8, static_cast<std::int64_t>(i) % 8, 6));
  for (std::size_t i = 0; i < ob.size(); ++i) {
    ASSERT_EQ(ob[i], y.expected(static_cast<std::int64_t>(i) / 24, static_cast<std::int64_t>(i) % 24, 9));
  }
}

}  // namespace
