// SPDX-License-Identifier: Apache-2.0
// tests/mpi/window_protocol_test.cpp: halves, buffer sets, handles, refusals, deadlines and the memory itself. A mistake of one rank is an
// error on all ranks within the deadline, and a newly built group works.
// moe-ranks: 1 2 3 4 8
#undef NDEBUG  // ids out of range are an error in this file, for every build type
#include <chrono>
#include <memory>

#include "window_harness.hpp"

namespace {

using namespace moe_test;
using moe::ErrorCode;

template <class Case>
class WindowProtocol : public testing::Test {
 protected:
  Comm comm{MPI_COMM_WORLD, {.timeout_ms = 20'000}};
  int rank() const { return comm.rank(); }
  int experts() const { return 2 * comm.size(); }
  /// The last rank fails.
  bool errs() const { return comm.rank() == comm.size() - 1; }
  ErrorCode seen(ErrorCode own, ErrorCode others = ErrorCode::peer) const { return errs() ? own : others; }
};
using Cases = testing::Types<LowLatencyCase, DeduplicatedCase, HighThroughputCase, OneSidedCase, TwoSidedCase, PplxCase>;
TYPED_TEST_SUITE(WindowProtocol, Cases, CaseNames);

TYPED_TEST(WindowProtocol, T4_T12_PrepareThatOneRankRefuses) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2, .max_tokens = 4});
  auto const good = random_batch<float>(this->rank(), 2, 4, 16, 2, experts);
  auto refuse = [&](moe::RoutedTokens<float> const& wrong, ErrorCode own, ErrorCode others, std::string const& sentence) {
    expect_prepare_refused(h, this->comm, good, wrong, own, others, sentence);
  };
  auto const t = good.tokens();
  auto const five = random_batch<float>(this->rank(), 2, 5, 16, 2, experts);
  h.check(good, "T_max rows");
  refuse(five.tokens(), ErrorCode::capacity, ErrorCode::capacity, "hidden_states: 5 rows exceed max_tokens_per_rank 4");
  refuse({moe::make_strided_rows(t.hidden.data_handle(), 4, 15, 16), t.topk_ids, t.topk_weights}, ErrorCode::argument, ErrorCode::peer,
         "hidden_states: width: 15, expected 16");
  refuse({t.hidden, moe::make_strided_rows(t.topk_ids.data_handle(), 4, 1, 2), t.topk_weights}, ErrorCode::argument, ErrorCode::peer,
         "topk_ids: width: 1, expected 2");
  refuse({moe::make_rows(static_cast<float const*>(nullptr), 4, 16), t.topk_ids, t.topk_weights}, ErrorCode::argument, ErrorCode::peer,
         "hidden_states: null pointer for 4 rows");
  auto bad = good;
  bad.ids[5] = experts;
  refuse(bad.tokens(), ErrorCode::argument, ErrorCode::peer,
         moe::text("topk_ids: ", experts, " in slot (2, 1) is out of range [0, ", experts, ") and is not -1"));
}

TYPED_TEST(WindowProtocol, FinalizeThatOneRankRefusesLeavesTheRoundOpen) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2, .max_tokens = 4});
  auto const b = random_batch<float>(this->rank(), 3, 4, 16, 2, experts);
  std::vector<float> out(b.x.size(), -3.0F);
  h.run_experts(h.exchange().prepare(b.tokens(), {}));
  expect_error(this->seen(ErrorCode::argument), [&] { h.exchange().finalize(moe::make_rows(out.data(), this->errs() ? 3 : 4, 16), {}); });
  EXPECT_EQ(out, std::vector<float>(b.x.size(), -3.0F)) << "a refused finalize writes nothing";
  h.exchange().finalize(h.view(out, b), {});
  h.compare(out, b, "corrected");
  h.check(b);
}

TYPED_TEST(WindowProtocol, AbandonedCallsArePeerErrors) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  auto const b = random_batch<float>(this->rank(), 4, 4, 16, 2, experts);
  std::vector<float> out(b.x.size());
  if (this->errs()) {
    h.exchange().abandon({});
  } else {
    std::string const message = expect_error(ErrorCode::peer, [&] { h.exchange().prepare(b.tokens(), {}); });
    EXPECT_EQ(message.find(moe::text("rank ", this->comm.size() - 1, " abandoned the call")), 0U) << message;
  }
  h.check(b, "next call");
  h.exchange().abandon({});  // all of them
  h.exchange().prepare(b.tokens(), {});
  if (this->errs()) {
    h.exchange().abandon({});
  } else {
    expect_error(ErrorCode::peer, [&] { h.exchange().finalize(h.view(out, b), {}); });
  }
  h.check(b, "the round is over on all ranks");
}

