// SPDX-License-Identifier: Apache-2.0
// eplb/balancedness.hpp: how evenly the ranks are loaded: mean over max, measured or predicted from a map.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/eplb/maps.hpp"

namespace moe::eplb {

/// Mean over max of one layer's rank loads, in (0, 1]; 1 without load.
inline double balancedness(std::span<double const> rank_load) {
  if (rank_load.empty()) return 1.0;
  double const most = *std::max_element(rank_load.begin(), rank_load.end());
  if (!(most > 0)) return 1.0;
  return std::accumulate(rank_load.begin(), rank_load.end(), 0.0) / static_cast<double>(rank_load.size()) / most;
}

/// rank_load [layers, R]: (sum over layers of the mean over ranks) / (sum over layers of the max over ranks); 1 without load.
/// Ranks are reduced layer by layer first: layers run one after the other, so each waits for its own slowest rank.
inline double balancedness(Table<double> const& rank_load) {
  double mean = 0;
  double most = 0;
  for (int layer = 0; layer < rank_load.rows() && rank_load.cols() > 0; ++layer) {
    auto const ranks = rank_load.row(layer);
    mean += std::accumulate(ranks.begin(), ranks.end(), 0.0) / static_cast<double>(ranks.size());
    most += *std::max_element(ranks.begin(), ranks.end());
  }
  return most > 0 ? mean / most : 1.0;
}

/// [R]: load of each rank if every expert's load spreads evenly over its replicas. expert_of_slot [P] (-1 allowed), replica_count
/// [E], load [E]. E_ARG if R does not divide P or E differs.
inline std::vector<double> rank_loads(std::span<std::int32_t const> expert_of_slot, std::span<std::int32_t const> replica_count,
                                      std::span<double const> load, int num_ranks) {
  if (num_ranks < 1 || expert_of_slot.size() % static_cast<std::size_t>(num_ranks) != 0) {
    throw Error(ErrorCode::argument, text("P = ", expert_of_slot.size(), " expert slots do not divide over ", num_ranks, " ranks"));
  }
  if (load.size() != replica_count.size()) {
    throw Error(ErrorCode::argument, text("load has ", load.size(), " experts, the map ", replica_count.size()));
  }
  std::size_t const slots_per_rank = expert_of_slot.size() / static_cast<std::size_t>(num_ranks);
  std::vector<double> ranks(static_cast<std::size_t>(num_ranks), 0.0);
  for (std::size_t slot = 0; slot < expert_of_slot.size(); ++slot) {
    if (expert_of_slot[slot] == kEmptySlot) continue;
    auto const e = static_cast<std::size_t>(expert_of_slot[slot]);
    ranks[slot / slots_per_rank] += load[e] / replica_count[e];
  }
  return ranks;
}

/// [R]: the same for one layer of the maps.
inline std::vector<double> rank_loads(ExpertMaps const& maps, int layer, std::span<double const> load, int num_ranks) {
  return rank_loads(maps.physical_to_logical().row(layer), maps.replica_count().row(layer), load, num_ranks);
}

/// [layers, R]: the same for all layers.
inline Table<double> rank_loads(ExpertMaps const& maps, Table<double> const& load, int num_ranks) {
  if (load.rows() != maps.num_layers()) {
    throw Error(ErrorCode::argument, text("load has ", load.rows(), " layers, the map ", maps.num_layers()));
  }
  Table<double> out(load.rows(), num_ranks);
  for (int layer = 0; layer < load.rows(); ++layer) {
    auto const ranks = rank_loads(maps, layer, load.row(layer), num_ranks);
    std::copy(ranks.begin(), ranks.end(), out.row(layer).begin());
  }
  return out;
}

}  // namespace moe::eplb
