// SPDX-License-Identifier: Apache-2.0
// eplb/propose.hpp: from the maps in use and a measured load to the next maps: rebalance, then keep what need not move.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/balancedness.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/eplb/rebalance.hpp"

namespace moe::eplb {

/// One layer as it is edited: which logical expert each physical expert is, and which replica of it. Both [P].
struct LayerSlots {
  std::vector<std::int32_t> expert;
  std::vector<std::int32_t> replica;
  bool operator==(LayerSlots const&) const = default;
};

/// Reorders the expert slots inside each rank so that an expert held before and after keeps its physical id; the others take the free ones
/// in order. Balance does not change, fewer weights move. Replica indices travel with their expert. old_expert [P], -1 allowed.
inline LayerSlots preserve_slots(std::span<std::int32_t const> old_expert, LayerSlots const& next, int num_ranks) {
  std::size_t const slots_per_rank = next.expert.size() / static_cast<std::size_t>(num_ranks);
  LayerSlots out{std::vector<std::int32_t>(next.expert.size(), kEmptySlot), std::vector<std::int32_t>(next.expert.size(), -1)};
  std::vector<char> placed(slots_per_rank);
  std::vector<char> taken(slots_per_rank);
  for (std::size_t first = 0; first < next.expert.size(); first += slots_per_rank) {
    std::fill(placed.begin(), placed.end(), char{0});
    std::fill(taken.begin(), taken.end(), char{0});
    auto const put = [&](std::size_t from, std::size_t to) {
      out.expert[first + to] = next.expert[first + from];
      out.replica[first + to] = next.replica[first + from];
      placed[from] = taken[to] = 1;
    };
    for (std::size_t to = 0; to < slots_per_rank; ++to) {
      for (std::size_t from = 0; from < slots_per_rank && !taken[to]; ++from) {
        if (!placed[from] && next.expert[first + from] == old_expert[first + to] && old_expert[first + to] != kEmptySlot) put(from, to);
      }
    }
    for (std::size_t from = 0, to = 0; from < slots_per_rank; ++from) {
      if (placed[from]) continue;
      while (taken[to]) ++to;
      put(from, to);
    }
  }
  return out;
}

/// Moves second replicas of one expert off a rank where the balance allows no better use of them: each is exchanged with a physical expert
/// of another rank of the same node, chosen so that the larger of the two rank loads becomes least (equals: lowest physical id). A rank
/// then holds an expert twice only if no exchange removes it. load [E]; count [E] replicas; num_nodes divides num_ranks.
inline void spread_replicas(LayerSlots& layer, std::span<double const> load, std::span<std::int32_t const> count, int num_ranks,
                            int num_nodes) {
  auto const num_slots = static_cast<int>(layer.expert.size());
  int const slots_per_rank = num_slots / num_ranks;
  int const slots_per_node = num_slots / num_nodes;
  auto const expert = [&](int slot) { return layer.expert[static_cast<std::size_t>(slot)]; };
  auto const weight = [&](int slot) {
    auto const e = static_cast<std::size_t>(expert(slot));
    return load[e] / count[e];
  };
  auto const holds = [&](int rank, std::int32_t e) {
    auto const first = layer.expert.begin() + rank * slots_per_rank;
    return std::count(first, first + slots_per_rank, e);
  };
  std::vector<double> rank_load(static_cast<std::size_t>(num_ranks), 0.0);
  for (int s = 0; s < num_slots; ++s) rank_load[static_cast<std::size_t>(s / slots_per_rank)] += weight(s);

  for (int s = 0; s < num_slots; ++s) {
    int const rank = s / slots_per_rank;
    if (holds(rank, expert(s)) < 2) continue;
    int best = -1;
    double best_load = std::numeric_limits<double>::infinity();
    int const node_first = s / slots_per_node * slots_per_node;
    for (int t = node_first; t < node_first + slots_per_node; ++t) {
      int const other = t / slots_per_rank;
      if (other == rank || holds(other, expert(s)) > 0 || holds(rank, expert(t)) > 0) continue;
      double const shift = weight(s) - weight(t);
      double const larger = std::max(rank_load[static_cast<std::size_t>(rank)] - shift, rank_load[static_cast<std::size_t>(other)] + shift);
      if (larger < best_load) {
        best = t;
        best_load = larger;
      }
    }
    if (best < 0) continue;
    double const shift = weight(s) - weight(best);
    rank_load[static_cast<std::size_t>(rank)] -= shift;
    rank_load[static_cast<std::size_t>(best / slots_per_rank)] += shift;
    std::swap(layer.expert[static_cast<std::size_t>(s)], layer.expert[static_cast<std::size_t>(best)]);
    std::swap(layer.replica[static_cast<std::size_t>(s)], layer.replica[static_cast<std::size_t>(best)]);
  }
}

/// How the next maps are derived.
struct ProposeOptions {
  Arithmetic arithmetic = Arithmetic::float64;
  bool keep_slots = true;        ///< preserve_slots
  bool spread_replicas = false;  ///< no two replicas of one expert on a rank where an exchange avoids it
  double min_gain = 0.0;         ///< a layer keeps its map if its predicted balancedness would rise by less
};

/// The maps to move to, and the predicted gain.
struct Proposal {
  ExpertMaps maps;
  std::vector<std::int32_t> changed_layers;  ///< ascending
  double balancedness_before = 1.0;          ///< predicted for this load under the maps in use
  double balancedness_after = 1.0;
  std::int64_t moved_slots = 0;  ///< expert slots whose expert changes
};

/// A pure function: equal on every rank. load [layers, E], tokens of a whole load window over the whole group. Layers without load keep
/// their map. E_ARG as rebalance(), or if load and maps disagree in shape.
inline Proposal propose(ExpertMaps const& current, Table<double> const& load, Topology topology, ProposeOptions const& options = {}) {
  if (load.rows() != current.num_layers() || load.cols() != current.num_logical()) {
    throw Error(ErrorCode::argument, text("load is [", load.rows(), ", ", load.cols(), "], the maps are of [", current.num_layers(), ", ",
                                          current.num_logical(), "]"));
  }
  topology.num_physical = current.num_physical();
  Topology const used = effective_topology(topology, load.cols()).first;
  ExpertMaps const fresh = rebalance(load, topology, options.arithmetic);
  Table<std::int32_t> const fresh_replica = fresh.replica_index();
  Table<std::int32_t> next = current.physical_to_logical();
  Table<std::int32_t> next_replica = current.replica_index();
  Proposal out;
  for (int layer = 0; layer < load.rows(); ++layer) {
    auto const layer_load = load.row(layer);
    if (std::all_of(layer_load.begin(), layer_load.end(), [](double w) { return w == 0; })) continue;
    auto const old_expert = current.physical_to_logical().row(layer);
    LayerSlots slots{{fresh.physical_to_logical().row(layer).begin(), fresh.physical_to_logical().row(layer).end()},
                     {fresh_replica.row(layer).begin(), fresh_replica.row(layer).end()}};
    if (options.spread_replicas) {
      spread_replicas(slots, layer_load, fresh.replica_count().row(layer), used.num_ranks, used.num_nodes);
    }
    if (options.keep_slots) slots = preserve_slots(old_expert, slots, used.num_ranks);
    if (std::equal(slots.expert.begin(), slots.expert.end(), old_expert.begin())) continue;
    double const before = balancedness(rank_loads(current, layer, layer_load, used.num_ranks));
    double const after = balancedness(rank_loads(slots.expert, fresh.replica_count().row(layer), layer_load, used.num_ranks));
    if (after - before < options.min_gain) continue;
    out.changed_layers.push_back(layer);
    for (int slot = 0; slot < current.num_physical(); ++slot) {
      auto const i = static_cast<std::size_t>(slot);
      out.moved_slots += slots.expert[i] != old_expert[i] ? 1 : 0;
      next(layer, slot) = slots.expert[i];
      next_replica(layer, slot) = slots.replica[i];
    }
  }
  bool const empty = std::find(next.flat().begin(), next.flat().end(), kEmptySlot) != next.flat().end();
  out.maps = ExpertMaps(std::move(next), next_replica, current.num_logical(), empty ? EmptySlots::allowed : EmptySlots::forbidden);
  out.balancedness_before = balancedness(rank_loads(current, load, used.num_ranks));
  out.balancedness_after = balancedness(rank_loads(out.maps, load, used.num_ranks));
  return out;
}

}  // namespace moe::eplb
