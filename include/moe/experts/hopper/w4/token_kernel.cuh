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

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"
#include "moe/experts/hopper/w4/token_units.cuh"

namespace moe::hopper::w4 {

/// A thread's view of shared memory.
struct TokenMemory {
  char* x;               ///< [H] bf16
  __nv_bfloat16* inter;  ///< [units of the block in the second product][64]
  float* sums;           ///< [warps][kTokenFlushes][kPairRows]
  char* buffers;         ///< of this warp
  std::uint64_t* full;   ///< [stages] of this warp
  float* weight_of;      ///< [kTokenSlots]
  int* expert_of;        ///< [kTokenSlots]
  Range* runs_of;        ///< [2][kTokenWarps] runs that the warps' units touch, by product
};

/// The factors of a slot's sums: of rows, or one.
template <W4Scheme S>
__device__ inline float sum_factor(Params const& p, int phase, int expert, int row) {
  float const* const factors = phase == 0 ? p.layer.factor[0] : p.layer.factor[1];
  if constexpr (!has_row_factors(S)) return __ldg(factors + expert);
  int const bricks = phase == 0 ? p.layer.bricks[0] : p.layer.bricks[1];
  return __ldg(factors + static_cast<long long>(expert) * bricks * kBrickRows + row);
}

/// Where the sums of a run lie that thread block `part` of those that share it has written.
__device__ inline float* shared_sums(Params const& p, TokenUnits const& units, int phase, int run, int part) {
  int const number = phase == 0 ? run : units.slots * units.pairs[0] + run;
  return p.partials + (static_cast<long long>(number) * kTokenParts + part) * kPairRows;
}

/// Adds what the block's warps have of each run of its units, in the order of the warps, and stores it for all blocks.
__device__ inline void share_sums(Params const& p, TokenMemory const& memory, TokenUnits const& units, int phase) {
  int const thread = thread_index();
  int const threads = static_cast<int>(blockDim.x);
  int const warps = threads / 32;
  int const blocks = static_cast<int>(gridDim.x);
  int const block = static_cast<int>(blockIdx.x);
  Range const mine = units.of_block(phase, block, blocks);
  Range const runs = units.runs_of(phase, mine);
  for (int i = thread; i < runs.size() * kPairRows; i += threads) {
    int const run = runs.begin + i / kPairRows;
    int const row = i % kPairRows;
    float sum = 0.0F;
    for (int warp = 0; warp < warps; ++warp) {
      Range const of_warp = memory.runs_of[phase * kTokenWarps + warp];
      if (run < of_warp.begin || run >= of_warp.end) continue;
      sum += memory.sums[(warp * kTokenFlushes + run - of_warp.begin) * kPairRows + row];
    }
    __stcg(shared_sums(p, units, phase, run, block - units.block_of(phase, run * one_of(units.run, phase), blocks)) + row, sum);
  }
}

/// Waits until every block has stored its sums of the first product. Thread 0 returns how many blocks passed before this one.
__device__ inline unsigned wait_for_blocks(Params const& p) {
  unsigned order = 0;
  __syncthreads();
  if (thread_index() == 0) {
    int* const arrived = p.layer.split_counters;
    int const blocks = static_cast<int>(gridDim.x);
    add_release_gpu(arrived, 1);
    for (std::uint32_t spin = 0; load_acquire_gpu(arrived) < blocks; ++spin) {
      if (spin > 400'000'000u) stop_program();
    }
    order = atomicInc(reinterpret_cast<unsigned*>(arrived + 1), static_cast<unsigned>(blocks - 1));  // wraps to zero after the last block
  }
  __syncthreads();
  return order;
}

/// The intermediate of the block's units of the second product: adds the blocks' sums, then bias and activation. Half a warp has a unit, a
/// lane four of its 64 features. A step of the second product is a pair of bricks of the first, whose rows are eight gate rows, then eight
/// up rows.
template <W4Scheme S>
__device__ inline void stage_intermediate(Params const& p, TokenMemory const& memory, TokenUnits const& units) {
  int const thread = thread_index();
  int const blocks = static_cast<int>(gridDim.x);
  int const lane = thread & 15;
  Range const mine = units.of_block(1, static_cast<int>(blockIdx.x), blocks);
  int const row = 64 * (lane >> 3) + 16 * (lane >> 1 & 3) + 4 * (lane & 1);  // of the first gate row; its up row is eight further
  for (int i = thread / 16; i < mine.size(); i += static_cast<int>(blockDim.x) / 16) {
    TokenUnit const unit(units, 1, mine.begin + i);
    int const run = unit.slot * units.pairs[0] + unit.step;
    int const first = units.block_of(0, run * units.run[0], blocks);
    int const last = units.block_of(0, (run + 1) * units.run[0] - 1, blocks);
    float gate[4] = {}, up[4] = {};
    float const* from = shared_sums(p, units, 0, run, 0) + row;
#pragma unroll 2
    for (int part = first; part <= last; ++part, from += kPairRows) {
      float4 const g = __ldcg(reinterpret_cast<float4 const*>(from));
      float4 const u = __ldcg(reinterpret_cast<float4 const*>(from + 8));
      float const gates[4] = {g.x, g.y, g.z, g.w};
      float const ups[4] = {u.x, u.y, u.z, u.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        gate[j] += gates[j];
        up[j] += ups[j];
      }
    }
    int const expert = memory.expert_of[unit.slot];
    int const feature = kBrickDepth * unit.step + 4 * lane;
    float const* const bias = p.layer.bias[0] == nullptr ? nullptr : p.layer.bias[0] + 2LL * expert * p.layer.bias_width + feature;
    float value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      bool const biased = bias != nullptr && feature + j < p.layer.bias_width;
      int const packed = kPairRows * unit.step + row + j;
      value[j] = activate(p.layer.activation, fmaf(gate[j], sum_factor<S>(p, 0, expert, packed), biased ? bias[j] : 0.0F),
                          fmaf(up[j], sum_factor<S>(p, 0, expert, packed + 8), biased ? bias[p.layer.bias_width + j] : 0.0F));
    }
    *reinterpret_cast<uint2*>(memory.inter + kBrickDepth * i + 4 * lane) =
        make_uint2(pack<__nv_bfloat16>(value[0], value[1]), pack<__nv_bfloat16>(value[2], value[3]));
  }
}

