// SPDX-License-Identifier: Apache-2.0
// routing/route.cuh: the routing kernel: a warp a token, then counts, offsets and the permutation, in one launch.
//
// Each block routes consecutive tokens and counts them per physical expert, with the rank of every slot among the block's slots of the same
// expert. After one barrier every block adds up the counts of all blocks before it (and of all, for the offsets), so a slot's row is
// offset[expert] + counts of earlier blocks + rank: stable in the slot number, whatever the order in which blocks ran.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "moe/core/cuda_space.hpp"
#include "moe/routing/route.hpp"
#include "moe/routing/route_warp.cuh"
#include "moe/routing/row_router.hpp"

namespace moe::routing {
namespace detail {

/// FusedRouting as the kernel takes it. 32-bit row numbers: a call has less than 2^31 slots.
template <class L>
struct RoutingCall {
  L const* logits;
  std::int64_t logits_stride;
  std::int32_t num_rows, valid_rows;
  std::int32_t const* valid_rows_word;
  std::int64_t const* token_ids;
  std::int32_t* ids;
  std::int64_t ids_stride;
  float* weights;
  std::int64_t weights_stride;
  float* shared_weights;
  std::int64_t shared_stride;
  unsigned long long* degenerate_rows;
  ExpertMapping mapping;  // logical_to_physical null: none
  int num_physical;
  LoadRecorder recorder;
  std::int32_t* logical_ids;
  float* zero_weights;
  Permutation permutation;
  unsigned* barrier;
  void* histograms;    // [blocks, histogram_bins(P)] of Count
  int scratch_floats;  // per warp
  bool large;          // 32-bit counts
};

/// Counts of blocks: 16 bits where a call has less than 2^16 rows, so that one 32-bit word adds up a total and a prefix at once. The width
/// is chosen at run time: little code depends on it.
struct SmallCounts {
  using Count = std::uint16_t;
  using Sum = unsigned;
  static constexpr int kHalf = 16;
};
struct LargeCounts {
  using Count = std::uint32_t;
  using Sum = unsigned long long;
  static constexpr int kHalf = 32;
};

/// What a block knows of an expert after the barrier.
struct BinSum {
  int total;        ///< slots in all blocks
  unsigned before;  ///< slots in earlier blocks
};

/// Shared memory of a block, in 4-byte words.
struct RoutingShared {
  int masks, ranks, sums, offsets, scratch, words;
};
MOE_HD inline RoutingShared routing_shared(int num_physical, int local_experts, bool large, int warps, int scratch_floats) {
  int const bins = histogram_bins(num_physical);
  RoutingShared s{};
  s.masks = 0;
  s.ranks = s.masks + bins;
  s.sums = s.ranks + bins;
  s.offsets = s.sums + bins * (large ? 2 : 1);
  s.scratch = s.offsets + (local_experts + 1 + 3) / 4 * 4;
  s.words = s.scratch + warps * scratch_floats;
  return s;
}

__device__ inline unsigned load_acquire(unsigned const* p) {
  unsigned v;
  asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

/// Waits for all blocks of the grid. Each round of arrivals adds exactly 2^31 to the word, whatever the number of blocks, so the top bit
/// flips once a round and the word needs no reset between launches.
__device__ inline void grid_barrier(GridBarrier kind, unsigned* word) {
  if (kind == GridBarrier::cluster) {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
    return;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    unsigned const add = blockIdx.x == 0 ? 0x80000000U - (gridDim.x - 1) : 1U;
    unsigned const before = atomicAdd(word, add);
    while (((load_acquire(word) ^ before) & 0x80000000U) == 0) {
    }
    __threadfence();
  }
  __syncthreads();
}

/// sums[i * groups + g] of bin 8 g + i: total in the low half, prefix over earlier blocks in the high half. One column of 8 bins is read by
/// consecutive threads of a row, and the transposed place keeps their additions off one another's banks.
template <class Counts>
__device__ inline void add_up_histograms(void const* histograms, int bins, typename Counts::Sum* sums) {
  using Count = typename Counts::Count;
  using Sum = typename Counts::Sum;
  int const groups = bins / 8;
  for (int i = static_cast<int>(threadIdx.x); i < bins; i += static_cast<int>(blockDim.x)) sums[i] = 0;
  __syncthreads();
  auto const* const all = static_cast<Count const*>(histograms);
  int const lanes = static_cast<int>(blockDim.x) / groups;  // rows read at a time
  int const g = static_cast<int>(threadIdx.x) % groups;
  int const first = static_cast<int>(threadIdx.x) / groups;
  if (lanes == 0) {  // more groups than threads: each thread owns columns
    for (int b = static_cast<int>(threadIdx.x); b < bins; b += static_cast<int>(blockDim.x)) {
      Sum sum = 0;
      for (unsigned r = 0; r < gridDim.x; ++r) {
        Sum const count = __ldcg(all + static_cast<std::int64_t>(r) * bins + b);
        sum += r < blockIdx.x ? count | count << Counts::kHalf : count;
      }
      sums[b % 8 * groups + b / 8] = sum;
    }
  } else if (first < lanes) {
    Sum mine[8] = {};
    for (unsigned r = static_cast<unsigned>(first); r < gridDim.x; r += static_cast<unsigned>(lanes)) {
      Count const* const row = all + static_cast<std::int64_t>(r) * bins + g * 8;
      Sum const both = r < blockIdx.x ? Sum{1} | Sum{1} << Counts::kHalf : Sum{1};
      alignas(16) Count part[8];
#pragma unroll
      for (int i = 0; i < 8; i += 16 / static_cast<int>(sizeof(Count))) {
        *reinterpret_cast<uint4*>(&part[i]) = __ldcg(reinterpret_cast<uint4 const*>(row + i));
      }
#pragma unroll
      for (int i = 0; i < 8; ++i) mine[i] += part[i] * both;
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) atomicAdd(&sums[i * groups + g], mine[i]);
  }
  __syncthreads();
}

/// Publishes this block's counts, waits for all blocks and adds theirs up.
template <class Counts>
__device__ inline void exchange_counts(GridBarrier barrier, unsigned* word, void* histograms, unsigned const* ranks, int bins, void* sums) {
  using Count = typename Counts::Count;
  auto* const mine = static_cast<Count*>(histograms) + static_cast<std::int64_t>(blockIdx.x) * bins;
  for (int i = static_cast<int>(threadIdx.x); i < bins; i += static_cast<int>(blockDim.x)) mine[i] = static_cast<Count>(ranks[i]);
  grid_barrier(barrier, word);
  add_up_histograms<Counts>(histograms, bins, static_cast<typename Counts::Sum*>(sums));
}
template <class Counts>
__device__ inline BinSum bin_sum(void const* sums, int bin, int bins) {
  typename Counts::Sum const sum = static_cast<typename Counts::Sum const*>(sums)[bin % 8 * (bins / 8) + bin / 8];
  constexpr typename Counts::Sum kLow = (typename Counts::Sum{1} << Counts::kHalf) - 1;
  return {static_cast<int>(sum & kLow), static_cast<unsigned>(sum >> Counts::kHalf)};
}

/// offsets[0 … n]: exclusive prefix of the counts in offsets[0 … n), each rounded up. One warp.
__device__ inline void scan_offsets(std::int32_t* offsets, int n, int alignment, int lane) {
  int const each = (n + kWarp - 1) / kWarp;
  int const begin = lane * each;
  int const end = begin + each < n ? begin + each : n;
  std::int32_t sum = 0;
  for (int i = begin; i < end; ++i) sum += (offsets[i] + alignment - 1) / alignment * alignment;
  std::int32_t before = sum;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    std::int32_t const other = __shfl_up_sync(kAllLanes, before, static_cast<unsigned>(step));
    if (lane >= step) before += other;
  }
  std::int32_t const total = __shfl_sync(kAllLanes, before, kWarp - 1);
  before -= sum;
  for (int i = begin; i < end; ++i) {
    std::int32_t const count = offsets[i];
    offsets[i] = before;
    before += (count + alignment - 1) / alignment * alignment;
  }
  if (lane == 0) offsets[n] = total;
}

/// Routes the token of this warp and writes its slots. Returns the physical expert of slot `lane`, -1 where there is none.
template <int V, class Config, class L>
__device__ inline std::int32_t route_token(Config const& cfg, RoutingCall<L> const& c, std::int64_t t, int lane, float* scratch) {
  int const k = cfg.topk;
  std::int64_t const token = c.token_ids == nullptr ? 0 : c.token_ids[t];
  WarpRow row = route_warp<V>(cfg, c.logits + t * c.logits_stride, token, lane, scratch);
  if (lane < k && c.logical_ids != nullptr) c.logical_ids[t * k + lane] = row.id;
  if (cfg.num_zero_experts > 0 && c.zero_weights != nullptr) {
    bool const zero = row.id >= cfg.num_experts;
    float const factor = warp_sum(zero && cfg.zero_expert_kind == ZeroExpertKind::identity ? row.weight : 0.0F);
    if (lane == 0) c.zero_weights[t] = factor;
    if (zero) {
      row.id = kNoExpert;
      row.weight = 0.0F;
    }
  }
  std::int32_t physical = row.id;
  if (c.mapping.logical_to_physical != nullptr) physical = map_expert(c.mapping, row.id, t, lane, k);
  std::int32_t* const ids = c.ids + t * c.ids_stride;
  float* const weights = c.weights + t * c.weights_stride;
  if (lane < k) {
    ids[lane] = physical;
    weights[lane] = row.weight;
  }
  if (lane < cfg.num_fused_shared) {
    ids[k + lane] = cfg.num_experts + lane;
    weights[k + lane] = lane < cfg.num_joint_shared ? row.shared_weight : cfg.fused_shared_weight;
  }
  if (lane < cfg.num_joint_shared && c.shared_weights != nullptr) c.shared_weights[t * c.shared_stride + lane] = row.shared_weight;
  if (lane == 0 && row.degenerate && c.degenerate_rows != nullptr) atomicAdd(c.degenerate_rows, 1ULL);
  return lane < k && physical < c.num_physical ? physical : kNoExpert;  // zero experts have no bin
}

template <class Config, class L>
__device__ inline void pad_token(Config const& cfg, RoutingCall<L> const& c, std::int64_t t, int lane) {
  int const slots = cfg.num_slots();
  for (int j = lane; j < slots; j += kWarp) {
    c.ids[t * c.ids_stride + j] = kNoExpert;
    c.weights[t * c.weights_stride + j] = 0.0F;
    if (c.permutation.expert_offsets != nullptr) c.permutation.inverse[t * slots + j] = -1;
  }
  if (lane < cfg.topk && c.logical_ids != nullptr) c.logical_ids[t * cfg.topk + lane] = kNoExpert;
  if (lane == 0 && cfg.num_zero_experts > 0 && c.zero_weights != nullptr) c.zero_weights[t] = 0.0F;
  if (lane < cfg.num_joint_shared && c.shared_weights != nullptr) c.shared_weights[t * c.shared_stride + lane] = 0.0F;
}

template <int V, class Config, class L>
__global__ void __launch_bounds__(kWarp* max_routing_warps(V), 1)
    routing_kernel(Config const cfg, RoutingCall<L> const c, GridBarrier const barrier) {
  extern __shared__ __align__(16) unsigned char routing_memory[];
  auto* const words = reinterpret_cast<unsigned*>(routing_memory);
  int const warps = static_cast<int>(blockDim.x) / kWarp;
  int const warp = static_cast<int>(threadIdx.x) / kWarp;
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  Permutation const& p = c.permutation;
  bool const permute = p.expert_offsets != nullptr;
  bool const record = c.recorder.load_counter != nullptr && (c.recorder.record == nullptr || *c.recorder.record != 0);
  bool const count = permute || record;
  int const bins = histogram_bins(c.num_physical);
  int const locals = permute ? p.num_local_experts + p.num_local_shared : 0;
  int const slots = cfg.num_slots();
  RoutingShared const shared = routing_shared(c.num_physical, locals, c.large, warps, c.scratch_floats);
  unsigned* const masks = words + shared.masks;  // bit w: warp w's token of this tile chose the expert
  unsigned* const ranks = words + shared.ranks;  // slots of the expert in this block's earlier tiles
  float* const scratch = reinterpret_cast<float*>(words + shared.scratch) + warp * c.scratch_floats;

  int valid = c.valid_rows;
  if (c.valid_rows_word != nullptr) valid = min(max(*c.valid_rows_word, 0), c.num_rows);
  // Whole tiles a block, so that only the last block with work has idle warps.
  int const tiles = (valid + warps - 1) / warps;
  int const block_tiles = (tiles + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  std::int64_t const begin = std::int64_t{block_tiles} * blockIdx.x * warps;

  if (count) {
    for (int i = static_cast<int>(threadIdx.x); i < bins; i += static_cast<int>(blockDim.x)) masks[i] = ranks[i] = 0;
    __syncthreads();
  }
  std::int32_t physical = kNoExpert;
  unsigned rank = 0;
  for (int tile = 0; tile < block_tiles; ++tile) {
    std::int64_t const t = begin + std::int64_t{tile} * warps + warp;
    physical = t < valid ? route_token<V>(cfg, c, t, lane, scratch) : kNoExpert;
    if (!count) continue;
    if (physical >= 0) atomicOr(&masks[physical], 1U << warp);
    __syncthreads();
    if (permute && physical >= 0) {
      rank = ranks[physical] + static_cast<unsigned>(__popc(masks[physical] & ((1U << warp) - 1)));
      // Kept where the row number will lie; the last tile keeps it in a register.
      if (tile + 1 < block_tiles) p.inverse[t * slots + lane] = static_cast<std::int32_t>(rank);
    }
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < bins; i += static_cast<int>(blockDim.x)) {
      ranks[i] += static_cast<unsigned>(__popc(masks[i]));
      masks[i] = 0;
    }
    __syncthreads();
  }
  for (std::int64_t t = valid + std::int64_t{blockIdx.x} * warps + warp; t < c.num_rows; t += std::int64_t{gridDim.x} * warps) {
    pad_token(cfg, c, t, lane);
  }
  if (record) {
    for (int i = static_cast<int>(threadIdx.x); i < c.num_physical; i += static_cast<int>(blockDim.x)) {
      if (ranks[i] != 0) atomicAdd(c.recorder.load_counter + i, static_cast<std::int32_t>(ranks[i]));
    }
  }
  if (!permute) return;

  void* const sums = words + shared.sums;
  auto* const offsets = reinterpret_cast<std::int32_t*>(words + shared.offsets);
  if (gridDim.x > 1) {
    if (c.large) {
      exchange_counts<LargeCounts>(barrier, c.barrier, c.histograms, ranks, bins, sums);
    } else {
      exchange_counts<SmallCounts>(barrier, c.barrier, c.histograms, ranks, bins, sums);
    }
  }
  auto const sum_of = [&](int i) -> BinSum {
    if (gridDim.x == 1) return {static_cast<int>(ranks[i]), 0};
    return c.large ? bin_sum<LargeCounts>(sums, i, bins) : bin_sum<SmallCounts>(sums, i, bins);
  };

  // Counts in local order, then their offsets; ranks become the first row of this block's slots of each expert.
  for (int i = static_cast<int>(threadIdx.x); i < locals; i += static_cast<int>(blockDim.x)) {
    offsets[i] = i < p.num_local_experts ? 0 : valid;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < c.num_physical; i += static_cast<int>(blockDim.x)) {
    int const local = p.expert_map == nullptr ? i : p.expert_map[i];
    if (local >= 0) offsets[local] = sum_of(i).total;
  }
  __syncthreads();
  if (blockIdx.x == 0 && p.expert_num_tokens != nullptr) {
    for (int i = static_cast<int>(threadIdx.x); i < locals; i += static_cast<int>(blockDim.x)) p.expert_num_tokens[i] = offsets[i];
    __syncthreads();
  }
  if (warp == 0) scan_offsets(offsets, locals, p.row_alignment, lane);
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < c.num_physical; i += static_cast<int>(blockDim.x)) {
    int const local = p.expert_map == nullptr ? i : p.expert_map[i];
    BinSum const sum = sum_of(i);
    ranks[i] = local < 0 ? ~0U : static_cast<unsigned>(offsets[local]) + sum.before;
    if (p.row_alignment == 1 || local < 0 || local % static_cast<int>(gridDim.x) != static_cast<int>(blockIdx.x)) continue;
    for (int r = offsets[local] + sum.total; r < offsets[local + 1]; ++r) p.sorted_slots[r] = c.num_rows * slots;
  }
  if (blockIdx.x == 0) {
    for (int i = static_cast<int>(threadIdx.x); i <= locals; i += static_cast<int>(blockDim.x)) p.expert_offsets[i] = offsets[i];
    for (int i = p.num_local_experts; i < locals; ++i) {
      for (int r = offsets[i] + valid + static_cast<int>(threadIdx.x); r < offsets[i + 1]; r += static_cast<int>(blockDim.x)) {
        p.sorted_slots[r] = c.num_rows * slots;
      }
    }
  }
  __syncthreads();

