// SPDX-License-Identifier: Apache-2.0
// examples/moe/report.hpp: the report of `moe layer` and `moe block`, as text or as JSON.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace moe_tool {

struct Report {
  std::string source;  ///< "qwen3_moe, layer 0"
  std::string router, quantization, backend, experts, device;
  int ranks = 1;
  int threads = 1;  ///< per rank
  std::int64_t tokens = 0;
  std::vector<std::int64_t> rank_tokens;
  std::int64_t hidden = 0, intermediate = 0;
  int num_experts = 0, topk = 0;
  std::vector<std::int64_t> load;       ///< [E] slots routed to each expert
  std::vector<std::int64_t> rank_load;  ///< [R] slots computed by each rank
  std::array<double, 4> seconds{};      ///< route, dispatch, experts, combine: the slowest rank
  std::optional<double> error;          ///< max |out - expected| / max |expected|
  std::string output;
};

std::string as_text(Report const& report);
std::string as_json(Report const& report);

}  // namespace moe_tool