TYPED_TEST(WindowProtocol, T21_CallOrder) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  auto const b = random_batch<float>(this->rank(), 6, 4, 16, 2, experts);
  std::vector<float> out(b.x.size());
  auto finalize = [&] { h.exchange().finalize(h.view(out, b), {}); };
  expect_error(ErrorCode::state, finalize);
  h.run_experts(h.exchange().prepare(b.tokens(), {}));
  expect_error(ErrorCode::state, [&] { h.exchange().prepare(b.tokens(), {}); });
  finalize();
  h.compare(out, b);
  expect_error(ErrorCode::state, finalize);
  h.check(b);
}

// T12: ranks that disagree about a shape are found at construction, and the field is named; ranks in different calls of one window are
// found by the first word.
TYPED_TEST(WindowProtocol, T12_RanksThatDisagree) {
  if (this->comm.size() == 1) GTEST_SKIP() << "one rank cannot disagree";
  using H = WindowHarness<TypeParam>;
  int const experts = this->experts();
  std::string const message =
      expect_error(ErrorCode::mismatch, [&] { H(this->comm, {.hidden = this->errs() ? 32 : 16, .num_experts = experts, .k = 2}); });
  EXPECT_NE(message.find("hidden: rank 0 has "), std::string::npos) << message;
  moe::comm::WindowManager<Window> manager(this->comm);
  auto params = H::patient();
  params.manager = &manager;
  typename H::Setup const setup{.hidden = 16, .num_experts = experts, .k = 2, .params = params};
  H a(this->comm, setup), b(this->comm, setup);
  EXPECT_EQ(manager.size(), 1U) << "layers of one shape share a window";
  EXPECT_EQ(&a.exchange().window(), &b.exchange().window());
  auto const batch = random_batch<float>(this->rank(), 7, 4, 16, 2, experts);
  for (int round = 0; round < 3; ++round) {
    a.check(batch, "layers of one window take turns");
    b.check(batch);
  }
  std::string const layer = expect_error(ErrorCode::mismatch, [&] { (this->errs() ? b : a).exchange().prepare(batch.tokens(), {}); });
  EXPECT_NE(layer.find("takes part in another call or layer"), std::string::npos) << layer;
  a.check(batch, "after the disagreement");
  b.check(batch);
}