  for (int tile = 0; tile < block_tiles; ++tile) {
    std::int64_t const t = begin + std::int64_t{tile} * warps + warp;
    if (t >= valid) continue;
    std::int64_t const slot = t * slots + lane;
    if (lane < cfg.topk) {
      unsigned own = rank;
      if (block_tiles > 1) {
        std::int32_t const id = c.ids[t * c.ids_stride + lane];
        physical = id < c.num_physical ? id : kNoExpert;
        if (tile + 1 < block_tiles) own = static_cast<unsigned>(p.inverse[slot]);
      }
      bool const here = physical >= 0 && ranks[physical] != ~0U;
      auto const at = static_cast<std::int32_t>(here ? ranks[physical] + own : 0);
      p.inverse[slot] = here ? at : -1;
      if (here) p.sorted_slots[at] = static_cast<std::int32_t>(slot);
    }
    if (lane < cfg.num_fused_shared) {  // every valid row has them: a slot's rank is its row
      std::int64_t const fused = t * slots + cfg.topk + lane;
      bool const here = p.num_local_shared != 0;
      std::int32_t const at = here ? offsets[p.num_local_experts + lane] + static_cast<std::int32_t>(t) : -1;
      p.inverse[fused] = at;
      if (here) p.sorted_slots[at] = static_cast<std::int32_t>(fused);
    }
  }
}

/// What the launch reads off the current device.
struct RoutingDevice {
  int num_sms = 0;
  bool has_clusters = false;
  int max_shared_bytes = 0;
};
inline RoutingDevice routing_device() {
  int device = 0;
  int major = 0;
  RoutingDevice d;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&d.num_sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&d.max_shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "cudaDeviceGetAttribute");
  d.has_clusters = major >= 9;
  return d;
}

