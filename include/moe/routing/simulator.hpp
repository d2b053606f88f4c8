// SPDX-License-Identifier: Apache-2.0
// routing/simulator.hpp: a router that ignores the logits and shapes the load, for tests and benchmarks (docs/semantics/routing.md §11).
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "moe/core/error.hpp"
#include "moe/routing/capture.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/route_row.hpp"
#include "moe/routing/row/validate.hpp"

namespace moe::routing {

/// What a simulated routing depends on, besides the row: equal values give equal routing on every machine.
struct SimulatorParams {
  std::string strategy = "uniform_random";  ///< a registered name
  int num_experts = 0;                      ///< E, at most kMaxLogits
  int topk = 0;
  std::uint64_t seed = 0;
  int layer = 0;
  std::int64_t step = 0;
  std::int64_t first_row = 0;             ///< global row number of the call's row 0
  bool with_replacement = false;          ///< uniform_random: ids of a row may repeat
  double mean = 0.0;                      ///< normal_routing
  double deviation = 1.0;                 ///< normal_routing
  double zipf_exponent = 1.0;             ///< zipf: P(e) ~ 1 / (e + 1)^s
  double hot_fraction = 0.5;              ///< hot_expert, hot_rank: share of the tokens that always hit
  int hot_expert = 0;                     ///< hot_expert
  int rank = 0;                           ///< hot_rank, one_rank, empty_rank
  int num_ranks = 1;                      ///< ranks that share the experts, linear placement: the first E % R ranks own one more
  RoutingRecord const* record = nullptr;  ///< replay: what the capture hook recorded, by global row; borrowed
};

/// A row's random numbers: a counter-based generator keyed by (seed, layer, step, global row), the same on every platform.
class RowRandom {
 public:
  RowRandom(SimulatorParams const& p, std::int64_t global_row)
      : state_(mix(mix(mix(mix(p.seed) + static_cast<std::uint64_t>(p.layer)) + static_cast<std::uint64_t>(p.step)) +
                   static_cast<std::uint64_t>(global_row))) {}
  std::uint64_t next() { return mix(state_ += kGolden); }
  /// Uniform in (0, 1): 53 bits, never 0.
  double uniform() { return (static_cast<double>(next() >> 11) + 0.5) * 0x1p-53; }
  /// Uniform in [0, n), n < 2^32, by a 32-bit multiply and shift.
  int below(int n) { return static_cast<int>(((next() >> 32) * static_cast<std::uint64_t>(n)) >> 32); }
  /// Standard normal, by the polar form of Box and Muller.
  double normal() { return std::sqrt(-2.0 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }

 private:
  static constexpr std::uint64_t kGolden = 0x9E3779B97F4A7C15U;
  static std::uint64_t mix(std::uint64_t x) {  // the finaliser of SplitMix64
    x += kGolden;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
  }
  std::uint64_t state_;
};

/// Fills one row: `global_row` is first_row + t. ids, weights: [topk] out.
using SimulatorStrategy = void (*)(SimulatorParams const&, std::int64_t global_row, std::int32_t* ids, float* weights);

namespace detail {

struct ExpertRange {
  int first, count;
};
/// Experts of a rank under linear placement.
inline ExpertRange experts_of_rank(SimulatorParams const& p, int rank) {
  int const base = p.num_experts / p.num_ranks;
  int const extra = p.num_experts % p.num_ranks;
  return {rank * base + std::min(rank, extra), base + (rank < extra ? 1 : 0)};
}

/// ids[first..k): distinct and uniform among the experts e with allowed(e), none of which may be in ids[0..first).
template <class Allowed>
void draw_distinct(SimulatorParams const& p, RowRandom& random, int first, std::int32_t* ids, Allowed const& allowed) {
  std::array<std::int32_t, kMaxLogits> pool;
  int n = 0;
  for (std::int32_t e = 0; e < p.num_experts; ++e) {
    if (allowed(e)) pool[static_cast<std::size_t>(n++)] = e;
  }
  for (int j = first; j < p.topk; ++j) {
    int const at = random.below(n--);
    ids[j] = pool[static_cast<std::size_t>(at)];
    pool[static_cast<std::size_t>(at)] = pool[static_cast<std::size_t>(n)];
  }
}
inline void even_weights(SimulatorParams const& p, float* weights) { std::fill_n(weights, p.topk, 1.0F / static_cast<float>(p.topk)); }

inline void simulate_uniform(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  RowRandom random(p, row);
  even_weights(p, weights);
  if (!p.with_replacement) return draw_distinct(p, random, 0, ids, [](int) { return true; });
  for (int j = 0; j < p.topk; ++j) ids[j] = random.below(p.num_experts);
}
inline void simulate_normal(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  RowRandom random(p, row);
  std::array<bool, kMaxLogits> used{};
  double sum = 0.0;
  for (int j = 0; j < p.topk; ++j) {
    double const n = p.mean + p.deviation * random.normal();
    int e = std::min(static_cast<int>(static_cast<double>(p.num_experts) / (1.0 + std::exp(-n))), p.num_experts - 1);
    while (used[static_cast<std::size_t>(e)]) e = (e + 1) % p.num_experts;
    used[static_cast<std::size_t>(e)] = true;
    ids[j] = e;
    weights[j] = static_cast<float>(std::abs(n));
    sum += weights[j];
  }
  if (sum == 0.0) return even_weights(p, weights);
  for (int j = 0; j < p.topk; ++j) weights[j] = static_cast<float>(weights[j] / sum);
}
inline void simulate_balanced(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  for (int j = 0; j < p.topk; ++j) ids[j] = static_cast<std::int32_t>((row * p.topk + j) % p.num_experts);
  even_weights(p, weights);
}
/// Weighted draws without replacement: the k largest log-weights plus Gumbel noise.
inline void simulate_zipf(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  RowRandom random(p, row);
  std::array<float, kMaxLogits> keys;
  for (int e = 0; e < p.num_experts; ++e) {
    keys[static_cast<std::size_t>(e)] = static_cast<float>(-p.zipf_exponent * std::log(e + 1.0) - std::log(-std::log(random.uniform())));
  }
  top_k(keys.data(), p.num_experts, p.topk, ids);
  even_weights(p, weights);
}
inline void simulate_hot_expert(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  RowRandom random(p, row);
  bool const hit = random.uniform() < p.hot_fraction;
  ids[0] = p.hot_expert;
  draw_distinct(p, random, hit ? 1 : 0, ids, [&](int e) { return !hit || e != p.hot_expert; });
  even_weights(p, weights);
}
inline void simulate_hot_rank(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  RowRandom random(p, row);
  bool const hit = random.uniform() < p.hot_fraction;
  ExpertRange const hot = experts_of_rank(p, p.rank);
  int const chosen = hot.first + random.below(hot.count);
  ids[0] = chosen;
  draw_distinct(p, random, hit ? 1 : 0, ids, [&](int e) { return !hit || e != chosen; });
  even_weights(p, weights);
}
inline void simulate_one_rank(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  RowRandom random(p, row);
  ExpertRange const hot = experts_of_rank(p, p.rank);
  draw_distinct(p, random, 0, ids, [&](int e) { return e >= hot.first && e < hot.first + hot.count; });
  even_weights(p, weights);
}
inline void simulate_empty_rank(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  RowRandom random(p, row);
  ExpertRange const cold = experts_of_rank(p, p.rank);
  draw_distinct(p, random, 0, ids, [&](int e) { return e < cold.first || e >= cold.first + cold.count; });
  even_weights(p, weights);
}
inline void simulate_replay(SimulatorParams const& p, std::int64_t row, std::int32_t* ids, float* weights) {
  std::copy_n(p.record->ids.begin() + row * p.topk, p.topk, ids);
  std::copy_n(p.record->weights.begin() + row * p.topk, p.topk, weights);
}

/// Refuses parameters that a built-in strategy cannot serve.
inline void validate_simulation(SimulatorParams const& p) {
  auto const e_config = ErrorCode::config;
  require(p.num_experts >= 1 && p.num_experts <= kMaxLogits, e_config, "num_experts: ", p.num_experts, " is out of range [1, ", kMaxLogits,
          "]");
  int const most = std::min(kMaxTopK, p.num_experts);
  require(p.topk >= 1 && p.topk <= most, e_config, "top_k: ", p.topk, " is out of range [1, ", most, "]");
  require(p.num_ranks >= 1 && p.num_ranks <= p.num_experts, e_config, "num_ranks: ", p.num_ranks, " is out of range [1, ", p.num_experts,
          "]");
  require(p.rank >= 0 && p.rank < p.num_ranks, e_config, "rank: ", p.rank, " is out of range [0, ", p.num_ranks, ")");
  require(p.hot_expert >= 0 && p.hot_expert < p.num_experts, e_config, "hot_expert: ", p.hot_expert, " is out of range [0, ", p.num_experts,
          ")");
  require(p.hot_fraction >= 0.0 && p.hot_fraction <= 1.0, e_config, "hot_fraction: ", p.hot_fraction, " is out of range [0, 1]");
  auto const finite = [&](char const* what, double value) { require(std::isfinite(value), e_config, what, ": ", value, " is not finite"); };
  finite("mean", p.mean);
  finite("deviation", p.deviation);
  finite("zipf_exponent", p.zipf_exponent);
  int const own = experts_of_rank(p, p.rank).count;
  require(p.strategy != "one_rank" || own >= p.topk, e_config, "top_k: ", p.topk, " distinct experts on rank ", p.rank, ", which owns ",
          own);
  require(p.strategy != "empty_rank" || p.num_experts - own >= p.topk, e_config, "top_k: ", p.topk, " distinct experts off rank ", p.rank,
          ", there are ", p.num_experts - own);
  if (p.strategy != "replay") return;
  require(p.record != nullptr, ErrorCode::argument, "record: null, replay needs one");
  require(p.record->topk == p.topk, ErrorCode::argument, "top_k: ", p.topk, ", the record has ", p.record->topk);
  for (std::int32_t id : p.record->ids) {
    require(id >= kNoExpert && id < p.num_experts, ErrorCode::argument, "record: id ", id, " is out of range [-1, ", p.num_experts, ")");
  }
}

}  // namespace detail

/// The strategies by name. New ones are added by name and then serve every Simulator.
class SimulatorRegistry {
 public:
  static SimulatorRegistry& instance() {
    static SimulatorRegistry registry;
    return registry;
  }
  /// Throws E_ARG if the name is taken.
  void add(std::string const& name, SimulatorStrategy strategy) {
    std::scoped_lock const lock(mutex_);
    detail::require(strategies_.emplace(name, strategy).second, ErrorCode::argument, "routing strategy '", name, "' is already registered");
  }
  /// Throws E_ARG listing the valid names.
  SimulatorStrategy find(std::string const& name) const {
    std::scoped_lock const lock(mutex_);
    auto const at = strategies_.find(name);
    if (at == strategies_.end()) throw Error(ErrorCode::argument, text("routing strategy '", name, "' is unknown; valid: ", joined()));
    return at->second;
  }
  /// "balanced, empty_rank, …"
  std::string names() const {
    std::scoped_lock const lock(mutex_);
    return joined();
  }