// T10: a missing rank. The others get the error in time, with the missing rank. After that, only a newly built group works.
TYPED_TEST(WindowProtocol, T10_T24_RankThatSleeps) {
  if (this->comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  int const experts = this->experts();
  int const last = this->comm.size() - 1;
  using H = WindowHarness<TypeParam>;
  auto const b = random_batch<float>(this->rank(), 8, 4, 16, 2, experts);
  {
    H h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
    h.check(b);
    h.exchange().window().set_timeout_ms(200);
    auto const start = std::chrono::steady_clock::now();
    if (!this->errs()) {
      try {
        h.exchange().prepare(b.tokens(), {});
        ADD_FAILURE() << "no error";
      } catch (moe::TransportError const& e) {
        EXPECT_TRUE(e.code() == ErrorCode::timeout || e.code() == ErrorCode::peer) << e.what();
        EXPECT_EQ(e.peer(), last) << e.what();
      }
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(1200));
      EXPECT_GT(h.exchange().window().failure().code, 0U);
      expect_error(ErrorCode::state, [&] { h.exchange().prepare(b.tokens(), {}); });
    } else {
      usleep(600'000);
      expect_error(ErrorCode::peer, [&] { h.exchange().prepare(b.tokens(), {}); });  // the others have told it
    }
  }  // destruction waits for no rank
  H h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  h.check(b, "built anew");
}

// T24: destruction after a dispatch without combine waits for no peer, and the next exchange starts from a clean state.
TYPED_TEST(WindowProtocol, T24_DestroyWithAnOutstandingHandle) {
  int const experts = this->experts();
  using H = WindowHarness<TypeParam>;
  auto const b = random_batch<float>(this->rank(), 9, 4, 16, 2, experts);
  for (int i = 0; i < 3; ++i) {
    auto h = std::make_unique<H>(this->comm, typename H::Setup{.hidden = 16, .num_experts = experts, .k = 2});
    h->run_experts(h->exchange().prepare(b.tokens(), {}));
    if (this->errs()) usleep(300'000);  // the others must not wait for this rank
    auto const start = std::chrono::steady_clock::now();
    h.reset();
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(200));
    H next(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
    next.check(b, "built after a destruction with a dispatch under way");
  }
}

// ---- Halves and buffer sets.

template <class Case>
struct Halves : WindowProtocol<Case> {};
using BatchedCases = testing::Types<LowLatencyCase, DeduplicatedCase>;
TYPED_TEST_SUITE(Halves, BatchedCases, CaseNames);

template <class H, class Handle>
std::vector<float> finish(H& h, Handle handle, Batch<float> const& b) {
  std::vector<float> out(b.x.size());
  h.exchange().send_outputs(handle);
  usleep(200);
  h.exchange().receive_outputs(handle, h.view(out, b));
  return out;
}

TYPED_TEST(Halves, T17_WorkBetweenSendAndReceive) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  for (int round = 0; round < 20; ++round) {
    auto b = random_batch<float>(this->rank(), round, random_rows(this->rank(), round, 8), 16, 2, experts);
    auto const original = b;
    auto const handle = h.exchange().send(b.tokens());
    std::fill(b.x.begin(), b.x.end(), -1.0F);  // the inputs may be reused
    std::fill(b.ids.begin(), b.ids.end(), -1);
    std::fill(b.weights.begin(), b.weights.end(), -1.0F);
    usleep(1000);
    auto const tokens = h.exchange().receive(handle);
    h.run_experts(tokens, h.exchange().expert_output(handle));
    h.compare(finish(h, handle, original), original, moe::text("round ", round));
  }
}

TYPED_TEST(Halves, T8_TwoBatchesOnOneBufferSet) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  auto& x = h.exchange();
  for (int round = 0; round < 20; ++round) {
    auto const b0 = random_batch<float>(this->rank(), 2 * round, random_rows(this->rank(), round, 8), 16, 2, experts);
    auto const b1 = random_batch<float>(this->rank(), 2 * round + 1, random_rows(this->rank(), round + 50, 8), 16, 2, experts);
    auto const d0 = x.send(b0.tokens());
    auto const t0 = x.receive(d0);
    auto const d1 = x.send(b1.tokens());
    h.run_experts(t0, x.expert_output(d0));
    auto const t1 = x.receive(d1);
    x.send_outputs(d0);
    h.run_experts(t1, x.expert_output(d1));
    std::vector<float> o0(b0.x.size());
    x.receive_outputs(d0, h.view(o0, b0));
    h.compare(o0, b0, "first");
    h.compare(finish(h, d1, b1), b1, "second");
  }
  // A third result overwrites the first.
  auto const b = random_batch<float>(this->rank(), 90, 4, 16, 2, experts);
  auto const d0 = x.send(b.tokens());
  expect_error(ErrorCode::state, [&] { x.send(b.tokens()); });  // T17: two sends before a receive
  x.receive(d0);
  expect_error(ErrorCode::state, [&] { x.receive(d0); });
  x.receive(x.send(b.tokens()));
  auto const d2 = x.send(b.tokens());
  h.run_experts(x.receive(d2), x.expert_output(d2));
  expect_error(ErrorCode::state, [&] { x.send_outputs(d0); });
  h.compare(finish(h, d2, b), b, "the newest");
  expect_error(ErrorCode::state, [&] { x.send_outputs(d2); });
}

template <class Case>
auto with_two_buffer_sets(int experts) {
  auto params = WindowHarness<Case>::patient();
  params.num_buffer_sets = 2;
  return typename WindowHarness<Case>::Setup{.hidden = 16, .num_experts = experts, .k = 2, .params = params};
}