template <int V, class Config, class L>
void launch_routing(Config const& cfg, RoutingCall<L> const& call, RoutingTuning const& tuning, RoutingDevice const& device,
                    cudaStream_t stream) {
  auto* const kernel = &routing_kernel<V, Config, L>;
  int const locals =
      call.permutation.expert_offsets == nullptr ? 0 : call.permutation.num_local_experts + call.permutation.num_local_shared;
  int const bytes = 4 * routing_shared(call.num_physical, locals, call.large, tuning.warps, call.scratch_floats).words;
  if (bytes > device.max_shared_bytes) {
    throw Error(ErrorCode::unsupported,
                text("routing kernel: ", bytes, " bytes of shared memory, the device has ", device.max_shared_bytes));
  }
  if (bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute");
  }
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t launch{};
  launch.gridDim = dim3(static_cast<unsigned>(tuning.blocks));
  launch.blockDim = dim3(static_cast<unsigned>(tuning.warps * kWarp));
  launch.dynamicSmemBytes = static_cast<std::size_t>(bytes);
  launch.stream = stream;
  if (tuning.barrier == GridBarrier::cooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  } else if (tuning.barrier == GridBarrier::cluster) {
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(tuning.blocks);
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  launch.attrs = &attribute;
  launch.numAttrs = tuning.barrier == GridBarrier::none ? 0 : 1;
  check_cuda(cudaLaunchKernelEx(&launch, kernel, cfg, call, tuning.barrier), "routing kernel");
}

template <class Config, class L>
void launch_routing_for(Config const& cfg, RoutingCall<L> const& call, RoutingTuning const& tuning, RoutingDevice const& device,
                        cudaStream_t stream) {
  switch (lane_values(cfg.num_experts + cfg.num_zero_experts)) {
    case 1: return launch_routing<1>(cfg, call, tuning, device, stream);
    case 2: return launch_routing<2>(cfg, call, tuning, device, stream);
    case 4: return launch_routing<4>(cfg, call, tuning, device, stream);
    case 8: return launch_routing<8>(cfg, call, tuning, device, stream);
    case 16: return launch_routing<16>(cfg, call, tuning, device, stream);
    default: return launch_routing<32>(cfg, call, tuning, device, stream);
  }
}

}  // namespace detail

