// SPDX-License-Identifier: Apache-2.0
// tests/unit/layer_schedule_choice_test.cpp: the table of measured schedules, and the choice that follows from it and from a made-up one.
#include "moe/layer/schedule_choice.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

#include "../declared_window.hpp"
#include "../expect_error.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "moe/runner/description.hpp"
#include "moe/runner/parts.hpp"

namespace {

using moe::choose_schedule;
using moe::kNotMeasured;
using moe::kScheduleTimes;
using moe::LayerSchedule;
using moe::ScheduleTimes;
using moe::TokenRange;
constexpr LayerSchedule kPlain{}, kDispatch{true, false}, kCombine{false, true}, kBoth{true, true};

// ---- The measured table.

constexpr bool same_group(ScheduleTimes const& a, ScheduleTimes const& b) {
  return a.backend == b.backend && a.experts == b.experts && a.scheme == b.scheme && a.layer == b.layer && a.ranks == b.ranks;
}
constexpr bool well_formed() {
  for (std::size_t i = 0; i < kScheduleTimes.size(); ++i) {
    ScheduleTimes const& t = kScheduleTimes[i];
    if (t.tokens < 1 || t.ranks < 2 || !(t.dispatch > 0.0 && t.combine > 0.0 && t.both > 0.0)) return false;
    if (t.layer.empty() || !t.source.starts_with("docs/log/layers.md")) return false;
    for (std::size_t before = 0; before < i; ++before) {
      if (same_group(kScheduleTimes[before], t) && kScheduleTimes[before].tokens >= t.tokens) return false;
    }
  }
  return true;
}
static_assert(well_formed());

/// No schedule of a row is chosen that is not faster than the plain layer by the margin.
constexpr bool never_slower(std::span<ScheduleTimes const> times) {
  for (ScheduleTimes const& t : times) {
    LayerSchedule const chosen = moe::detail::choose_schedule(times, {t.backend, t.experts, t.scheme}, {t.tokens, t.tokens});
    double const ratio = chosen == kBoth ? t.both : chosen == kDispatch ? t.dispatch : chosen == kCombine ? t.combine : 0.0;
    if (ratio >= 0.98) return false;
    if (t.dispatch >= 0.98 && t.combine >= 0.98 && t.both >= 0.98 && chosen != kPlain) return false;
  }
  return true;
}
static_assert(never_slower(kScheduleTimes));

struct Config : moe::LayerDefaults {
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
};
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
using Decode = moe::backends::LowLatency<moe_test::DeclaredWindow>;
using Prefill = moe::backends::HighThroughput<moe_test::DeclaredWindow>;
using Masked = moe::experts::HopperMasked;
using Contiguous = moe::experts::HopperContiguous;
using Fp8 = moe::quantization::Fp8Block<>;
using None = moe::quantization::None;

/// The rules allow every schedule of a pair that a row has: a layer of it compiles, and its exchange has what the schedule needs.
template <class Backend, class Experts, class Quant, bool kArrives, bool kCompletes>
constexpr bool fuses() {
  using Layer = moe::ModularKernel<moe::WithSchedule<Config, kArrives, kCompletes>, Router, Quant, Backend, Experts>;
  return sizeof(Layer) > 0 && moe::facts::arrives<typename Layer::Exchange>() == kArrives &&
         moe::facts::completes<typename Layer::Exchange>() == kCompletes;
}
template <class Backend, class Experts, class Quant>
constexpr bool names(ScheduleTimes const& t) {
  return t.backend == Backend::kName && t.experts == Experts::kName && t.scheme == Quant::kName;
}
constexpr bool may_fuse(ScheduleTimes const& t) {
  constexpr bool kLow = fuses<Decode, Masked, Fp8, true, false>() && fuses<Decode, Masked, None, true, false>();
  if (names<Decode, Masked, Fp8>(t) || names<Decode, Masked, None>(t)) {
    return kLow && t.combine == kNotMeasured && t.both == kNotMeasured;
  }
  constexpr bool kHigh = fuses<Prefill, Contiguous, Fp8, true, false>() && fuses<Prefill, Contiguous, Fp8, false, true>() &&
                         fuses<Prefill, Contiguous, Fp8, true, true>() && fuses<Prefill, Contiguous, None, true, false>() &&
                         fuses<Prefill, Contiguous, None, false, true>() && fuses<Prefill, Contiguous, None, true, true>();
  return kHigh && (names<Prefill, Contiguous, Fp8>(t) || names<Prefill, Contiguous, None>(t));
}
static_assert(std::ranges::all_of(kScheduleTimes, may_fuse));

// A configuration takes the choice; a pair that was not measured is plain.
static_assert(moe::measured_schedule<Decode, Masked, Fp8>({8, 256}) == kPlain);
static_assert(moe::measured_schedule<Prefill, Contiguous, None>({512, 8192}) == kPlain);
static_assert(moe::measured_schedule<Prefill, Masked, None>({512, 8192}) == kPlain);
struct Chosen : Config {
  static constexpr bool overlap_dispatch = moe::measured_schedule<Decode, Masked, Fp8>({8, 256}).dispatch;
};
static_assert(moe::kScheduleOf<Chosen> == kPlain);

// A schedule that a configuration has already leaves its type alone; fixed kernels are named by the configuration below.
static_assert(std::is_same_v<moe::WithSchedule<Config, false, false>, Config>);
using Overlapped = moe::WithSchedule<Config, true, false>;
static_assert(moe::kScheduleOf<Overlapped> == kDispatch && moe::kScheduleOf<moe::WithSchedule<Overlapped, false, true>> == kCombine);
static_assert(std::is_same_v<moe::WithSchedule<Overlapped, true, false>, Overlapped>);
static_assert(std::is_same_v<moe::FixedKernelsOf<Config>, Config> && std::is_same_v<moe::FixedKernelsOf<Overlapped>, Config>);
static_assert(std::is_same_v<moe::FixedKernelsOf<moe::WithSchedule<Overlapped, true, true>>, Config>);

// ---- A made-up table.

constexpr ScheduleTimes row(std::string_view scheme, int tokens, double dispatch, double combine, double both) {
  return {"b", "e", scheme, "Flash", 2, tokens, dispatch, combine, both, "docs/log/layers.md"};
}
constexpr auto kMadeUp = std::to_array<ScheduleTimes>({
    row("faster", 100, 0.90, 1.10, 1.00),
    row("faster", 400, 1.00, 0.90, 0.97),
    row("faster", 1600, 1.00, 0.95, 0.94),
    row("margin", 10, 0.98, kNotMeasured, kNotMeasured),
    row("margin", 20, 0.9799, kNotMeasured, kNotMeasured),
    row("lacks", 10, 1.00, 0.50, 0.60),
    row("lacks", 20, 0.97, kNotMeasured, 0.70),
    row("two layers", 10, 0.50, 0.97, 0.97),
    row("two layers", 10, 1.00, 0.96, 0.96),
});
static_assert(never_slower(kMadeUp));
constexpr LayerSchedule at(std::string_view scheme, TokenRange tokens) {
  return moe::detail::choose_schedule(kMadeUp, {"b", "e", scheme}, tokens);
}

TEST(ScheduleChoice, TheNearestMeasuredPointDecides) {
  EXPECT_EQ(at("faster", {100, 100}), kDispatch);
  EXPECT_EQ(at("faster", {200, 200}), kDispatch);  // as near to 400
  EXPECT_EQ(at("faster", {201, 201}), kCombine);
  EXPECT_EQ(at("faster", {400, 400}), kCombine);
  EXPECT_EQ(at("faster", {800, 800}), kCombine);
  EXPECT_EQ(at("faster", {801, 801}), kBoth);
  EXPECT_EQ(at("faster", {1600, 1600}), kBoth);
}

TEST(ScheduleChoice, BeyondTheMeasuredPointsTheLayerIsPlain) {
  EXPECT_EQ(at("faster", {99, 100}), kPlain);
  EXPECT_EQ(at("faster", {1, 1}), kPlain);
  EXPECT_EQ(at("faster", {1600, 1601}), kPlain);
  EXPECT_EQ(at("unknown", {100, 100}), kPlain);
  EXPECT_EQ(moe::detail::choose_schedule(kMadeUp, {"e", "b", "faster"}, {100, 100}), kPlain);
  EXPECT_EQ(moe::detail::choose_schedule({}, {"b", "e", "faster"}, {100, 100}), kPlain);
}

TEST(ScheduleChoice, ARangeTakesTheWorstOfItsPoints) {
  EXPECT_EQ(at("faster", {100, 400}), kPlain);     // none is faster at both
  EXPECT_EQ(at("faster", {400, 1600}), kCombine);  // 0.95, and both 0.97
  EXPECT_EQ(at("faster", {200, 201}), kPlain);
  EXPECT_EQ(at("faster", {201, 801}), kCombine);
  EXPECT_EQ(at("faster", {100, 1600}), kPlain);
}

TEST(ScheduleChoice, LessThanTheMarginIsPlain) {
  EXPECT_EQ(at("margin", {10, 10}), kPlain);
  EXPECT_EQ(at("margin", {20, 20}), kDispatch);
  EXPECT_EQ(at("margin", {10, 20}), kPlain);
}

TEST(ScheduleChoice, ARowThatLacksAScheduleRulesItOut) {
  EXPECT_EQ(at("lacks", {10, 10}), kCombine);
  EXPECT_EQ(at("lacks", {20, 20}), kBoth);
  EXPECT_EQ(at("lacks", {10, 20}), kBoth);
}

TEST(ScheduleChoice, EveryLayerOfAPointCounts) { EXPECT_EQ(at("two layers", {10, 10}), kCombine); }  // of equals what needs less

TEST(ScheduleChoice, ARangeThatIsNoneIsAnError) {
  auto const choose = [](TokenRange tokens) { return [tokens] { choose_schedule("low_latency", "hopper_masked", "none", tokens); }; };
  moe_test::expect_error(moe::ErrorCode::config, "choose_schedule: 0 to 8 tokens a rank, expected 1 <= least <= most", choose({0, 8}));
  moe_test::expect_error(moe::ErrorCode::config, "choose_schedule: 8 to 7 tokens a rank, expected 1 <= least <= most", choose({8, 7}));
}

TEST(ScheduleChoice, ItIsPrinted) {
  EXPECT_EQ(name(kPlain), "plain");
  EXPECT_EQ(name(kDispatch), "dispatch");
  EXPECT_EQ(name(kCombine), "combine");
  EXPECT_EQ(name(kBoth), "both");
  EXPECT_EQ(describe(row("", 1024, 1.04, 1.15, 1.19)),
            "Flash, 1024 tokens a rank: dispatch 1.04, combine 1.15, both 1.19 of the plain layer's time (docs/log/layers.md)");
  EXPECT_EQ(describe(row("", 8, 183.1 / 180.2, kNotMeasured, kNotMeasured)),
            "Flash, 8 tokens a rank: dispatch 1.016 of the plain layer's time (docs/log/layers.md)");
  EXPECT_EQ(moe::schedule_times("low_latency", "hopper_masked", "none").size(), 6U);
  EXPECT_TRUE(moe::schedule_times("low_latency", "hopper_contiguous", "none").empty());
  EXPECT_EQ(
      moe::describe_schedule(kDispatch, "high_throughput", "hopper_contiguous", "fp8_block128", 1400),
      "dispatch; measured nearest to 1400 tokens a rank: Flash, 1024 tokens a rank: dispatch 1.04, combine 1.15, both 1.19 of the plain "
      "layer's time (docs/log/layers.md, 2 x H200, 12f809b1); Pro, 1024 tokens a rank: dispatch 1 of the plain layer's time "
      "(docs/log/layers.md, "
      "2 x H200, e0fa36c0)");
  EXPECT_EQ(moe::describe_schedule(kPlain, "low_latency", "reference", "none", 8), "");
}

/// What description() asks of a runner, of which no layer is constructed.
template <class ConfigT, class ExpertsT>
struct Block {
  struct Layer {
    using Config = ConfigT;
    using Backend = Decode;
    using Experts = ExpertsT;
    using Quant = Fp8;
    using Space = moe::space::cuda;
    using Kernel = int;
  };
  using Parts = moe::RunnerDefaults;
  Layer own{};
  Layer& layer() { return own; }
  static std::string gate_choice() { return ""; }
  static std::string shared_choice() { return ""; }
  static moe::runner::ReductionPlan reductions() { return {}; }
  static std::int64_t max_rows() { return 128; }
  static std::int64_t hidden() { return 4096; }
  static std::size_t bytes() { return 1; }
};

TEST(ScheduleChoice, ARunnerOfAMeasuredPairNamesItsSchedule) {
  Block<Overlapped, Masked> fused;
  EXPECT_EQ(moe::runner::description(fused).at(1),
            "schedule: dispatch; measured nearest to 128 tokens a rank: Flash, 128 tokens a rank: dispatch 1.015 of the plain layer's time "
            "(docs/log/layers.md, 2 x H200, 12f809b1)");
  Block<Config, Masked> plain;
  EXPECT_TRUE(moe::runner::description(plain).at(1).starts_with("schedule: plain; measured nearest to 128 tokens a rank: "));
  Block<Config, Contiguous> unmeasured;
  for (std::string const& line : moe::runner::description(unmeasured)) EXPECT_FALSE(line.starts_with("schedule")) << line;
}

}  // namespace