TYPED_TEST(Halves, T8_T17_T21_TwoBufferSets) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, with_two_buffer_sets<TypeParam>(experts));
  auto& x = h.exchange();
  for (int round = 0; round < 20; ++round) {
    auto const b0 = random_batch<float>(this->rank(), 2 * round, random_rows(this->rank(), round, 8), 16, 2, experts);
    auto const b1 = random_batch<float>(this->rank(), 2 * round + 1, random_rows(this->rank(), round + 50, 8), 16, 2, experts);
    auto const d0 = x.send(b0.tokens(), 0);
    auto const d1 = x.send(b1.tokens(), 1);  // both are in flight and can be received in either order
    bool const swap = round % 2 == 1;
    auto const t_first = x.receive(swap ? d1 : d0);
    auto const t_second = x.receive(swap ? d0 : d1);
    h.run_experts(t_first, x.expert_output(swap ? d1 : d0));
    h.run_experts(t_second, x.expert_output(swap ? d0 : d1));
    h.compare(finish(h, d0, b0), b0, "buffer set 0");
    auto wrong = d1;
    wrong.buffer_set = 0;
    expect_error(ErrorCode::state, [&] { x.send_outputs(wrong); });
    h.compare(finish(h, d1, b1), b1, "buffer set 1");
  }
  expect_error(ErrorCode::argument, [&] { x.send({}, 2); });
}

// T12, T21: which messages an abandoning rank must still send to its peers depends on the state of its handles.
TYPED_TEST(Halves, T12_T21_AbandonWithHandles) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, with_two_buffer_sets<TypeParam>(experts));
  auto& x = h.exchange();
  auto const b0 = random_batch<float>(this->rank(), 20, 5, 16, 2, experts);
  auto const b1 = random_batch<float>(this->rank(), 21, 3, 16, 2, experts);
  auto receive = [&](auto handle) { h.run_experts(x.receive(handle), x.expert_output(handle)); };
  auto expect_given_up = [&](auto handle, Batch<float> const& b, std::string const& what) {
    if (this->errs()) {
      expect_error(ErrorCode::state, [&] { x.send_outputs(handle); });
    } else {
      std::string const message = expect_error(ErrorCode::peer, [&] { finish(h, handle, b); });
      EXPECT_EQ(message.find(moe::text("rank ", this->comm.size() - 1, " abandoned the call")), 0U) << what << ": " << message;
      expect_error(ErrorCode::state, [&] { x.send_outputs(handle); });
    }
  };
  for (int buffer_set : {0, 1}) {
    auto const d = x.send(b0.tokens(), buffer_set);  // instead of receive()
    this->errs() ? x.abandon({}) : receive(d);
    expect_given_up(d, b0, "sent");
    h.check(b1, "after a dispatch that was sent");

    auto const d0 = x.send(b0.tokens(), buffer_set);  // instead of the first of two combines
    receive(d0);
    auto const d1 = x.send(b1.tokens(), buffer_set);
    receive(d1);
    if (this->errs()) x.abandon({});
    expect_given_up(d0, b0, "first of two");
    h.compare(finish(h, d1, b1), b1, "second of two");

    auto const e0 = x.send(b0.tokens(), buffer_set);  // the same, with the second one still to be received
    receive(e0);
    auto const e1 = x.send(b1.tokens(), buffer_set);
    if (!this->errs()) receive(e1);
    if (this->errs()) x.abandon({});
    expect_given_up(e0, b0, "before a receive");
    if (this->errs()) receive(e1);
    h.compare(finish(h, e1, b1), b1, "received late");

    auto const s0 = x.send(b0.tokens(), buffer_set);  // the oldest handle, in either buffer set
    auto const s1 = x.send(b1.tokens(), 1 - buffer_set);
    receive(s1);
    this->errs() ? x.abandon({}) : receive(s0);
    expect_given_up(s0, b0, "the other buffer set");
    h.compare(finish(h, s1, b1), b1, "its own buffer set");

    auto const o = x.send(b0.tokens(), buffer_set);  // instead of receive_outputs(): the peers have received everything they need
    receive(o);
    if (this->errs()) {
      x.send_outputs(o);
      x.abandon({});
    } else {
      h.compare(finish(h, o, b0), b0, "the peer's outputs were sent");
    }
    h.check(b0, "at the end");
  }
}

class PplxHalves : public WindowProtocol<PplxCase> {};

