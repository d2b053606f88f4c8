// SPDX-License-Identifier: Apache-2.0
// tests/mpi/backend_agreement_test.cpp: a mistake of one rank is an error on all ranks, never a hang, and the next call works.
// moe-ranks: 1 2 3 4
#undef NDEBUG  // ids out of range are an error in this file, for every build type
#include "exchange_harness.hpp"
#include "moe/quantization/fp8_group128.hpp"

namespace {

using namespace moe_test;
using moe::ErrorCode;

template <class Backend>
class Agreement : public testing::Test {
 protected:
  Comm comm{MPI_COMM_WORLD, {.timeout_ms = 20'000}};
  int rank() const { return comm.rank(); }
  /// The last rank fails.
  bool errs() const { return comm.rank() == comm.size() - 1; }
  /// The error on each rank if the failing rank gets `own`.
  ErrorCode seen(ErrorCode own, ErrorCode others = ErrorCode::peer) const { return errs() ? own : others; }
};
struct Names {
  template <class Backend>
  static std::string GetName(int) {
    return Backend::kName;
  }
};
using Backends = testing::Types<NaiveBackend, GatherBackend, AllToAllBackend>;
TYPED_TEST_SUITE(Agreement, Backends, Names);

TYPED_TEST(Agreement, G10_P9_ConstructionNamesTheFieldAndBothValues) {
  using H = Harness<TypeParam>;
  if (this->comm.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  typename H::Setup const good{.hidden = 16, .num_experts = 6, .k = 2, .max_tokens = 4};
  auto check = [&](typename H::Setup wrong, std::string const& sentence) {
    std::string const message = expect_error(ErrorCode::mismatch, [&] { H(this->comm, this->errs() ? wrong : good); });
    int const last = this->comm.size() - 1;
    EXPECT_NE(message.find(moe::text(sentence.substr(0, sentence.find('|')), ", rank ", last, sentence.substr(sentence.find('|') + 1))),
              std::string::npos)
        << message;
  };
  auto with = [&](auto&& change) {
    auto setup = good;
    change(setup);
    return setup;
  };
  check(with([](auto& s) { s.hidden = 32; }), "hidden: rank 0 has 16| has 32");
  check(with([](auto& s) { s.k = 3; }), "topk: rank 0 has 2| has 3");
  check(with([](auto& s) { s.num_experts = 7; }), "num_physical_experts: rank 0 has 6| has 7");
  check(with([](auto& s) { s.max_tokens = 5; }), "max_tokens_per_rank: rank 0 has 4| has 5");
  std::string const placement = expect_error(ErrorCode::mismatch, [&] {
    H(this->comm, with([&](auto& s) { s.strategy = this->errs() ? moe::PlacementStrategy::round_robin : s.strategy; }));
  });
  EXPECT_EQ(placement.find(moe::text("placement: rank 0 and rank ", this->comm.size() - 1, " give experts to other ranks")), 0U)
      << placement;
  H h(this->comm, good);
  h.check(random_batch<float>(this->rank(), 1, 4, 16, 2, 6), "the communicator still works");
}

TYPED_TEST(Agreement, G10_OtherQuantisation) {
  if (this->comm.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  std::string const message = expect_error(ErrorCode::mismatch, [&] {
    if (this->errs()) {
      Harness<TypeParam, float, moe::quantization::Fp8Group<>> h(this->comm, {});
    } else {
      Harness<TypeParam> h(this->comm, {});
    }
  });
  EXPECT_EQ(message.find("quantization: rank 0 has none"), 0U) << message;
}

TEST(AgreementOfBackends, G10_OtherBackend) {
  Comm comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  if (comm.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  std::string const message = expect_error(ErrorCode::mismatch, [&] {
    if (comm.rank() == 0) {
      Harness<NaiveBackend> h(comm, {});
    } else {
      Harness<GatherBackend> h(comm, {});
    }
  });
  EXPECT_EQ(message.find("backend: rank 0 has naive, rank 1 has allgather_reduce_scatter"), 0U) << message;
}

// A rank with invalid arguments reports its own error, and the others are told.
TYPED_TEST(Agreement, ConstructionThatOneRankRefuses) {
  using H = Harness<TypeParam>;
  typename H::Setup setup{.hidden = 16, .num_experts = 6, .k = 2, .max_tokens = 4};
  if (this->errs()) setup.placement = moe::ExpertPlacement(6, this->comm.size() + 1, moe::PlacementStrategy::linear, true);
  std::string const message = expect_error(this->seen(ErrorCode::config, ErrorCode::mismatch), [&] { H(this->comm, setup); });
  if (this->errs()) {
    EXPECT_EQ(message.find("placement: ep_size is "), 0U) << message;
  }
}

// Every way in which one rank's prepare() can be wrong; after each, a good round.
TYPED_TEST(Agreement, T4_T12_G3_G10_PrepareThatOneRankRefuses) {
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = 6, .k = 2, .max_tokens = 4});
  auto const good = random_batch<float>(this->rank(), 2, 4, 16, 2, 6);
  auto refuse = [&](moe::RoutedTokens<float> const& wrong, ErrorCode own, ErrorCode others, std::string const& sentence) {
    expect_prepare_refused(h, this->comm, good, wrong, own, others, sentence);
  };
  auto const t = good.tokens();
  auto const five = random_batch<float>(this->rank(), 2, 5, 16, 2, 6);
  refuse(five.tokens(), ErrorCode::capacity, ErrorCode::capacity, "hidden_states: 5 rows exceed max_tokens_per_rank 4");
  refuse({moe::make_strided_rows(t.hidden.data_handle(), 4, 15, 16), t.topk_ids, t.topk_weights}, ErrorCode::argument, ErrorCode::peer,
         "hidden_states: width: 15, expected 16");
  refuse({t.hidden, moe::make_strided_rows(t.topk_ids.data_handle(), 4, 1, 2), t.topk_weights}, ErrorCode::argument, ErrorCode::peer,
         "topk_ids: width: 1, expected 2");
  refuse({t.hidden, moe::make_rows(t.topk_ids.data_handle(), 3, 2), t.topk_weights}, ErrorCode::argument, ErrorCode::peer,
         "topk_ids: rows: 3, expected 4");
  refuse({t.hidden, t.topk_ids, moe::make_strided_rows(t.topk_weights.data_handle(), 4, 1, 2)}, ErrorCode::argument, ErrorCode::peer,
         "topk_weights: width: 1, expected 2");
  refuse({moe::make_rows(static_cast<float const*>(nullptr), 4, 16), t.topk_ids, t.topk_weights}, ErrorCode::argument, ErrorCode::peer,
         "hidden_states: null pointer for 4 rows");
  auto bad = good;
  bad.ids[5] = 6;
  refuse(bad.tokens(), ErrorCode::argument, ErrorCode::peer, "topk_ids: 6 in slot (2, 1) is out of range [0, 6) and is not -1");
  bad.ids[5] = -2;
  refuse(bad.tokens(), ErrorCode::argument, ErrorCode::peer, "topk_ids: -2 in slot (2, 1) is out of range [0, 6) and is not -1");
}

TYPED_TEST(Agreement, T26_FinalizeThatOneRankRefuses) {
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = 6, .k = 2, .max_tokens = 4});
  auto const b = random_batch<float>(this->rank(), 3, 4, 16, 2, 6);
  std::vector<float> out(b.x.size(), -3.0F);
  h.run_experts(h.exchange().prepare(b.tokens(), {}));
  expect_error(this->seen(ErrorCode::argument), [&] { h.exchange().finalize(moe::make_rows(out.data(), this->errs() ? 3 : 4, 16), {}); });
  EXPECT_EQ(out, std::vector<float>(b.x.size(), -3.0F)) << "a refused finalize writes nothing";
  h.exchange().finalize(moe::make_rows(out.data(), 4, 16), {});  // the round is still open: the call can be repeated with correct arguments
  EXPECT_EQ(out[0], b.expected(0, 0, 6));
  h.check(b);
}

TYPED_TEST(Agreement, AbandonedDispatchIsAPeerError) {
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = 6, .k = 2});
  auto const b = random_batch<float>(this->rank(), 4, 4, 16, 2, 6);
  if (this->errs()) {
    h.exchange().abandon({});
  } else {
    std::string const message = expect_error(ErrorCode::peer, [&] { h.exchange().prepare(b.tokens(), {}); });
    EXPECT_EQ(message.find(moe::text("rank ", this->comm.size() - 1, " abandoned the call")), 0U) << message;
  }
  h.check(b, "next call");
  h.exchange().abandon({});  // all of them
  h.check(b, "next call");
}