 private:
  std::string joined() const {
    std::string all;
    for (auto const& [name, strategy] : strategies_) all += (all.empty() ? "" : ", ") + name;
    return all;
  }
  mutable std::mutex mutex_;
  std::map<std::string, SimulatorStrategy> strategies_{
      {"uniform_random", &detail::simulate_uniform}, {"normal_routing", &detail::simulate_normal},
      {"balanced", &detail::simulate_balanced},      {"zipf", &detail::simulate_zipf},
      {"hot_expert", &detail::simulate_hot_expert},  {"hot_rank", &detail::simulate_hot_rank},
      {"one_rank", &detail::simulate_one_rank},      {"empty_rank", &detail::simulate_empty_rank},
      {"replay", &detail::simulate_replay},
  };
};

/// Overrides the real router. Host space; a device composition copies the ids that it needs.
class Simulator {
 public:
  static constexpr char const* kName = "simulator";
  static constexpr bool kWeightOnInput = false;
  using Params = SimulatorParams;
  /// Throws E_ARG for an unknown strategy (with the valid names) or a bad record, E_CONFIG for impossible sizes.
  explicit Simulator(Params const& p) : p_(p), strategy_(SimulatorRegistry::instance().find(p.strategy)) {
    detail::validate_simulation(p_);
    config_.num_experts = p_.num_experts;
    config_.topk = p_.topk;
  }