TEST_F(PplxHalves, T12_T21_AbandonBetweenHalves) {
  WindowHarness<PplxCase> h(comm, {.hidden = 16, .num_experts = experts(), .k = 2});
  auto& x = h.exchange();
  auto const b = random_batch<float>(rank(), 22, 5, 16, 2, experts());
  std::vector<float> out(b.x.size());
  for (int given_up = 0; given_up < 6; ++given_up) {  // all three twice: each parity of the rounds
    x.send(b.tokens());
    if (!errs() || given_up % 3 > 0) h.run_experts(x.receive());
    if (errs() && given_up % 3 < 2) {
      x.abandon({});
    } else if (given_up % 3 < 2) {
      std::string const message = expect_error(ErrorCode::peer, [&] { x.send_outputs(); });
      EXPECT_EQ(message.find(moe::text("rank ", comm.size() - 1, " abandoned the call")), 0U) << message;
    } else {
      x.send_outputs();
      errs() ? x.abandon({}) : x.receive_outputs(h.view(out, b));
      if (!errs()) h.compare(out, b, "the peer's outputs were sent");
    }
    h.check(b, moe::text("after ", given_up));
  }
}

// ---- Standard format: two batches under way, the same routing again, counts, capacity.

template <class Case>
struct Packed : WindowProtocol<Case> {};
using StandardCases = testing::Types<HighThroughputCase, OneSidedCase, TwoSidedCase>;
TYPED_TEST_SUITE(Packed, StandardCases, CaseNames);

TYPED_TEST(Packed, T8_T14_TwoBatchesAndTheSameRoutingAgain) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  auto& x = h.exchange();
  auto combine = [&](moe::detail::Handle d, Batch<float> const& b, char const* what) {
    std::vector<float> out(b.x.size());
    x.combine(d, h.view(out, b));
    h.compare(out, b, what);
  };
  for (int round = 0; round < 20; ++round) {
    auto const b0 = random_batch<float>(this->rank(), 2 * round, random_rows(this->rank(), round, 8), 16, 2, experts);
    auto b1 = random_batch<float>(this->rank(), 2 * round + 1, b0.rows, 16, 2, experts);
    bool const again = round % 2 == 1;
    if (again) b1.ids = b0.ids;
    auto const d0 = x.dispatch(b0.tokens());
    auto const d1 = again ? x.dispatch(b1.tokens(), d0) : x.dispatch(b1.tokens());
    h.run_experts(x.tokens(d0), x.expert_output(d0));
    h.run_experts(x.tokens(d1), x.expert_output(d1));
    combine(d0, b0, "first");
    combine(d1, b1, again ? "second, same routing" : "second");
    expect_error(ErrorCode::state, [&] { combine(d0, b0, "twice"); });
  }
  auto const b = random_batch<float>(this->rank(), 91, 4, 16, 2, experts);
  auto const d0 = x.dispatch(b.tokens());
  auto const fewer = random_batch<float>(this->rank(), 91, 3, 16, 2, experts);
  expect_error(this->seen(ErrorCode::argument), [&] { x.dispatch(this->errs() ? fewer.tokens() : b.tokens(), d0); });
  x.dispatch(b.tokens());
  std::vector<float> out(b.x.size());
  expect_error(ErrorCode::state, [&] { x.combine(d0, h.view(out, b)); });
  expect_error(ErrorCode::state, [&] { x.dispatch(b.tokens(), d0); });
}

TYPED_TEST(Packed, T12_T21_AbandonWithHandles) {
  int const experts = this->experts();
  WindowHarness<TypeParam> h(this->comm, {.hidden = 16, .num_experts = experts, .k = 2});
  auto& x = h.exchange();
  auto const b0 = random_batch<float>(this->rank(), 20, 5, 16, 2, experts);
  auto const b1 = random_batch<float>(this->rank(), 21, 3, 16, 2, experts);
  auto dispatch = [&](Batch<float> const& b) {
    auto const d = x.dispatch(b.tokens());
    h.run_experts(x.tokens(d), x.expert_output(d));
    return d;
  };
  auto combine = [&](moe::detail::Handle d, Batch<float> const& b) {
    std::vector<float> out(b.x.size());
    x.combine(d, h.view(out, b));
    h.compare(out, b);
  };
  auto expect_given_up = [&](moe::detail::Handle d, Batch<float> const& b) {
    if (this->errs()) {
      x.abandon({});
    } else {
      std::string const message = expect_error(ErrorCode::peer, [&] { combine(d, b); });
      EXPECT_EQ(message.find(moe::text("rank ", this->comm.size() - 1, " abandoned the call")), 0U) << message;
    }
    expect_error(ErrorCode::state, [&] { combine(d, b); });
  };
  for (int round = 0; round < 4; ++round) {
    auto const d0 = dispatch(b0);
    auto const d1 = dispatch(b1);
    expect_given_up(d0, b0);
    round % 2 == 0 ? combine(d1, b1) : expect_given_up(d1, b1);
    expect_given_up(dispatch(b1), b1);  // the only one
    h.check(b0, "next round");
  }
}

