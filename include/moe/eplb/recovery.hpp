// SPDX-License-Identifier: Apache-2.0
// eplb/recovery.hpp: new maps when ranks die: every expert gets an expert slot on a live rank again, at the cost of a replica of another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/maps.hpp"

namespace moe::eplb {

/// An expert that no live rank holds: the owner of the expert slot must load it from the checkpoint.
struct Reload {
  std::int32_t layer;
  std::int32_t expert;
  std::int32_t slot;
  bool operator==(Reload const&) const = default;
};

/// Maps of the survivors: expert slots of dead ranks are empty. Load windows are cleared, and exchanges mask the dead ranks.
struct Recovery {
  ExpertMaps maps;
  std::vector<Reload> reloads;  ///< by layer, then expert; empty if every expert had a replica on a live rank
};

/// EP ranks that die with data-parallel rank d: {d · TP · PCP + i}.
inline std::vector<int> ep_ranks_of_dp_rank(int dp_rank, int tp_size, int pcp_size) {
  std::vector<int> ranks(static_cast<std::size_t>(tp_size) * static_cast<std::size_t>(pcp_size));
  std::iota(ranks.begin(), ranks.end(), dp_rank * tp_size * pcp_size);
  return ranks;
}

namespace detail {

inline void check_dead_ranks(ExpertMaps const& maps, std::span<int const> dead_ranks, int num_ranks) {
  if (num_ranks < 1 || maps.num_physical() % num_ranks != 0) {
    throw Error(ErrorCode::argument, text("P = ", maps.num_physical(), " expert slots do not divide over ", num_ranks, " ranks"));
  }
  for (int rank : dead_ranks) {
    if (rank < 0 || rank >= num_ranks) throw Error(ErrorCode::argument, text("dead rank ", rank, " is out of range [0, ", num_ranks, ")"));
  }
}

/// One layer: each expert without an expert slot takes over a slot of an expert that has several. slots: of num_ranks ranks, kEmptySlot on
/// dead ones. E_PEER if there are too few such slots.
inline void assign_missing(int layer, std::span<std::int32_t> slots, int num_logical, int num_ranks, std::vector<Reload>& reloads,
                           std::string const& after) {
  auto const slots_per_rank = static_cast<std::ptrdiff_t>(slots.size()) / num_ranks;
  std::vector<int> live(static_cast<std::size_t>(num_logical), 0);
  for (std::int32_t e : slots) {
    if (e != kEmptySlot) ++live[static_cast<std::size_t>(e)];
  }
  int turn = 0;  // the live rank that is tried first
  for (std::int32_t missing = 0; missing < num_logical; ++missing) {
    if (live[static_cast<std::size_t>(missing)] > 0) continue;
    auto const donor = std::max_element(live.begin(), live.end());
    if (*donor < 2) {
      auto const without = std::count(live.begin(), live.end(), 0);
      throw Error(ErrorCode::peer, text("insufficient redundancy: ", without, " experts have no expert slot in layer ", layer, after));
    }
    auto const spare = static_cast<std::int32_t>(donor - live.begin());
    for (int asked = 0; asked < num_ranks; ++asked) {
      int const rank = (turn + asked) % num_ranks;
      auto const first = slots.begin() + rank * slots_per_rank;
      auto const found = std::find(first, first + slots_per_rank, spare);
      if (found == first + slots_per_rank) continue;
      *found = missing;
      --*donor;
      ++live[static_cast<std::size_t>(missing)];
      reloads.push_back({layer, missing, static_cast<std::int32_t>(found - slots.begin())});
      turn = (rank + 1) % num_ranks;
      break;
    }
  }
}

}  // namespace detail

/// Remaps around the dead ranks. Each missing expert, in ascending order, takes an expert slot of the expert that then has the most live
/// replicas (equals: lowest id) and more than one; the expert slots come from the live ranks in turn. A pure function, equal on every
/// survivor. E_ARG on a rank outside [0, R) or P % R != 0. E_PEER "insufficient redundancy" if no expert slot can be spared; nothing is
/// changed then.
inline Recovery recover(ExpertMaps const& maps, std::span<int const> dead_ranks, int num_ranks) {
  detail::check_dead_ranks(maps, dead_ranks, num_ranks);
  std::set<int> const dead(dead_ranks.begin(), dead_ranks.end());
  int const slots_per_rank = maps.num_physical() / num_ranks;
  Table<std::int32_t> next = maps.physical_to_logical();
  std::vector<Reload> reloads;
  for (int layer = 0; layer < next.rows(); ++layer) {
    auto const slots = next.row(layer);
    for (int slot = 0; slot < next.cols(); ++slot) {
      if (dead.contains(slot / slots_per_rank)) slots[static_cast<std::size_t>(slot)] = kEmptySlot;
    }
    detail::assign_missing(layer, slots, maps.num_logical(), num_ranks, reloads,
                           text(" after losing ", dead.size(), " of ", num_ranks, " ranks"));
  }
  return {ExpertMaps(std::move(next), maps.num_logical(), EmptySlots::allowed), std::move(reloads)};
}

/// The same in the numbering of the survivors' new group. held [layers, R' L]: the expert in each of their expert slots (gather_held). The
/// maps have no empty expert slots: what new layers and a new RuntimeBalancer take. X shrinks with P.
inline Recovery recover_held(Table<std::int32_t> held, int num_logical, int num_ranks) {
  if (num_ranks < 1 || held.cols() % num_ranks != 0) {
    throw Error(ErrorCode::argument, text("P = ", held.cols(), " expert slots do not divide over ", num_ranks, " ranks"));
  }
  std::vector<Reload> reloads;
  for (int layer = 0; layer < held.rows(); ++layer) {
    detail::assign_missing(layer, held.row(layer), num_logical, num_ranks, reloads, text(" on ", num_ranks, " ranks"));
  }
  return {ExpertMaps(std::move(held), num_logical), std::move(reloads)};
}

/// Collective over the survivors' new group: the expert in every expert slot that they hold, [layers, R' L]. `mine`: the maps in use on
/// this rank, of which its own expert slots in the old group are read: a rank that died inside an agreement may leave survivors one layer
/// apart, and each then holds what its own map says.
template <BalancingGroup Group>
Table<std::int32_t> gather_held(Group& group, int new_rank, ExpertMaps const& mine, int old_rank, int old_num_ranks) {
  detail::check_dead_ranks(mine, std::span<int const>(&old_rank, 1), old_num_ranks);
  int const slots_per_rank = mine.num_physical() / old_num_ranks;
  Table<std::int64_t> all(mine.num_layers(), group.size() * slots_per_rank);
  for (int layer = 0; layer < mine.num_layers(); ++layer) {
    for (int s = 0; s < slots_per_rank; ++s) {
      all(layer, new_rank * slots_per_rank + s) = mine.physical_to_logical()(layer, old_rank * slots_per_rank + s);
    }
  }
  group.all_reduce_sum(std::span<std::int64_t>(all.flat()));
  Table<std::int32_t> held(all.rows(), all.cols());
  std::transform(all.flat().begin(), all.flat().end(), held.flat().begin(), [](std::int64_t e) { return static_cast<std::int32_t>(e); });
  return held;
}

/// Loads this rank's missing experts from the checkpoint: load_expert(layer, expert, local slot) for each of its reloads, in their order.
/// rank: its number in the recovery's maps. Returns how many it loaded.
template <class LoadExpert>
int reload_experts(Recovery const& recovery, int rank, int slots_per_rank, LoadExpert&& load_expert) {
  int loaded = 0;
  for (Reload const& r : recovery.reloads) {
    if (r.slot / slots_per_rank != rank) continue;
    load_expert(static_cast<int>(r.layer), static_cast<int>(r.expert), static_cast<int>(r.slot % slots_per_rank));
    ++loaded;
  }
  return loaded;
}

}  // namespace moe::eplb
