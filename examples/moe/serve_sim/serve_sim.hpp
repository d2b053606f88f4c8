// SPDX-License-Identifier: Apache-2.0
// examples/moe/serve_sim/serve_sim.hpp: a simulated serving run: what it is asked for, what its ranks do in a step, what it reports.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "moe/eplb/maps.hpp"

namespace moe_tool::serve_sim {

/// The command line of `moe serve-sim`.
struct Options {
  std::int64_t steps = 0;
  std::string routing;        ///< zipf:S or trace:FILE
  int experts = 0;            ///< 0: 256, or as many as the trace names
  int topk = 8;               ///< of zipf; a trace has its own
  int ranks = 0;              ///< simulated in one process; 0: 8
  std::int64_t tokens = 128;  ///< of a rank in a step
  int replicas = 0;
  std::string eplb = "pause";
  int window = 32;
  int interval = 0;  ///< 0: half of the steps
  std::int64_t hidden = 128;
  std::int64_t intermediate = 64;
  std::uint64_t seed = 0;
  std::int64_t timeout_ms = 100'000;
  std::filesystem::path html;
  std::filesystem::path maps;
  bool json = false;
};

/// Of a run; as many as a checkpoint may have.
inline constexpr int kMostExperts = 1 << 16;

/// The experts that each token of the run visits.
class Routing {
 public:
  /// E_ARG naming the word or the file that is wrong; E_CONFIG for sizes that cannot be.
  explicit Routing(Options const& options);
  int num_experts() const { return num_experts_; }
  int topk() const { return topk_; }
  /// Those of the trace.
  std::vector<std::filesystem::path> const& files() const { return files_; }
  /// ids [rows, topk] of the rows from `first` on of a step of `rows_per_step`. Equal on every machine.
  void fill(std::int64_t step, std::int64_t first, std::int64_t rows, std::int64_t rows_per_step, std::int32_t* ids) const;

 private:
  void read_trace(std::filesystem::path const& path);
  int num_experts_;
  int topk_;
  double exponent_ = 0;
  std::uint64_t seed_;
  std::vector<std::int32_t> trace_;  // [rows, topk], or empty
  std::vector<std::filesystem::path> files_;
};

/// What the ranks did in a step.
struct Step {
  std::vector<std::int64_t> rank_slots;  ///< [R] token-expert pairs that each rank computed
  double seconds = 0;                    ///< the slowest rank's forward; 0 where nothing was computed
  bool rebalanced = false;               ///< new weights and maps are in use from the next step on
};

/// The ranks of a run: simulated ones, or those of mpirun.
class Ranks {
 public:
  Ranks() = default;
  Ranks(Ranks const&) = delete;
  Ranks& operator=(Ranks const&) = delete;
  virtual ~Ranks() = default;
  virtual int size() const = 0;
  /// Collective.
  virtual Step step(std::int64_t number) = 0;
  virtual moe::eplb::ExpertMaps const& maps() const = 0;
};

/// The whole run.
struct Report {
  Options options;
  int num_experts = 0, topk = 0, ranks = 0;
  bool computed = false;  ///< a layer ran on every rank
  std::vector<Step> steps;

  /// Steps up to the first rebalancing, and from after the last one on: [first, last).
  struct Span {
    std::size_t first, last;
  };
  Span before() const;
  Span after() const;
  /// [R] slots in a mean step of the span.
  std::vector<double> rank_slots(Span span) const;
  /// Mean over max of each step's rank loads, its mean over the span.
  double balancedness(Span span) const;
  std::vector<double> imbalance() const;   ///< of each step: largest over mean
  std::vector<double> step_times() const;  ///< milliseconds
};

std::string as_text(Report const& report);
std::string as_json(Report const& report);
/// A page that draws its charts from the data that it holds; it loads nothing.
std::string as_html(Report const& report);

}  // namespace moe_tool::serve_sim
