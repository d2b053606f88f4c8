// SPDX-License-Identifier: Apache-2.0
// examples/moe/report.cpp: the report as text with a bar chart, and as one JSON object.
#include "examples/moe/report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <range/v3/algorithm/max.hpp>
#include <range/v3/numeric/accumulate.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/chunk.hpp>
#include <range/v3/view/join.hpp>
#include <range/v3/view/transform.hpp>
#include <utility>

#include "examples/moe/chart.hpp"

namespace moe_tool {
namespace {

/// Largest over mean; 1 when there is nothing to balance.
double imbalance(std::vector<std::int64_t> const& load) {
  auto const total = ranges::accumulate(load, std::int64_t{0});
  return total == 0 ? 1.0 : static_cast<double>(ranges::max(load)) * static_cast<double>(load.size()) / static_cast<double>(total);
}

/// One line per expert while they fit on a screen, else a line of columns per 64 experts.
std::string load_chart(std::vector<std::int64_t> const& load) {
  std::int64_t const largest = load.empty() ? 0 : ranges::max(load);
  std::string out;
  if (load.size() <= 32) {
    for (std::size_t e = 0; e < load.size(); ++e) {
      out += fmt::format("  {:>4} {:>7}  {}\n", e, load[e], bar(load[e], largest, 40));
    }
    return out;
  }
  for (std::size_t first = 0; first < load.size(); first += 64) {
    out += fmt::format("  {:>4}  ", first);
    for (std::size_t e = first; e < std::min(load.size(), first + 64); ++e) {
      out += column(static_cast<double>(load[e]), static_cast<double>(largest));
    }
    out += '\n';
  }
  return out;
}

std::string joined_counts(std::vector<std::int64_t> const& values) {
  return values | ranges::views::transform([](std::int64_t v) { return std::to_string(v); }) | ranges::views::join(' ') |
         ranges::to<std::string>;
}

/// The rank that others waited for longest, and each rank's waits while they fit on a screen.
std::string waits(Report const& r) {
  if (r.waited.empty()) return "waits         not counted by this backend\n";
  auto const ranks = static_cast<std::size_t>(r.ranks);
  std::string out = "waits         ms of a mean forward that a rank (line) waited for each rank (column)\n";
  if (ranks > 16) {
    auto const at = static_cast<std::size_t>(std::max_element(r.waited.begin(), r.waited.end()) - r.waited.begin());
    return fmt::format("waits         the longest in a mean forward: rank {} for rank {}, {:.3f} ms\n", at / ranks, at % ranks,
                       r.waited[at] * 1e3);
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    out += fmt::format("  {:>4}       ", rank);
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      out += peer == rank ? fmt::format(" {:>8}", "-") : fmt::format(" {:>8.3f}", r.waited[rank * ranks + peer] * 1e3);
    }
    out += '\n';
  }
  return out;
}

/// Name and seconds of each phase: of a layer's always, of what is around it if it took any time.
std::vector<std::pair<std::string, double>> phases(Report const& r) {
  std::vector<std::pair<std::string, double>> out;
  for (std::size_t p = 0; p < r.seconds.size(); ++p) {
    auto const phase = static_cast<moe::Phase>(p);
    if (phase <= moe::Phase::combine || r.seconds[p] > 0) out.emplace_back(moe::name(phase), r.seconds[p]);
  }
  return out;
}

}  // namespace

