// SPDX-License-Identifier: Apache-2.0
// eplb/runtime_balancer.hpp: load balancing while a model serves: counts, load window, plan, weights and maps of one model, step by step.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/async_rearrangement.hpp"
#include "moe/eplb/balancer.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/hold_forwards.hpp"
#include "moe/eplb/map_tables.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/eplb/propose.hpp"
#include "moe/eplb/rearrange.hpp"
#include "moe/eplb/step_loads.hpp"
#include "moe/eplb/weight_mover.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/routing/expert_mapping.hpp"

namespace moe::eplb {

/// How weights move once a step has triggered a rearrangement.
enum class MoveMode : std::uint8_t {
  pause,       ///< all layers inside that step
  stepwise,    ///< one layer inside each of the next steps
  background,  ///< by a thread, while steps go on; a step only exchanges whether a layer is ready, and commits it
};
constexpr std::string_view name(MoveMode mode) {
  constexpr std::string_view names[] = {"pause", "stepwise", "background"};
  return names[static_cast<int>(mode)];
}

/// What one step did; equal on every rank.
struct RuntimeStep {
  bool triggered = false;             ///< a rearrangement began
  std::vector<int> committed_layers;  ///< their new weights and maps are in use from now on
  bool finished = false;              ///< the rearrangement is complete
  std::vector<LoadReport> reports;    ///< CUDA space: of the step before
};

/// The experts of one model under load. The layers route through its tables and count into them, step() does the rest:
///
///     RuntimeBalancer balancer(weights_comm, group, tensors, {.maps = maps});        // collective; weights are loaded to `maps`
///     Layer layer(tokens_comm, store.view(), {…, .placement = balancer.placement(l), .mapping = balancer.mapping(l),
///                                             .load = balancer.load(l)});            // a ModularKernel, or a Runner's params.layer
///     balancer.attach(l, layer);
///     for (;;) { …every layer's forward on `stream`…; balancer.step({}, stream); }
///
/// Comm moves weights: a communicator used for nothing else, whose space is the layers'. Group: the ranks' agreement, over another one.
/// A layer's weights and map change together, between two steps, in the same step on all ranks or on none, and the layers attached to it
/// are told (weights_changed). Until then the old ones serve, so every output is right; a forward that begins on another thread while they
/// change is E_STATE. Immovable: layers hold the addresses of its tables.
template <class Comm, BalancingGroup Group>
class RuntimeBalancer {
  static_assert(sizeof(Met<NeedsCommunicator<Comm>>) == 1);

 public:
  using Space = typename moe::detail::SpaceOf<Comm>::type;
  using StreamType = Stream<Space>;
  struct Params {
    ExpertMaps maps;             ///< in use at the start
    std::string model = "main";  ///< of the reports
    BalancerOptions options{};
    Topology topology{};  ///< groups and nodes; the numbers of physical experts and ranks are those of the maps and of Comm
    ProposeOptions propose{};
    MoveMode mode = MoveMode::background;
    routing::ReplicaPolicy policy = routing::ReplicaPolicy::token;
    int ranks_per_node = 1;  ///< for ReplicaPolicy::node_first
    typename WeightMover<Comm>::Params mover{};
    /// Milliseconds until a layer must be ready on all ranks, and until a step's counts must be on the host.
    std::int64_t timeout_ms = comm::kDefaultTimeoutMs;
    std::function<void()> on_thread_start{};  ///< background: see AsyncRearrangement
    /// CUDA space, background: a stream that nothing else uses, of another priority than those of the forwards, or the device may run
    /// the worker's collectives behind a forward's kernels that wait for a peer, and a peer's the other way round. While a rearrangement
    /// is pending, no thread waits for the whole device (cudaDeviceSynchronize, the legacy default stream) between forwards: that waits
    /// for the worker's collectives too, and they may need a forward that another rank has begun.
    StreamType worker_stream{};
  };

