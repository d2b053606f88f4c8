// SPDX-License-Identifier: Apache-2.0
// examples/moe/report.hpp: the report of `moe layer` and `moe block`, as text or as JSON.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "examples/moe/job.hpp"

namespace moe_tool {

struct Report {
  std::string source;  ///< "qwen3_moe, layer 0"
  std::string router, quantization, backend, experts, device;
  int ranks = 1;
  struct Grid {
    int tp = 1, dp = 1, pcp = 1;
    int ep = 1;      ///< ranks that the experts are divided among
    int moe_tp = 1;  ///< ranks that an expert's columns are divided among
    bool sequence_parallel = false;
  } grid;
  std::int64_t chunk_rows = 0;  ///< most rows of a rank in one pass
  int passes = 1;
  int passes_in_halves = 0;
  std::string dual_batch;  ///< on, off, or what auto comes to and why
  int threads = 1;         ///< per rank
  std::int64_t tokens = 0;
  std::vector<std::int64_t> group_tokens;  ///< of each TP group
  std::int64_t hidden = 0, intermediate = 0;
  int num_experts = 0, topk = 0;
  bool routes_inside = false;      ///< the experts make the choice and report none: no loads
  std::vector<std::int64_t> load;  ///< [E] slots routed to each expert
  int replicas = 0;
  std::vector<double> waited;           ///< [R, R] seconds of a mean forward that a rank waited for another; empty: not counted
  std::vector<std::int64_t> rank_load;  ///< [EP] slots of the experts of each
  Seconds seconds{};                    ///< of each phase: the slowest rank
  std::optional<double> error;          ///< max |out - expected| / max |expected|
  std::string output;
};

std::string as_text(Report const& report);
std::string as_json(Report const& report);

}  // namespace moe_tool
