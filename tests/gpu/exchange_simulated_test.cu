// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_simulated_test.cu: the device exchanges between ranks that share one GPU: payload, places, outputs, reuse, faults.
#include <gtest/gtest.h>

#include "moe/backends/window/device/low_latency/fixed.cuh"
#include "tests/gpu/simulated_high_throughput.cuh"

namespace {

using namespace moe_test;
using moe::detail::LowLatencyCalls;
using moe::detail::LowLatencyShape;
using moe::quantization::ScaleFloor;

constexpr std::uint64_t kTimeout = 3'000'000'000ULL;
constexpr int kBlocks = 12;

struct Case {
  int ranks, max_tokens, hidden, topk, experts;
  bool fp8, per_rank;
  Routing routing;
};

class LowLatencyRun {
 public:
  explicit LowLatencyRun(Case const& c, std::uint64_t timeout = kTimeout, moe::detail::LowLatencyFixed const* fixed = nullptr) : case_(c) {
    shape_.ranks = c.ranks;
    shape_.max_tokens = c.max_tokens;
    shape_.hidden = c.hidden;
    shape_.topk = c.topk;
    shape_.num_experts = c.experts;
    shape_.fp8 = c.fp8;
    shape_.per_rank = c.per_rank;
    shape_.blocks = kBlocks;
    group_ = std::make_unique<RankGroup>(c.ranks, true, LowLatencyCalls::window_bytes(shape_), timeout);
    for (int r = 0; r < c.ranks; ++r) {
      calls_.emplace_back(group_->view(r), shape_, moe::detail::ExchangeOptions{.programmatic = false}, fixed);
    }
  }
  void bring(unsigned seed) {
    tokens_.clear();
    buffers_.clear();
    auto const y_rows = case_.per_rank ? static_cast<std::size_t>(shape_.local_experts()) * static_cast<std::size_t>(shape_.capacity()) : 0;
    for (int r = 0; r < case_.ranks; ++r) {
      tokens_.push_back(
          make_tokens(r, tokens_of(case_.max_tokens, r, seed), case_.hidden, case_.topk, case_.experts, case_.ranks, case_.routing, seed));
      buffers_.push_back(make_buffers(tokens_.back(), case_.hidden, shape_.local_experts(), y_rows));
    }
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void experts(int r, int parity) {
    auto& b = buffer(r);
    auto const& c = calls_[static_cast<std::size_t>(r)];
    dim3 const grid(4, static_cast<unsigned>(shape_.local_experts()));
    identity_batched<<<grid, 128, 0, group_->stream(r)>>>(c.own<char>(c.layout().rows[parity]), c.own<float>(c.layout().scales[parity]),
                                                          case_.per_rank ? c.own<std::int32_t>(c.layout().sources[parity]) : nullptr,
                                                          b.num.data(), shape_.capacity(), case_.hidden, case_.fp8,
                                                          case_.per_rank ? as_bf16(b.y) : c.outputs(parity));
    if (case_.per_rank) {
      c.reduce(as_bf16(b.y), parity, 4, group_->stream(r));
    }
  }
  void round(int parity, unsigned delays = 0) {
    for (int r = 0; r < case_.ranks; ++r) {
      auto& b = buffer(r);
      auto const pause = [&](unsigned salt) { random_delay(delays, r, salt, group_->stream(r)); };
      auto const& c = calls_[static_cast<std::size_t>(r)];
      pause(1);
      c.dispatch(b.in, b.num.data(), parity, group_->stream(r));
      pause(2);
      experts(r, parity);
      pause(3);
      c.combine(b.in, as_bf16(b.out), case_.hidden, parity, group_->stream(r));
    }
  }
  void expect_good(int parity) {
    group_->synchronize_and_check();
    for (int r = 0; r < case_.ranks; ++r) {
      EXPECT_EQ(check_low_latency_rows(calls_[static_cast<std::size_t>(r)], tokens_, buffer(r), r, parity, 1), "");
      EXPECT_EQ(outputs(r), "");
    }
  }
  std::string outputs(int r) {
    return check_outputs<ScaleFloor::amax_1e4>(tokens_[static_cast<std::size_t>(r)], buffer(r), r, case_.hidden, case_.topk,
                                               shape_.local_experts(), case_.ranks, case_.fp8, case_.per_rank, 1);
  }
  RankBuffers& buffer(int r) { return buffers_[static_cast<std::size_t>(r)]; }
  LowLatencyCalls& calls(int r) { return calls_[static_cast<std::size_t>(r)]; }
  RankGroup& group() { return *group_; }
  LowLatencyShape const& shape() const { return shape_; }

 private:
  Case case_;
  LowLatencyShape shape_;
  std::unique_ptr<RankGroup> group_;
  std::vector<LowLatencyCalls> calls_;
  std::vector<RankTokens> tokens_;
  std::vector<RankBuffers> buffers_;
};

std::string describe(Case const& c) {
  return moe::text("R=", c.ranks, " T=", c.max_tokens, " H=", c.hidden, " k=", c.topk, " E=", c.experts, c.fp8 ? " fp8" : " bf16",
                   c.per_rank ? " per rank" : " per expert", " routing ", static_cast<int>(c.routing));
}

std::vector<Case> cases() {
  std::vector<Case> list;
  for (bool fp8 : {true, false}) {
    for (bool per_rank : {false, true}) {
      for (auto routing : {Routing::uniform, Routing::with_gaps, Routing::duplicates, Routing::one_rank, Routing::none}) {
        list.push_back({4, 9, 512, 4, 16, fp8, per_rank, routing});
      }
      list.push_back({1, 5, 128, 1, 3, fp8, per_rank, Routing::uniform});
      list.push_back({2, 40, 2944, 2, 4, fp8, per_rank, Routing::uniform});
      list.push_back({8, 16, 7168, 8, 64, fp8, per_rank, Routing::uniform});
      list.push_back({8, 3, 4096, 6, 256, fp8, per_rank, Routing::with_gaps});
      list.push_back({2, 64, 8192, 16, 32, fp8, per_rank, Routing::duplicates});
    }
  }
  return list;
}

TEST(LowLatency, T1_T2_T3_T5_T6_T19_PayloadPlacesAndOutputs) {
  for (Case const& c : cases()) {
    SCOPED_TRACE(describe(c));
    LowLatencyRun run(c);
    for (unsigned seed = 0; seed < 4; ++seed) {
      run.bring(seed);
      run.round(static_cast<int>(seed & 1U));
      run.expect_good(static_cast<int>(seed & 1U));
      if (HasFailure()) {
        return;
      }
    }
  }
}

/// Kernels with the sizes of a configuration compiled in: the rows, places and output bits of the kernels with run-time sizes.
template <class Config, bool kFp8>
void expect_same_with_fixed(int ranks, int max_tokens) {
  auto const& fixed = moe::detail::low_latency_fixed<Config, kFp8>();
  for (auto routing : {Routing::uniform, Routing::with_gaps, Routing::duplicates, Routing::one_rank, Routing::none}) {
    Case const c{ranks, max_tokens, Config::hidden, Config::topk, Config::num_experts, kFp8, false, routing};
    SCOPED_TRACE(describe(c));
    LowLatencyRun plain(c);
    ASSERT_TRUE(fixed.fit(plain.shape()));
    LowLatencyRun run(c, kTimeout, &fixed);
    for (unsigned seed = 0; seed < 4; ++seed) {
      int const parity = static_cast<int>(seed & 1U);
      for (LowLatencyRun* r : {&plain, &run}) {
        r->bring(seed);
        r->round(parity);
        r->expect_good(parity);
      }
      for (int r = 0; r < ranks; ++r) EXPECT_EQ(run.buffer(r).out.host(), plain.buffer(r).out.host());
    }
  }
}
struct Sizes512 {
  static constexpr int hidden = 512, topk = 4, num_experts = 16;
};
struct Sizes2944 {
  static constexpr int hidden = 2944, topk = 2, num_experts = 4;
};
struct Sizes7168 {
  static constexpr int hidden = 7168, topk = 8, num_experts = 64;
};
TEST(LowLatency, T23_FixedSizesGiveTheSameBits) {
  expect_same_with_fixed<Sizes512, true>(4, 9);
  expect_same_with_fixed<Sizes512, false>(4, 9);
  expect_same_with_fixed<Sizes2944, true>(2, 40);
  expect_same_with_fixed<Sizes7168, true>(8, 16);
  expect_same_with_fixed<Sizes7168, false>(8, 16);
}
TEST(LowLatency, FixedSizesAreTakenByTheirShapeOnly) {
  auto const& fixed = moe::detail::low_latency_fixed<Sizes512, true>();
  moe::detail::LowLatencyShape s{.ranks = 4, .max_tokens = 9, .hidden = 512, .topk = 4, .num_experts = 16, .fp8 = true};
  EXPECT_TRUE(fixed.fit(s));
  auto const refuses = [&](auto const& change) {
    auto other = s;
    change(other);
    EXPECT_FALSE(fixed.fit(other));
  };
  refuses([](auto& x) { x.hidden = 1024; });
  refuses([](auto& x) { x.topk = 2; });
  refuses([](auto& x) { x.num_experts = 20; });
  refuses([](auto& x) { x.fp8 = false; });
  refuses([](auto& x) { x.per_rank = true; });
  refuses([](auto& x) { x.combine = moe::backends::CombineFormat::fp8; });
  LowLatencyRun run({4, 9, 512, 4, 20, true, false, Routing::uniform}, kTimeout, &fixed);  // replicas: the other kernels
  run.bring(1);
  run.round(0);
  run.expect_good(0);
}

/// A model that leaves a size to run time asks for no such kernels; its library has none of it.
struct SizesOfRunTime : Sizes512 {
  static constexpr int hidden = moe::dynamic;
};
TEST(LowLatency, SizesOfRunTimeHaveNoFixedKernels) {
  auto const& fixed = moe::detail::low_latency_fixed<SizesOfRunTime, true>();
  EXPECT_EQ(fixed.dispatch, nullptr);
  EXPECT_FALSE(fixed.fit({.ranks = 4, .max_tokens = 9, .hidden = 512, .topk = 4, .num_experts = 16, .fp8 = true}));
}

TEST(LowLatency, T7_RoundsWithRandomDelays) {
  LowLatencyRun run({4, 8, 512, 4, 16, true, false, Routing::uniform});
  for (unsigned seed = 0; seed < 20; ++seed) {
    run.bring(seed);
    for (unsigned i = 0; i < 50; ++i) {
      run.round(static_cast<int>(i & 1U), seed * 50 + i + 1);
    }
    run.expect_good(1);
  }
}

TEST(LowLatency, T8_TwoBatchesInterleaved) {
  for (bool per_rank : {false, true}) {
    Case const c{4, 8, 512, 4, 16, true, per_rank, Routing::uniform};
    LowLatencyRun run(c);
    run.bring(1);
    for (int i = 0; i < 10; ++i) {
      for (int r = 0; r < 4; ++r) {
        auto& b = run.buffer(r);
        auto const s = run.group().stream(r);
        run.calls(r).dispatch(b.in, b.num.data(), 0, s);
        run.calls(r).dispatch(b.in, b.num.data(), 1, s);
        run.experts(r, 0);
        run.experts(r, 1);
        run.calls(r).combine(b.in, as_bf16(b.out), c.hidden, 0, s);
        run.calls(r).combine(b.in, as_bf16(b.out), c.hidden, 1, s);
      }
    }
    run.expect_good(1);
  }
}

TEST(LowLatency, T9_GraphReplayWithNewInputs) {
  Case const c{4, 8, 512, 4, 16, true, false, Routing::uniform};
  LowLatencyRun run(c);
  run.bring(2);
  std::vector<DeviceArray<std::int32_t>> counts;
  for (int r = 0; r < 4; ++r) {
    counts.emplace_back(std::vector<std::int32_t>{run.buffer(r).in.tokens});
    run.buffer(r).in.tokens_device = counts.back().data();
  }
  RankGraphs graphs(run.group(), [&](int r) {
    auto& b = run.buffer(r);
    auto const s = run.group().stream(r);
    run.calls(r).dispatch(b.in, b.num.data(), 0, s);
    run.experts(r, 0);
    run.calls(r).combine(b.in, as_bf16(b.out), c.hidden, 0, s);
  });
  for (int i = 0; i < 100; ++i) graphs.launch();
  run.expect_good(0);
}

TEST(LowLatency, T17_HalvesApart) {
  Case const c{4, 8, 512, 4, 16, true, false, Routing::uniform};
  LowLatencyRun run(c);
  for (unsigned seed = 0; seed < 6; ++seed) {
    run.bring(seed);
    for (int r = 0; r < 4; ++r) {
      auto& b = run.buffer(r);
      auto const s = run.group().stream(r);
      run.calls(r).dispatch(b.in, b.num.data(), 0, s, true, false);
      delay<<<1, 1, 0, s>>>(50000);
      run.calls(r).dispatch(b.in, b.num.data(), 0, s, false, true);
      run.experts(r, 0);
      run.calls(r).combine(b.in, as_bf16(b.out), c.hidden, 0, s);
    }
    run.expect_good(0);
  }
}

TEST(LowLatency, T22_RoundsWrap) {
  Case const c{4, 8, 512, 4, 16, true, false, Routing::uniform};
  LowLatencyRun run(c);
  expect_rounds_wrap(run, 4U * static_cast<unsigned>(run.calls(0).layout().count_stride));
}

TEST(LowLatency, T10_AbsentRankIsNamed) {
  Case const c{4, 8, 512, 4, 16, true, false, Routing::uniform};
  LowLatencyRun run(c, 200'000'000ULL);
  run.bring(0);
  for (int r = 0; r < 3; ++r) {
    auto& b = run.buffer(r);
    run.calls(r).dispatch(b.in, b.num.data(), 0, run.group().stream(r));
  }
  expect_last_rank_is_named(run.group());
}

TEST(LowLatency, T12_RanksThatDisagreeGetMismatch) {
  Case const c{2, 8, 512, 4, 16, true, false, Routing::uniform};
  LowLatencyRun run(c, 1'000'000'000ULL);
  run.bring(0);
  LowLatencyShape other = run.shape();
  other.max_tokens = 7;
  LowLatencyCalls const wrong(run.group().view(1), other, false);
  run.buffer(1).in.tokens = 2;
  run.calls(0).dispatch(run.buffer(0).in, run.buffer(0).num.data(), 0, run.group().stream(0));
  wrong.dispatch(run.buffer(1).in, run.buffer(1).num.data(), 0, run.group().stream(1));
  expect_mismatch(run.group());
}

TEST(LowLatency, T23_SameBitsEveryTime) {
  LowLatencyRun run({8, 16, 2048, 8, 64, false, false, Routing::uniform});
  run.bring(3);
  expect_same_bits(run, [&](int parity, unsigned delays) { run.round(parity, delays); });
}

class HighThroughputRun : public SimulatedHighThroughput {
 public:
  HighThroughputRun(Case const& c, int alignment, int parities, int capacity = 0, bool lists = true, std::uint64_t timeout = kTimeout)
      : SimulatedHighThroughput(shape_of(c, alignment, parities, capacity, lists), c.routing, timeout, false) {
    y_rows_ = static_cast<std::size_t>(shape_.list_size());
  }
  void round(int parity, int routing_parity = -1, unsigned delays = 0) {
    for (int r = 0; r < shape_.ranks; ++r) {
      enqueue(r, parity, routing_parity, delays);
    }
  }
  void enqueue(int r, int parity, int routing_parity = -1, unsigned delays = 0) {
    int const routing = routing_parity >= 0 ? routing_parity : parity;
    auto& b = buffers_[static_cast<std::size_t>(r)];
    auto const& c = calls_[static_cast<std::size_t>(r)];
    auto const s = group_->stream(r);
    auto const pause = [&](unsigned salt) { random_delay(delays, r, salt, s); };
    pause(1);
    c.dispatch(b.in, parity, s, routing_parity);
    pause(2);
    identity_listed<<<8, 128, 0, s>>>(c.own<char>(c.layout().rows[parity]), c.own<float>(c.layout().scales[parity]),
                                      c.layout().scale_stride, c.own<std::int32_t>(c.layout().list[parity]),
                                      c.own<std::int32_t>(c.layout().summary[routing]), shape_.hidden, shape_.fp8, as_bf16(b.y));
    c.reduce(as_bf16(b.y), parity, 4, s, routing_parity);
    pause(3);
    c.combine(b.in, as_bf16(b.out), shape_.hidden, parity, s, routing_parity);
  }

 private:
  static Shape shape_of(Case const& c, int alignment, int parities, int capacity, bool lists) {
    Shape shape = high_throughput_shape(c);
    shape.lists = lists;
    shape.alignment = alignment;
    shape.capacity = capacity;
    shape.blocks = kBlocks;
    shape.parities = parities;
    return shape;
  }
};

TEST(HighThroughput, T1_T2_T3_T5_T14_T16_RowsListsAndOutputs) {
  for (Case c : cases()) {
    if (c.per_rank) {
      continue;
    }
    c.max_tokens *= 11;
    SCOPED_TRACE(describe(c));
    HighThroughputRun run(c, c.hidden == 512 ? 1 : 128, c.ranks == 4 ? 1 : 2);
    for (unsigned seed = 0; seed < 4; ++seed) {
      int const parity = c.ranks == 4 ? 0 : static_cast<int>(seed & 1U);
      run.bring(seed);
      run.round(parity);
      run.expect_good(parity);
      if (HasFailure()) {
        return;
      }
    }
  }
}

TEST(HighThroughput, T14_CachedRouting) {
  HighThroughputRun run({4, 100, 1024, 4, 16, true, false, Routing::uniform}, 16, 2);
  run.bring(1);
  run.round(0);
  run.expect_good(0);
  run.round(0, 0);
  run.expect_good(0, 0);
  run.round(1, 0);
  run.expect_good(1, 0);
}

TEST(HighThroughput, T7_T14_MoreTokensThanWarps) {
  for (bool fp8 : {true, false}) {
    HighThroughputRun run({4, 400, 512, 4, 16, fp8, false, Routing::with_gaps}, 16, 2);
    for (int blocks : {3, 1, 12}) {
      for (int r = 0; r < 4; ++r) {
        run.calls(r).set_blocks(blocks);
      }
      for (unsigned seed = 0; seed < 4; ++seed) {
        SCOPED_TRACE(testing::Message() << "fp8 " << fp8 << ", blocks " << blocks << ", seed " << seed);
        run.bring(seed);
        for (unsigned i = 0; i < 6; ++i) {
          run.round(static_cast<int>(i & 1U), -1, seed * 6 + i + 1);
        }
        run.expect_good(1);
        run.round(0, 1, seed + 1);
        run.expect_good(0, 1);
      }
    }
  }
}

TEST(HighThroughput, T7_RoundsWithRandomDelays) {
  HighThroughputRun run({4, 60, 512, 4, 16, true, false, Routing::uniform}, 1, 2);
  for (unsigned seed = 0; seed < 8; ++seed) {
    run.bring(seed);
    for (unsigned i = 0; i < 50; ++i) {
      run.round(static_cast<int>(i & 1U), -1, seed * 50 + i + 1);
    }
    run.expect_good(1);
  }
}

TEST(HighThroughput, T9_GraphReplay) {
  HighThroughputRun run({4, 60, 512, 4, 16, true, false, Routing::uniform}, 1, 2);
  run.bring(2);
  run.round(0);
  run.group().synchronize();
  std::vector<DeviceArray<std::int32_t>> counts;
  for (int r = 0; r < 4; ++r) {
    counts.emplace_back(std::vector<std::int32_t>{run.buffer(r).in.tokens});
    run.buffer(r).in.tokens_device = counts.back().data();
  }
  RankGraphs graphs(run.group(), [&](int r) {
    run.enqueue(r, 0);
    run.enqueue(r, 1);
  });
  for (int i = 0; i < 50; ++i) graphs.launch();
  run.expect_good(1);
}

TEST(HighThroughput, T10_AbsentRankIsNamed) {
  HighThroughputRun run({4, 60, 512, 4, 16, true, false, Routing::uniform}, 1, 2, 0, true, 200'000'000ULL);
  run.bring(0);
  for (int r = 0; r < 3; ++r) {
    run.calls(r).dispatch(run.buffer(r).in, 0, run.group().stream(r));
  }
  expect_last_rank_is_named(run.group());
}

TEST(HighThroughput, T22_RoundsWrap) {
  HighThroughputRun run({4, 60, 512, 4, 16, true, false, Routing::uniform}, 1, 2);
  for (int r = 0; r < 4; ++r) {
    run.calls(r).set_blocks(2);  // more tokens than warps: tickets carry the round too
  }
  expect_rounds_wrap(run, 4U * (16 + 4));
}

TEST(HighThroughput, T23_SameBitsEveryTime) {
  HighThroughputRun run({8, 60, 2048, 8, 64, false, false, Routing::uniform}, 1, 2);
  run.bring(3);
  expect_same_bits(run, [&](int parity, unsigned delays) { run.round(parity, -1, delays); });
}

TEST(HighThroughput, T25_OverflowIsAgreedBeforeRowsMove) {
  HighThroughputRun run({4, 64, 512, 4, 16, true, false, Routing::one_rank}, 1, 2, 80);
  run.bring(1);
  run.round(0);
  run.group().synchronize();
  for (int r = 0; r < 4; ++r) {
    try {
      run.group().check(r);
      ADD_FAILURE() << "rank " << r << " saw no failure";
    } catch (moe::TransportError const& e) {
      EXPECT_EQ(e.code(), moe::ErrorCode::capacity) << e.what();
      EXPECT_EQ(e.peer(), 3) << e.what();
    }
  }
}

}  // namespace
