// SPDX-License-Identifier: Apache-2.0
// parallel/process_grid.hpp: the process grid (XDP, DP, PP, PCP, TP), its groups, and which ranks share a node.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"

namespace moe {

/// Sizes of the grid. World size = xdp · dp · pp · pcp · tp; dcp subdivides and adds no ranks.
struct GridSizes {
  int xdp = 1;  ///< independent replicas outside the library
  int dp = 1;   ///< data parallel
  int pp = 1;   ///< pipeline stages
  int pcp = 1;  ///< prefill context parallel
  int tp = 1;   ///< tensor parallel; varies fastest
  int dcp = 1;  ///< decode context parallel: consecutive ranks inside TP, or inside TP·PCP
  bool operator==(GridSizes const&) const = default;
};

/// Position of one process in the grid.
struct GridCoordinates {
  int xdp = 0;
  int dp = 0;
  int pp = 0;
  int pcp = 0;
  int tp = 0;
  bool operator==(GridCoordinates const&) const = default;
};

/// The groups that a process belongs to. EPLB has the members of EP but its own communicator, so that weight moves never
/// interleave with layer traffic.
enum class GroupKind : std::uint8_t { tp, pcp, dp, pp, dcp, ep, eplb };
constexpr std::string_view name(GroupKind kind) {
  constexpr std::string_view names[] = {"tp", "pcp", "dp", "pp", "dcp", "ep", "eplb"};
  return names[static_cast<int>(kind)];
}

namespace detail {
inline constexpr std::int64_t kMaxWorldSize = std::int64_t{1} << 24;
inline void check_size(std::string_view field, std::int64_t size) {
  if (size < 1) throw Error(ErrorCode::config, text(field, " must be at least 1, is ", size));
  if (size > kMaxWorldSize) throw Error(ErrorCode::config, text(field, " must be at most ", kMaxWorldSize, ", is ", size));
}
inline void check_rank(std::string_view field, std::int64_t rank, std::int64_t size) {
  if (rank < 0 || rank >= size) throw Error(ErrorCode::config, text(field, " ", rank, " is out of range [0, ", size, ")"));
}
}  // namespace detail

/// global_rank = (((xdp · DP + dp) · PP + pp) · PCP + pcp) · TP + tp. Immutable, host memory.
class ProcessGrid {
 public:
  /// E_CONFIG: a size below 1 (names the field), PCP with DP, or a dcp that does not divide.
  explicit ProcessGrid(GridSizes const& sizes) : sizes_(sizes) {
    detail::check_size("xdp_size", sizes.xdp);
    detail::check_size("dp_size", sizes.dp);
    detail::check_size("pp_size", sizes.pp);
    detail::check_size("pcp_size", sizes.pcp);
    detail::check_size("tp_size", sizes.tp);
    detail::check_size("dcp_size", sizes.dcp);
    std::int64_t world = 1;
    for (int size : {sizes.xdp, sizes.dp, sizes.pp, sizes.pcp, sizes.tp}) {
      world *= size;  // both factors are at most 2^24
      if (world > detail::kMaxWorldSize) throw Error(ErrorCode::config, text("world size exceeds ", detail::kMaxWorldSize));
    }
    if (sizes.dp > 1 && sizes.pcp > 1) {
      throw Error(ErrorCode::config, text("PCP with DP is not possible: pcp_size = ", sizes.pcp, ", dp_size = ", sizes.dp));
    }
    if (sizes.pcp == 1 && sizes.tp % sizes.dcp != 0) {
      throw Error(ErrorCode::config, text("dcp_size = ", sizes.dcp, " must divide tp_size = ", sizes.tp));
    }
    if (sizes.pcp > 1 && sizes.dcp != 1 && sizes.dcp != sizes.pcp && sizes.dcp != sizes.tp * sizes.pcp) {
      throw Error(ErrorCode::config,
                  text("dcp_size = ", sizes.dcp, " must be 1, pcp_size = ", sizes.pcp, " or tp_size * pcp_size = ", sizes.tp * sizes.pcp));
    }
  }

  GridSizes const& sizes() const { return sizes_; }
  std::int64_t world_size() const { return std::int64_t{1} * sizes_.xdp * sizes_.dp * sizes_.pp * sizes_.pcp * sizes_.tp; }