// The worked example of docs/semantics/exchange.md §7.7.
TYPED_TEST(Packed, T14_T16_WorkedExample) {
  if (this->comm.size() != 2) GTEST_SKIP() << "two ranks";
  WindowHarness<TypeParam> h(this->comm, {.hidden = 4, .num_experts = 4, .k = 2});
  Batch<float> b(this->rank() == 0 ? 3 : 2, 4, 2);
  std::fill(b.x.begin(), b.x.end(), 1.0F);
  std::fill(b.weights.begin(), b.weights.end(), 0.5F);
  b.ids = this->rank() == 0 ? std::vector<std::int32_t>{0, 2, 1, 0, 3, 2} : std::vector<std::int32_t>{2, 3, 0, -1};
  auto const tokens = h.exchange().prepare(b.tokens(), {});
  std::vector<std::array<int, 2>> const expected = this->rank() == 0 ? std::vector<std::array<int, 2>>{{0, -1}, {1, 0}, {0, -1}}
                                                                     : std::vector<std::array<int, 2>>{{-1, 0}, {1, 0}, {0, 1}};
  std::size_t row = 0;
  for (std::int64_t i = 0; i < tokens.rows.extent(0); ++i) {
    if (tokens.topk_ids(i, 0) < 0 && tokens.topk_ids(i, 1) < 0) continue;
    ASSERT_LT(row, expected.size());
    EXPECT_EQ(tokens.topk_ids(i, 0), expected[row][0]);
    EXPECT_EQ(tokens.topk_ids(i, 1), expected[row][1]);
    ++row;
  }
  EXPECT_EQ(row, 3U);
  EXPECT_EQ(h.exchange().rows_from(0), 2);
  EXPECT_EQ(h.exchange().rows_from(1), 1);
  std::array<std::int32_t, 2> counts{};
  h.exchange().expert_counts(1, counts.data());
  EXPECT_EQ(counts, (std::array<std::int32_t, 2>{3, this->rank() == 0 ? 1 : 2}));
  h.exchange().expert_counts(4, counts.data());
  EXPECT_EQ(counts, (std::array<std::int32_t, 2>{4, 4}));
}

TYPED_TEST(Packed, T25_ReceiveOverflow) {
  if constexpr (std::is_same_v<TypeParam, OneSidedCase>) {
    GTEST_SKIP() << "the workspace is of the worst case";
  } else {
    using H = WindowHarness<TypeParam>;
    int const experts = this->experts();
    auto params = H::patient();
    params.max_recv_rows = 8;
    H h(this->comm, {.hidden = 16, .num_experts = experts, .k = 1, .max_tokens = 8, .params = params});
    EXPECT_EQ(h.exchange().max_rows(), 8);
    auto b = random_batch<float>(this->rank(), 9, 8, 16, 1, experts);
    for (int target = 0; target < this->comm.size(); ++target) {
      std::fill(b.ids.begin(), b.ids.end(), 2 * target);
      if (this->comm.size() == 1) {
        h.check(b, "8 rows fit");
        continue;
      }
      std::string const message = expect_error(ErrorCode::capacity, [&] { h.exchange().prepare(b.tokens(), {}); });
      EXPECT_EQ(message.find(moe::text("rank ", target, " would receive ", 8 * this->comm.size(), " rows, more than max_recv_rows 8")), 0U)
          << message;
      auto spread = b;
      std::fill(spread.ids.begin(), spread.ids.end(), 2 * this->rank());
      h.check(spread, "next call");
    }
  }
}

// ---- The window and its manager.

class SharedWindow : public WindowProtocol<LowLatencyCase> {};

