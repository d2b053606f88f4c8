// SPDX-License-Identifier: Apache-2.0
// layer/schedule_choice.hpp: what dispatch and combine beside the experts were measured to take, and the choice that follows: a layer for
// which no schedule was faster everywhere runs the plain one. All of it is constexpr, so a program compiles the kernels of one schedule.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"

namespace moe {

/// What runs beside the experts: the values of overlap_dispatch and overlap_combine of a layer's configuration.
struct LayerSchedule {
  bool dispatch = false;
  bool combine = false;
  constexpr bool operator==(LayerSchedule const&) const = default;
};
/// "plain", "dispatch", "combine" or "both".
constexpr std::string_view name(LayerSchedule s) {
  if (s.dispatch) return s.combine ? "both" : "dispatch";
  return s.combine ? "combine" : "plain";
}

/// The schedule that a configuration has.
template <class Config>
inline constexpr LayerSchedule kScheduleOf{kOverlapsDispatch<Config>, kOverlapsCombine<Config>};

/// A schedule that was not measured: slower than any that was.
inline constexpr double kNotMeasured = std::numeric_limits<double>::infinity();

/// One measured point of one pair: the time of a layer in each schedule over that of the plain one, below 1 where it is faster.
struct ScheduleTimes {
  std::string_view backend, experts, scheme;  ///< kName of the policies; "none" is bf16
  std::string_view layer;                     ///< "Flash" (4096, 2048, top-6, 32 experts a rank) or "Pro" (7168, 3072, top-6, 48)
  int ranks;
  int tokens;  ///< of each rank
  double dispatch, combine, both;
  std::string_view source;  ///< document, machine, build
};

namespace detail {
inline constexpr std::string_view kInTurns = "docs/log/layers.md, 2 x H200, in turns";
inline constexpr std::string_view kE0fa36c0 = "docs/log/layers.md, 2 x H200, e0fa36c0";
inline constexpr std::string_view k12f809b1 = "docs/log/layers.md, 2 x H200, 12f809b1";
}  // namespace detail

/// The newest measurement of each point in docs/log/layers.md, "Limits of whole layers", with the default number of blocks of rows (16) and
/// of columns (4). A quotient is one of microseconds. Grouped by pair, scheme and layer, by tokens within a group.
// clang-format off
inline constexpr auto kScheduleTimes = std::to_array<ScheduleTimes>({
    {"low_latency", "hopper_masked", "fp8_block128", "Flash", 2, 8, 183.1 / 180.2, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "fp8_block128", "Flash", 2, 16, 212.5 / 208.4, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "fp8_block128", "Flash", 2, 32, 214.8 / 211.0, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "fp8_block128", "Flash", 2, 64, 223.2 / 220.9, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "fp8_block128", "Flash", 2, 128, 238.3 / 234.8, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "fp8_block128", "Flash", 2, 256, 269.9 / 267.5, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "none", "Flash", 2, 8, 332.0 / 329.5, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "none", "Flash", 2, 16, 388.8 / 386.0, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "none", "Flash", 2, 32, 393.0 / 389.7, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "none", "Flash", 2, 64, 409.1 / 406.8, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "none", "Flash", 2, 128, 427.5 / 424.8, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"low_latency", "hopper_masked", "none", "Flash", 2, 256, 460.7 / 458.5, kNotMeasured, kNotMeasured, detail::k12f809b1},
    {"high_throughput", "hopper_contiguous", "fp8_block128", "Flash", 2, 512, 1.06, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "fp8_block128", "Flash", 2, 1024, 1.04, 1.15, 1.19, detail::k12f809b1},
    {"high_throughput", "hopper_contiguous", "fp8_block128", "Flash", 2, 4096, 1.02, 1.07, 1.08, detail::k12f809b1},
    {"high_throughput", "hopper_contiguous", "fp8_block128", "Flash", 2, 8192, 1.01, 1.10, 1.10, detail::k12f809b1},
    {"high_throughput", "hopper_contiguous", "fp8_block128", "Pro", 2, 512, 1.01, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "fp8_block128", "Pro", 2, 1024, 1.00, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "fp8_block128", "Pro", 2, 4096, 0.98, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "fp8_block128", "Pro", 2, 8192, 0.99, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "none", "Flash", 2, 256, 466.0 / 453.0, kNotMeasured, kNotMeasured, detail::kInTurns},
    {"high_throughput", "hopper_contiguous", "none", "Flash", 2, 512, 1.01, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "none", "Flash", 2, 1024, 0.99, 1.08, 1.07, detail::k12f809b1},
    {"high_throughput", "hopper_contiguous", "none", "Flash", 2, 2048, 1250.0 / 1206.0, kNotMeasured, kNotMeasured, detail::kInTurns},
    {"high_throughput", "hopper_contiguous", "none", "Flash", 2, 4096, 1.02, 1.04, 1.08, detail::k12f809b1},
    {"high_throughput", "hopper_contiguous", "none", "Flash", 2, 8192, 1.00, 1.03, 1.04, detail::k12f809b1},
    {"high_throughput", "hopper_contiguous", "none", "Pro", 2, 512, 1.00, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "none", "Pro", 2, 1024, 1.01, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "none", "Pro", 2, 4096, 1.02, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
    {"high_throughput", "hopper_contiguous", "none", "Pro", 2, 8192, 0.98, kNotMeasured, kNotMeasured, detail::kE0fa36c0},
});
// clang-format on

/// A schedule has to be faster by more than this part of the plain layer's time. Turns of low_latency agree within 0.5 %; single runs of
/// high_throughput differ by up to 8 %, so a row that changes a choice should be measured in turns.
inline constexpr double kScheduleMargin = 0.02;

/// Tokens a rank of the calls that a layer is for.
struct TokenRange {
  int least;
  int most;
};

namespace detail {

struct MeasuredPair {
  std::string_view backend, experts, scheme;
  constexpr bool has(ScheduleTimes const& t) const { return t.backend == backend && t.experts == experts && t.scheme == scheme; }
};

/// The measured number of tokens nearest to `tokens` by their ratio, of two as near the smaller one; 0 for a pair that was not measured.
constexpr int nearest_point(std::span<ScheduleTimes const> times, MeasuredPair pair, int tokens) {
  auto const distance = [&](int point) { return static_cast<double>(std::max(point, tokens)) / std::min(point, tokens); };
  int found = 0;
  for (ScheduleTimes const& t : times) {
    if (!pair.has(t)) continue;
    bool const nearer = found == 0 || distance(t.tokens) < distance(found);
    if (nearer || (distance(t.tokens) == distance(found) && t.tokens < found)) found = t.tokens;
  }
  return found;
}

/// choose_schedule() over any table.
constexpr LayerSchedule choose_schedule(std::span<ScheduleTimes const> times, MeasuredPair pair, TokenRange tokens) {
  if (tokens.least < 1 || tokens.most < tokens.least) {
    throw Error(ErrorCode::config,
                text("choose_schedule: ", tokens.least, " to ", tokens.most, " tokens a rank, expected 1 <= least <= most"));
  }
  int const first = nearest_point(times, pair, tokens.least), last = nearest_point(times, pair, tokens.most);
  int smallest = std::numeric_limits<int>::max(), largest = 0;
  double dispatch = 0.0, combine = 0.0, both = 0.0;  // the worst of each
  for (ScheduleTimes const& t : times) {
    if (!pair.has(t)) continue;
    smallest = std::min(smallest, t.tokens);
    largest = std::max(largest, t.tokens);
    if (t.tokens < first || t.tokens > last) continue;
    dispatch = std::max(dispatch, t.dispatch);
    combine = std::max(combine, t.combine);
    both = std::max(both, t.both);
  }
  double const best = std::min({dispatch, combine, both});
  if (tokens.least < smallest || tokens.most > largest || best >= 1.0 - kScheduleMargin) return {};
  if (best == dispatch) return {.dispatch = true, .combine = false};
  return {.dispatch = best != combine, .combine = true};
}

}  // namespace detail

/// The schedule for calls of `tokens` with policies of these names: the one whose worst measured time is the least, if that is less than
/// the plain layer's by more than kScheduleMargin; else the plain one. What counts are all rows of the pair, of any layer and number of
/// ranks, at the measured points of the range, whose ends stand for the points nearest to them by their ratio (of two as near the smaller
/// one). Plain are a pair that was not measured, a range that goes beyond the measured points, and a schedule that one of the rows lacks.
/// E_CONFIG, at compile time an error, unless 1 <= least <= most.
constexpr LayerSchedule choose_schedule(std::string_view backend, std::string_view experts, std::string_view scheme, TokenRange tokens) {
  return detail::choose_schedule(kScheduleTimes, {backend, experts, scheme}, tokens);
}

/// The same for the policies of a composition. A configuration writes `overlap_dispatch = moe::measured_schedule<…>({8, 256}).dispatch`,
/// and overlap_combine likewise.
template <class Backend, class Experts, class Quant>
constexpr LayerSchedule measured_schedule(TokenRange tokens) {
  return choose_schedule(Backend::kName, Experts::kName, Quant::kName, tokens);
}

namespace detail {
template <class Config, bool kDispatch, bool kCombine>
struct InSchedule : Config {
  using FixedKernels = FixedKernelsOf<Config>;
  static constexpr bool overlap_dispatch = kDispatch;
  static constexpr bool overlap_combine = kCombine;
};
}  // namespace detail

/// A configuration in a schedule: Config itself if that is its schedule.
template <class Config, bool kDispatch, bool kCombine>
using WithSchedule =
    std::conditional_t<kScheduleOf<Config> == LayerSchedule{kDispatch, kCombine}, Config, detail::InSchedule<Config, kDispatch, kCombine>>;

/// "Flash, 1024 tokens a rank: dispatch 1.04, combine 1.15, both 1.19 of the plain layer's time (docs/log/layers.md, 2 x H200, 12f809b1)".
inline std::string describe(ScheduleTimes const& t) {
  std::string out;
  auto const add = [&](LayerSchedule s, double ratio) {
    if (ratio != kNotMeasured) out += text(out.empty() ? " " : ", ", name(s), " ", std::round(ratio * 1000.0) / 1000.0);
  };
  add({true, false}, t.dispatch);
  add({false, true}, t.combine);
  add({true, true}, t.both);
  return text(t.layer, ", ", t.tokens, " tokens a rank:", out, " of the plain layer's time (", t.source, ")");
}

/// The rows of kScheduleTimes of a pair, for a program that prints them; none for one that was not measured.
inline std::vector<ScheduleTimes> schedule_times(std::string_view backend, std::string_view experts, std::string_view scheme) {
  std::vector<ScheduleTimes> out;
  for (ScheduleTimes const& t : kScheduleTimes) {
    if (detail::MeasuredPair{backend, experts, scheme}.has(t)) out.push_back(t);
  }
  return out;
}

/// What a layer for up to `tokens` a rank has, and what was measured of that, for a log: "plain; measured nearest to 9 tokens a rank: …".
/// Empty for a pair that was not measured.
inline std::string describe_schedule(LayerSchedule has, std::string_view backend, std::string_view experts, std::string_view scheme,
                                     int tokens) {
  detail::MeasuredPair const pair{backend, experts, scheme};
  int const point = detail::nearest_point(kScheduleTimes, pair, tokens);
  std::string out;
  for (ScheduleTimes const& t : kScheduleTimes) {
    if (pair.has(t) && t.tokens == point) out += text(out.empty() ? "" : "; ", describe(t));
  }
  return out.empty() ? out : text(name(has), "; measured nearest to ", tokens, " tokens a rank: ", out);
}

}  // namespace moe
