// SPDX-License-Identifier: Apache-2.0
// routing/route.hpp: routing, mapping, load recording and permutation of a batch in one launch: its arguments and its launch shape.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

#include "moe/core/space.hpp"
#include "moe/routing/expert_mapping.hpp"
#include "moe/routing/permutation.hpp"
#include "moe/routing/route_args.hpp"
#include "moe/routing/validate.hpp"

namespace moe::routing {

/// Everything that one launch does for a batch. All pointers but `mapping` are to device memory; all are borrowed.
template <class L>
struct FusedRouting {
  RouteArgs<L> args;                             ///< topk_ids: physical ids if there is a mapping, else logical
  std::int32_t const* num_valid_rows = nullptr;  ///< one device word: valid rows where only the device knows, at most M; null: args say
  ExpertMapping const* mapping = nullptr;        ///< host pointer to a mapping of device tables, or null
  LoadRecorder recorder = {};                    ///< counts per physical expert
  std::int32_t* logical_ids = nullptr;           ///< [M, k] out: ids before mapping, what the capture hook sees; or null
  float* zero_expert_weights = nullptr;  ///< [M] out: sum of the row's zero-expert weights, whose slots become -1; or null: they stay
  Permutation permutation = {};          ///< or none
  void* workspace = nullptr;             ///< routing_workspace_bytes(), zeroed once after allocation; needed for a permutation
};

/// How blocks of one launch wait for each other between counting and placing.
enum class GridBarrier : std::uint8_t {
  none,         ///< one block, or nothing to place
  cluster,      ///< the grid is one thread block cluster (sm_90)
  cooperative,  ///< all blocks are resident: a counter in the workspace
};
constexpr char const* name(GridBarrier b) {
  return b == GridBarrier::none ? "none" : b == GridBarrier::cluster ? "cluster" : "cooperative";
}

/// Launch shape of the routing kernel: a warp a token, consecutive tokens in a block.
struct RoutingTuning {
  int blocks = 0;
  int warps = 0;  ///< per block
  GridBarrier barrier = GridBarrier::none;
  bool operator==(RoutingTuning const&) const = default;
  friend std::ostream& operator<<(std::ostream& out, RoutingTuning const& t) {
    return out << "RoutingTuning{blocks " << t.blocks << ", warps " << t.warps << ", barrier " << name(t.barrier) << "}";
  }
};

/// Most warps of a block: 32 while a lane's values fit into the 64 registers that such a block leaves a thread.
MOE_HD constexpr int max_routing_warps(int lane_values) { return lane_values <= 8 ? 32 : 16; }

/// Chooses the launch shape. A few blocks form a cluster, whose barrier costs a fraction of one through memory; otherwise enough warps a
/// block that there is at most one block per SM, so that all are resident. `permute`: whether blocks must wait for each other.
constexpr RoutingTuning choose_routing_tuning(std::int64_t num_rows, int num_logits, int num_sms, bool has_clusters, bool permute) {
  int const most = max_routing_warps(detail::lane_values(num_logits));
  auto const blocks_of = [&](int warps) { return static_cast<int>(std::min<std::int64_t>((num_rows + warps - 1) / warps, num_sms)); };
  if (!permute) return {static_cast<int>(std::min<std::int64_t>((num_rows + 7) / 8, 16LL * num_sms)), 8, GridBarrier::none};
  int warps = 16;
  if (num_rows > std::int64_t{warps} * num_sms) warps = most;
  int const blocks = std::max(blocks_of(warps), 1);
  if (blocks == 1) return {1, warps, GridBarrier::none};
  return {blocks, warps, has_clusters && blocks <= 8 ? GridBarrier::cluster : GridBarrier::cooperative};
}

namespace detail {
/// Bins of a block's histogram in the workspace: 16-byte rows.
MOE_HD constexpr int histogram_bins(int num_physical) { return (num_physical + 7) / 8 * 8; }
inline constexpr std::int64_t kBarrierBytes = 128;
}  // namespace detail

/// Bytes of the workspace of a device with `num_sms` multiprocessors. 16-byte aligned, zeroed once; one call uses it at a time.
constexpr std::int64_t routing_workspace_bytes(int num_physical, int num_sms) {
  return detail::kBarrierBytes + std::int64_t{num_sms} * detail::histogram_bins(num_physical) * 4;
}

/// Refuses a call that cannot work. Throws E_ARG, E_STATE, E_CONFIG or E_CAPACITY.
template <class L>
void check_fused(RouterConfig const& c, FusedRouting<L> const& f) {
  using detail::require;
  check_args(c, f.args);
  int num_physical = c.num_experts;
  if (f.mapping != nullptr) {
    validate(*f.mapping, nullptr);
    require(f.mapping->num_experts == c.num_experts, ErrorCode::argument, "mapping: of ", f.mapping->num_experts,
            " experts, the router chooses among ", c.num_experts);
    num_physical = f.mapping->num_physical;
    require(c.num_zero_experts == 0 || f.zero_expert_weights != nullptr, ErrorCode::argument,
            "zero_expert_weights: null, zero experts leave the slots before mapping");
  }
  if (f.permutation.expert_offsets == nullptr) return;
  validate(f.permutation, f.args.logits.extent(0), c.num_slots(), num_physical, c.num_fused_shared);
  require(f.workspace != nullptr, ErrorCode::argument, "workspace: null, a permutation needs routing_workspace_bytes()");
}

/// Routes, maps, records and permutes a batch on the device in one launch: capturable, no host synchronisation, deterministic. Ids are
/// those of route_row() bit for bit. Defined in routing/route.cuh. Throws as check_fused(), E_CUDA if the launch is refused.
template <class Router, class L>
void route_fused(Router const& router, FusedRouting<L> const& f, Stream<space::cuda> stream);

}  // namespace moe::routing