/// The output of those runs of the block's units at which this block is the last to arrive.
__device__ inline void store_columns(Params const& p, TokenMemory const& memory, TokenUnits const& units) {
  __shared__ int last_of_run;
  int const thread = thread_index();
  int const blocks = static_cast<int>(gridDim.x);
  Range const runs = units.runs_of(1, units.of_block(1, static_cast<int>(blockIdx.x), blocks));
  for (int run = runs.begin; run < runs.end; ++run) {
    int const parts = units.block_of(1, (run + 1) * units.run[1] - 1, blocks) - units.block_of(1, run * units.run[1], blocks) + 1;
    __syncthreads();
    if (thread == 0) {
      fence_device();
      auto* const counter = reinterpret_cast<unsigned*>(p.layer.split_counters + 2 + run);
      last_of_run = atomicInc(counter, static_cast<unsigned>(parts - 1)) == static_cast<unsigned>(parts - 1) ? 1 : 0;
      fence_device();
    }
    __syncthreads();
    int const row = kPairRows * run + thread;
    if (last_of_run == 0 || thread >= kPairRows || row >= p.align.hidden) continue;
    float total = 0.0F;
    float const* const from = shared_sums(p, units, 1, run, 0) + thread;
#pragma unroll 4
    for (int part = 0; part < parts; ++part) total += __ldcg(from + part * kPairRows);
    if (p.layer.bias[1] != nullptr) {
      for (int slot = 0; slot < units.slots; ++slot) {
        float const bias = __ldg(p.layer.bias[1] + static_cast<long long>(memory.expert_of[slot]) * p.align.hidden + row);
        total = fmaf(memory.weight_of[slot], bias, total);
      }
    }
    static_cast<__nv_bfloat16*>(p.out)[row] = __float2bfloat16_rn(total);
  }
}

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
  int const expert = memory.expert_of[unit.slot];
  float const weight = memory.weight_of[unit.slot];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    int const row = kPairRows * unit.pair + 64 * (i / 8) + 16 * (i / 2 % 4) + (lane >> 2) + 8 * (i % 2);
    float const factor = row < p.align.hidden ? sum_factor<S>(p, 1, expert, row) : 0.0F;
    float& to = total.of[i / 8][i / 2 % 4][i % 2];
    to = fmaf(sums.of[i / 8][i / 2 % 4][i % 2], weight * factor, to);
  }
  sums.clear();
}

/// Waits for the preceding kernel and reads the token's slots. The number of slots with a local expert; -1 if there is no token.
__device__ inline int read_slots(Params const& p, TokenMemory const& memory) {
  int const lane = thread_index() & 31;
  wait_for_dependencies();
  int const tokens = p.align.num_tokens == nullptr ? 1 : *p.align.num_tokens;
  int const id = lane < p.align.topk ? p.align.ids[lane] : -1;
  float const weight = lane < p.align.topk ? p.align.weights[lane] : 0.0F;
  bool const local = static_cast<unsigned>(id) < static_cast<unsigned>(p.align.num_experts);
  unsigned const valid = __ballot_sync(0xFFFFFFFFu, local);
  if (local && thread_index() < 32) {
    int const slot = __popc(valid & ((1u << lane) - 1));
    memory.expert_of[slot] = id;
    memory.weight_of[slot] = weight;
  }
  return tokens < 1 ? -1 : __popc(valid);
}