  /// Collective over both groups. weights[l]: the arrays of layer l, borrowed (expert_tensors(store)), loaded to the maps. E_CONFIG on
  /// options or P % R; E_ARG and E_MISMATCH as WeightMover; E_MISMATCH if ranks have other maps. If one rank fails, all throw.
  /// E_UNSUPPORTED in the background if Comm cannot be used beside another thread's (MPI started below MPI_THREAD_MULTIPLE).
  RuntimeBalancer(Comm& weights_comm, Group& group, std::vector<LayerTensors> weights, Params const& p)
      : group_(group),
        rank_(weights_comm.rank()),
        num_ranks_(weights_comm.size()),
        params_(p),
        balancer_(agreed("construction of the load balancer", [&] { return bookkeeping(p, weights.size()); })),
        tables_(p.maps),
        loads_(tables_, p.timeout_ms),
        mover_(weights_comm, std::move(weights), p.maps.num_physical() / num_ranks_, p.mover),
        async_(mover_, {.background = p.mode == MoveMode::background, .timeout_ms = p.timeout_ms, .on_thread_start = p.on_thread_start},
               p.worker_stream),
        users_(static_cast<std::size_t>(p.maps.num_layers())),
        forwards_(users_.size()) {
    params_.topology.num_physical = p.maps.num_physical();
    params_.topology.num_ranks = num_ranks_;
    check_same_maps(group_.all_gather(p.maps.hash()));
  }
  RuntimeBalancer(RuntimeBalancer const&) = delete;
  RuntimeBalancer& operator=(RuntimeBalancer const&) = delete;

  /// What a layer takes as .placement, .mapping and .load. E_ARG on a layer out of range.
  ExpertPlacement placement(int layer) const {
    return ExpertPlacement::from_physical_to_logical(maps().physical_to_logical().row(checked(layer)), maps().num_logical(), num_ranks_);
  }
  routing::ExpertMapping mapping(int layer) const {
    return tables_.mapping(layer, rank_, num_ranks_, params_.policy, params_.ranks_per_node);
  }
  routing::LoadRecorder load(int layer) { return {.load_counter = tables_.load_counter(layer)}; }

  /// A ModularKernel or a Runner over this layer's weights, which must outlive the last step(). Each layer needs one; several may share
  /// its weights. An object of the user's own has weights_changed(stream), and weight_move() if its forwards are to be refused meanwhile.
  /// E_ARG on a layer out of range.
  template <class LayerOrRunner>
  void attach(int layer, LayerOrRunner& user) {
    auto const l = static_cast<std::size_t>(checked(layer));
    users_[l].push_back([&user](StreamType stream) { user.weights_changed(stream); });
    if constexpr (requires { user.weight_move(); }) forwards_[l].push_back(&user.weight_move());
  }

  /// Ends one engine step: every rank calls it once, after the step's forwards were enqueued on `stream`. Collective where it reports,
  /// triggers, and while a rearrangement is pending. `rearranging` of the input is not read.
  /// A failure to move weights is thrown in the same step on all ranks (E_TIMEOUT, E_PEER naming the rank, …) and ends balancing: layers
  /// that were committed keep their new maps, the others their old ones, and steps and forwards go on. E_STATE if a layer has no user.
  /// An error of a layer's weights_changed() is thrown on its rank, which must then make no forward.
  RuntimeStep step(StepInput input = {}, StreamType stream = {}) {
    check_users();
    RuntimeStep out;
    if (input.is_profile) {
      mover_.profile(stream);
      return out;
    }
    loads_.end_step(input.is_dummy, stream);
    input.is_dummy = !loads_.take(balancer_.load_pass(0));
    input.rearranging = pending() || disabled_;
    StepOutcome outcome = balancer_.step(input, group_);
    out.reports = std::move(outcome.reports);
    out.triggered = outcome.rearrange;
    if (outcome.rearrange) begin(out, stream);
    if (async_.pending()) advance(out, stream);
    return out;
  }

  /// Collective. Moves to given maps at once: a static placement, or maps of a load that was measured before. No forward may run
  /// meanwhile: one of a layer that is moving is E_STATE. Throws as rearrange(), which ends balancing; E_STATE while a rearrangement is
  /// pending.
  RearrangeReport move_to(ExpertMaps const& next, StreamType stream = {}) {
    check_users();
    if (pending()) throw Error(ErrorCode::state, "a rearrangement is pending already");
    return guarded([&] {
      return rearrange(mover_, ExpertMaps(maps()), next, group_, [&](int layer) { commit(layer, next, stream); }, stream, hold());
    });
  }

