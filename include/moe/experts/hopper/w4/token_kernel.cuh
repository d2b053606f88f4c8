// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/token_kernel.cuh: the whole layer of packed weights for one token in one kernel. Every multiprocessor has an equal part
// of either product, cut between bricks and not between matrices. Every warp loads its own bricks, also during the one grid-wide step
// between the products, so that loads go on through it.
//
// All warps have the same role: a warp multiplies its units of the first product, then those of the second. A warp waits for the copies of
// its bricks, all threads of a block for x, all blocks for each other once, between the products. Sums that several blocks share are added
// in the order of the blocks, so the bits do not depend on which block is first. Every block that needs sums of the first product adds them
// itself; the last block to arrive adds those of the second.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/experts/hopper/w4/token_sums.cuh"
#include "moe/experts/hopper/w4/token_units.cuh"

namespace moe::hopper::w4 {

/// Writes a lane's sums where share_sums() finds them, and clears them.
__device__ inline void flush(float* to, PairSums& sums) {
  int const lane = thread_index() & 31;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    if ((lane & 3) == 0) to[64 * (i / 8) + 16 * (i / 2 % 4) + (lane >> 2) + 8 * (i % 2)] = sums.of[i / 8][i / 2 % 4][i % 2];
  }
  sums.clear();
}
/// total += weight · the factors of the slot's rows · sums; clears sums.
template <W4Scheme S>
__device__ inline void add_slot(Params const& p, TokenMemory const& memory, TokenUnit const& unit, PairSums& sums, PairSums& total) {
  int const lane = thread_index() & 31;
  SlotFactors<S> const factors(p, 1, memory.expert_of[unit.slot], kPairRows * unit.pair + (lane >> 2));
  float const weight = memory.weight_of[unit.slot];
  int const bricks = bricks_of(p, unit);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int const row = 64 * (i / 8) + 16 * (i / 2 % 4) + 8 * (i % 2);
    float const factor = has_row_factors(S) && i / 8 >= bricks ? 0.0F : factors.of(row);
    float& to = total.of[i / 8][i / 2 % 4][i % 2];
    to = fmaf(sums.of[i / 8][i / 2 % 4][i % 2], weight * factor, to);
  }
  sums.clear();
}

/// What a lane knows of the token's slots: lane i has the router's choice i.
struct RoutedSlot {
  int expert;
  float weight;
  unsigned local;  ///< the lanes whose expert is local
  bool token;      ///< whether there is a token

  __device__ explicit RoutedSlot(AlignArgs const& align) {
    int const lane = thread_index() & 31;
    int const tokens = align.num_tokens == nullptr ? 1 : *align.num_tokens;
    expert = lane < align.topk ? align.ids[lane] : -1;
    weight = lane < align.topk ? align.weights[lane] : 0.0F;
    token = tokens > 0;
    local = __ballot_sync(0xFFFFFFFFu, static_cast<unsigned>(expert) < static_cast<unsigned>(align.num_experts));
  }
  /// Writes the slots with a local expert to shared memory, by one warp.
  __device__ void store(TokenMemory const& memory) const {
    int const lane = thread_index() & 31;
    if ((local >> lane & 1u) == 0) return;
    int const slot = __popc(local & ((1u << lane) - 1));
    memory.expert_of[slot] = expert;
    memory.weight_of[slot] = weight;
  }
};

/// The output of a token without a local expert.
__device__ inline void store_zeros(Params const& p) {
  for (int i = static_cast<int>(blockIdx.x * blockDim.x) + thread_index(); i < p.align.hidden;
       i += static_cast<int>(gridDim.x * blockDim.x)) {
    static_cast<__nv_bfloat16*>(p.out)[i] = __float2bfloat16_rn(0.0F);
  }
}

/// The units of `slots` slots. A function of its own, since it is long and rarely runs.
__device__ __noinline__ inline void divide_again(Params const& p, int slots, TokenUnits& units) {
  units = TokenUnits(slots, p.align.hidden, p.layer.intermediate, static_cast<int>(gridDim.x), static_cast<int>(blockDim.x) / 32);
}