/// Gated layers, weights of slots on the output; every one of the blocks must be resident.
template <W4Scheme S>
__global__ void __launch_bounds__(32 * token_warps(S), 1)
    token_kernel(__grid_constant__ Params const p, __grid_constant__ TokenPlan const plan) {
  extern __shared__ __align__(1024) uint4 w4_token_smem[];
  __shared__ std::uint64_t full[kTokenWarps][kTokenStages];
  __shared__ std::uint64_t x_full;
  __shared__ float weight_of[kTokenSlots];
  __shared__ int expert_of[kTokenSlots];
  __shared__ Range runs_of[2 * kTokenWarps];
  int const lane = thread_index() & 31;
  int const warp = thread_index() >> 5;
  int const warps = static_cast<int>(blockDim.x) >> 5;
  char* const base = reinterpret_cast<char*>(w4_token_smem);
  TokenMemory const memory{base,
                           reinterpret_cast<__nv_bfloat16*>(base + plan.inter_at),
                           reinterpret_cast<float*>(base + plan.sums_at),
                           base + plan.buffers_at + warp * kTokenStages * token_buffer_bytes(S),
                           full[warp],
                           weight_of,
                           expert_of,
                           runs_of};
  if (lane < kTokenStages) ptx::mbarrier_init(memory.full + lane, 1);
  if (thread_index() == 0) ptx::mbarrier_init(&x_full, 1);
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  std::uint64_t const policy = policy_evict_first();
  launch_dependents();

  int const slots = read_slots(p, memory);
  if (slots < 0) return;
  if (slots == 0) {  // no expert here: the output is zero
    for (int i = static_cast<int>(blockIdx.x * blockDim.x) + thread_index(); i < p.align.hidden;
         i += static_cast<int>(gridDim.x * blockDim.x)) {
      static_cast<__nv_bfloat16*>(p.out)[i] = __float2bfloat16_rn(0.0F);
    }
    return;
  }
  __syncthreads();  // experts, weights and barriers
  if (thread_index() == 0) {
    auto const bytes = static_cast<std::uint32_t>(2 * p.align.hidden);
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &x_full, bytes);
    bulk_load(memory.x, p.x, bytes, &x_full, policy);
  }

  TokenUnits const units(p, slots);
  int const block = static_cast<int>(blockIdx.x);
  int const blocks = static_cast<int>(gridDim.x);
  Range const second_of_block = units.of_block(1, block, blocks);
  Range const first = units.of_block(0, block, blocks).part(warp, warps);
  Range const second = second_of_block.part(warp, warps);
  int const all = first.size() + second.size();
  if (lane < 2) runs_of[lane * kTokenWarps + warp] = units.runs_of(lane, lane == 0 ? first : second);  // read behind a barrier
  auto const unit_of = [&](int n) {
    bool const later = n >= first.size();
    return TokenUnit(units, later ? 1 : 0, later ? second.begin + n - first.size() : first.begin + n);
  };
  auto const fetch = [&](TokenUnit const& unit, int stage) {
    fetch_unit<S>(p, unit, memory.expert_of[unit.slot], memory.buffers + stage * token_buffer_bytes(S), memory.full + stage, policy);
  };
  static_assert(kTokenStages == 2);
  TokenUnit queue[2] = {unit_of(0), unit_of(1)};  // the next units, decoded once
  if (all > 0) fetch(queue[0], 0);
  if (all > 1) fetch(queue[1], 1);

  PairSums sums, total;
  sums.clear();
  total.clear();
  float* to = memory.sums + warp * kTokenFlushes * kPairRows;
  bool crossed = false;
  unsigned order = 0;
  int stage = 0;
  std::uint32_t parity = 0;
  wait_parity(&x_full, 0);
  for (int n = 0;; ++n) {
    if (n >= first.size() && !crossed) {
      crossed = true;
      __syncthreads();  // every warp has flushed its sums
      share_sums(p, memory, units, 0);
      order = wait_for_blocks(p);
      stage_intermediate<S>(p, memory, units);
      to = memory.sums + warp * kTokenFlushes * kPairRows;
      __syncthreads();
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
    multiply_unit<S>(memory.buffers + stage * token_buffer_bytes(S), unit.bricks(p), vector, sums);
    if (n + kTokenStages < all) fetch(queue[1], stage);
    stage ^= 1;
    if (stage == 0) parity ^= 1u;

    bool const last = n + 1 == (later ? all : first.size());  // of the warp in this product
    bool const slot_ends = unit.step + 1 == one_of(units.steps, unit.phase);
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
  __syncthreads();  // every warp has flushed its sums
  share_sums(p, memory, units, 1);
  store_columns(p, memory, units);
  if (order == gridDim.x - 1 && thread_index() == 0)
    *p.layer.split_counters = 0;  // every block is past its wait: leave the counter as it was
}

}  // namespace moe::hopper::w4
