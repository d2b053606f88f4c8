// SPDX-License-Identifier: Apache-2.0
// eplb/balancer.hpp: the bookkeeping of load balancing, step by step: counters, load windows of several models, when to rearrange.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/balancedness.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/load_window.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/eplb/propose.hpp"

namespace moe::eplb {

/// Units: engine steps.
struct BalancerOptions {
  int window = 1000;
  int step_interval = 3000;
  int log_interval = 1000;       ///< of the steps that ask for statistics, every log_interval-th is reported
  bool never_rearrange = false;  ///< a static map: counting and reports only
};

/// What the engine reports about a step; equal on every rank except is_dummy.
struct StepInput {
  bool is_dummy = false;    ///< this rank ran a batch without real tokens
  bool is_profile = false;  ///< reserve memory and warm up communicators; nothing is counted
  bool log_stats = false;
  bool rearranging = false;  ///< an asynchronous rearrangement is still under way
};

/// Balance of one model in one step, over all ranks of the group.
struct LoadReport {
  std::string model;
  double balancedness = 1.0;
  std::vector<double> per_layer;    ///< [layers]
  Table<std::int64_t> rank_tokens;  ///< [layers, R]
};

/// What the engine must do after a step.
struct StepOutcome {
  bool rearrange = false;  ///< collective: every rank has it in the same step
  bool profile = false;    ///< rearrange with dummy data and without changing maps
  std::vector<LoadReport> reports;
};

/// Counters and load windows of one rank. Several models (main and draft) have their own maps and load windows and share the step counter.
class Balancer {
 public:
  /// E_CONFIG on an option below 1.
  explicit Balancer(BalancerOptions const& options) : options_(options) {
    auto const positive = [](std::string_view field, int value) {
      if (value < 1) throw Error(ErrorCode::config, text("eplb ", field, " must be greater than 0, is ", value));
    };
    positive("window", options.window);
    positive("step_interval", options.step_interval);
    positive("log_interval", options.log_interval);
    // The first rebalance comes early: after a quarter of the interval.
    step_ = options.step_interval - options.step_interval / 4;
  }

  /// Returns the model's index. E_CONFIG on a name in use or P % num_ranks != 0.
  int add_model(std::string model, ExpertMaps maps, int num_ranks) {
    for (Model const& known : models_) {
      if (known.name == model) throw Error(ErrorCode::config, text("model \"", model, "\" is registered already"));
    }
    check_ranks(maps, num_ranks);
    Table<std::int32_t> pass(maps.num_layers(), maps.num_physical());
    LoadWindow window(options_.window, maps.num_layers(), maps.num_logical());
    models_.push_back({std::move(model), std::move(maps), std::move(pass), std::move(window), num_ranks});
    return static_cast<int>(models_.size()) - 1;
  }

  int num_models() const { return static_cast<int>(models_.size()); }
  /// Steps since the last rearrangement (starts at interval - interval / 4).
  std::int64_t step_count() const { return step_; }
  std::string const& model_name(int model) const { return at(model).name; }
  ExpertMaps const& maps(int model) const { return at(model).maps; }
  LoadWindow const& window(int model) const { return at(model).window; }
  /// [layers, P]: counts of the current step; the routers add to it.
  Table<std::int32_t>& load_pass(int model) { return at(model).pass; }

  /// Ends the counting of one step of one model: the counts enter its load window and are cleared. step() does so for steps that are not
  /// dummies; for an engine that gets the counts of several steps at once. E_ARG on a count below 0.
  void record(int model) {
    Model& m = at(model);
    m.window.record(to_logical(m.pass, m.maps));
    clear(m.pass);
  }

  /// New maps of one model, after all weights have moved. The tables keep their addresses. E_ARG on another shape.
  void commit(int model, ExpertMaps const& maps) {
    for (int layer = 0; layer < at(model).maps.num_layers(); ++layer) commit_layer(model, layer, maps);
  }
  /// The same for one layer: what a rearrangement calls once that layer's weights are in place.
  void commit_layer(int model, int layer, ExpertMaps const& maps) {
    Model& m = at(model);
    if (!m.maps.same_shape(maps)) throw Error(ErrorCode::argument, text("new maps of \"", m.name, "\" have another shape"));
    m.maps.set_layer(layer, maps);
  }
  /// New maps of another topology (a dead rank, scaling): the load window is cleared. E_CONFIG on P % num_ranks != 0, with nothing changed.
  void replace(int model, ExpertMaps maps, int num_ranks) {
    Model& m = at(model);
    check_ranks(maps, num_ranks);
    m.pass = Table<std::int32_t>(maps.num_layers(), maps.num_physical());
    m.window = LoadWindow(options_.window, maps.num_layers(), maps.num_logical());
    m.maps = std::move(maps);
    m.num_ranks = num_ranks;
  }

