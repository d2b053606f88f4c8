// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/token_sums.cuh: how the thread blocks of the one-token kernel of packed weights share sums: those of the first product,
// of which every block makes the intermediate that it needs, and those of the second, which are the output.
//
// A token is short beside the latencies of memory, so reads that depend on nothing new are started before a wait, and independent ones
// together. Code that runs once is fetched as it runs, so it is short.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/core/ptx/memory.cuh"
#include "moe/experts/hopper/common/wait.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/token_plan.hpp"

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
  Range* runs_of;        ///< [2][kTokenWarps] runs that the warps' units touch, by product; empty ones of warps that are not there
};

/// What an expert's sums from row `row` on are multiplied with: a factor of each row, or one of all.
template <W4Scheme S>
struct SlotFactors {
  float const* from;
  __device__ SlotFactors(Params const& p, int phase, int expert, int row) : from(phase == 0 ? p.layer.factor[0] : p.layer.factor[1]) {
    int const bricks = phase == 0 ? p.layer.bricks[0] : p.layer.bricks[1];
    from += has_row_factors(S) ? static_cast<long long>(expert) * bricks * kBrickRows + row : expert;
  }
  __device__ float const& at(int row) const { return has_row_factors(S) ? from[row] : *from; }
  __device__ float of(int row) const { return __ldg(&at(row)); }
};

/// Where the sums of a run lie that thread block `part` of those that share it has written.
__device__ inline float* shared_sums(Params const& p, TokenUnits const& units, int phase, int run, int part) {
  int const number = phase == 0 ? run : units.slots * units.pairs[0] + run;
  return p.partials + (static_cast<long long>(number) * kTokenParts + part) * kPairRows;
}

/// Adds what the block's warps have of each run of its units, in the order of the warps, and stores it for all blocks.
__device__ inline void share_sums(Params const& p, TokenMemory const& memory, TokenUnits const& units, int phase) {
  int const thread = thread_index();
  int const block = static_cast<int>(blockIdx.x);
  Range const runs = units.runs_of(phase, units.of_block(phase, block));
  Range const of_warp = memory.runs_of[phase * kTokenWarps + (thread & (kTokenWarps - 1))];
  static_assert(kTokenFlushes == 2);
  for (int i = thread; i < runs.size() * kPairRows; i += static_cast<int>(blockDim.x)) {  // a warp has one run at a time
    int const run = runs.begin + i / kPairRows;
    unsigned const first = __ballot_sync(0xFFFFFFFFu, run == of_warp.begin && run < of_warp.end);  // in the warps' first flush
    unsigned const second = __ballot_sync(0xFFFFFFFFu, run == of_warp.begin + 1 && run < of_warp.end);
    float const* const from = memory.sums + i % kPairRows;
    float sum = 0.0F;
#pragma unroll
    for (int warp = 0; warp < kTokenWarps; ++warp) {
      int const flush = kTokenFlushes * warp + static_cast<int>(second >> warp & 1u);
      if (((first | second) >> warp & 1u) != 0) sum += from[flush * kPairRows];
    }
    __stcg(shared_sums(p, units, phase, run, block - units.first_block(phase, run)) + i % kPairRows, sum);
  }
}

/// The thread that waits for the other blocks: the last one, which seldom has loads under way, for those would have to end first.
__device__ inline bool is_waiter() { return thread_index() == static_cast<int>(blockDim.x) - 1; }

/// Waits until every block has stored its sums of the first product.
__device__ inline void wait_for_blocks(Params const& p) {
  int* const arrived = p.layer.split_counters;
  __syncthreads();
  if (is_waiter()) {
    add_release_gpu(arrived, 1);
    for (std::uint32_t spin = 0; load_acquire_gpu(arrived) < static_cast<int>(gridDim.x); ++spin) {
      if (spin > 400'000'000u) stop_program();
    }
  }
  __syncthreads();
}
/// How many blocks have called this before; every block has waited. Called long after the wait, since it would slow the others' down.
__device__ inline unsigned count_block(Params const& p) {
  return atomicInc(reinterpret_cast<unsigned*>(p.layer.split_counters + 1), gridDim.x - 1);  // wraps to zero after the last block
}