/// Gated layers, weights of slots on the output; every one of the blocks must be resident.
template <W4Scheme S>
__global__ void __launch_bounds__(32 * token_warps(S), 1) packed_token_kernel(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) uint4 w4_token_smem[];
  __shared__ std::uint64_t full[kTokenWarps][kTokenStages];
  __shared__ std::uint64_t x_full;
  __shared__ float weight_of[kTokenSlots];
  __shared__ int expert_of[kTokenSlots];
  __shared__ Range runs_of[2 * kTokenWarps];
  __shared__ TokenUnits units;
  int const lane = thread_index() & 31;
  int const warp = thread_index() >> 5;
  int const block = static_cast<int>(blockIdx.x);
  char* const base = reinterpret_cast<char*>(w4_token_smem);
  TokenMemory const memory{base,
                           reinterpret_cast<__nv_bfloat16*>(base + p.token.inter_at),
                           reinterpret_cast<float*>(base + p.token.sums_at),
                           base + p.token.buffers_at + warp * kTokenStages * token_buffer_bytes(S),
                           full[warp],
                           weight_of,
                           expert_of,
                           runs_of};
  if (lane < kTokenStages) ptx::mbarrier_init(memory.full + lane, 1);
  if (thread_index() == 0) {
    ptx::mbarrier_init(&x_full, 1);
    units = p.token.units;
  }
  if (thread_index() < 2 * kTokenWarps) runs_of[thread_index()] = {0, 0};
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  std::uint64_t const policy = policy_evict_first();
  launch_dependents();
  __syncthreads();

  // The units of topk slots, before the router's choices are there; computed again if some of its experts are not local.
  static_assert(kTokenStages == 2);
  Range first{}, second{}, second_of_block{};
  int all = 0;
  TokenUnit queue[2];  // the next units, decoded once
  auto const unit_of = [&](int n) {
    bool const later = n >= first.size();
    return TokenUnit(units, later ? 1 : 0, later ? second.begin + n - first.size() : first.begin + n);
  };
  int slots = 0;
#pragma unroll 1
  for (bool again = false;; again = true) {
    second_of_block = units.of_block(1, block);
    first = units.of_block(0, block).part(warp, units.by_warps);
    second = second_of_block.part(warp, units.by_warps);
    all = first.size() + second.size();
    queue[0] = unit_of(0);
    queue[1] = unit_of(1);
    if (lane < 2) runs_of[lane * kTokenWarps + warp] = units.runs_of(lane, lane == 0 ? first : second);  // read behind a barrier
    if (again) break;

    wait_for_dependencies();
    RoutedSlot const routed(p.align);
    if (!routed.token) return;
    slots = __popc(routed.local);
    if (slots == 0) return store_zeros(p);
    if (thread_index() == 0) {
      auto const bytes = static_cast<std::uint32_t>(2 * p.align.hidden);
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &x_full, bytes);
      bulk_load(memory.x, p.x, bytes, &x_full, policy);
    }
    if (warp == 0) routed.store(memory);
    if (slots == units.slots) break;
    __syncthreads();  // every warp has read the units
    if (thread_index() == 0) {
      divide_again(p, slots, units);
    }
    __syncthreads();
  }
  __syncthreads();  // experts and weights
  auto const fetch = [&](TokenUnit const& unit, int stage) {
    fetch_unit<S>(p, unit, memory.expert_of[unit.slot], memory.buffers + stage * token_buffer_bytes(S), memory.full + stage, policy);
  };
  if (all > 0) fetch(queue[0], 0);
  if (all > 1) fetch(queue[1], 1);
  prefetch_constants<S>(p, memory, units);

  PairSums sums, total;
  sums.clear();
  total.clear();
  float* to = memory.sums + warp * kTokenFlushes * kPairRows;
  bool crossed = false;
  int stage = 0;
  std::uint32_t parity = 0;
  wait_parity(&x_full, 0);
  for (int n = 0;; ++n) {
    if (n >= first.size() && !crossed) {
      crossed = true;
      cross<S>(p, memory, units);
      to = memory.sums + warp * kTokenFlushes * kPairRows;
    }
    if (n >= all) break;

    TokenUnit const unit = queue[0];
    queue[0] = queue[1];
    if (n + kTokenStages < all) queue[1] = unit_of(n + kTokenStages);
    bool const later = unit.phase != 0;
    int const number = later ? second.begin + n - first.size() : first.begin + n;
    char const* const vector = later ? reinterpret_cast<char const*>(memory.inter + kBrickDepth * (number - second_of_block.begin))
                                     : memory.x + 2 * kBrickDepth * unit.step;
    wait_parity(memory.full + stage, parity);
    multiply_unit<S>(memory.buffers + stage * token_buffer_bytes(S), bricks_of(p, unit), vector, sums);
    if (n + kTokenStages < all) fetch(queue[1], stage);
    stage ^= 1;
    if (stage == 0) parity ^= 1u;

    bool const last = n + 1 == (later ? all : first.size());  // of the warp in this product
    bool const slot_ends = unit.step + 1 == units.steps[unit.phase];
    if (!last && !slot_ends) continue;
    if (!later) {
      flush(to, sums);
      to += kPairRows;
      continue;
    }
    add_slot<S>(p, memory, unit, sums, total);
    if (last || unit.slot + 1 == slots) {
      flush(to, total);
      to += kPairRows;
    }
  }
  unsigned const before = is_waiter() ? count_block(p) : 0;
  __syncthreads();  // every warp has flushed its sums
  share_sums(p, memory, units, 1);
  store_columns(p, memory, units);
  if (is_waiter() && before == gridDim.x - 1) *p.layer.split_counters = 0;  // leave the counter as it was
}

}  // namespace moe::hopper::w4