  int num_experts() const { return p_.num_experts; }
  int topk() const { return p_.topk; }
  int num_logits() const { return p_.num_experts; }
  int num_slots() const { return p_.topk; }
  /// Moves to another step, or to the rows of another rank.
  void set_position(std::int64_t step, std::int64_t first_row) {
    p_.step = step;
    p_.first_row = first_row;
  }

  /// Reads no logits, but checks their shape. Throws E_ARG; also if replay runs past its record.
  template <class L>
  void select(RouteArgs<L> const& a) const {
    check_args(config_, a);
    detail::require(p_.first_row >= 0, ErrorCode::argument, "first_row: ", p_.first_row, " is below 0");
    std::int64_t const last = p_.first_row + a.num_valid_rows;
    detail::require(p_.strategy != "replay" || last <= p_.record->rows(), ErrorCode::argument, "record: row ", last - 1,
                    " is out of range [0, ", p_.record == nullptr ? 0 : p_.record->rows(), ")");
    for (std::int64_t t = 0; t < a.topk_ids.extent(0); ++t) {
      if (t < a.num_valid_rows) {
        strategy_(p_, p_.first_row + t, row_ptr(a.topk_ids, t), row_ptr(a.topk_weights, t));
      } else {
        pad_row(config_, row_ptr(a.topk_ids, t), row_ptr(a.topk_weights, t));
      }
    }
  }

 private:
  SimulatorParams p_;
  SimulatorStrategy strategy_;
  RouterConfig config_;
};

}  // namespace moe::routing
