// SPDX-License-Identifier: Apache-2.0
// eplb/elastic.hpp: growing and shrinking the EP group: sizes, rank maps, the maps to move between, and the order of states.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/eplb/rebalance.hpp"
#include "moe/eplb/transfer_plan.hpp"

namespace moe::eplb {

/// Quantities after scaling; expert slots per rank L stay. Captured graphs are invalid if num_redundant changes (the shape of
/// logical_to_physical depends on it).
struct ElasticSizes {
  int num_ranks;      ///< R'
  int num_physical;   ///< P' = L · R'
  int num_redundant;  ///< X' = P' - E
  bool operator==(ElasticSizes const&) const = default;
};

/// E_CONFIG on sizes below 1, or "not enough expert slots" naming the fewest ranks that hold all experts.
inline ElasticSizes elastic_sizes(int num_logical, int slots_per_rank, int new_num_ranks) {
  if (num_logical < 1 || slots_per_rank < 1 || new_num_ranks < 1) {
    throw Error(ErrorCode::config,
                text("scaling needs experts, expert slots and ranks, has ", num_logical, ", ", slots_per_rank, " and ", new_num_ranks));
  }
  std::int64_t const physical = std::int64_t{slots_per_rank} * new_num_ranks;
  if (physical < num_logical) {
    throw Error(ErrorCode::config, text("not enough expert slots: ", new_num_ranks, " ranks of ", slots_per_rank, " expert slots for ",
                                        num_logical, " experts: need >= ", (num_logical + slots_per_rank - 1) / slots_per_rank, " ranks"));
  }
  return {new_num_ranks, static_cast<int>(physical), static_cast<int>(physical) - num_logical};
}

/// Scaling by one rank map. During the move both topologies share one rank numbering: all old ranks, then the joining ones.
struct ElasticPlan {
  ElasticSizes sizes;
  std::vector<int> rank_map;           ///< [R]: new rank of each old rank, -1 if it leaves
  std::vector<int> union_rank_of_new;  ///< [R']: rank of each new rank in the space of the move
  std::vector<int> parameter_source;   ///< [R']: old rank that sends non-expert weights to a joining rank, -1 for others
  int num_union_ranks;
  Table<std::int32_t> old_map;  ///< [layers, union ranks · L]: -1 on joining ranks, which only receive
  Table<std::int32_t> new_map;  ///< [layers, union ranks · L]: -1 on leaving ranks, which only send
  ExpertMaps maps;              ///< [layers, P'], in the new ranks' numbering: what is used after the switch

  /// One rank's part in one layer's move; `union_rank` counts old ranks, then joining ones.
  RankPlan transfer(int layer, int union_rank) const {
    return plan_rank(old_map.row(layer), new_map.row(layer), maps.num_logical(), num_union_ranks, union_rank);
  }
};

/// Plans scaling to the ranks that remain (old ranks less `leaving`) plus num_joining new ones. load [layers, E].
/// E_CONFIG as elastic_sizes; E_ARG on a leaving rank outside [0, R) or named twice, and as rebalance().
inline ElasticPlan plan_elastic(ExpertMaps const& current, int num_ranks, std::span<int const> leaving, int num_joining,
                                Table<double> const& load, Topology topology = {}) {
  if (num_ranks < 1 || current.num_physical() % num_ranks != 0 || num_joining < 0) {
    throw Error(ErrorCode::argument,
                text("P = ", current.num_physical(), " expert slots on ", num_ranks, " ranks, ", num_joining, " joining"));
  }
  if (load.rows() != current.num_layers() || load.cols() != current.num_logical()) {
    throw Error(ErrorCode::argument, text("load is [", load.rows(), ", ", load.cols(), "], the maps are of [", current.num_layers(), ", ",
                                          current.num_logical(), "]"));
  }
  int const slots_per_rank = current.num_physical() / num_ranks;
  std::vector<int> rank_map(static_cast<std::size_t>(num_ranks), 0);
  for (int rank : leaving) {
    if (rank < 0 || rank >= num_ranks || rank_map[static_cast<std::size_t>(rank)] == -1) {
      throw Error(ErrorCode::argument, text("leaving rank ", rank, " is out of range [0, ", num_ranks, ") or named twice"));
    }
    rank_map[static_cast<std::size_t>(rank)] = -1;
  }
  std::vector<int> union_rank_of_new;
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (rank_map[static_cast<std::size_t>(rank)] == -1) continue;
    rank_map[static_cast<std::size_t>(rank)] = static_cast<int>(union_rank_of_new.size());
    union_rank_of_new.push_back(rank);
  }
  int const remaining = static_cast<int>(union_rank_of_new.size());
  std::vector<int> parameter_source(union_rank_of_new.size(), -1);
  for (int i = 0; i < num_joining; ++i) {
    parameter_source.push_back(remaining > 0 ? union_rank_of_new[static_cast<std::size_t>(i % remaining)] : -1);
    union_rank_of_new.push_back(num_ranks + i);
  }
  ElasticSizes const sizes = elastic_sizes(current.num_logical(), slots_per_rank, remaining + num_joining);
  if (remaining == 0) throw Error(ErrorCode::config, "scaling needs a rank that stays, to send the weights");
  topology.num_physical = sizes.num_physical;
  topology.num_ranks = sizes.num_ranks;

