// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_completions_test.cu: HighThroughput's combine beside experts that tell their columns, between ranks that share one
// GPU: outputs and bits, delays, mixtures with rounds without it, graphs, refusals, a rank that is missing between two blocks of columns.
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <optional>

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/quantization/none.hpp"
#include "tests/gpu/exchange_policy_ranks.cuh"
#include "tests/gpu/simulated_high_throughput.cuh"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using moe::detail::HighThroughputCalls;
using moe::detail::HighThroughputShape;

constexpr std::uint64_t kTimeout = 3'000'000'000ULL;

struct Case {
  int ranks, max_tokens, hidden, topk, experts;
  bool fp8;
  Routing routing;
  int column_blocks;
  bool arriving = false;
};

enum class Round { plain, completing };

/// How a rank's experts and combine behave in a round; `late`, `watched`, `seen`, `told`: as in Telling.
struct Way {
  Round round = Round::completing;
  int routing_parity = -1;
  unsigned delays = 0;
  int late = -1;
  std::uint64_t late_ns = 0;
  int told = moe::comm::kMaxColumnBlocks;
  std::uint16_t const* watched = nullptr;
  std::uint32_t* seen = nullptr;
};

/// The kernels of all ranks. `programmatic`: a rank's combine begins while its experts run; with few blocks, so that all kernels of all
/// ranks have a multiprocessor at once.
class CompletionsRun : public SimulatedHighThroughput {
 public:
  explicit CompletionsRun(Case const& c, bool programmatic = false, std::uint64_t timeout = kTimeout)
      : SimulatedHighThroughput(shape_of(c, programmatic), c.routing, timeout, programmatic) {
    for (int r = 0; r < c.ranks; ++r) finished_.emplace_back(std::size_t{moe::comm::kMaxColumnBlocks}, 0);
  }
  void round(int parity, unsigned delays = 0) {
    for (int r = 0; r < shape_.ranks; ++r) enqueue(r, parity, {.delays = delays});
  }
  void enqueue(int r, int parity, Way const& way = {}) {
    dispatch(r, parity, way);
    random_delay(way.delays, r, 2, group_->stream(r));
    experts(r, parity, way);
    combine(r, parity, way);
  }
  void dispatch(int r, int parity, Way const& way = {}) {
    random_delay(way.delays, r, 1, group_->stream(r));
    calls(r).dispatch(buffer(r).in, parity, group_->stream(r), way.routing_parity);
  }
  void experts(int r, int parity, Way const& way = {}) {
    auto const& c = calls(r);
    Telling const telling{.to = c.completions(parity),
                          .finished = finished_[static_cast<std::size_t>(r)].data(),
                          .told = way.round == Round::completing ? way.told : 0,
                          .late = way.late,
                          .late_ns = way.late_ns,
                          .watched = way.watched,
                          .seen = way.seen};
    auto const y = moe::make_rows(c.outputs(parity), shape_.rows(), shape_.hidden);
    auto const run = [&](auto const& tokens) {
      if (shape_.column_blocks == 0) {
        run_identity(tokens, y, group_->stream(r));
      } else {
        run_telling(tokens, y, telling, group_->stream(r));
      }
    };
    if (shape_.fp8) {
      run(received<std::uint8_t>(r, parity, way.routing_parity));
    } else {
      run(received<moe::bf16>(r, parity, way.routing_parity));
    }
  }
  void combine(int r, int parity, Way const& way = {}) {
    auto& b = buffer(r);
    if (way.round == Round::completing) {
      calls(r).combine_completing(b.in, as_bf16(b.out), shape_.hidden, parity, group_->stream(r), way.routing_parity);
    } else {
      random_delay(way.delays, r, 3, group_->stream(r));
      calls(r).combine(b.in, as_bf16(b.out), shape_.hidden, parity, group_->stream(r), way.routing_parity);
    }
  }
  /// The words in which rank r sees what is complete: [column block][rank].
  std::vector<std::uint32_t> words(int r, int parity) const {
    auto const& c = calls_[static_cast<std::size_t>(r)];
    auto const n = static_cast<std::size_t>(shape_.num_column_blocks() * shape_.ranks);
    return read_device<std::uint32_t>(c.own<char>(c.layout().complete[parity]), n);
  }
  void poison() {
    for (auto& b : buffers_) b.out = DeviceArray<std::uint16_t>(b.x.host().size());
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  RankTokens const& brought(int r) const { return tokens_[static_cast<std::size_t>(r)]; }

 private:
  static Shape shape_of(Case const& c, bool programmatic) {
    Shape shape = high_throughput_shape(c);
    shape.lists = false;
    shape.blocks = programmatic ? 3 : 10;
    shape.column_blocks = c.column_blocks;
    shape.arriving = c.arriving;
    return shape;
  }
  template <class Payload>
  moe::StandardTokens<Payload, float> received(int r, int parity, int routing_parity) {
    auto const& c = calls(r);
    auto const& at = c.layout();
    auto const records = c.own<std::int32_t>(at.records[parity]);
    int const groups = shape_.fp8 ? shape_.groups() : 0;
    std::int64_t const n = shape_.rows();
    return {
        moe::make_rows(static_cast<Payload const*>(c.own<Payload>(at.rows[parity])), n, shape_.hidden),
        moe::make_strided_rows(static_cast<float const*>(c.own<float>(at.scales[parity])), n, groups, groups == 0 ? 0 : at.scale_stride),
        moe::make_strided_rows(static_cast<std::int32_t const*>(records), n, shape_.topk, at.record_words),
        moe::make_strided_rows(reinterpret_cast<float const*>(records + shape_.topk), n, shape_.topk, at.record_words),
        c.own<std::int32_t>(at.summary[routing_parity >= 0 ? routing_parity : parity])};
  }

  std::vector<DeviceArray<unsigned>> finished_;
};

std::string describe(Case const& c) {
  return moe::text("R=", c.ranks, " T=", c.max_tokens, " H=", c.hidden, " k=", c.topk, " E=", c.experts, c.fp8 ? " fp8" : " bf16",
                   " routing ", static_cast<int>(c.routing), ", ", c.column_blocks, " column blocks", c.arriving ? ", arriving" : "");
}

std::vector<Case> cases() {
  std::vector<Case> list;
  for (bool fp8 : {true, false}) {
    for (auto routing : {Routing::uniform, Routing::with_gaps, Routing::duplicates, Routing::one_rank, Routing::none}) {
      list.push_back({4, 40, 1024, 4, 16, fp8, routing, 4});
    }
    for (int blocks : {1, 2, 3, 5, 8}) list.push_back({2, 60, 2944, 2, 4, fp8, Routing::uniform, blocks});
    list.push_back({1, 9, 128, 1, 3, fp8, Routing::uniform, 4});
    list.push_back({8, 50, 7168, 8, 64, fp8, Routing::uniform, 4});
    list.push_back({8, 33, 4096, 6, 256, fp8, Routing::with_gaps, 8});
    list.push_back({2, 100, 8208, 16, 32, fp8, Routing::duplicates, 4});
    list.push_back({4, 60, 2048, 4, 16, fp8, Routing::uniform, 4, true});
  }
  return list;
}

TEST(Completions, T1_T2_T3_T5_T19_SumsFollowTheExperts) {
  for (Case const& c : cases()) {
    SCOPED_TRACE(describe(c));
    CompletionsRun run(c);
    for (unsigned seed = 0; seed < 4; ++seed) {
      int const parity = static_cast<int>(seed & 1U);
      run.bring(seed);
      run.round(parity);
      run.expect_good(parity);
      if (HasFailure()) return;
    }
  }
}

/// Each rank's combine begins while its experts run, which one block of columns holds up.
TEST(Completions, T7_AnyBlockMayBeLate) {
  Case const c{4, 60, 1024, 4, 16, true, Routing::uniform, 4};
  CompletionsRun run(c, true);
  for (unsigned seed = 0; seed < 4; ++seed) {
    run.bring(seed);
    for (int late = 0; late < 4; ++late) {
      for (int slow = 0; slow < c.ranks; ++slow) {
        run.poison();
        for (int r = 0; r < c.ranks; ++r) run.enqueue(r, late & 1, {.late = r == slow ? late : -1, .late_ns = 300'000});
        run.expect_good(late & 1);
      }
    }
    if (HasFailure()) return;
  }
}

/// The experts of every rank wait until their rank's combine has written columns of the first block, before they write the second.
TEST(Completions, TheCombineRunsBesideTheExperts) {
  Case const c{2, 32, 1024, 4, 16, true, Routing::uniform, 4};
  CompletionsRun run(c, true);
  run.bring(0);
  for (int r = 0; r < c.ranks; ++r) ASSERT_GT(run.brought(r).tokens, 0);
  DeviceArray<std::uint32_t> seen(static_cast<std::size_t>(c.ranks), 0);
  for (int i = 0; i < 4; ++i) {
    run.poison();
    for (int r = 0; r < c.ranks; ++r) run.enqueue(r, i & 1, {.watched = run.buffer(r).out.data(), .seen = seen.data() + r});
    run.expect_good(i & 1);
    EXPECT_EQ(seen.host(), std::vector<std::uint32_t>(static_cast<std::size_t>(c.ranks), 1U)) << "round " << i;
  }
}

/// Every rank chooses for itself in every round; MOE_FUSED_ROUNDS asks for more of them.
TEST(Completions, T7_RoundsOfBothKindsWithRandomDelays) {
  char const* const wanted = std::getenv("MOE_FUSED_ROUNDS");
  int const rounds = wanted == nullptr ? 200 : std::atoi(wanted);
  for (bool programmatic : {false, true}) {
    for (bool arriving : {false, true}) {
      Case const c{4, 40, 1024, 4, 16, !arriving, Routing::uniform, 4, arriving};
      CompletionsRun run(c, programmatic);
      std::mt19937 random(programmatic ? 7 : 8);
      for (int i = 0; i < rounds && !HasFailure(); ++i) {
        if (i % 10 == 0) run.bring(random());
        for (int r = 0; r < c.ranks; ++r) {
          run.enqueue(r, i & 1,
                      {.round = random() % 3 == 0 ? Round::plain : Round::completing,
                       .delays = static_cast<unsigned>(random() % 1000),
                       .late = static_cast<int>(random() % 8),
                       .late_ns = random() % 30'000});
        }
        if (i % 10 == 9 || i + 1 == rounds) run.expect_good(i & 1);
      }
    }
  }
}

TEST(Completions, T8_TwoBatchesInterleaved) {
  CompletionsRun run({4, 40, 1024, 4, 16, true, Routing::uniform, 4}, true);
  run.bring(1);
  for (int i = 0; i < 10; ++i) {
    for (int r = 0; r < 4; ++r) {
      run.dispatch(r, 0);
      run.dispatch(r, 1);
      run.experts(r, 0);
      run.experts(r, 1);
      run.combine(r, i & 1);
      run.combine(r, 1 - (i & 1));
    }
  }
  run.expect_good(1);
}

/// One graph repeats one parity, then with a cached routing; another has both parities.
TEST(Completions, T9_T14_GraphReplay) {
  for (bool programmatic : {false, true}) {
    CompletionsRun run({4, 40, 1024, 4, 16, true, Routing::uniform, 4}, programmatic);
    run.bring(2);
    run.round(0);
    run.group().synchronize();
    {
      RankGraphs graphs(run.group(), [&](int r) {
        run.enqueue(r, 0);
        run.enqueue(r, 1);
      });
      for (int i = 0; i < 30; ++i) graphs.launch();
      run.expect_good(1);
    }
    {
      RankGraphs graphs(run.group(), [&](int r) { run.enqueue(r, 1, {.late = r, .late_ns = 5000}); });
      for (int i = 0; i < 30; ++i) graphs.launch();
      run.expect_good(1);
    }
    run.poison();
    RankGraphs graphs(run.group(), [&](int r) { run.enqueue(r, 0, {.routing_parity = 1, .late = r, .late_ns = 5000}); });
    for (int i = 0; i < 30; ++i) graphs.launch();
    run.expect_good(0, 1);
  }
}

TEST(Completions, T14_CachedRouting) {
  CompletionsRun run({4, 100, 1024, 4, 16, true, Routing::uniform, 4});
  run.bring(1);
  run.round(0);
  run.expect_good(0);
  for (int parity : {0, 1, 1, 0}) {
    run.poison();
    for (int r = 0; r < 4; ++r) run.enqueue(r, parity, {.routing_parity = 0});
    run.expect_good(parity, 0);
  }
}

/// A rank without tokens waits like the others: when its combine has ended, all ranks have told all blocks.
TEST(Completions, T2_ARankWithoutTokensWaits) {
  Case const c{3, 40, 1024, 4, 12, true, Routing::uniform, 4};
  CompletionsRun run(c);
  run.bring(1);
  run.buffer(0).in.tokens = 0;
  for (std::uint32_t round = 1; round < 4; ++round) {
    for (int r = 0; r < c.ranks; ++r) run.enqueue(r, 1, {.late = r == 2 ? 3 : -1, .late_ns = 20'000'000});
    moe::check_cuda(cudaStreamSynchronize(run.group().stream(0)), "cudaStreamSynchronize");
    EXPECT_EQ(run.words(0, 1), std::vector<std::uint32_t>(12, round));
    run.group().synchronize_and_check();
  }
}

TEST(Completions, T10_ARankMissingBetweenTwoBlocksIsNamed) {
  for (bool programmatic : {false, true}) {
    Case const c{4, 40, 1024, 4, 16, true, Routing::uniform, 4};
    {
      CompletionsRun run(c, programmatic, 200'000'000ULL);
      run.bring(0);
      for (int r = 0; r < 4; ++r) {
        run.dispatch(r, 0);
        run.experts(r, 0, {.told = r == 3 ? 2 : moe::comm::kMaxColumnBlocks});
        if (r != 3) run.combine(r, 0);
      }
      expect_last_rank_is_named(run.group());
    }
    CompletionsRun again(c, programmatic);  // the GPU is usable
    again.bring(1);
    again.round(0);
    again.expect_good(0);
  }
}

TEST(Completions, T12_RanksThatDisagreeGetMismatch) {
  CompletionsRun run({2, 8, 1024, 4, 16, true, Routing::uniform, 4}, false, 1'000'000'000ULL);
  run.bring(0);
  HighThroughputShape other = run.shape();
  other.column_blocks = 2;
  HighThroughputCalls const wrong(run.group().view(1), other, false);
  run.dispatch(0, 0);
  wrong.dispatch(run.buffer(1).in, 0, run.group().stream(1));
  expect_mismatch(run.group());
}

TEST(Completions, T22_RoundsWrap) {
  CompletionsRun run({4, 60, 1024, 4, 16, true, Routing::uniform, 4});
  expect_rounds_wrap(run, 4U * (16 + 4));
}

/// Three combines: of a layout without column blocks, behind the experts, and beside them.
TEST(Completions, T23_SameBitsAsWithoutIt) {
  Case const c{4, 60, 2048, 8, 64, false, Routing::uniform, 4};
  Case without = c;
  without.column_blocks = 0;
  CompletionsRun plain(without);
  CompletionsRun run(c);
  for (unsigned seed = 0; seed < 3; ++seed) {
    plain.bring(seed);
    for (int r = 0; r < c.ranks; ++r) plain.enqueue(r, 0, {.round = Round::plain});
    plain.expect_good(0);
    run.bring(seed);
    for (unsigned i = 0; i < 6; ++i) {
      run.poison();
      for (int r = 0; r < c.ranks; ++r) {
        run.enqueue(r, static_cast<int>(i & 1U), {.round = i == 0 ? Round::plain : Round::completing, .delays = i});
      }
      run.group().synchronize_and_check();
      for (int r = 0; r < c.ranks; ++r) EXPECT_EQ(run.buffer(r).out.host(), plain.buffer(r).out.host()) << "rank " << r << ", round " << i;
    }
  }
}

// ---- The policy.

struct Overlapping : PolicyConfig {
  static constexpr bool overlap_combine = true;
};
struct OverlappingBoth : Overlapping {
  static constexpr bool overlap_dispatch = true;
};
using High = moe::backends::HighThroughput<SimulatedWindow>;
template <class Config = Overlapping, class Quant = Fp8Transport>
using HighRanks = Ranks<High, Quant, bf16, Config>;
static_assert(HighRanks<>::Exchange::kCompletes && !HighRanks<>::Exchange::kArrives);
static_assert(HighRanks<OverlappingBoth>::Exchange::kCompletes && HighRanks<OverlappingBoth>::Exchange::kArrives);
static_assert(!HighRanks<PolicyConfig>::Exchange::kCompletes && !Ranks<High, Fp8Transport, float, Overlapping>::Exchange::kCompletes);

template <class R>
void round_trips(R&& run, std::string const& what) {
  unsigned seed = 1;
  for (Routing routing : {Routing::uniform, Routing::with_gaps, Routing::duplicates, Routing::one_rank, Routing::none}) {
    run.bring(seed++, routing);
    run.round();
    run.expect_good(true, what);
  }
}

TEST(CompletionsPolicy, T1_T20_EveryPlacement) {
  for (auto strategy : {moe::PlacementStrategy::linear, moe::PlacementStrategy::round_robin}) {
    for (int experts : {16, 13, 3}) {
      RankSizes const s{.hidden = 1024, .topk = experts == 3 ? 2 : 4, .experts = experts, .strategy = strategy};
      std::string const what = moe::text(experts, " experts, ", moe::name(strategy));
      round_trips(HighRanks<>(s, {.window = {kTimeout}}), what);
      round_trips(HighRanks<OverlappingBoth>(s, {.window = {kTimeout}}), what + ", both");
      round_trips(HighRanks<Overlapping, moe::quantization::None>(s, {.column_blocks = 2, .window = {kTimeout}}), what + ", bf16");
    }
  }
}

TEST(CompletionsPolicy, T8_T14_TwoBatchesOfWhichOneMayBePlain) {
  HighRanks<> run(RankSizes{.max_tokens = 24, .hidden = 1024}, {.window = {kTimeout}});
  for (unsigned i = 0; i < 8; ++i) {
    run.bring(i, i % 2 == 0 ? Routing::uniform : Routing::with_gaps);
    for (int r = 0; r < 4; ++r) {
      auto& x = run.at(r);
      auto const s = run.stream(r);
      auto const d0 = x.dispatch(run.in(r), s);
      auto const d1 = x.dispatch(run.in(r), s, i < 4 ? std::optional<moe::detail::Handle>() : d0);
      for (auto d : {d0, d1}) {
        if (d.generation % 3 == 0) {
          run_identity(x.tokens(d), x.expert_output(d), s);
        } else {
          run_telling(x.tokens(d), x.expert_output(d), run.telling(r, x.completions(d)), s);
        }
      }
      x.combine(i % 2 == 0 ? d0 : d1, run.out(r), s);
      moe::check_cuda(cudaMemsetAsync(run.buffer(r).out.data(), 0xff, run.brought(r).x.size() * 2, s), "cudaMemsetAsync");
      x.combine(i % 2 == 0 ? d1 : d0, run.out(r), s);
      expect_error(ErrorCode::state, [&] { x.completions(d0); });
    }
    run.expect_good(true, moe::text("round ", i));
  }
}

/// A rank refuses its arguments, gives up before its experts, or when they have told some of their blocks: the others see it in that round,
/// and the next is exact.
TEST(CompletionsPolicy, T4_T12_T21_RefusalsLeaveTheGroupSound) {
  auto const check = [](auto&& run) {
    int const last = run.size() - 1;
    unsigned seed = 1;
    auto const others = [&](auto const& refuse) {
      run.bring(seed++, Routing::uniform, 8);
      for (int r = 0; r < run.size(); ++r) {
        if (r == last) {
          refuse(run.at(r));
        } else {
          run.pair(r);
        }
      }
    };
    auto const exact = [&](std::string const& what) {
      for (int i = 0; i < 3; ++i) {
        run.bring(seed++);
        run.round();
        run.expect_good(true, what);
      }
    };
    others([&](auto& x) { expect_error(ErrorCode::argument, [&] { x.prepare({}, run.stream(last)); }); });
    run.expect_refusal(ErrorCode::peer, last, "refused its arguments with E_ARG");
    exact("after a refusal");
    others([&](auto& x) { x.abandon(run.stream(last)); });
    run.expect_refusal(ErrorCode::peer, last, "abandoned the call");
    exact("after an abandoned call");
    for (int told : {0, 1, 3}) {
      others([&](auto& x) {
        auto const t = x.prepare(run.in(last), run.stream(last));
        Telling telling = run.telling(last, x.completions());
        telling.told = told;
        run_telling(t, x.expert_output(), telling, run.stream(last));
        x.abandon(run.stream(last));
      });
      run.expect_refusal(ErrorCode::peer, last, "abandoned the call");
      exact(moe::text("after ", told, " blocks"));
    }
  };
  check(HighRanks<>(RankSizes{.hidden = 1024}, {.window = {kTimeout}}));
  check(HighRanks<OverlappingBoth>(RankSizes{.hidden = 1024}, {.window = {kTimeout}}));
}

/// A rank that gives up when its experts have told everything: the sums of the others are complete, and they see it in that round or in a
/// later one.
TEST(CompletionsPolicy, T21_GivingUpAfterTheLastBlockIsReported) {
  HighRanks<> run(RankSizes{.hidden = 1024}, {.window = {kTimeout}});
  run.bring(5, Routing::uniform, 8);
  for (int r = 0; r < 4; ++r) {
    if (r < 3) {
      run.pair(r);
      continue;
    }
    auto const t = run.at(r).prepare(run.in(r), run.stream(r));
    run_telling(t, run.at(r).expert_output(), run.telling(r, run.at(r).completions()), run.stream(r));
    run.at(r).abandon(run.stream(r));
  }
  run.synchronize();
  for (int r = 0; r < 3; ++r) EXPECT_EQ(run.differs(r, true), "");
  run.bring(6);
  run.round();
  run.expect_refusal(ErrorCode::peer, 3, "abandoned the call");
  for (int r = 0; r < 4; ++r) EXPECT_EQ(run.differs(r, true), "");
}

/// The same with two dispatches and then two combines: the others may end both combines before the rank gives up the first, and see it in
/// the third.
TEST(CompletionsPolicy, T8_T21_GivingUpTheFirstOfTwoBatchesIsReported) {
  HighRanks<> run(RankSizes{.hidden = 1024}, {.window = {kTimeout}});
  run.bring(5, Routing::uniform, 8);
  std::vector<std::array<moe::detail::Handle, 2>> handles;
  for (int r = 0; r < 4; ++r) {
    auto& x = run.at(r);
    auto const s = run.stream(r);
    auto const first = x.dispatch(run.in(r), s);
    handles.push_back({first, x.dispatch(run.in(r), s)});
    for (auto const& d : handles.back()) run_telling(x.tokens(d), x.expert_output(d), run.telling(r, x.completions(d)), s);
    if (r == 3) continue;
    for (auto const& d : handles.back()) x.combine(d, run.out(r), s);
  }
  for (int r = 0; r < 3; ++r) moe::check_cuda(cudaStreamSynchronize(run.stream(r)), "cudaStreamSynchronize");
  run.at(3).abandon(run.stream(3));
  run.at(3).combine(handles[3][1], run.out(3), run.stream(3));
  run.synchronize();
  for (int r = 0; r < 4; ++r) EXPECT_EQ(run.differs(r, true), "");
  run.bring(6);
  run.round();
  run.expect_refusal(ErrorCode::peer, 3, "abandoned the call");
  for (int r = 0; r < 4; ++r) EXPECT_EQ(run.differs(r, true), "");
}

TEST(CompletionsPolicy, T10_ATimeoutReplacesARefusal) {
  HighRanks<> run(RankSizes{.hidden = 1024}, {.window = {150'000'000ULL}});
  run.expect_timeout_after_refusal();
}

TEST(CompletionsPolicy, T12_WhatDoesNotGoTogether) {
  EXPECT_EQ(expect_error(ErrorCode::config, [] { HighRanks<>(RankSizes{}, {.column_blocks = 0}); }),
            "high_throughput: 0 column blocks, at least 1");
  EXPECT_EQ(expect_error(ErrorCode::config, [] { HighRanks<>(RankSizes{}, {.column_blocks = 9}); }),
            "high_throughput: 9 column blocks, at most 8");
  HighRanks<> run(RankSizes{.ranks = 1, .hidden = 1024, .experts = 4}, {.expert_alignment = 8, .window = {kTimeout}});
  run.bring(1, Routing::uniform, 8);
  auto& x = run.at(0);
  DeviceArray<std::uint16_t> y(std::size_t{64} * 1024, 0);
  auto d = x.dispatch(run.in(0), run.stream(0));
  x.reduce_expert_major(d, as_bf16(y), run.stream(0));
  expect_error(ErrorCode::state, [&] { x.completions(d); });
  x.combine(d, run.out(0), run.stream(0));
  d = x.dispatch(run.in(0), run.stream(0));
  run_telling(x.tokens(d), x.expert_output(d), run.telling(0, x.completions(d)), run.stream(0));
  expect_error(ErrorCode::state, [&] { x.reduce_expert_major(d, as_bf16(y), run.stream(0)); });
  x.combine(d, run.out(0), run.stream(0));
  run.expect_good(true);
}

TEST(CompletionsPolicy, BlocksMayChangeBetweenCalls) {
  HighRanks<> run(RankSizes{.max_tokens = 24, .hidden = 1024}, {.window = {kTimeout}});
  for (int blocks : {10, 4, 1, 7}) {
    for (int r = 0; r < 4; ++r) run.at(r).set_blocks(blocks);
    run.bring(static_cast<unsigned>(blocks));
    run.round();
    run.expect_good(true, moe::text(blocks, " blocks"));
  }
}

}  // namespace
