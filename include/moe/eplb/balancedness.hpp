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

/// [R]: load of each rank under one layer's map if every expert's load spreads evenly over its replicas. R divides P.
inline std::vector<double> rank_loads(ExpertMaps const& maps, int layer, std::span<double const> load, int num_ranks) {
  if (num_ranks < 1 || maps.num_physical() % num_ranks != 0) {
    throw Error(ErrorCode::argument, text("P = ", maps.num_physical(), " slots do not divide over ", num_ranks, " ranks"));
  }
  if (static_cast<int>(load.size()) != maps.num_logical()) {
    throw Error(ErrorCode::argument, text("load has ", load.size(), " experts, the map ", maps.num_logical()));
  }
  int const slots_per_rank = maps.num_physical() / num_ranks;
  std::vector<double> ranks(static_cast<std::size_t>(num_ranks), 0.0);
  for (int slot = 0; slot < maps.num_physical(); ++slot) {
    std::int32_t const e = maps.physical_to_logical()(layer, slot);
    if (e == kEmptySlot) continue;
    ranks[static_cast<std::size_t>(slot / slots_per_rank)] += load[static_cast<std::size_t>(e)] / maps.replica_count()(layer, e);
  }
  return ranks;
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