  ExpertMaps const& maps() const { return balancer_.maps(0); }
  LoadWindow const& window() const { return balancer_.window(0); }
  /// [layers, E]: load window sums of the whole group. Collective.
  Table<double> global_load() { return balancer_.global_load(0, group_); }
  /// A rearrangement is under way.
  bool pending() const { return async_.pending(); }
  /// A failure ended balancing.
  bool disabled() const { return disabled_; }
  MoveStats const& stats() const { return mover_.stats(); }
  /// Bytes beside the weights: one layer's experts of this rank.
  std::int64_t buffer_bytes() const { return mover_.buffer_bytes(); }
  /// After an error that ends the group, in a forward or a step, and before any other call of CUDA: ends the weights' communicator, where a
  /// message may wait for a rank that is gone, then stop(). Freeing memory would wait for that message. Not collective.
  void end() {
    mover_.end();
    stop();
  }
  /// Ends a rearrangement that is pending; see AsyncRearrangement::stop(). Not collective.
  void stop() { async_.stop(); }

 private:
  template <class Make>
  auto agreed(std::string_view what, Make&& make) -> decltype(make()) {
    std::optional<decltype(make())> made;
    std::exception_ptr failed;
    try {
      made.emplace(make());
    } catch (...) {
      failed = std::current_exception();
    }
    succeed_together(group_, failed, what);
    return std::move(*made);
  }
  Balancer bookkeeping(Params const& p, std::size_t layers) const {
    if (p.maps.num_layers() < 1 || static_cast<std::size_t>(p.maps.num_layers()) != layers) {
      throw Error(ErrorCode::argument, text("expert maps of ", p.maps.num_layers(), " layers for the weights of ", layers));
    }
    if (group_.size() != num_ranks_) {
      throw Error(ErrorCode::argument, text("the group has ", group_.size(), " ranks, the communicator of the weights ", num_ranks_));
    }
    Balancer balancer(p.options);
    balancer.add_model(p.model, p.maps, num_ranks_);
    return balancer;
  }
  int checked(int layer) const {
    if (layer < 0 || layer >= maps().num_layers()) {
      throw Error(ErrorCode::argument, text("layer ", layer, " is out of range [0, ", maps().num_layers(), ")"));
    }
    return layer;
  }
  void check_users() const {
    for (std::size_t l = 0; l < users_.size(); ++l) {
      if (users_[l].empty()) throw Error(ErrorCode::state, text("load balancing: no layer is attached to the weights of layer ", l));
    }
  }

  void begin(RuntimeStep& out, StreamType stream) {
    guarded([&] {
      Table<double> load = balancer_.global_load(0, group_);
      auto plan = [maps = maps(), load = std::move(load), topology = params_.topology, options = params_.propose] {
        return propose(maps, load, topology, options).maps;
      };
      if (params_.mode != MoveMode::pause) {
        async_.begin(maps(), std::move(plan));
        return;
      }
      ExpertMaps const next = plan();
      rearrange(
          mover_, ExpertMaps(maps()), next, group_,
          [&](int layer) {
            commit(layer, next, stream);
            out.committed_layers.push_back(layer);
          },
          stream, hold());
      out.finished = true;
    });
  }
  void advance(RuntimeStep& out, StreamType stream) {
    guarded([&] {
      AsyncStep const done = async_.step(group_, [&](int layer, ExpertMaps const& next) { commit(layer, next, stream); }, stream, hold());
      if (done.committed_layer >= 0) out.committed_layers.push_back(done.committed_layer);
      out.finished = done.finished;
    });
  }
  auto hold() {
    return [this](int layer) { return HoldForwards(layer, forwards_[static_cast<std::size_t>(layer)]); };
  }
  template <class Call>
  auto guarded(Call&& call) {
    try {
      return call();
    } catch (...) {
      disabled_ = true;
      throw;
    }
  }
  /// The layer's weights are in place. Counts that were taken under its old map enter the load window first.
  void commit(int layer, ExpertMaps const& next, StreamType stream) {
    while (loads_.take(balancer_.load_pass(0), 0)) balancer_.record(0);
    balancer_.commit_layer(0, layer, next);
    tables_.publish(layer, next, stream);
    for (auto const& user : users_[static_cast<std::size_t>(layer)]) user(stream);
  }

  Group& group_;
  int rank_;
  int num_ranks_;
  Params params_;
  Balancer balancer_;
  MapTables<Space> tables_;
  StepLoads<Space> loads_;
  WeightMover<Comm> mover_;
  AsyncRearrangement<Comm> async_;
  std::vector<std::vector<std::function<void(StreamType)>>> users_;  // [layers]
  std::vector<std::vector<WeightMove*>> forwards_;                   // [layers] of the users
  bool disabled_ = false;
};

}  // namespace moe::eplb