TYPED_TEST(Agreement, AbandonedCombineIsAPeerError) {
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = 6, .k = 2});
  auto const b = random_batch<float>(this->rank(), 5, 4, 16, 2, 6);
  std::vector<float> out(b.x.size());
  h.exchange().prepare(b.tokens(), {});
  if (this->errs()) {
    h.exchange().abandon({});
  } else {
    expect_error(ErrorCode::peer, [&] { h.exchange().finalize(moe::make_rows(out.data(), 4, 16), {}); });
  }
  h.check(b, "the round is over on all ranks");
}

TYPED_TEST(Agreement, T21_CallOrder) {
  Harness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = 6, .k = 2});
  auto const b = random_batch<float>(this->rank(), 6, 4, 16, 2, 6);
  std::vector<float> out(b.x.size());
  auto finalize = [&] { h.exchange().finalize(moe::make_rows(out.data(), 4, 16), {}); };
  expect_error(ErrorCode::state, finalize);
  h.run_experts(h.exchange().prepare(b.tokens(), {}));
  expect_error(ErrorCode::state, [&] { h.exchange().prepare(b.tokens(), {}); });
  finalize();
  EXPECT_EQ(out[0], b.expected(0, 0, 6));
  expect_error(ErrorCode::state, finalize);
  h.check(b);
}

