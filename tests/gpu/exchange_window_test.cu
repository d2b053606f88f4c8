// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_window_test.cu: OneSided, TwoSided and Pplx between ranks that share one GPU: rows, outputs, reuse, graphs, faults.
#include <gtest/gtest.h>

#include "tests/gpu/shared_gpu.cuh"
#include "tests/multigpu/window_harness.cuh"

namespace {

using namespace moe_test;
using moe::text;

std::vector<Case> cases() {
  std::vector<Case> list;
  for (bool fp8 : {true, false}) {
    for (auto routing : {Routing::uniform, Routing::with_gaps, Routing::duplicates, Routing::one_rank, Routing::none}) {
      list.push_back({4, 40, 512, 4, 16, fp8, routing});
    }
    list.push_back({1, 5, 128, 1, 3, fp8, Routing::uniform});
    list.push_back({3, 30, 1152, 3, 9, fp8, Routing::uniform});
    list.push_back({2, 100, 2944, 2, 4, fp8, Routing::uniform});
    list.push_back({8, 16, 7168, 8, 64, fp8, Routing::uniform});
    list.push_back({8, 70, 4096, 6, 256, fp8, Routing::with_gaps});
    list.push_back({2, 64, 8192, 16, 32, fp8, Routing::duplicates});
  }
  return list;
}
Case const kSmall{4, 16, 512, 4, 16, true, Routing::uniform};

template <class Peer>
class DeviceWindow : public testing::Test {};
struct PeerNames {
  template <class Peer>
  static std::string GetName(int) {
    return Peer::kName;
  }
};
using Peers = testing::Types<OneSidedPeer, TwoSidedPeer, PplxPeer>;
TYPED_TEST_SUITE(DeviceWindow, Peers, PeerNames);

TYPED_TEST(DeviceWindow, T1_T2_T3_T5_T6_T19_RowsAndOutputs) {
  for (Case const& c : cases()) {
    SCOPED_TRACE(text("R=", c.ranks, " T=", c.max_tokens, " H=", c.hidden, " k=", c.topk, " E=", c.experts, c.fp8 ? " fp8" : " bf16",
                      " routing ", static_cast<int>(c.routing)));
    PeerRun<TypeParam> run(c);
    for (unsigned seed = 0; seed < 4; ++seed) {
      run.bring(seed);
      run.round(static_cast<int>(seed & 1U));
      EXPECT_EQ(run.wrong(static_cast<int>(seed & 1U)), "");
      if (this->HasFailure()) {
        return;
      }
    }
  }
}

TYPED_TEST(DeviceWindow, T7_RoundsWithRandomDelays) {
  PeerRun<TypeParam> run(kSmall);
  for (unsigned seed = 0; seed < 20; ++seed) {
    run.bring(seed);
    for (unsigned i = 0; i < 50; ++i) {
      run.round(static_cast<int>(i & 1U), seed * 50 + i + 1);
    }
    EXPECT_EQ(run.wrong(1), "");
  }
}

TYPED_TEST(DeviceWindow, T8_TwoBatchesInterleaved) {
  PeerRun<TypeParam> run(kSmall);
  run.bring(1);
  for (int i = 0; i < 10; ++i) {
    for (int r = 0; r < 4; ++r) {
      for (int parity : {0, 1}) run.dispatch(r, parity);
      for (int parity : {0, 1}) run.experts(r, parity);
      for (int parity : {0, 1}) run.combine(r, parity);
    }
  }
  EXPECT_EQ(run.wrong(1), "");
}

TYPED_TEST(DeviceWindow, T9_GraphReplayWithNewInputs) {
  PeerRun<TypeParam> run(kSmall);
  run.bring(0);
  std::vector<DeviceArray<std::int32_t>> counts;
  for (int r = 0; r < 4; ++r) {
    counts.emplace_back(std::vector<std::int32_t>{0});
    // Room for every number of tokens; the number itself is on the device.
    auto const most = make_tokens(r, kSmall.max_tokens, kSmall.hidden, kSmall.topk, kSmall.experts, 4, Routing::uniform, 99);
    run.buffer(r) = make_buffers(most, kSmall.hidden, run.shape().local_experts(), 0);
    run.buffer(r).in.tokens_device = counts.back().data();
  }
  RankGraphs graphs(run.group(), [&](int r) {
    run.dispatch(r, 0);
    run.experts(r, 0);
    run.combine(r, 0);
  });
  for (unsigned i = 0; i < 100; ++i) {
    bool const fresh = i % 10 == 0;
    for (int r = 0; r < 4 && fresh; ++r) {
      auto& t = run.tokens(r);
      t = make_tokens(r, tokens_of(kSmall.max_tokens, r, i), kSmall.hidden, kSmall.topk, kSmall.experts, 4, Routing::with_gaps, i);
      auto put = [](void const* to, auto const& from) {
        moe::check_cuda(cudaMemcpy(const_cast<void*>(to), from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice), "copy");
      };
      put(run.buffer(r).in.x, t.x);
      put(run.buffer(r).in.ids, t.ids);
      put(run.buffer(r).in.weights, t.weights);
      put(counts[static_cast<std::size_t>(r)].data(), std::vector<std::int32_t>{t.tokens});
    }
    graphs.launch();
    if (i % 10 == 9) {
      EXPECT_EQ(run.wrong(0), "");
    }
  }
}

// A graph of one pair always uses one parity, and a rank that sends and receives nothing need not wait for a slow one.
TYPED_TEST(DeviceWindow, T9_RanksWithoutRowsRunAhead) {
  PeerRun<TypeParam> run(kSmall);
  run.bring(0);
  for (int r = 1; r < 4; ++r) {
    run.tokens(r).tokens = 0;
    run.buffer(r).in.tokens = 0;
  }
  auto const slow = run.group().stream(0);
  for (int i = 0; i < 20; ++i) {
    if constexpr (TypeParam::kHalves) {
      TypeParam::dispatch(run.calls(0), run.buffer(0).in, 0, slow, true, false);
      delay<<<1, 1, 0, slow>>>(1'000'000);
      TypeParam::dispatch(run.calls(0), run.buffer(0).in, 0, slow, false, true);
    } else {
      delay<<<1, 1, 0, slow>>>(1'000'000);
      run.dispatch(0, 0);
    }
    run.experts(0, 0);
    run.combine(0, 0);
    for (int r = 1; r < 4; ++r) {
      run.dispatch(r, 0);
      run.experts(r, 0);
      run.combine(r, 0);
    }
  }
  EXPECT_EQ(run.wrong(0), "");
}

TYPED_TEST(DeviceWindow, T10_AbsentRankIsNamed) {
  PeerRun<TypeParam> run(kSmall, 200'000'000ULL);
  run.bring(0);
  for (int r = 0; r < 3; ++r) {
    run.dispatch(r, 0);
  }
  expect_last_rank_is_named(run.group());
}

TYPED_TEST(DeviceWindow, T10_RankMissingFromCombineIsNamed) {
  PeerRun<TypeParam> run({4, 32, 512, 4, 4, true, Routing::uniform}, 200'000'000ULL);  // every token goes to every rank
  run.bring(3);
  for (int r = 0; r < 4; ++r) {
    run.dispatch(r, 0);
    run.experts(r, 0);
  }
  run.group().synchronize_and_check();
  for (int r : {0, 2, 3}) {
    run.combine(r, 0);
  }
  run.group().synchronize();
  int failures = 0;
  for (int r : {0, 2, 3}) {
    try {
      run.group().check(r);
    } catch (moe::TransportError const& e) {
      EXPECT_EQ(e.peer(), 1) << e.what();
      EXPECT_EQ(e.phase(), "combine") << e.what();
      ++failures;
    }
  }
  EXPECT_GE(failures, 1);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TYPED_TEST(DeviceWindow, T10_AbandonedGroupEndsEveryWait) {
  PeerRun<TypeParam> run(kSmall);
  run.bring(0);
  for (int r = 0; r < 3; ++r) {
    run.dispatch(r, 0);
  }
  run.calls(3).abandon(run.group().stream(3));
  run.group().synchronize();
  for (int r = 0; r < 3; ++r) {
    try {
      run.group().check(r);
      ADD_FAILURE() << "rank " << r << " saw no failure";
    } catch (moe::TransportError const& e) {
      EXPECT_EQ(e.code(), moe::ErrorCode::peer) << e.what();
      EXPECT_EQ(e.peer(), 3) << e.what();
    }
  }
}

TYPED_TEST(DeviceWindow, T12_RanksThatDisagreeGetMismatch) {
  Case const c{2, 8, 512, 4, 16, true, Routing::uniform};
  PeerRun<TypeParam> run(c, 1'000'000'000ULL);
  run.bring(0);
  PeerShape other = run.shape();
  other.topk = 3;
  auto const wrong = TypeParam::calls(run.group().view(1), other, false);
  run.dispatch(0, 0);
  TypeParam::dispatch(wrong, run.buffer(1).in, 0, run.group().stream(1));
  expect_mismatch(run.group());
}

TYPED_TEST(DeviceWindow, T12_ShapesThatCannotWorkAreRefused) {
  moe::comm::WindowView const view;
  PeerShape const good{TypeParam::kName, 2, 8, 512, 4, 16, true, 8};
  auto code = [&](auto&& change) {
    PeerShape s = good;
    change(s);
    try {
      TypeParam::calls(view, s, false);
    } catch (moe::Error const& e) {
      return e.code();
    }
    return moe::ErrorCode::internal;
  };
  using moe::ErrorCode;
  EXPECT_EQ(code([](PeerShape&) {}), ErrorCode::internal);  // nothing was thrown
  EXPECT_EQ(code([](PeerShape& s) { s.hidden = 520; }), ErrorCode::unsupported);
  EXPECT_EQ(code([](PeerShape& s) { s.num_experts = 15; }), ErrorCode::unsupported);
  EXPECT_EQ(code([](PeerShape& s) { s.topk = 33; }), ErrorCode::config);
  EXPECT_EQ(code([](PeerShape& s) { s.ranks = 33; }), ErrorCode::unsupported);
  EXPECT_EQ(code([](PeerShape& s) { s.blocks = 1000; }), ErrorCode::config);
  EXPECT_EQ(code([](PeerShape& s) { s.max_tokens = 1 << 20; }), ErrorCode::capacity);
}

TYPED_TEST(DeviceWindow, T22_RoundsWrap) {
  PeerRun<TypeParam> run(kSmall);
  for (std::uint32_t start : {0x7ffffffbU, 0xfffffffbU}) {  // four rounds before the wrap fill every count word of a ring
    for (int r = 0; r < 4; ++r) {
      auto const& c = run.calls(r);
      auto const& at = c.layout();
      auto set = [&](std::size_t where, std::size_t n) {
        std::vector<std::uint32_t> const words(n, start);
        moe::check_cuda(cudaMemcpy(c.template own<char>(where), words.data(), n * 4, cudaMemcpyHostToDevice), "copy");
      };
      auto const blocks = static_cast<std::size_t>(moe::detail::kMaxExchangeBlocks);
      if constexpr (std::is_same_v<TypeParam, TwoSidedPeer>) {
        set(at.planned, blocks);
        std::vector<std::size_t> const words{at.tail, at.head, at.sent_tail, at.read_head};
        for (std::size_t where : words) {
          set(where, static_cast<std::size_t>(at.queues * 4));
        }
      } else if constexpr (std::is_same_v<TypeParam, OneSidedPeer>) {
        set(at.sent, blocks);
        set(at.combined, blocks);
        set(at.ready, 4);
      } else {
        set(at.sent, blocks);
        set(at.received, blocks);
      }
    }
    for (unsigned i = 0; i < 8; ++i) {
      run.bring(i);
      run.round(static_cast<int>(i & 1U));
      EXPECT_EQ(run.wrong(static_cast<int>(i & 1U)), "");
    }
  }
}

TYPED_TEST(DeviceWindow, T23_SameBitsEveryTime) {
  PeerRun<TypeParam> run({8, 16, 2048, 8, 64, false, Routing::uniform});
  run.bring(3);
  expect_same_bits(run, [&](int parity, unsigned delays) { run.round(parity, delays); });
}

TYPED_TEST(DeviceWindow, Inv4_BlocksDoNotChangeResults) {
  std::vector<std::vector<std::uint16_t>> first;
  for (int blocks : {2, 5, 16}) {
    PeerRun<TypeParam> run({4, 33, 1024, 4, 16, true, Routing::with_gaps, blocks});
    run.bring(0);
    run.round(0);
    EXPECT_EQ(run.wrong(0), "");
    for (int r = 0; r < 4; ++r) {
      auto out = run.buffer(r).out.host();
      if (blocks == 2) {
        first.push_back(std::move(out));
      } else {
        EXPECT_EQ(out, first[static_cast<std::size_t>(r)]);
      }
    }
  }
}

TEST(OneSidedDevice, T11_DeadRanksAreLeftOut) {
  PeerRun<OneSidedPeer> run(kSmall);
  run.bring(3);
  for (int r : {0, 1, 3}) {
    EXPECT_THROW(run.calls(r).set_active_ranks(0b1111U & ~(1U << r)), moe::Error);
    run.calls(r).set_active_ranks(0b1011);
    auto& ids = run.tokens(r).ids;
    run.dispatch(r, 0);
    run.experts(r, 0);
    run.combine(r, 0);
    std::replace_if(ids.begin(), ids.end(), [](int e) { return e / 4 == 2; }, -1);  // the ids that are expected then
  }
  for (int r : {0, 1, 3}) {
    moe::check_cuda(cudaStreamSynchronize(run.group().stream(r)), "cudaStreamSynchronize");
    run.group().check(r);
    EXPECT_EQ(check_sums(run.shape(), SumOrder::named_ranks, run.tokens(r), run.buffer(r), r, 1), "");
  }
}

TEST(OneSidedDevice, RuntimeMaximumIsAgreed) {
  PeerRun<OneSidedPeer> run({2, 16, 512, 4, 16, true, Routing::uniform}, 1'000'000'000ULL);
  run.bring(2);  // 0 and 5 tokens
  for (int i = 0; i < 3; ++i) {
    for (int r = 0; r < 2; ++r) {
      auto& b = run.buffer(r);
      auto const s = run.group().stream(r);
      auto const& c = run.calls(r);
      auto const& at = c.layout();
      c.dispatch(b.in, 5, 0, s);
      identity_standard<<<4, 128, 0, s>>>(c.own<char>(at.rows[0]), 512, c.own<float>(at.scales[0]), c.shape().scale_stride(),
                                          c.own<std::int32_t>(at.ids[0]), c.own<float>(at.weights[0]), nullptr, 2 * 5, 4, 512, true,
                                          c.outputs(0));
      c.combine(b.in, as_bf16(b.out), 512, 5, 0, s);
    }
  }
  run.group().synchronize_and_check();
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(check_sums(run.shape(), SumOrder::named_ranks, run.tokens(r), run.buffer(r), r, 1), "");
  }
  EXPECT_THROW(run.calls(0).dispatch(run.buffer(0).in, 17, 0, nullptr), moe::Error);
  run.calls(0).dispatch(run.buffer(0).in, 6, 0, run.group().stream(0));
  run.calls(1).dispatch(run.buffer(1).in, 7, 0, run.group().stream(1));
  expect_mismatch(run.group());
}

TEST(PplxDevice, T17_HalvesApart) {
  PeerRun<PplxPeer> run(kSmall);
  for (unsigned seed = 0; seed < 6; ++seed) {
    run.bring(seed);
    for (int r = 0; r < 4; ++r) {
      auto& b = run.buffer(r);
      auto const s = run.group().stream(r);
      PplxPeer::dispatch(run.calls(r), b.in, 0, s, true, false);
      delay<<<1, 1, 0, s>>>(50000);
      PplxPeer::dispatch(run.calls(r), b.in, 0, s, false, true);
      run.experts(r, 0);
      PplxPeer::combine(run.calls(r), b.in, nullptr, 0, s, true, false);
      delay<<<1, 1, 0, s>>>(50000);
      PplxPeer::combine(run.calls(r), b.in, as_bf16(b.out), 0, s, false, true);
    }
    EXPECT_EQ(run.wrong(0), "");
  }
}

TEST(PplxDevice, RanksOfAGroupShareOutTheirTokens) {
  PeerShape const s{"pplx", 4, 17, 512, 4, 16, true, 8};
  PplxGroup const pairs{2, false};
  RankGroup group(4, true, PplxCalls::window_bytes(s, pairs), 1'000'000'000ULL);
  std::vector<PplxCalls> calls;
  std::vector<RankTokens> tokens;
  std::vector<RankBuffers> buffers;
  for (int r = 0; r < 4; ++r) {
    calls.emplace_back(group.view(r), s, pairs, moe::detail::PeerOptions{.programmatic = false});
    tokens.push_back(make_tokens(r / 2, 17 - r / 2 * 4, s.hidden, s.topk, s.num_experts, 4, Routing::duplicates, 3));
    buffers.push_back(make_buffers(tokens.back(), s.hidden, s.local_experts(), 0));
  }
  moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  auto round = [&](int parity) {
    for (int r = 0; r < 4; ++r) {
      auto const i = static_cast<std::size_t>(r);
      PplxPeer::dispatch(calls[i], buffers[i].in, parity, group.stream(r));
      PplxPeer::experts(calls[i], parity, group.stream(r));
      PplxPeer::combine(calls[i], buffers[i].in, as_bf16(buffers[i].out), parity, group.stream(r));
    }
    group.synchronize();
  };
  for (int i = 0; i < 4; ++i) {
    round(i & 1);
    for (int r = 0; r < 4; ++r) {
      group.check(r);
      EXPECT_EQ(check_rows(calls, tokens, r, i & 1, 1), "");
      EXPECT_EQ(check_sums(s, SumOrder::choices, tokens[static_cast<std::size_t>(r)], buffers[static_cast<std::size_t>(r)], r, 1), "");
    }
  }
  buffers[3].in.tokens -= 1;  // ranks 2 and 3 hold the same tokens, so their counts must be equal
  round(0);
  int mismatches = 0;
  for (int r : {2, 3}) {
    try {
      group.check(r);
    } catch (moe::TransportError const& e) {
      mismatches += e.code() == moe::ErrorCode::mismatch ? 1 : 0;
    }
  }
  EXPECT_GE(mismatches, 1);
}

TEST(PplxDevice, T13_WeightOnInputIsAppliedOnce) {
  for (bool fp8 : {true, false}) {
    PeerShape const s{"pplx", 2, 9, 1024, 1, 8, fp8, 8};
    PplxGroup const on_input{1, true};
    RankGroup group(2, true, PplxCalls::window_bytes(s, on_input), kTimeout);
    std::vector<PplxCalls> calls;
    std::vector<RankTokens> tokens;
    std::vector<RankBuffers> buffers;
    for (int r = 0; r < 2; ++r) {
      calls.emplace_back(group.view(r), s, on_input, moe::detail::PeerOptions{.programmatic = false});
      tokens.push_back(make_tokens(r, 9, s.hidden, 1, s.num_experts, 2, Routing::uniform, 3));
      buffers.push_back(make_buffers(tokens.back(), s.hidden, s.local_experts(), 0));
    }
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    for (int r = 0; r < 2; ++r) {
      auto const i = static_cast<std::size_t>(r);
      PplxPeer::dispatch(calls[i], buffers[i].in, 0, group.stream(r));
      PplxPeer::experts(calls[i], 0, group.stream(r));
      PplxPeer::combine(calls[i], buffers[i].in, as_bf16(buffers[i].out), 0, group.stream(r));
    }
    group.synchronize_and_check();
    for (int r = 0; r < 2; ++r) {
      auto& t = tokens[static_cast<std::size_t>(r)];
      for (std::size_t i = 0; i < t.x.size(); ++i) {
        t.x[i] = bf16_bits(bf16_value(t.x[i]) * t.weights[i / static_cast<std::size_t>(s.hidden)]);
      }
      t.weights.assign(t.weights.size(), 1.0F);
      EXPECT_EQ(check_sums(s, SumOrder::choices, t, buffers[static_cast<std::size_t>(r)], r, 1), "");
    }
  }
}

}  // namespace