  /// Ends one engine step; every rank of the group calls it once per step. Collective where it reports. The step counter advances
  /// in every step, dummy ones too, because all ranks must agree on it. E_MISMATCH if the ranks' step counters differ.
  template <BalancingGroup Group>
  StepOutcome step(StepInput const& input, Group& group) {
    StepOutcome out;
    if (input.is_profile) {
      out.profile = true;
      return out;
    }
    if (input.is_dummy) {
      for (Model& m : models_) clear(m.pass);
    }
    if (input.log_stats && log_calls_++ % options_.log_interval == 0) out.reports = report(group);
    if (!input.is_dummy) {
      for (int model = 0; model < num_models(); ++model) record(model);
    }
    ++step_;
    if (step_ >= options_.step_interval && !input.rearranging && !options_.never_rearrange) {
      step_ = 0;
      out.rearrange = true;
    }
    return out;
  }

  /// [layers, E]: load window sums of the whole group. Collective. E_MISMATCH if step counters or maps differ between ranks.
  template <BalancingGroup Group>
  Table<double> global_load(int model, Group& group) {
    check_agreement(group);
    Table<std::int64_t> sums = at(model).window.sums();
    group.all_reduce_sum(std::span<std::int64_t>(sums.flat()));
    return to_load(sums);
  }

  /// The next maps of one model, from the load of the whole group. Collective; equal on every rank.
  template <BalancingGroup Group>
  Proposal propose(int model, Topology const& topology, Group& group, ProposeOptions const& options = {}) {
    Table<double> const load = global_load(model, group);
    return eplb::propose(at(model).maps, load, topology, options);
  }

 private:
  struct Model {
    std::string name;
    ExpertMaps maps;
    Table<std::int32_t> pass;
    LoadWindow window;
    int num_ranks;
  };

  Model const& at(int model) const {
    if (model < 0 || model >= num_models()) {
      throw Error(ErrorCode::argument, text("model ", model, " is out of range [0, ", num_models(), ")"));
    }
    return models_[static_cast<std::size_t>(model)];
  }
  Model& at(int model) { return const_cast<Model&>(std::as_const(*this).at(model)); }
  static void check_ranks(ExpertMaps const& maps, int num_ranks) {
    if (num_ranks < 1 || maps.num_physical() % num_ranks != 0) {
      throw Error(ErrorCode::config, text("P must be divisible by ep_size: P = ", maps.num_physical(), ", ep_size = ", num_ranks));
    }
  }
  static void clear(Table<std::int32_t>& table) { std::fill(table.flat().begin(), table.flat().end(), 0); }

  template <class Group>
  void check_agreement(Group& group) {
    auto const steps = group.all_gather(static_cast<std::uint64_t>(step_));
    for (std::size_t r = 1; r < steps.size(); ++r) {
      if (steps[r] != steps[0]) {
        throw Error(ErrorCode::mismatch,
                    text("ranks disagree about the EPLB step: rank 0 has ", steps[0], ", rank ", r, " has ", steps[r]));
      }
    }
    for (Model const& m : models_) check_same_maps(group.all_gather(m.maps.hash()));
  }

  template <class Group>
  std::vector<LoadReport> report(Group& group) {
    check_agreement(group);
    std::vector<LoadReport> out;
    for (Model const& m : models_) {
      // Tokens per owner rank: this rank counted its own tokens on all expert slots, so the sum over the group is the whole step.
      LoadReport entry{m.name, 1.0, {}, Table<std::int64_t>(m.maps.num_layers(), m.num_ranks)};
      int const slots_per_rank = m.maps.num_physical() / m.num_ranks;
      for (int layer = 0; layer < m.pass.rows(); ++layer) {
        for (int slot = 0; slot < m.pass.cols(); ++slot) entry.rank_tokens(layer, slot / slots_per_rank) += m.pass(layer, slot);
      }
      group.all_reduce_sum(std::span<std::int64_t>(entry.rank_tokens.flat()));
      Table<double> const tokens = to_load(entry.rank_tokens);
      for (int layer = 0; layer < tokens.rows(); ++layer) entry.per_layer.push_back(balancedness(tokens.row(layer)));
      entry.balancedness = balancedness(tokens);
      out.push_back(std::move(entry));
    }
    return out;
  }

  BalancerOptions options_;
  std::int64_t step_;  // not reset under never_rearrange
  std::int64_t log_calls_ = 0;
  std::vector<Model> models_;
};

}  // namespace moe::eplb