template <class Router, class L>
void route_fused(Router const& router, FusedRouting<L> const& f, Stream<space::cuda> stream) {
  using namespace detail;
  auto const& cfg = router.config();
  RouteArgs<L> const& a = f.args;
  check_fused(resolve(cfg), f);
  std::int64_t const rows = a.logits.extent(0);
  bool const permute = f.permutation.expert_offsets != nullptr;
  require(rows * cfg.num_slots() < std::int64_t{1} << 31, ErrorCode::capacity, "router_logits: ", rows, " rows of ", cfg.num_slots(),
          " slots, at most 2^31 - 1 slots");
  if (rows == 0) {
    if (!permute) return;
    std::size_t const n = static_cast<std::size_t>(f.permutation.num_local_experts + f.permutation.num_local_shared);
    check_cuda(cudaMemsetAsync(f.permutation.expert_offsets, 0, (n + 1) * sizeof(std::int64_t), stream), "cudaMemsetAsync");
    if (f.permutation.expert_num_tokens == nullptr) return;
    check_cuda(cudaMemsetAsync(f.permutation.expert_num_tokens, 0, n * sizeof(std::int32_t), stream), "cudaMemsetAsync");
    return;
  }
  RoutingDevice const device = routing_device();
  int const n = cfg.num_experts + cfg.num_zero_experts;
  auto* const work = static_cast<unsigned char*>(f.workspace);
  RoutingCall<L> call{};
  call.logits = a.logits.data_handle();
  call.logits_stride = a.logits.stride(0);
  call.num_rows = static_cast<std::int32_t>(rows);
  call.valid_rows = static_cast<std::int32_t>(a.num_valid_rows);
  call.valid_rows_word = f.num_valid_rows;
  call.token_ids = a.token_ids;
  call.ids = a.topk_ids.data_handle();
  call.ids_stride = a.topk_ids.stride(0);
  call.weights = a.topk_weights.data_handle();
  call.weights_stride = a.topk_weights.stride(0);
  call.shared_weights = a.shared_weights.data_handle();
  call.shared_stride = call.shared_weights == nullptr ? 0 : a.shared_weights.stride(0);
  static_assert(sizeof(RouteCounters::degenerate_rows) == sizeof(unsigned long long));
  call.degenerate_rows = a.counters == nullptr ? nullptr : reinterpret_cast<unsigned long long*>(&a.counters->degenerate_rows);
  if (f.mapping != nullptr) call.mapping = *f.mapping;
  call.num_physical = f.mapping != nullptr ? f.mapping->num_physical : cfg.num_experts;
  call.recorder = f.recorder;
  call.logical_ids = f.logical_ids;
  call.zero_weights = f.zero_expert_weights;
  call.permutation = f.permutation;
  call.barrier = reinterpret_cast<unsigned*>(work);
  call.histograms = work == nullptr ? nullptr : work + kBarrierBytes;
  int const size = cfg.num_expert_group > 1 ? cfg.num_experts / cfg.num_expert_group : 0;
  int const lanes = size / lane_values(n);
  bool const in_registers = lanes * lane_values(n) == size && (lanes & (lanes - 1)) == 0;
  call.scratch_floats = size == 0 || (in_registers && lanes > 0) ? 0 : cfg.num_experts + cfg.num_expert_group;
  RoutingTuning const tuning = choose_routing_tuning(rows, n, device.num_sms, device.has_clusters, permute);
  call.large = rows >= 1 << 16;
  launch_routing_for(cfg, call, tuning, device, stream);
}

template <class Config>
template <class L>
void RowRouter<Config>::select(RouteArgs<L> const& a, Stream<space::cuda> stream) const {
  FusedRouting<L> f;
  f.args = a;
  route_fused(*this, f, stream);
}

}  // namespace moe::routing
