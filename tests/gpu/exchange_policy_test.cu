// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_policy_test.cu: LowLatency and HighThroughput as policies, between simulated ranks on one GPU: every option of their
// parameters, refusals, handles, masks, statistics, windows that layers share.
#include <gtest/gtest.h>

#include <set>

#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/quantization/none.hpp"
#include "tests/gpu/exchange_policy_ranks.cuh"
#include "tests/gpu/shared_gpu.cuh"
#include "tests/multigpu/exchange_harness.cuh"

namespace {

using namespace moe_test;
using moe::ErrorCode;
using moe::backends::CombineFormat;
using moe::comm::SimulatedWindow;
static_assert(moe::SymmetricMemory<SimulatedWindow>);
static_assert(moe::PrepareAndFinalize<moe::backends::LowLatencyRankMajor<SimulatedWindow>>);

using Config = PolicyConfig;
constexpr std::uint64_t kTimeout = 3'000'000'000ULL;
constexpr std::uint64_t kShort = 150'000'000ULL;

using Low = moe::backends::LowLatency<SimulatedWindow>;
using RankMajor = moe::backends::LowLatencyRankMajor<SimulatedWindow>;
using High = moe::backends::HighThroughput<SimulatedWindow>;

// ---- T1: layouts, schemes, placements, output types.

template <class R>
void round_trips(R& run, bool per_rank, std::string const& what) {
  unsigned seed = 1;
  for (Routing routing : {Routing::uniform, Routing::with_gaps, Routing::duplicates, Routing::one_rank, Routing::none}) {
    run.bring(seed++, routing);
    run.round();
    run.expect_good(per_rank, what);
  }
}

TEST(LowLatencyPolicy, T1_T3_T19_T20_EveryLayoutAndPlacement) {
  for (auto strategy : {moe::PlacementStrategy::linear, moe::PlacementStrategy::round_robin}) {
    for (int experts : {16, 13, 3}) {  // divisible or not; fewer experts than ranks
      RankSizes const s{.topk = experts == 3 ? 2 : 4, .experts = experts, .strategy = strategy};
      for (bool dedup : {false, true}) {
        std::string const what = moe::text(experts, " experts, ", moe::name(strategy), dedup ? ", deduplicated" : "");
        Ranks<Low> run(s, {.deduplicate = dedup, .window = {kTimeout}});
        round_trips(run, dedup, what);
      }
      Ranks<RankMajor> run(s, {.window = {kTimeout}});
      round_trips(run, true, "rank major");
    }
  }
}

// One rank would send one expert more than T rows if each choice had its own row.
TEST(LowLatencyPolicy, T3_T19_AllSlotsOnOneExpert) {
  for (bool masks : {false, true}) {
    for (bool dedup : {false, true}) {
      if (masks && dedup) continue;
      Ranks<Low> run(RankSizes{}, {.deduplicate = dedup, .masks = masks, .window = {kTimeout}});
      for (int expert : {0, 5, 15}) {
        run.bring(2, Routing::uniform, 8);
        for (int r = 0; r < 4; ++r) run.name_one_expert(r, expert);
        run.round();
        run.expect_good(dedup, moe::text("expert ", expert));
      }
    }
  }
}

TEST(LowLatencyPolicy, T5_T6_WidthsSchemesAndOutputTypes) {
  for (int hidden : {128, 512, 2048, 2560, 2880, 4096, 7168}) {
    RankSizes const s{.ranks = 2, .max_tokens = 5, .hidden = hidden, .topk = 2, .experts = 6};
    for (bool dedup : {false, true}) {
      Ranks<Low> fp8(s, {.deduplicate = dedup, .window = {kTimeout}});
      fp8.bring(3);
      fp8.round();
      fp8.expect_good(dedup, moe::text("fp8 ", hidden));
      Ranks<Low, moe::quantization::None, float> wide(s, {.deduplicate = dedup, .window = {kTimeout}});
      wide.bring(4);
      wide.round();
      wide.expect_good(dedup, moe::text("bf16, float outputs ", hidden));
    }
    Ranks<RankMajor, moe::quantization::None, float> rank_major(s, {.window = {kTimeout}});
    rank_major.bring(5);
    rank_major.round();
    rank_major.expect_good(true, moe::text("rank major ", hidden));
  }
}

TEST(LowLatencyPolicy, T13_WeightOnInput) {
  RankSizes s{.topk = 1, .on_input = true};
  for (bool dedup : {false, true}) {
    Ranks<Low> fp8(s, {.deduplicate = dedup, .window = {kTimeout}});
    fp8.bring(3);
    fp8.round();
    fp8.expect_good(dedup);
    Ranks<Low, moe::quantization::None> plain(s, {.deduplicate = dedup, .window = {kTimeout}});
    plain.bring(4);
    plain.round();
    plain.expect_good(dedup);
  }
  s.topk = 2;
  EXPECT_EQ(expect_error(ErrorCode::argument, [&] { Ranks<Low>(s, {}); }), "apply_router_weight_on_input requires topk == 1");
}

// ---- T18: zero copy, coded outputs.

TEST(LowLatencyPolicy, T18_ZeroCopyAndCodedOutputs) {
  RankSizes const s{.hidden = 1088};  // a last group of 64
  for (std::optional<bool> zero_copy : {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
    Ranks<Low> run(s, {.zero_copy = zero_copy, .window = {kTimeout}});
    run.bring(2);
    run.round();
    run.expect_good(false, "plain");
  }
  for (auto format : {CombineFormat::fp8, CombineFormat::logfmt}) {
    for (bool dedup : {false, true}) {
      auto check = [&](auto&& run) {
        for (unsigned seed = 0; seed < 4; ++seed) {
          run.bring(seed, seed % 2 == 0 ? Routing::uniform : Routing::duplicates);
          run.round();
          // e4m3: half of 2^-3 of a value, or half of the smallest step, 2^-9 of the scale. LogFMT: half of 2^(32/510) - 1.
          run.expect_good(dedup, moe::text(name(format), dedup ? " deduplicated" : ""), 0.066F);
        }
      };
      check(Ranks<Low>(s, {.deduplicate = dedup, .combine = format, .window = {kTimeout}}));
      check(Ranks<Low, moe::quantization::None, float>(s, {.deduplicate = dedup, .combine = format, .window = {kTimeout}}));
    }
    expect_error(ErrorCode::argument, [&] { Ranks<Low>(s, {.combine = format, .zero_copy = true}); });
  }
  expect_error(ErrorCode::unsupported, [&] { Ranks<Low>(s, {.deduplicate = true, .zero_copy = true}); });
}

// The device writes the host's codes and decodes them identically.
TEST(LowLatencyPolicy, T18_CodesAreThoseOfTheHost) {
  constexpr int kHidden = 1088;
  for (auto format : {CombineFormat::fp8, CombineFormat::logfmt}) {
    moe::detail::LowLatencyShape shape;
    shape.max_tokens = 16;
    shape.hidden = kHidden;
    shape.topk = 1;
    shape.num_experts = 1;
    shape.blocks = 4;
    shape.combine = format;
    RankGroup group(1, true, moe::detail::LowLatencyCalls::window_bytes(shape), kTimeout);
    moe::detail::LowLatencyCalls calls(group.view(0), shape, false);
    std::vector<std::uint16_t> y(16 * kHidden);
    std::mt19937 g(7);
    for (std::size_t i = 0; i < y.size(); ++i) {  // magnitudes under one, over one, far apart, zero, by group
      int const kind = static_cast<int>(i / 128 % 5);
      float const v = std::ldexp(static_cast<float>(g() % 2000) / 1000.0F - 1.0F, kind == 1   ? 6
                                                                                  : kind == 2 ? -static_cast<int>(g() % 60)
                                                                                              : 0);
      y[i] = bf16_bits(kind == 3 ? 0.0F : v);
    }
    DeviceArray<std::uint16_t> device(y);
    DeviceArray<std::int32_t> num(std::vector<std::int32_t>{16});
    calls.code(as_bf16(device), num.data(), 0, group.stream(0));
    group.synchronize_and_check();
    auto const row_bytes = static_cast<std::size_t>(calls.layout().output_bytes);
    std::vector<std::byte> codes(row_bytes);
    std::vector<std::uint32_t> headers(static_cast<std::size_t>(shape.groups()));
    std::vector<float> host(kHidden), back(kHidden);
    double worst = 0;
    for (std::size_t row = 0; row < 16; ++row) {
      std::vector<bf16> x(kHidden);
      std::memcpy(static_cast<void*>(x.data()), y.data() + row * kHidden, 2 * kHidden);
      moe::detail::encode_row(format, x.data(), kHidden, codes.data(), headers.data());
      moe::detail::decode_row(format, codes.data(), headers.data(), kHidden, host.data());
      auto const theirs = read_device<std::byte>(calls.own<char>(calls.layout().outputs[0]) + row * row_bytes, row_bytes);
      auto const their_headers =
          read_device<std::uint32_t>(calls.own<char>(calls.layout().headers[0]) + 4 * row * headers.size(), headers.size());
      ASSERT_EQ(their_headers, headers);
      moe::detail::decode_row(format, theirs.data(), their_headers.data(), kHidden, back.data());
      for (std::size_t h = 0; h < kHidden; ++h) {
        float const v = moe::to_float(x[h]);
        // The last bit of a logarithm may differ: then the neighbouring code.
        ASSERT_LE(std::fabs(back[h] - host[h]), format == CombineFormat::fp8 ? 0.0F : 0.045F * std::fabs(v)) << h;
        worst = std::max(worst, v == 0.0F ? 0.0 : std::fabs(static_cast<double>(host[h]) - v) / std::fabs(v));
      }
    }
    if (format == CombineFormat::fp8) continue;
    EXPECT_LT(worst, 1.001);  // values under 2^-32 of the largest become zero or the smallest code
  }
}

// ---- T8, T17, T21: handles, halves, buffer sets.

TEST(LowLatencyPolicy, T8_T17_T21_HandlesHalvesAndBufferSets) {
  for (int buffer_sets : {1, 2}) {
    Ranks<Low> run(RankSizes{}, {.num_buffer_sets = buffer_sets, .window = {kTimeout}});
    run.bring(5, Routing::uniform, 8);
    for (int i = 0; i < 4; ++i) {
      std::vector<moe::detail::Handle> d0, d1;
      for (int r = 0; r < 4; ++r) {
        auto& x = run.at(r);
        auto const s = run.stream(r);
        d0.push_back(x.send(run.in(r), s));
        if (buffer_sets == 1) {
          expect_error(ErrorCode::state, [&] { x.send(run.in(r), s); });
          delay<<<1, 1, 0, s>>>(100000);
          run_identity(x.receive(d0.back(), s), x.expert_output(d0.back()), s);
          d1.push_back(x.send(run.in(r), s));
        } else {
          d1.push_back(x.send(run.in(r), s, 1));
        }
      }
      for (int r = 0; r < 4; ++r) {
        auto& x = run.at(r);
        auto const s = run.stream(r);
        auto const a = d0[static_cast<std::size_t>(r)];
        auto const b = d1[static_cast<std::size_t>(r)];
        run_identity(x.receive(b, s), x.expert_output(b), s);
        if (buffer_sets == 2) run_identity(x.receive(a, s), x.expert_output(a), s);
        x.combine(a, run.out(r), s);
        expect_error(ErrorCode::state, [&] { x.combine(a, run.out(r), s); });
        x.combine(b, run.out(r), s);
      }
      run.expect_good(false, moe::text(buffer_sets, " buffer sets"));
    }
    auto& x = run.at(0);
    expect_error(ErrorCode::state, [&] { x.finalize(run.out(0), run.stream(0)); });
    expect_error(ErrorCode::argument, [&] { x.send(run.in(0), run.stream(0), buffer_sets); });
  }
}

// A third result overwrites the first.
TEST(LowLatencyPolicy, T8_StaleHandle) {
  Ranks<Low> run(RankSizes{.ranks = 1, .experts = 4}, {.window = {kTimeout}});
  run.bring(5, Routing::uniform, 8);
  auto& x = run.at(0);
  auto const s = run.stream(0);
  auto const d0 = x.send(run.in(0), s);
  x.receive(d0, s);
  for (int i = 0; i < 2; ++i) x.receive(x.send(run.in(0), s), s);
  expect_error(ErrorCode::state, [&] { x.combine(d0, run.out(0), s); });
}

// ---- T4, T12, section 14: refusals by one rank.

template <class R>
void refusals(R& run, bool per_rank) {
  int const last = run.size() - 1;
  auto expect_refusal = [&](ErrorCode peers, std::string const& what) {
    run.expect_refusal(peers, last, what);
    run.bring(8);
    run.round();
    run.expect_good(per_rank, "after a refusal");
  };
  run.bring(7);
  run.round();
  run.expect_good(per_rank, "before");
  run.bring(7, Routing::uniform, 9);
  for (int r = 0; r < run.size(); ++r) {
    auto const s = run.stream(r);
    if (r == last) {
      EXPECT_EQ(expect_error(ErrorCode::capacity, [&] { run.at(r).prepare(run.in(r), s); }),
                "hidden_states: 9 rows exceed max_tokens_per_rank 8");
    } else {
      auto const t = run.at(r).prepare(run.in(r, 8), s);
      run_identity(t, run.at(r).expert_output(), s);
      run.at(r).finalize(moe::make_rows(as_bf16(run.buffer(r).out), 8, 512), s);
    }
  }
  expect_refusal(ErrorCode::capacity, "refused its arguments with E_CAPACITY");
  run.bring(9);
  for (int r = 0; r < run.size(); ++r) {
    if (r == last) {
      run.at(r).abandon(run.stream(r));
    } else {
      run.pair(r);
    }
  }
  expect_refusal(ErrorCode::peer, "abandoned the call");
  run.bring(9);
  for (int r = 0; r < run.size(); ++r) {
    if (r == last) {
      run.at(r).prepare(run.in(r), run.stream(r));
      run.at(r).abandon(run.stream(r));
    } else {
      run.pair(r);
    }
  }
  expect_refusal(ErrorCode::peer, "abandoned the call");
}
TEST(LowLatencyPolicy, T4_T12_RefusalsLeaveTheGroupSound) {
  for (bool dedup : {false, true}) {
    Ranks<Low> run(RankSizes{}, {.deduplicate = dedup, .window = {kTimeout}});
    refusals(run, dedup);
  }
  Ranks<Low> masked(RankSizes{}, {.masks = true, .window = {kTimeout}});
  refusals(masked, false);
}
TEST(HighThroughputPolicy, T4_T12_RefusalsLeaveTheGroupSound) {
  Ranks<High> run(RankSizes{}, {.window = {kTimeout}});
  refusals(run, true);
}

// A refusal that the host has not read yet does not hide a missing rank.
TEST(LowLatencyPolicy, T4_T10_ATimeoutReplacesARefusal) {
  Ranks<Low> run(RankSizes{}, {.window = {kShort}});
  run.expect_timeout_after_refusal();
}
TEST(HighThroughputPolicy, T4_T10_ATimeoutReplacesARefusal) {
  Ranks<High> run(RankSizes{}, {.window = {kShort}});
  run.expect_timeout_after_refusal();
}

// ---- T11: masks. F5: statistics.

TEST(LowLatencyPolicy, T11_MasksDropDeadRanks) {
  for (auto format : {CombineFormat::plain, CombineFormat::fp8}) {
    Ranks<Low> run(RankSizes{}, {.combine = format, .masks = true, .window = {kShort}});
    float const tolerance = format == CombineFormat::plain ? 0.0F : 0.066F;
    run.bring(4);
    run.round();
    run.expect_good(false, "all alive", tolerance);
    for (unsigned i = 0; i < 4; ++i) {  // rank 2 is missing; from the second round on no rank waits for it
      run.bring(5 + i, Routing::uniform, 8);
      for (int r : {0, 1, 3}) run.pair(r);
      run.synchronize();
      for (int r : {0, 1, 3}) {
        run.at(r).check();
        EXPECT_EQ(run.differs(r, false, tolerance, 1U << 2), "") << "round " << i;
        EXPECT_EQ(run.at(r).query_mask(), (std::vector<bool>{false, false, true, false}));
      }
    }
    // Rank 2 is back: all ranks clear its mask, and it takes part again.
    for (int r = 0; r < 4; ++r) run.at(r).clear_mask(run.stream(r));
    for (unsigned i = 0; i < 3; ++i) {
      run.bring(20 + i);
      run.round();
      run.expect_good(false, "back", tolerance);
    }
    // Masked by hand, on all ranks but itself.
    for (int r : {0, 2, 3}) run.at(r).mask_rank(1, run.stream(r));
    run.bring(30, Routing::uniform, 8);
    for (int r : {0, 2, 3}) run.pair(r);
    run.synchronize();
    for (int r : {0, 2, 3}) {
      run.at(r).check();
      EXPECT_EQ(run.differs(r, false, tolerance, 1U << 1), "");
    }
    expect_error(ErrorCode::argument, [&] { run.at(0).mask_rank(0, run.stream(0)); });
  }
  expect_error(ErrorCode::config, [&] { Ranks<Low>(RankSizes{}, {.deduplicate = true, .masks = true}); });
  Ranks<Low> without(RankSizes{.ranks = 1, .experts = 4}, {});
  expect_error(ErrorCode::state, [&] { without.at(0).clear_mask(nullptr); });
}

// A rank that dies between dispatch and combine.
TEST(LowLatencyPolicy, T11_RankDiesBeforeCombine) {
  Ranks<Low> run(RankSizes{}, {.masks = true, .window = {kShort}});
  run.bring(4, Routing::uniform, 8);
  for (int r = 0; r < 4; ++r) {
    if (r == 1) {
      run.at(r).prepare(run.in(r), run.stream(r));
    } else {
      run.pair(r);
    }
  }
  run.synchronize();
  for (int r : {0, 2, 3}) {
    run.at(r).check();
    EXPECT_EQ(run.differs(r, false, 0.0F, 1U << 1), "");
  }
}

constexpr int kLateRounds = 5;
/// Rank `late` starts every round `ns` after the others: the nanoseconds that each rank has waited for each other rank, summed over all
/// rounds.
template <class R>
std::vector<std::vector<std::uint64_t>> waits_for(R& run, int late, std::uint64_t ns) {
  std::vector<std::vector<std::uint64_t>> waited;
  for (int r = 0; r < 4; ++r) waited.push_back(run.at(r).waited_ns());
  for (unsigned i = 0; i < kLateRounds; ++i) {
    run.bring(i);
    if (ns > 0) delay<<<1, 1, 0, run.stream(late)>>>(ns);
    run.round();
    run.synchronize_and_check();
  }
  for (int r = 0; r < 4; ++r) {
    auto const now = run.at(r).waited_ns();
    auto& row = waited[static_cast<std::size_t>(r)];
    for (std::size_t p = 0; p < now.size(); ++p) row[p] = now[p] - row[p];
  }
  return waited;
}
/// The statistics of every other rank identify the late one. One thread launches the ranks one after the other, so they start microseconds
/// apart, or milliseconds under a sanitizer. The delay is much longer than the waits without one.
template <class R>
void late_rank(R& run) {
  waits_for(run, 0, 0);  // the first launches
  std::uint64_t apart = 0;
  for (auto const& row : waits_for(run, 0, 0)) apart = std::max(apart, *std::max_element(row.begin(), row.end()) / kLateRounds);
  std::uint64_t const ns = std::clamp<std::uint64_t>(20 * apart, 4'000'000, kTimeout / 4);
  for (int late = 0; late < 4; ++late) {
    auto const waited = waits_for(run, late, ns);
    for (int r = 0; r < 4; ++r) {
      if (r == late) continue;
      auto const& row = waited[static_cast<std::size_t>(r)];
      std::uint64_t const longest = row[static_cast<std::size_t>(late)];
      EXPECT_GT(longest, kLateRounds * ns / 2) << "rank " << r << " for " << late << ", late by " << ns << " ns";
      for (int p = 0; p < 4; ++p) {
        if (p == late || p == r) continue;
        EXPECT_LT(2 * row[static_cast<std::size_t>(p)], longest) << "rank " << r << " for " << p << ", late by " << ns << " ns is " << late;
      }
    }
  }
}
TEST(LowLatencyPolicy, F5_WaitStatisticsNameTheLateRank) {
  for (bool masks : {false, true}) {
    Ranks<Low> run(RankSizes{}, {.masks = masks, .statistics = true, .window = {kTimeout}});
    late_rank(run);
    run.bring(1, Routing::one_rank, 8);
    auto const before = run.at(3).expert_totals();
    run.round();
    run.synchronize_and_check();
    auto const after = run.at(3).expert_totals();
    std::int64_t sum = 0;
    for (std::size_t e = 0; e < after.size(); ++e) sum += after[e] - before[e];
    std::int64_t wanted = 0;
    for (int r = 0; r < 4; ++r) {
      for (int t = 0; t < 8; ++t) {
        auto const first = run.brought(r).ids.begin() + 4 * t;
        wanted += static_cast<std::int64_t>(std::set<int>(first, first + 4).size());
      }
    }
    EXPECT_EQ(sum, wanted);
  }
}
TEST(HighThroughputPolicy, F5_WaitStatisticsNameTheLateRank) {
  Ranks<High> run(RankSizes{}, {.statistics = true, .window = {kTimeout}});
  late_rank(run);
}

// ---- HighThroughput.

TEST(HighThroughputPolicy, T1_T5_T20_LayoutsWidthsAndPlacements) {
  for (auto strategy : {moe::PlacementStrategy::linear, moe::PlacementStrategy::round_robin}) {
    for (int experts : {16, 13, 3}) {
      Ranks<High> run(RankSizes{.max_tokens = 60, .topk = experts == 3 ? 2 : 4, .experts = experts, .strategy = strategy},
                      {.window = {kTimeout}});
      round_trips(run, true, moe::text(experts, " experts, ", moe::name(strategy)));
    }
  }
  for (int hidden : {128, 2048, 2880, 7168}) {
    RankSizes const s{.ranks = 2, .max_tokens = 20, .hidden = hidden, .topk = 2, .experts = 6};
    Ranks<High> fp8(s, {.window = {kTimeout}});
    fp8.bring(12);
    fp8.round();
    fp8.expect_good(true, moe::text("fp8 ", hidden));
    Ranks<High, moe::quantization::None, float> wide(s, {.window = {kTimeout}});
    wide.bring(13);
    wide.round();
    wide.expect_good(true, moe::text("bf16 ", hidden));
  }
}

TEST(HighThroughputPolicy, T25_OverflowIsReportedAndTheNextCallWorks) {
  Ranks<High> run(RankSizes{.max_tokens = 16}, {.capacity = 40, .window = {kTimeout}});
  for (int i = 0; i < 3; ++i) {
    run.bring(3, Routing::one_rank, 16);
    run.round();
    run.synchronize();
    for (int r = 0; r < 4; ++r) {
      std::string const message = expect_error(ErrorCode::capacity, [&] { run.at(r).check(); });
      EXPECT_EQ(message.find("rank 3 would receive 64 rows, capacity 40"), 0U) << message;
      run.at(r).check();
      auto const out = run.buffer(r).out.host();
      EXPECT_TRUE(std::all_of(out.begin(), out.end(), [](std::uint16_t v) { return v == 0; }));
    }
    run.bring(4, Routing::uniform, 9);
    run.round();
    run.expect_good(true, "next call");
  }
}

TEST(HighThroughputPolicy, T8_T14_TwoBatchesAndTheSameRoutingAgain) {
  Ranks<High> run(RankSizes{.max_tokens = 24}, {.expert_alignment = 8, .window = {kTimeout}});
  for (unsigned i = 0; i < 6; ++i) {
    run.bring(i, i % 2 == 0 ? Routing::uniform : Routing::with_gaps);
    std::vector<moe::detail::Handle> d0, d1;
    for (int r = 0; r < 4; ++r) {
      auto& x = run.at(r);
      auto const s = run.stream(r);
      d0.push_back(x.dispatch(run.in(r), s));
      d1.push_back(i < 2 ? x.dispatch(run.in(r), s) : x.dispatch(run.in(r), s, d0.back()));
      if (i >= 2) {  // a new layout would overwrite one in use
        expect_error(ErrorCode::state, [&] { x.dispatch(run.in(r), s); });
      }
      for (auto d : {d0.back(), d1.back()}) run_identity(x.tokens(d), x.expert_output(d), s);
      x.combine(d0.back(), run.out(r), s);
      expect_error(ErrorCode::state, [&] { x.combine(d0.back(), run.out(r), s); });
      moe::check_cuda(cudaMemsetAsync(run.buffer(r).out.data(), 0xff, run.brought(r).x.size() * 2, s), "cudaMemsetAsync");
      x.combine(d1.back(), run.out(r), s);
      auto const again = x.dispatch(run.in(r), s, d1.back());
      run_identity(x.tokens(again), x.expert_output(again), s);
      x.combine(again, run.out(r), s);
    }
    run.expect_good(true, "round");
  }
  auto& x = run.at(0);
  if (run.brought(0).tokens > 0) {
    auto const old = x.last();
    expect_error(ErrorCode::state, [&] { x.dispatch(run.in(0), run.stream(0), moe::detail::Handle{0, old.generation + 40}); });
  }
}

TEST(HighThroughputPolicy, T14_ExpertMajorLists) {
  constexpr int kAlignment = 8;
  Ranks<High> run(RankSizes{.max_tokens = 24}, {.expert_alignment = kAlignment, .window = {kTimeout}});
  run.bring(6);
  std::vector<std::unique_ptr<DeviceArray<std::uint16_t>>> y;
  for (int r = 0; r < 4; ++r) {
    auto& x = run.at(r);
    auto const s = run.stream(r);
    auto const d = x.dispatch(run.in(r), s);
    auto const list = x.expert_major(d);
    auto const t = x.tokens(d);
    y.push_back(std::make_unique<DeviceArray<std::uint16_t>>(static_cast<std::size_t>(list.max_entries) * 512));
    identity_listed<<<8, 128, 0, s>>>(reinterpret_cast<char const*>(t.rows.data_handle()), t.scales.data_handle(),
                                      static_cast<int>(t.scales.stride(0)), list.rows, list.num_entries - 1, 512, true, as_bf16(*y.back()));
    x.reduce_expert_major(d, as_bf16(*y.back()), s);
    x.combine(d, run.out(r), s);
  }
  run.expect_good(true);
  Ranks<High> without(RankSizes{.ranks = 1, .experts = 4}, {.window = {kTimeout}});
  without.bring(1);
  auto const d = without.at(0).dispatch(without.in(0), without.stream(0));
  expect_error(ErrorCode::state, [&] { without.at(0).expert_major(d); });
}

TEST(HighThroughputPolicy, BlocksMayChangeBetweenCalls) {
  Ranks<High> run(RankSizes{.max_tokens = 24}, {.window = {kTimeout}});
  for (int blocks : {10, 4, 1, 7}) {
    for (int r = 0; r < 4; ++r) run.at(r).set_blocks(blocks);
    run.bring(static_cast<unsigned>(blocks));
    run.round();
    run.expect_good(true, moe::text(blocks, " blocks"));
  }
  expect_error(ErrorCode::config, [&] { run.at(0).set_blocks(0); });
}

// ---- F2: windows that layers share.

template <class Backend>
void layers_share_a_window(typename Backend::Params params) {
  SimulatedGroup group(3);
  std::vector<SimulatedRank> ranks;
  for (int r = 0; r < 3; ++r) ranks.emplace_back(group, r);
  std::vector<std::unique_ptr<Manager>> managers;
  std::vector<Manager*> pointers;
  for (auto& rank : ranks) {
    managers.push_back(std::make_unique<Manager>(rank, SimulatedWindow::Params{kTimeout}));
    pointers.push_back(managers.back().get());
  }
  RankSizes const s{.ranks = 3, .experts = 12};
  {
    Ranks<Backend> a(s, params, pointers, &ranks), b(s, params, pointers, &ranks);
    Ranks<Backend> other(RankSizes{.ranks = 3, .max_tokens = 7, .experts = 12}, params, pointers, &ranks);
    for (auto* manager : pointers) EXPECT_EQ(manager->size(), 2U);
    EXPECT_EQ(&a.at(0).window(), &b.at(0).window());
    for (unsigned i = 0; i < 6; ++i) {
      for (auto* layer : {&a, &b, &other}) {
        layer->bring(i, Routing::uniform, 5);
        layer->round();
        layer->expect_good(true, "layers in turn", 1e-2F);
      }
    }
    // Ranks in different layers of one window disagree.
    a.bring(9, Routing::uniform, 5);
    b.bring(9, Routing::uniform, 5);
    for (int r = 0; r < 3; ++r) (r == 2 ? b : a).pair(r);
    a.synchronize();
    b.synchronize();
    int mismatches = 0;
    for (int r = 0; r < 3; ++r) {
      try {
        (r == 2 ? b : a).at(r).check();
        ADD_FAILURE() << "rank " << r << " saw no failure";
      } catch (moe::TransportError const& e) {
        mismatches += e.code() == ErrorCode::mismatch ? 1 : 0;
      }
    }
    EXPECT_GE(mismatches, 1);
    expect_error(ErrorCode::mismatch, [&] {
      try {
        a.at(0).prepare(a.in(0), a.stream(0));
      } catch (moe::TransportError const& e) {
        throw moe::Error(ErrorCode::mismatch, e.message());
      }
    });
  }
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}
TEST(LowLatencyPolicy, F2_T12_LayersShareAWindow) { layers_share_a_window<Low>({.window = {kTimeout}}); }
TEST(HighThroughputPolicy, F2_T12_LayersShareAWindow) { layers_share_a_window<High>({.window = {kTimeout}}); }

// ---- Memory.

TEST(LowLatencyPolicy, TheWindowHasTheBytesOfTheFormula) {
  using namespace moe::backends;
  auto const size = memory_size();
  expect_window(Ranks<Low>(memory_sizes(), {.window = {kTimeout}}), low_latency_window(size), "plain");
  expect_window(Ranks<Low>(memory_sizes(), {.masks = true, .window = {kTimeout}}), low_latency_window(size, 1, true), "masks");
  expect_window(Ranks<Low>(memory_sizes(), {.num_buffer_sets = 2, .window = {kTimeout}}), low_latency_window(size, 2), "two buffer sets");
  expect_window(Ranks<Low>(memory_sizes(), {.deduplicate = true, .window = {kTimeout}}), low_latency_deduplicated_window(size), "dedup");
  expect_window(Ranks<RankMajor>(memory_sizes(), {.window = {kTimeout}}), low_latency_deduplicated_window(size), "rank major");
}
TEST(HighThroughputPolicy, TheWindowHasTheBytesOfTheFormula) {
  using namespace moe::backends;
  auto const size = memory_size();
  expect_window(Ranks<High>(memory_sizes(), {.window = {kTimeout}}), high_throughput_window(size, 0, 0), "no lists");
  expect_window(Ranks<High>(memory_sizes(), {.expert_alignment = 64, .window = {kTimeout}}), high_throughput_window(size, 0, 64), "lists");
  expect_window(Ranks<High>(memory_sizes(), {.capacity = 300, .window = {kTimeout}}), high_throughput_window(size, 300, 0), "300 rows");
}

}  // namespace