/// Four features of the intermediate, in one of the block's units of the second product; half a warp has the 64 of a unit. A step of the
/// second product is a pair of bricks of the first, whose rows are eight gate rows, then eight up rows.
template <W4Scheme S>
struct FourFeatures {
  float const* from = nullptr;  ///< the first block's sums of the first gate row; its up row is eight further
  int parts = 0;
  float factors[2][4] = {};
  float biases[2][4] = {};

  /// Reads what does not depend on the first product. `i`: the unit in the block's part `mine`.
  __device__ FourFeatures(Params const& p, TokenMemory const& memory, TokenUnits const& units, Range const& mine, int i) {
    if (i >= mine.size()) return;
    int const lane = thread_index() & 15;
    int const row = 64 * (lane >> 3) + 16 * (lane >> 1 & 3) + 4 * (lane & 1);
    TokenUnit const unit(units, 1, mine.begin + i);
    int const run = unit.slot * units.pairs[0] + unit.step;
    int const expert = memory.expert_of[unit.slot];
    int const feature = kBrickDepth * unit.step + 4 * lane;
    from = shared_sums(p, units, 0, run, 0) + row;
    parts = units.blocks_of(0, run);
    SlotFactors<S> const of_rows(p, 0, expert, kPairRows * unit.step + row);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        factors[half][j] = of_rows.of(8 * half + j);
        if (p.layer.bias[0] != nullptr && feature + j < p.layer.bias_width) {
          biases[half][j] = __ldg(p.layer.bias[0] + (2LL * expert + half) * p.layer.bias_width + feature + j);
        }
      }
    }
  }

  /// Adds the blocks' sums, then bias and activation.
  __device__ uint2 activated(Params const& p) const {
    constexpr int kLoads = 4;  // of one row, at a time
    float sums[2][4] = {};
#pragma unroll 1
    for (int first = 0; first < parts; first += kLoads) {
      float4 loaded[kLoads][2] = {};
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        if (first + i >= parts) break;
#pragma unroll
        for (int half = 0; half < 2; ++half)
          loaded[i][half] = __ldcg(reinterpret_cast<float4 const*>(from + (first + i) * kPairRows + 8 * half));
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float4 const& v = loaded[i][half];
          float const four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[half][j] += four[j];
        }
      }
    }
    float value[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      value[j] = activate(p.layer.activation, fmaf(sums[0][j], factors[0][j], biases[0][j]), fmaf(sums[1][j], factors[1][j], biases[1][j]));
    }
    return make_uint2(pack<__nv_bfloat16>(value[0], value[1]), pack<__nv_bfloat16>(value[2], value[3]));
  }
};

/// Brings into L2 what FourFeatures and store_columns() read of biases and factors.
template <W4Scheme S>
__device__ inline void prefetch_constants(Params const& p, TokenMemory const& memory, TokenUnits const& units) {
  constexpr int kLine = 32;  // floats
  int const lane = thread_index() & 15;
  Range const mine = units.of_block(1, static_cast<int>(blockIdx.x));
  if (int const i = thread_index() / 16; i < mine.size() && lane < 8) {
    TokenUnit const unit(units, 1, mine.begin + i);
    int const expert = memory.expert_of[unit.slot];
    int const feature = kBrickDepth * unit.step + kLine * (lane & 1);
    if (lane < 4 && p.layer.bias[0] != nullptr && feature < p.layer.bias_width) {
      prefetch_l2(p.layer.bias[0] + (2LL * expert + lane / 2) * p.layer.bias_width + feature);
    }
    if (lane >= 4) prefetch_l2(&SlotFactors<S>(p, 0, expert, kPairRows * unit.step + kLine * (lane - 4)).at(0));
  }
  if (p.layer.bias[1] == nullptr) return;
  constexpr int kLines = kPairRows / kLine;
  Range const runs = units.runs_of(1, mine);
  for (int i = thread_index(); i < kLines * units.slots * runs.size(); i += static_cast<int>(blockDim.x)) {
    int const row = kPairRows * (runs.begin + i / (kLines * units.slots)) + kLine * (i % kLines);
    if (row >= p.align.hidden) continue;
    prefetch_l2(p.layer.bias[1] + static_cast<long long>(memory.expert_of[i / kLines % units.slots]) * p.align.hidden + row);
  }
}

