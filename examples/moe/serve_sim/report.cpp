// SPDX-License-Identifier: Apache-2.0
// examples/moe/serve_sim/report.cpp: what a simulated run showed, as text with charts and as JSON.
#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <range/v3/algorithm/max.hpp>
#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/join.hpp>
#include <range/v3/view/slice.hpp>
#include <range/v3/view/transform.hpp>

#include "examples/moe/chart.hpp"
#include "examples/moe/serve_sim/serve_sim.hpp"
#include "moe/eplb/balancedness.hpp"

namespace moe_tool::serve_sim {
namespace views = ranges::views;

namespace {

double mean(std::vector<double> const& values) {
  return values.empty() ? 0 : ranges::accumulate(values, 0.0) / static_cast<double>(values.size());
}
double balance_of(Step const& step) { return moe::eplb::balancedness(step.rank_slots | ranges::to<std::vector<double>>); }
std::vector<std::size_t> rebalanced_steps(Report const& r) {
  return views::enumerate(r.steps) | views::filter([](auto const& step) { return step.second.rebalanced; }) |
         views::transform([](auto const& step) { return std::size_t{step.first}; }) | ranges::to<std::vector>;
}
std::string last_of(Report::Span span) { return span.last == span.first + 1 ? "" : fmt::format(" to {}", span.last - 1); }

}  // namespace

Report::Span Report::before() const {
  auto const changed = rebalanced_steps(*this);
  return {0, changed.empty() ? steps.size() : changed.front() + 1};
}
Report::Span Report::after() const {
  auto const changed = rebalanced_steps(*this);
  std::size_t const first = changed.empty() ? 0 : changed.back() + 1;
  return first < steps.size() ? Span{first, steps.size()} : Span{steps.size() - 1, steps.size()};
}

std::vector<double> Report::rank_slots(Span span) const {
  std::vector<double> out(static_cast<std::size_t>(ranks), 0.0);
  for (Step const& step : steps | views::slice(span.first, span.last)) {
    for (auto const [rank, slots] : views::enumerate(step.rank_slots)) out[rank] += static_cast<double>(slots);
  }
  for (double& slots : out) slots /= static_cast<double>(span.last - span.first);
  return out;
}

double Report::balancedness(Span span) const {
  return mean(steps | views::slice(span.first, span.last) | views::transform(balance_of) | ranges::to<std::vector>);
}
std::vector<double> Report::imbalance() const {
  return steps | views::transform([](Step const& step) { return 1.0 / balance_of(step); }) | ranges::to<std::vector>;
}
std::vector<double> Report::step_times() const {
  return steps | views::transform([](Step const& step) { return step.seconds * 1e3; }) | ranges::to<std::vector>;
}

std::string as_text(Report const& r) {
  constexpr int kWidth = 28;
  constexpr std::size_t kColumns = 64;
  Report::Span const before = r.before(), after = r.after();
  auto const first = r.rank_slots(before), last = r.rank_slots(after);
  auto const full = static_cast<std::int64_t>(std::max(ranges::max(first), ranges::max(last)));
  std::string out = fmt::format("{} experts + {} replicas, top {}, on {} {} ranks; {} tokens a rank and step, routing {}\n", r.num_experts,
                                r.options.replicas, r.topk, r.ranks, r.computed ? "MPI" : "simulated", r.options.tokens, r.options.routing);
  auto const changed = rebalanced_steps(r);
  out += changed.empty() ? fmt::format("rebalanced    never in {} steps (--eplb {})\n", r.steps.size(), r.options.eplb)
                         : fmt::format("rebalanced    after {} of {} steps: {}\n", changed.size(), r.steps.size(),
                                       changed | views::transform([](std::size_t s) { return std::to_string(s); }) | views::join(' ') |
                                           ranges::to<std::string>);
  out +=
      fmt::format("\ntoken-expert pairs of a rank in a mean step\n  rank  {:<{}}  {}\n", fmt::format("before (steps 0{})", last_of(before)),
                  kWidth + 8, fmt::format("after (steps {}{})", after.first, last_of(after)));
  auto const cell = [&](double slots) {
    std::string const cells = bar(static_cast<std::int64_t>(slots), full, kWidth);
    int const drawn = static_cast<int>((static_cast<std::int64_t>(slots) * 8 * kWidth / std::max<std::int64_t>(full, 1) + 7) / 8);
    return cells + std::string(static_cast<std::size_t>(kWidth - drawn), ' ') + fmt::format("{:>8.0f}", slots);
  };
  for (auto const [rank, slots] : views::enumerate(first)) out += fmt::format("  {:>4}  {}  {}\n", rank, cell(slots), cell(last[rank]));
  out +=
      fmt::format("\nbalancedness  {:.3f} -> {:.3f} (mean rank / largest; 1 is perfect)\n", r.balancedness(before), r.balancedness(after));
  auto const imbalance = r.imbalance();
  out +=
      fmt::format("imbalance     {}  largest / mean of each step, at most {:.2f}\n", columns(imbalance, kColumns), ranges::max(imbalance));
  if (r.computed) {
    auto const times = r.step_times();
    out += fmt::format("step time     {}  mean {:.3f} ms, at most {:.3f} ms\n", columns(times, kColumns), mean(times), ranges::max(times));
  }
  if (!r.options.html.empty()) out += fmt::format("page          {}\n", r.options.html.string());
  if (!r.options.maps.empty()) out += fmt::format("placement     {}\n", r.options.maps.string());
  return out;
}

std::string as_json(Report const& r) {
  Report::Span const before = r.before(), after = r.after();
  auto const side = [&](Report::Span span) {
    return nlohmann::ordered_json{{"first_step", span.first},
                                  {"last_step", span.last - 1},
                                  {"balancedness", r.balancedness(span)},
                                  {"rank_slots", r.rank_slots(span)}};
  };
  nlohmann::ordered_json out{{"experts", r.num_experts},
                             {"replicas", r.options.replicas},
                             {"topk", r.topk},
                             {"ranks", r.ranks},
                             {"computed", r.computed},
                             {"tokens_per_rank", r.options.tokens},
                             {"routing", r.options.routing},
                             {"eplb", r.options.eplb},
                             {"steps", r.steps.size()},
                             {"rebalanced_after", rebalanced_steps(r)},
                             {"before", side(before)},
                             {"after", side(after)},
                             {"imbalance", r.imbalance()}};
  if (r.computed) out["step_ms"] = r.step_times();
  return out.dump();
}

}  // namespace moe_tool::serve_sim
