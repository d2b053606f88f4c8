// SPDX-License-Identifier: Apache-2.0
// examples/moe/report.cpp: the report as text with a bar chart, and as one JSON object.
#include "examples/moe/report.hpp"

#include <fmt/core.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <numeric>

namespace moe_tool {
namespace {

/// Largest over mean; 1 when there is nothing to balance.
double imbalance(std::vector<std::int64_t> const& load) {
  auto const total = std::accumulate(load.begin(), load.end(), std::int64_t{0});
  return total == 0 ? 1.0
                    : static_cast<double>(*std::max_element(load.begin(), load.end())) * static_cast<double>(load.size()) /
                          static_cast<double>(total);
}

/// A horizontal bar of eighths, `width` cells for `largest`.
std::string bar(std::int64_t value, std::int64_t largest, int width) {
  constexpr std::array<char const*, 8> eighths{"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  std::int64_t const cells = largest == 0 ? 0 : value * 8 * width / largest;
  std::string out;
  for (std::int64_t i = 0; i < cells / 8; ++i) {
    out += "█";
  }
  return out + eighths[static_cast<std::size_t>(cells % 8)];
}

/// One line per expert while they fit on a screen, else a line of columns per 64 experts.
std::string load_chart(std::vector<std::int64_t> const& load) {
  std::int64_t const largest = load.empty() ? 0 : *std::max_element(load.begin(), load.end());
  std::string out;
  if (load.size() <= 32) {
    for (std::size_t e = 0; e < load.size(); ++e) {
      out += fmt::format("  {:>4} {:>7}  {}\n", e, load[e], bar(load[e], largest, 40));
    }
    return out;
  }
  constexpr std::array<char const*, 9> columns{" ", "▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  for (std::size_t first = 0; first < load.size(); first += 64) {
    out += fmt::format("  {:>4}  ", first);
    for (std::size_t e = first; e < std::min(load.size(), first + 64); ++e) {
      out += columns[static_cast<std::size_t>(largest == 0 ? 0 : (load[e] * 8 + largest - 1) / largest)];
    }
    out += "\n";
  }
  return out;
}

std::string joined(std::vector<std::int64_t> const& values) {
  std::string out;
  for (std::int64_t v : values) {
    out += (out.empty() ? "" : " ") + std::to_string(v);
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
  out += fmt::format("tokens        {} (per rank: {})\n", r.tokens, joined(r.rank_tokens));
  out += fmt::format("load          slots per expert, largest / mean = {:.2f}\n{}", imbalance(r.load), load_chart(r.load));
  if (r.ranks > 1) {
    out += fmt::format("              slots per rank: {}, largest / mean = {:.2f}\n", joined(r.rank_load), imbalance(r.rank_load));
  }
  double const total = r.seconds[0] + r.seconds[1] + r.seconds[2] + r.seconds[3];
  out += fmt::format("time          route {:.3f} ms | dispatch {:.3f} ms | experts {:.3f} ms | combine {:.3f} ms | together {:.3f} ms\n",
                     r.seconds[0] * 1e3, r.seconds[1] * 1e3, r.seconds[2] * 1e3, r.seconds[3] * 1e3, total * 1e3);
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
      {"tokens_per_rank", r.rank_tokens},
      {"hidden", r.hidden},
      {"intermediate", r.intermediate},
      {"num_experts", r.num_experts},
      {"topk", r.topk},
      {"load", r.load},
      {"load_imbalance", imbalance(r.load)},
      {"load_per_rank", r.rank_load},
      {"rank_imbalance", imbalance(r.rank_load)},
      {"seconds", {{"route", r.seconds[0]}, {"dispatch", r.seconds[1]}, {"experts", r.seconds[2]}, {"combine", r.seconds[3]}}},
      {"output", r.output}};
  if (r.error) {
    j["error"] = *r.error;
  }
  return j.dump() + "\n";
}

}  // namespace moe_tool