TEST_F(SharedWindow, PartsAreZeroAlignedAndSeenByAll) {
  for (std::int64_t bytes : {0, 1, 4096, 100'000}) {
    Window w(comm, bytes);
    EXPECT_GE(w.bytes(), bytes + static_cast<std::int64_t>(moe::comm::kWindowControlBytes));
    for (int r = 0; r < w.size(); ++r) {
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(w.peer(r, 0)) % 4096, 0U);
    }
    for (std::int64_t i = 0; i < bytes; ++i) ASSERT_EQ(*w.own<char>(moe::comm::kWindowControlBytes + static_cast<std::size_t>(i)), 0);
    w.barrier();
    if (bytes > 8) {
      for (int r = 0; r < w.size(); ++r)
        *w.at<char>(r, moe::comm::kWindowControlBytes + static_cast<std::size_t>(rank())) = static_cast<char>(rank() + 1);
      w.barrier();
      for (int r = 0; r < w.size(); ++r) EXPECT_EQ(*w.own<char>(moe::comm::kWindowControlBytes + static_cast<std::size_t>(r)), r + 1);
    }
    for (int i = 0; i < 100; ++i) w.barrier();
  }
}

TEST_F(SharedWindow, RefusedAtConstruction) {
  expect_error(ErrorCode::capacity, [&] { Window(comm, std::int64_t{1} << 50U); });
  if (comm.size() == 1) return;
  expect_error(ErrorCode::mismatch, [&] { Window(comm, errs() ? 100'000 : 1000); });
  MPI_Comm half = MPI_COMM_NULL;  // as if the last rank were on another node
  MPI_Comm_split(MPI_COMM_WORLD, errs() ? 1 : 0, rank(), &half);
  std::string const message = expect_error(ErrorCode::unsupported, [&] { Window(comm, 1000, {.node = half}); });
  EXPECT_EQ(message.find(moe::text("window: rank ", rank(), " shares no memory with rank ", errs() ? 0 : comm.size() - 1)), 0U) << message;
  MPI_Comm_free(&half);
  Window(comm, 1000).barrier();
}

TEST_F(SharedWindow, F2_ManagerReturnsTheSameWindowForEqualArguments) {
  for (int i = 0; i < 20; ++i) {
    moe::comm::WindowManager<Window> manager(comm);
    Window& a = manager.window({"low_latency", {1, 2, 3}, 5000});
    Window& b = manager.window({"low_latency", {1, 2, 4}, 5000});
    EXPECT_NE(&a, &b);
    EXPECT_NE(&a, &manager.window({"high_throughput", {1, 2, 3}, 5000}));
    EXPECT_EQ(&a, &manager.window({"low_latency", {1, 2, 3}, 5000}));
    EXPECT_EQ(manager.size(), 3U);
    a.barrier();
    b.barrier();
    expect_error(ErrorCode::argument, [&] { manager.window({"", {}, 5000}); });
  }
}

TEST_F(SharedWindow, BarrierNamesTheMissingRank) {
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  Window w(comm, 1000);
  w.set_timeout_ms(150);
  if (errs()) {
    usleep(500'000);
    return;
  }
  try {
    w.barrier();
    ADD_FAILURE() << "no error";
  } catch (moe::TransportError const& e) {
    EXPECT_EQ(e.peer(), comm.size() - 1) << e.what();
    EXPECT_EQ(e.phase(), "barrier");
    EXPECT_EQ(e.round(), 1U);
    EXPECT_NE(e.message().find(e.code() == ErrorCode::timeout ? "expected round 1, observed 0" : "is missing"), std::string::npos)
        << e.what();
  }
  expect_error(ErrorCode::state, [&] { w.barrier(); });
}

// The window's own deadline is never set here.
TEST_F(SharedWindow, WaitsHaveTheCommunicatorsDeadline) {
  if (comm.size() == 1) GTEST_SKIP() << "one rank has no peers";
  comm.set_timeout_ms(1000);
  WindowHarness<LowLatencyCase> h(comm, {.hidden = 16, .num_experts = experts(), .k = 2});
  auto const b = random_batch<float>(rank(), 8, 4, 16, 2, experts());
  if (errs()) {
    usleep(2'500'000);
    expect_error(ErrorCode::peer, [&] { h.exchange().prepare(b.tokens(), {}); });  // the others have told it
    return;
  }
  auto const start = std::chrono::steady_clock::now();
  try {
    h.exchange().prepare(b.tokens(), {});
    ADD_FAILURE() << "no error";
  } catch (moe::TransportError const& e) {
    EXPECT_TRUE(e.code() == ErrorCode::timeout || e.code() == ErrorCode::peer) << e.what();
    EXPECT_EQ(e.peer(), comm.size() - 1) << e.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::milliseconds(2300));
}

}  // namespace
