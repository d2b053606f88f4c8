// SPDX-License-Identifier: Apache-2.0
// eplb/recovery.hpp: new maps when ranks die: every expert gets a live slot again, at the cost of a replica of another.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/maps.hpp"

namespace moe::eplb {

/// An expert that no live rank holds: the owner of the slot must load it from the checkpoint.
struct Reload {
  std::int32_t layer;
  std::int32_t expert;
  std::int32_t slot;
  bool operator==(Reload const&) const = default;
};

/// Maps of the survivors: slots of dead ranks are empty. Load windows are cleared, and transports mask the dead ranks.
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
    throw Error(ErrorCode::argument, text("P = ", maps.num_physical(), " slots do not divide over ", num_ranks, " ranks"));
  }
  for (int rank : dead_ranks) {
    if (rank < 0 || rank >= num_ranks) throw Error(ErrorCode::argument, text("dead rank ", rank, " is out of range [0, ", num_ranks, ")"));
  }
}

}  // namespace detail

/// Remaps around the dead ranks. Each missing expert, in ascending order, takes a slot of the expert that then has the most live
/// replicas (equals: lowest id) and more than one; the slots come from the live ranks in turn. A pure function, equal on every survivor.
/// E_ARG on a rank outside [0, R) or P % R != 0. E_PEER "insufficient redundancy" if no slot can be spared; nothing is changed then.
inline Recovery recover(ExpertMaps const& maps, std::span<int const> dead_ranks, int num_ranks) {
  detail::check_dead_ranks(maps, dead_ranks, num_ranks);
  std::set<int> const dead(dead_ranks.begin(), dead_ranks.end());
  int const slots_per_rank = maps.num_physical() / num_ranks;
  Table<std::int32_t> next = maps.physical_to_logical();
  std::vector<Reload> reloads;
  for (int layer = 0; layer < next.rows(); ++layer) {
    auto const slots = next.row(layer);
    std::vector<int> live(static_cast<std::size_t>(maps.num_logical()), 0);
    for (int slot = 0; slot < next.cols(); ++slot) {
      std::int32_t& e = slots[static_cast<std::size_t>(slot)];
      if (dead.contains(slot / slots_per_rank)) e = kEmptySlot;
      if (e != kEmptySlot) ++live[static_cast<std::size_t>(e)];
    }
    int turn = 0;  // the live rank that is tried first
    for (std::int32_t missing = 0; missing < maps.num_logical(); ++missing) {
      if (live[static_cast<std::size_t>(missing)] > 0) continue;
      auto const donor = std::max_element(live.begin(), live.end());
      if (*donor < 2) {
        auto const without = std::count(live.begin(), live.end(), 0);
        throw Error(ErrorCode::peer, text("insufficient redundancy: ", without, " experts have no slot in layer ", layer, " after losing ",
                                          dead.size(), " of ", num_ranks, " ranks"));
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
  return {ExpertMaps(std::move(next), maps.num_logical(), EmptySlots::allowed), std::move(reloads)};
}

/// The maps in the numbering of a new group, which has the ranks that are not dead, in their old order: what new layers and a new
/// RuntimeBalancer take. X shrinks with P. E_ARG as recover(), or if an expert has no live slot.
inline ExpertMaps without_ranks(ExpertMaps const& maps, std::span<int const> dead_ranks, int num_ranks) {
  detail::check_dead_ranks(maps, dead_ranks, num_ranks);
  std::set<int> const dead(dead_ranks.begin(), dead_ranks.end());
  int const slots_per_rank = maps.num_physical() / num_ranks;
  Table<std::int32_t> live(maps.num_layers(), (num_ranks - static_cast<int>(dead.size())) * slots_per_rank);
  for (int layer = 0; layer < maps.num_layers(); ++layer) {
    int at = 0;
    for (int slot = 0; slot < maps.num_physical(); ++slot) {
      if (!dead.contains(slot / slots_per_rank)) live(layer, at++) = maps.physical_to_logical()(layer, slot);
    }
  }
  return ExpertMaps(std::move(live), maps.num_logical());
}

/// Loads this rank's missing experts from the checkpoint: load_expert(layer, expert, local slot) for each of its reloads, in their order.
/// rank: its number in the old group. Returns how many it loaded.
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
