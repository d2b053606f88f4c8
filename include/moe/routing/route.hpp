// SPDX-License-Identifier: Apache-2.0
// routing/route.hpp: routing, mapping, load recording and permutation of a batch in one launch: its arguments and its launch shape.
#pragma once

#include <algorithm>
#include <cstdint>
#include <ostream>

#include "moe/core/space.hpp"
#include "moe/routing/expert_mapping.hpp"
#include "moe/routing/permutation.hpp"
#include "moe/routing/row/expert_capacity.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/validate.hpp"

/// Defined in routing/device/route.cuh, so that the linker's message for a program without the kernels says what to do.
namespace moe::fix {
void include_moe_routing_device_route_cuh_or_link_a_model_library();
}  // namespace moe::fix

namespace moe::routing {

/// How the blocks of a launch exchange their counts between routing and placing.
enum class GridBarrier : std::uint8_t {
  none,         ///< one block, or no permutation
  cluster,      ///< the grid is one thread block cluster (sm_90)
  cooperative,  ///< all blocks are resident and use the workspace
};
constexpr char const* name(GridBarrier b) {
  return b == GridBarrier::none ? "none" : b == GridBarrier::cluster ? "cluster" : "cooperative";
}

/// Launch shape of the routing kernel: one warp per token, consecutive tokens in a block.
struct RoutingTuning {
  int blocks = 0;
  int warps = 0;    ///< per block
  int cluster = 1;  ///< blocks of a thread block cluster
  GridBarrier barrier = GridBarrier::none;
  bool operator==(RoutingTuning const&) const = default;
  friend std::ostream& operator<<(std::ostream& out, RoutingTuning const& t) {
    return out << "RoutingTuning{blocks " << t.blocks << ", warps " << t.warps << ", cluster " << t.cluster << ", barrier "
               << name(t.barrier) << "}";
  }
};

/// Blocks of the routing kernel that a device runs at the same time, one per multiprocessor, in clusters of 1, 2, 4, 8 and 16. Larger
/// clusters run fewer blocks, because a cluster must fit into one group of multiprocessors. 0: no clusters of this size.
struct RoutingCapacity {
  static constexpr int kSizes = 5;
  int blocks[kSizes] = {};
};

/// Most warps of a block: 32 while a lane's values fit into the 64 registers that such a block leaves a thread.
MOE_HD constexpr int max_routing_warps(int lane_values) { return lane_values <= 8 ? 32 : 16; }

namespace detail {
/// The most tokens that an 8-bit count holds; counts are stored plus one.
inline constexpr int kSmallCount = 254;
}  // namespace detail

/// Chooses the launch shape. Blocks of one cluster exchange counts at a fraction of the cost of device memory, so a batch that fits gets
/// one cluster, with few warps per block. A larger batch gets at most one block per multiprocessor, so that all blocks are resident, in the
/// largest clusters that neither make a block route more iterations nor need wider counts. `permute`: whether blocks must wait for each
/// other.
constexpr RoutingTuning choose_routing_tuning(std::int64_t num_rows, int num_logits, RoutingCapacity const& device, bool permute) {
  int const most = max_routing_warps(detail::lane_values(num_logits));
  if (!permute) return {static_cast<int>(std::min<std::int64_t>((num_rows + 7) / 8, 16LL * device.blocks[0])), 8, 1, GridBarrier::none};
  if (num_rows <= 16) return {1, num_rows <= 8 ? 8 : 16, 1, GridBarrier::none};
  for (int warps = 8; warps <= 16; warps *= 2) {
    std::int64_t const needed = (num_rows + warps - 1) / warps;
    for (int i = 1; i < RoutingCapacity::kSizes; ++i) {
      if (device.blocks[i] > 0 && needed <= 1 << i) return {1 << i, warps, 1 << i, GridBarrier::cluster};
    }
  }
  RoutingTuning best;
  std::int64_t best_iterations = 0;
  int const warps = num_rows > 16LL * device.blocks[0] ? most : num_rows > 8LL * device.blocks[0] ? 16 : 8;
  std::int64_t const needed = (num_rows + warps - 1) / warps;
  for (int i : {3, 2, 0}) {  // clusters of 2 are not faster
    int const size = 1 << i;
    if (device.blocks[i] == 0) continue;
    std::int64_t const blocks = std::min<std::int64_t>((needed + size - 1) / size * size, device.blocks[i]);
    std::int64_t const iterations = (needed + blocks - 1) / blocks;
    bool const wide = iterations * warps * size > detail::kSmallCount && iterations * warps <= detail::kSmallCount;
    if (wide || (best.blocks != 0 && iterations >= best_iterations)) continue;
    best = {static_cast<int>(blocks), warps, size, GridBarrier::cooperative};
    best_iterations = iterations;
  }
  return best;
}

/// Everything that one launch does for a batch. All pointers but `mapping` are to device memory; all are borrowed.
template <class L>
struct FusedRouting {
  RouteArgs<L> args;                             ///< topk_ids: physical ids if there is a mapping, else logical
  std::int32_t const* num_valid_rows = nullptr;  ///< device word: valid rows (at most M) if only the device knows; null: those of args
  ExpertMapping const* mapping = nullptr;        ///< host pointer to a mapping of device tables, or null
  LoadRecorder recorder = {};                    ///< counts per physical expert
  std::int32_t* logical_ids = nullptr;           ///< [M, k] out: ids before mapping, what the capture hook sees; or null
  std::int64_t logical_stride = 0;               ///< elements from one of its rows to the next; 0: k
  float* zero_expert_weights = nullptr;   ///< [M] out: sum of the row's zero-expert weights, whose slots become -1; or null: they stay
  Permutation permutation = {};           ///< or none
  void* workspace = nullptr;              ///< routing_workspace_bytes(), zeroed once after allocation; needed for a permutation
  RoutingTuning const* tuning = nullptr;  ///< null: choose_routing_tuning() decides
};

namespace detail {
/// Bins of a block's counts: whole 16-byte words of 8-bit ones.
MOE_HD constexpr int histogram_bins(int num_physical) { return (num_physical + 15) / 16 * 16; }
inline constexpr std::int64_t kHeaderBytes = 256;
}  // namespace detail

/// Bytes of the workspace of a device with `num_sms` multiprocessors. 16-byte aligned, zeroed once; one call uses it at a time, calls of
/// several routers may share the largest.
constexpr std::int64_t routing_workspace_bytes(int num_physical, int num_sms) {
  return detail::kHeaderBytes + 2 * (std::int64_t{num_sms} * detail::histogram_bins(num_physical) * 4 + 128);
}

/// Refuses a call that cannot work. Throws E_ARG, E_STATE, E_CONFIG or E_CAPACITY.
template <class L>
void check_fused(RouterConfig const& c, FusedRouting<L> const& f) {
  using detail::require;
  check_args(c, f.args);
  check_logits(f.args);
  require(!capacity_may_bind(c, f.args), ErrorCode::unsupported, "expert_capacity: ", c.expert_capacity, " tokens of a sequence of ",
          f.args.sequence_length, " is applied in the host space only");
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
/// those of route_row() bit for bit. Defined in routing/device/route.cuh. Throws as check_fused(), E_CUDA if the launch is refused.
template <class Router, class L>
void route_fused(Router const& router, FusedRouting<L> const& f, Stream<space::cuda> stream);

/// Columns k, k + 1, … of topk_ids, of which the valid ones hold the fused shared experts num_experts, num_experts + 1, …: into logical_ids
/// as they are, and in place the ids of `copies`. Device memory; one launch. Defined in routing/device/route.cuh.
void name_shared(SharedCopies const& copies, int num_experts, int k, Rows<std::int32_t> topk_ids, Rows<std::int32_t> logical_ids,
                 Stream<space::cuda> stream);

}  // namespace moe::routing