// One rank is in another layer than the others.
TYPED_TEST(Agreement, RanksInDifferentLayersAreAMismatch) {
  if (this->comm.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  typename Harness<TypeParam>::Setup const setup{.hidden = 16, .num_experts = 6, .k = 2};
  Harness<TypeParam> a(this->comm, setup), b(this->comm, setup);
  auto const batch = random_batch<float>(this->rank(), 7, 4, 16, 2, 6);
  std::string const layer = expect_error(ErrorCode::mismatch, [&] { (this->errs() ? b : a).exchange().prepare(batch.tokens(), {}); });
  EXPECT_EQ(layer.find("layer: rank 0 is in layer "), 0U) << layer;
  for (int round = 0; round < 2; ++round) {
    a.check(batch, "the layer of most");
    b.check(batch, "the layer of one");
    if (this->errs()) {
      b.exchange().abandon({});
    } else {
      expect_error(ErrorCode::mismatch, [&] { a.exchange().prepare(batch.tokens(), {}); });
    }
  }
  a.run_experts(a.exchange().prepare(batch.tokens(), {}));  // one rank is in the other layer's dispatch, or abandons it
  std::vector<float> out(batch.x.size());
  auto finalize = [&] { a.exchange().finalize(moe::make_rows(out.data(), batch.rows, batch.hidden), {}); };
  expect_error(ErrorCode::mismatch, [&] { this->errs() ? (void)b.exchange().prepare(batch.tokens(), {}) : finalize(); });
  if (this->errs()) {
    b.exchange().abandon({});
  } else {
    expect_error(ErrorCode::mismatch, finalize);
  }
  finalize();
  EXPECT_EQ(out[0], batch.expected(0, 0, 6)) << "the round is still open";
  Harness<TypeParam> c(this->comm, setup);
  for (auto* h : {&a, &b, &c}) {
    h->check(batch, "all layers of the group work");
  }
}

// T10: a missing rank. The others get the error in time, with the phase and the missing rank.
TYPED_TEST(Agreement, T10_RankThatNeverComes) {
  if (this->comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  Comm comm(MPI_COMM_WORLD);
  Harness<TypeParam> h(comm, {.hidden = 16, .num_experts = 6, .k = 2});
  comm.set_timeout_ms(300);
  auto const b = random_batch<float>(this->rank(), 8, 4, 16, 2, 6);
  if (this->errs()) return;
  try {
    h.exchange().prepare(b.tokens(), {});
    FAIL() << "no error";
  } catch (moe::TransportError const& e) {
    EXPECT_EQ(e.code(), ErrorCode::timeout);
    EXPECT_EQ(e.peer(), comm.size() - 1);
    EXPECT_EQ(e.phase(), "dispatch");
  }
  expect_error(ErrorCode::state, [&] { h.exchange().prepare(b.tokens(), {}); });
}

// T25: with less room than the worst case, a round that needs more is an error on every rank and moves nothing.
TEST(AllToAllV, T25_ReceiveOverflow) {
  Comm comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  int const experts = 2 * comm.size();
  Harness<AllToAllBackend> h(comm, {.hidden = 16, .num_experts = experts, .k = 1, .max_tokens = 8, .max_recv_rows = 8});
  EXPECT_EQ(h.exchange().max_rows(), 8);
  auto b = random_batch<float>(comm.rank(), 9, 8, 16, 1, experts);
  for (int target = 0; target < comm.size(); ++target) {
    std::fill(b.ids.begin(), b.ids.end(), 2 * target);
    if (comm.size() == 1) {
      h.check(b, "8 rows fit");
      continue;
    }
    std::string const message = expect_error(ErrorCode::capacity, [&] { h.exchange().prepare(b.tokens(), {}); });
    EXPECT_EQ(message.find(moe::text("rank ", target, " would receive ", 8 * comm.size(), " rows, more than max_recv_rows 8")), 0U)
        << message;
    auto spread = b;
    std::fill(spread.ids.begin(), spread.ids.end(), 2 * comm.rank());
    h.check(spread, "next call");
  }
  expect_error(ErrorCode::config, [&] {
    Harness<AllToAllBackend>(comm, {.hidden = 16, .num_experts = experts, .k = 1, .max_tokens = 8, .max_recv_rows = -1});
  });
}

}  // namespace