  /// E_CONFIG unless the launched number of processes is the grid's.
  void check_world_size(int launched) const {
    if (launched != world_size()) {
      throw Error(ErrorCode::config, text("world size ", launched, " is not xdp * dp * pp * pcp * tp = ", sizes_.xdp, " * ", sizes_.dp,
                                          " * ", sizes_.pp, " * ", sizes_.pcp, " * ", sizes_.tp, " = ", world_size()));
    }
  }

  /// Global rank at these coordinates. E_CONFIG naming a coordinate out of range.
  int rank(GridCoordinates const& at) const {
    detail::check_rank("xdp_rank", at.xdp, sizes_.xdp);
    detail::check_rank("dp_rank", at.dp, sizes_.dp);
    detail::check_rank("pp_rank", at.pp, sizes_.pp);
    detail::check_rank("pcp_rank", at.pcp, sizes_.pcp);
    detail::check_rank("tp_rank", at.tp, sizes_.tp);
    return (((at.xdp * sizes_.dp + at.dp) * sizes_.pp + at.pp) * sizes_.pcp + at.pcp) * sizes_.tp + at.tp;
  }

  /// Inverse of rank(). E_CONFIG on a rank outside the world.
  GridCoordinates coordinates(int global_rank) const {
    detail::check_rank("global rank", global_rank, world_size());
    GridCoordinates at;
    at.tp = global_rank % sizes_.tp;
    global_rank /= sizes_.tp;
    at.pcp = global_rank % sizes_.pcp;
    global_rank /= sizes_.pcp;
    at.pp = global_rank % sizes_.pp;
    global_rank /= sizes_.pp;
    at.dp = global_rank % sizes_.dp;
    at.xdp = global_rank / sizes_.dp;
    return at;
  }

  /// Global ranks of this rank's group, in group-rank order.
  std::vector<int> group(GroupKind kind, int global_rank) const {
    GridCoordinates const me = coordinates(global_rank);
    std::vector<int> members;
    auto const along = [&](int GridCoordinates::* axis, int size) {
      GridCoordinates at = me;
      for (at.*axis = 0; at.*axis < size; ++(at.*axis)) members.push_back(rank(at));
    };
    switch (kind) {
      case GroupKind::tp: along(&GridCoordinates::tp, sizes_.tp); break;
      case GroupKind::pcp: along(&GridCoordinates::pcp, sizes_.pcp); break;
      case GroupKind::dp: along(&GridCoordinates::dp, sizes_.dp); break;
      case GroupKind::pp: along(&GridCoordinates::pp, sizes_.pp); break;
      case GroupKind::dcp: {
        int const first = global_rank - (me.pcp * sizes_.tp + me.tp) % sizes_.dcp;
        for (int i = 0; i < sizes_.dcp; ++i) members.push_back(first + i);
        break;
      }
      case GroupKind::ep:
      case GroupKind::eplb: {
        GridCoordinates at = me;
        for (at.dp = 0; at.dp < sizes_.dp; ++at.dp) {
          for (at.pcp = 0; at.pcp < sizes_.pcp; ++at.pcp) {
            for (at.tp = 0; at.tp < sizes_.tp; ++at.tp) members.push_back(rank(at));
          }
        }
        break;
      }
    }
    return members;
  }

 private:
  GridSizes sizes_;
};

/// Node of every rank, [ranks]: ranks with the same host identity share a node; nodes are numbered by first appearance.
inline std::vector<int> node_of_ranks(std::vector<std::string> const& host_of_rank) {
  std::vector<std::string> hosts;
  std::vector<int> nodes;
  for (std::string const& host : host_of_rank) {
    auto const known = std::find(hosts.begin(), hosts.end(), host);
    nodes.push_back(static_cast<int>(known - hosts.begin()));
    if (known == hosts.end()) hosts.push_back(host);
  }
  return nodes;
}

/// Number of nodes if the ranks lie on them in equal consecutive runs (what node-aware balancing assumes), else 1.
inline int uniform_node_count(std::vector<int> const& node_of_rank) {
  if (node_of_rank.empty()) return 1;
  int const nodes = *std::max_element(node_of_rank.begin(), node_of_rank.end()) + 1;
  std::size_t const ranks = node_of_rank.size();
  if (ranks % static_cast<std::size_t>(nodes) != 0) return 1;
  std::size_t const per_node = ranks / static_cast<std::size_t>(nodes);
  for (std::size_t r = 0; r < ranks; ++r) {
    if (node_of_rank[r] != static_cast<int>(r / per_node)) return 1;
  }
  return nodes;
}

}  // namespace moe