/// The step between the products: shares the block's sums of the first, waits for the other blocks, and computes the intermediate of the
/// block's units of the second.
template <W4Scheme S>
__device__ inline void cross(Params const& p, TokenMemory const& memory, TokenUnits const& units) {
  Range const mine = units.of_block(1, static_cast<int>(blockIdx.x));
  int const half_warps = static_cast<int>(blockDim.x) / 16;
  int i = thread_index() / 16;
  FourFeatures<S> features(p, memory, units, mine, i);
  __syncthreads();  // every warp has flushed its sums
  share_sums(p, memory, units, 0);
  wait_for_blocks(p);
  while (i < mine.size()) {
    *reinterpret_cast<uint2*>(memory.inter + kBrickDepth * i + 4 * (thread_index() & 15)) = features.activated(p);
    i += half_warps;
    features = FourFeatures<S>(p, memory, units, mine, i);
  }
  __syncthreads();
}

/// The output of those runs of the block's units at which this block is the last to arrive.
__device__ inline void store_columns(Params const& p, TokenMemory const& memory, TokenUnits const& units) {
  constexpr int kRuns = 32;  // at a time
  constexpr int kLoads = 8;
  __shared__ bool last_of_run[kRuns];
  int const thread = thread_index();
  int const groups = static_cast<int>(blockDim.x) / kPairRows;  // of threads, each of which has a run at a time
  int const group = thread / kPairRows;
  Range const runs = units.runs_of(1, units.of_block(1, static_cast<int>(blockIdx.x)));
  for (int begin = runs.begin; begin < runs.end; begin += kRuns) {
    int const count = min(kRuns, runs.end - begin);
    __syncthreads();
    if (thread < count) {
      auto const last = static_cast<unsigned>(units.blocks_of(1, begin + thread) - 1);
      auto* const counter = reinterpret_cast<unsigned*>(p.layer.split_counters + 2 + begin + thread);
      last_of_run[thread] = increment_acq_rel_gpu(counter, last) == last;
    }
    __syncthreads();
    for (int i = group; i < count && group < groups; i += groups) {
      int const run = begin + i;
      int const row = kPairRows * run + thread % kPairRows;
      if (!last_of_run[i] || row >= p.align.hidden) continue;
      int const parts = units.blocks_of(1, run);
      float const* const from = shared_sums(p, units, 1, run, 0) + thread % kPairRows;
      float total = 0.0F;
#pragma unroll 1
      for (int first = 0; first < parts; first += kLoads) {
        float loaded[kLoads] = {};
#pragma unroll
        for (int part = 0; part < kLoads; ++part) {
          if (first + part < parts) loaded[part] = __ldcg(from + (first + part) * kPairRows);
        }
#pragma unroll
        for (float const v : loaded) total += v;
      }
      if (p.layer.bias[1] != nullptr) {
        for (int slot = 0; slot < units.slots; ++slot) {
          float const bias = __ldg(p.layer.bias[1] + static_cast<long long>(memory.expert_of[slot]) * p.align.hidden + row);
          total = fmaf(memory.weight_of[slot], bias, total);
        }
      }
      static_cast<__nv_bfloat16*>(p.out)[row] = __float2bfloat16_rn(total);
    }
  }
}

}  // namespace moe::hopper::w4
