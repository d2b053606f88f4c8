// SPDX-License-Identifier: Apache-2.0
// routing/device/route_kernel.cuh: the routing kernel: one warp per token, then counts, offsets and the permutation, in one launch.
#pragma once

#include <cstdint>

#include "moe/routing/device/route_permute.cuh"
#include "moe/routing/device/route_sigmoid_groups.cuh"
#include "moe/routing/device/route_warp.cuh"
#include "moe/routing/route.hpp"

namespace moe::routing::detail {

/// FusedRouting in the form that the kernel takes. Row numbers have 32 bits: a call has fewer than 2^31 slots.
template <class L>
struct RoutingCall {
  L const* logits;
  std::int64_t logits_stride;
  std::int32_t num_rows, valid_rows, block_iterations;
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
  std::int64_t logical_stride;
  float* zero_weights;
  Permutation permutation;
  RoutingGrid grid;
  int scratch_floats;  // per warp
};

/// A lane's part of a row, loaded ahead; empty for routers that load it themselves.
template <class Config, class L>
__device__ inline void load_ahead(RoutingCall<L> const& c, std::int64_t t, int lane, float (&z)[SigmoidGroups::kValues]) {
  if constexpr (kIsSigmoidGroups<Config>) {
    if (t < c.num_rows) load_floats(c.logits + t * c.logits_stride + lane * SigmoidGroups::kValues, z);
  }
}
template <int V, class Config, class L>
__device__ inline WarpRow route_logits(Config const& cfg, RoutingCall<L> const& c, std::int64_t t, int lane, float* scratch,
                                       [[maybe_unused]] float (&z)[SigmoidGroups::kValues]) {
  if constexpr (kIsSigmoidGroups<Config>) {
    return route_sigmoid_groups(cfg, z, lane, scratch);
  } else {
    return route_warp<V>(cfg, c.logits + t * c.logits_stride, c.token_ids == nullptr ? 0 : c.token_ids[t], lane, scratch);
  }
}

/// Routes the token of this warp and writes its slots. Returns the physical expert of slot `lane`, -1 if there is none.
template <int V, class Config, class L>
__device__ inline std::int32_t route_token(Config const& cfg, RoutingCall<L> const& c, std::int64_t t, int lane, float* scratch,
                                           float (&z)[SigmoidGroups::kValues]) {
  int const k = cfg.topk;
  WarpRow row = route_logits<V>(cfg, c, t, lane, scratch, z);
  if (lane < k && c.logical_ids != nullptr) c.logical_ids[t * c.logical_stride + lane] = row.id;
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
  if (lane < cfg.topk && c.logical_ids != nullptr) c.logical_ids[t * c.logical_stride + lane] = kNoExpert;
  if (lane == 0 && cfg.num_zero_experts > 0 && c.zero_weights != nullptr) c.zero_weights[t] = 0.0F;
  if (lane < cfg.num_joint_shared && c.shared_weights != nullptr) c.shared_weights[t * c.shared_stride + lane] = 0.0F;
}

template <int V, class Config, class L>
__global__ void __launch_bounds__(kWarp* max_routing_warps(V), 1)
    routing_kernel(__grid_constant__ Config const cfg, __grid_constant__ RoutingCall<L> const c) {
  extern __shared__ __align__(16) unsigned char routing_memory[];
  auto* const words = reinterpret_cast<unsigned*>(routing_memory);
  int const thread = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  int const warps = threads / kWarp;
  int const warp = thread / kWarp;
  int const lane = thread % kWarp;
  int valid = c.valid_rows;
  if (c.valid_rows_word != nullptr) valid = min(max(*c.valid_rows_word, 0), c.num_rows);
  // A block routes its tokens in iterations, a token per warp. Whole iterations per block, so that only the last block with work has idle
  // warps.
  int block_iterations = c.block_iterations;
  if (c.valid_rows_word != nullptr) {
    int const iterations = (valid + warps - 1) / warps;
    block_iterations = (iterations + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  }
  std::int64_t const begin = std::int64_t{block_iterations} * blockIdx.x * warps;
  float z[SigmoidGroups::kValues];
  load_ahead<Config>(c, begin + warp, lane, z);

  Permutation const& p = c.permutation;
  bool const permute = p.expert_offsets != nullptr;
  bool const record = c.recorder.load_counter != nullptr && (c.recorder.record == nullptr || *c.recorder.record != 0);
  bool const count = permute || record;
  int const locals = permute ? p.num_local_experts + p.num_local_shared : 0;
  int const slots = cfg.num_slots();
  RoutingShared const shared = routing_shared(c.num_physical, locals, c.grid, warps, c.scratch_floats);
  auto* const offsets = reinterpret_cast<std::int32_t*>(words + shared.offsets);
  float* const scratch = reinterpret_cast<float*>(words + shared.scratch) + warp * c.scratch_floats;
  SlotCounter counter(c.grid, words, shared, c.num_physical);

  if (count) {
#pragma unroll 1
    for (int i = thread; i < locals; i += threads) offsets[i] = i < p.num_local_experts ? 0 : valid;
    counter.clear();
  }
  std::int32_t physical = kNoExpert;
  unsigned rank = 0;
#pragma unroll 1
  for (int iteration = 0; iteration < block_iterations; ++iteration) {
    std::int64_t const t = begin + std::int64_t{iteration} * warps + warp;
    physical = t < valid ? route_token<V>(cfg, c, t, lane, scratch, z) : kNoExpert;
    if (iteration + 1 < block_iterations) load_ahead<Config>(c, t + warps, lane, z);
    if (!count) continue;
    if (iteration == 0) __syncthreads();  // clear()
    counter.add(physical, warp);
    __syncthreads();
    bool const last = iteration + 1 == block_iterations;
    if (permute && physical >= 0) {
      rank = counter.rank(physical, warp);
      // Kept where the row number will be stored; the last iteration keeps it in a register.
      if (!last) p.inverse[t * slots + lane] = static_cast<std::int32_t>(rank);
    }
    if (!last) counter.next_iteration();
  }
#pragma unroll 1
  for (std::int64_t t = valid + std::int64_t{blockIdx.x} * warps + warp; t < c.num_rows; t += std::int64_t{gridDim.x} * warps) {
    pad_token(cfg, c, t, lane);
  }
  if (!permute) {
    if (block_iterations == 0) return;
#pragma unroll 1
    for (int i = thread; record && i < c.num_physical; i += threads) {
      unsigned const n = counter.in_block(i);
      if (n != 0) atomicAdd(c.recorder.load_counter + i, static_cast<std::int32_t>(n));
    }
    return;
  }

  if (block_iterations == 0) __syncthreads();  // clear()

  // Counts in local order, then their offsets. Every block computes them; one block writes them to memory.
  auto const local_of = [&](int e) { return p.expert_map == nullptr ? e : p.expert_map[e]; };
  counter.sum_up([&](int e, int total) {
    if (e >= c.num_physical) return;
    int const local = local_of(e);
    if (local >= 0) offsets[local] = total;
    if (record && blockIdx.x == 0 && total != 0) atomicAdd(c.recorder.load_counter + e, total);
  });
  __syncthreads();
  counter.leave();
  scan_offsets(offsets, locals, p.row_alignment, words + shared.sums, [&](int i, int total, std::int32_t offset, std::int32_t end) {
    if (blockIdx.x == 0) {
      p.expert_offsets[i] = offset;
      if (i + 1 == locals) p.expert_offsets[locals] = end;
      if (p.expert_num_tokens != nullptr) p.expert_num_tokens[i] = total;
    }
    if (p.row_alignment == 1 || i % static_cast<int>(gridDim.x) != static_cast<int>(blockIdx.x)) return;
#pragma unroll 1
    for (int r = offset + total; r < end; ++r) p.sorted_slots[r] = c.num_rows * slots;
  });

#pragma unroll 1
  for (int iteration = 0; iteration < block_iterations; ++iteration) {
    std::int64_t const t = begin + std::int64_t{iteration} * warps + warp;
    if (t >= valid) continue;
    std::int64_t const slot = t * slots + lane;
    if (lane < cfg.topk) {
      unsigned own = rank;
      if (block_iterations > 1) {
        std::int32_t const id = c.ids[t * c.ids_stride + lane];
        physical = id < c.num_physical ? id : kNoExpert;
        if (iteration + 1 < block_iterations) own = static_cast<unsigned>(p.inverse[slot]);
      }
      int const local = physical >= 0 ? local_of(physical) : -1;
      std::int32_t const at = local >= 0 ? offsets[local] + static_cast<std::int32_t>(counter.before(physical) + own) : -1;
      p.inverse[slot] = at;
      if (local >= 0) p.sorted_slots[at] = static_cast<std::int32_t>(slot);
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

}  // namespace moe::routing::detail