  int const num_union = num_ranks + num_joining;
  ElasticPlan plan{sizes,
                   std::move(rank_map),
                   std::move(union_rank_of_new),
                   std::move(parameter_source),
                   num_union,
                   Table<std::int32_t>(current.num_layers(), num_union * slots_per_rank, kEmptySlot),
                   Table<std::int32_t>(current.num_layers(), num_union * slots_per_rank, kEmptySlot),
                   rebalance(load, topology)};
  for (int layer = 0; layer < current.num_layers(); ++layer) {
    auto const old_row = current.physical_to_logical().row(layer);
    std::copy(old_row.begin(), old_row.end(), plan.old_map.row(layer).begin());
    auto const new_row = plan.maps.physical_to_logical().row(layer);
    for (int r = 0; r < sizes.num_ranks; ++r) {
      auto const first = new_row.begin() + r * slots_per_rank;
      int const at = plan.union_rank_of_new[static_cast<std::size_t>(r)] * slots_per_rank;
      std::copy(first, first + slots_per_rank, plan.new_map.row(layer).begin() + at);
    }
  }
  return plan;
}

/// Part of a rank in one scaling operation.
enum class ElasticRole : std::uint8_t { existing, joining, leaving };
/// States in the order of each role: existing idle → preparing → ready → committed → rebalancing → complete; joining init →
/// prepared → committed → rebalancing → complete; leaving idle → ready → drained → exited.
enum class ElasticState : std::uint8_t { idle, init, preparing, prepared, ready, committed, rebalancing, complete, drained, exited };
constexpr std::string_view name(ElasticState state) {
  constexpr std::string_view names[] = {"idle",      "init",        "preparing", "prepared", "ready",
                                        "committed", "rebalancing", "complete",  "drained",  "exited"};
  return names[static_cast<int>(state)];
}

/// The state of one rank in a scaling operation. Forwards are allowed only in states that use one complete topology.
class ElasticOperation {
 public:
  explicit ElasticOperation(ElasticRole role = ElasticRole::existing) : role_(role), state_(order().front()) {}

  ElasticRole role() const { return role_; }
  ElasticState state() const { return state_; }
  /// The operation has begun and has not ended.
  bool in_progress() const { return state_ != order().front() && state_ != order().back(); }
  /// No forward may run between commit and complete.
  bool forward_allowed() const {
    return role_ == ElasticRole::joining ? state_ == ElasticState::complete
                                         : state_ != ElasticState::committed && state_ != ElasticState::rebalancing &&
                                               state_ != ElasticState::drained && state_ != ElasticState::exited;
  }

  /// Starts an operation. E_STATE "scaling in progress" if one is under way.
  void begin(ElasticRole role) {
    if (in_progress()) throw Error(ErrorCode::state, text("scaling in progress: state is ", name(state_)));
    role_ = role;
    state_ = order().front();
    advance(order()[1]);
  }
  /// E_STATE unless `next` follows the present state.
  void advance(ElasticState next) {
    auto const states = order();
    auto const here = std::find(states.begin(), states.end(), state_);
    if (here + 1 == states.end() || *(here + 1) != next) {
      throw Error(ErrorCode::state, text("scaling cannot go from ", name(state_), " to ", name(next)));
    }
    state_ = next;
  }
  /// Back to the old groups after a failure. E_STATE once committed (or drained): the group is lost then.
  void roll_back() {
    if (state_ == ElasticState::committed || state_ == ElasticState::rebalancing || state_ == ElasticState::drained ||
        state_ == ElasticState::exited) {
      throw Error(ErrorCode::state, text("scaling failed in state ", name(state_), ": the group cannot go on"));
    }
    state_ = order().front();
  }

 private:
  std::span<ElasticState const> order() const {
    using S = ElasticState;
    static constexpr S existing[] = {S::idle, S::preparing, S::ready, S::committed, S::rebalancing, S::complete};
    static constexpr S joining[] = {S::init, S::prepared, S::committed, S::rebalancing, S::complete};
    static constexpr S leaving[] = {S::idle, S::ready, S::drained, S::exited};
    switch (role_) {
      case ElasticRole::joining: return joining;
      case ElasticRole::leaving: return leaving;
      default: return existing;
    }
  }

  ElasticRole role_;
  ElasticState state_;
};

}  // namespace moe::eplb