std::string as_text(Report const& r) {
  std::string out =
      fmt::format("{}: hidden {}, intermediate {}, {} experts, top {}\n", r.source, r.hidden, r.intermediate, r.num_experts, r.topk);
  out += fmt::format("composition   router {} | quantization {} | backend {} | experts {} | device {}\n", r.router, r.quantization,
                     r.backend, r.experts, r.device);
  out += fmt::format("ranks         {} x {} thread{}\n", r.ranks, r.threads, r.threads == 1 ? "" : "s");
  Report::Grid const& g = r.grid;
  if (g.tp > 1 || g.pcp > 1 || g.moe_tp > 1) {
    out += fmt::format("grid          tp {} x dp {} x pcp {} | experts over {}, their columns over {} | sequence parallel {}\n", g.tp, g.dp,
                       g.pcp, g.ep, g.moe_tp, g.sequence_parallel ? "on" : "off");
  }
  if (r.passes > 1) out += fmt::format("chunks        {} of at most {} rows\n", r.passes, r.chunk_rows);
  if (r.dual_batch != "off") {
    out += fmt::format("dual batch    {} of {} passes in two halves; {}\n", r.passes_in_halves, r.passes, r.dual_batch);
  }
  out += fmt::format("tokens        {} (per {}: {})\n", r.tokens, g.tp > 1 ? "TP group" : "rank", joined_counts(r.group_tokens));
  if (r.routes_inside) {
    out += "load          not known: the experts route inside\n";
  } else {
    out += fmt::format("load          slots per expert, largest / mean = {:.2f}\n{}", imbalance(r.load), load_chart(r.load));
  }
  if (r.rank_load.size() > 1) {
    out += fmt::format("              slots per rank: {}, largest / mean = {:.2f}\n", joined_counts(r.rank_load), imbalance(r.rank_load));
  }
  out += "time          ";
  for (auto const& [phase, seconds] : phases(r)) out += fmt::format("{} {:.3f} ms | ", phase, seconds * 1e3);
  out += fmt::format("together {:.3f} ms\n", ranges::accumulate(r.seconds, 0.0) * 1e3);
  if (r.ranks > 1) out += waits(r);
  if (r.error) {
    out += fmt::format("error         max |output - expected| / max |expected| = {:.2e}\n", *r.error);
  }
  return out + fmt::format("output        {}\n", r.output);
}

std::string as_json(Report const& r) {
  nlohmann::ordered_json j{
      {"source", r.source},
      {"composition",
       {{"router", r.router}, {"quantization", r.quantization}, {"backend", r.backend}, {"experts", r.experts}, {"device", r.device}}},
      {"ranks", r.ranks},
      {"threads_per_rank", r.threads},
      {"tokens", r.tokens},
      {"grid",
       {{"tp", r.grid.tp},
        {"dp", r.grid.dp},
        {"pcp", r.grid.pcp},
        {"ep", r.grid.ep},
        {"moe_tp", r.grid.moe_tp},
        {"sequence_parallel", r.grid.sequence_parallel}}},
      {"passes", r.passes},
      {"passes_in_halves", r.passes_in_halves},
      {"dual_batch", r.dual_batch},
      {"tokens_per_rank", r.group_tokens},
      {"hidden", r.hidden},
      {"intermediate", r.intermediate},
      {"num_experts", r.num_experts},
      {"topk", r.topk},
      {"replicas", r.replicas},
      {"load", r.load},
      {"load_imbalance", imbalance(r.load)},
      {"load_per_rank", r.rank_load},
      {"rank_imbalance", imbalance(r.rank_load)},
      {"seconds", nlohmann::ordered_json::object()},
      {"output", r.output}};
  if (r.ranks > 1 && r.waited.empty()) {
    j["waited_ms"] = nullptr;
  } else if (r.ranks > 1) {
    j["waited_ms"] = r.waited | ranges::views::chunk(r.ranks) | ranges::views::transform([](auto row) {
                       return row | ranges::views::transform([](double s) { return s * 1e3; }) | ranges::to<std::vector<double>>;
                     }) |
                     ranges::to<std::vector<std::vector<double>>>;
  }
  for (auto const& [phase, seconds] : phases(r)) j["seconds"][phase] = seconds;
  if (r.routes_inside) {
    for (char const* const unknown : {"load", "load_imbalance", "load_per_rank", "rank_imbalance"}) j[unknown] = nullptr;
  }
  if (r.error) {
    j["error"] = *r.error;
  }
  return j.dump() + "\n";
}

}  // namespace moe_tool
