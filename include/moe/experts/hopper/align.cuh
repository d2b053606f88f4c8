// SPDX-License-Identifier: Apache-2.0
// experts/hopper/align.cuh: one CTA sorts the slots by expert (stable), cuts the rows into tiles and plans the work list.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/epilogue.cuh"
#include "moe/experts/hopper/schedule.cuh"

namespace moe::hopper {

/// Arguments of the aligning kernel. Batched format: `counts` is given and `ids` is null; expert e owns rows [e·capacity, e·capacity +
/// counts[e]) of x and of the output. Standard format: `ids` [M, k].
struct AlignArgs {
  std::int32_t const* ids;
  float const* weights;
  std::int32_t const* num_tokens;
  std::int32_t const* counts;
  int capacity;
  int max_tokens;
  int topk;
  int num_experts;
  int tile_rows;
  int workers;
  int max_splits;
  int max_units;  ///< counters of one phase
  long long partial_floats;
  UnitSpace space;
  Control* control;
  TokenTile* tiles;
  int* counters;  ///< ready counters [max_tiles], then split counters of phase 0 and 1
  int max_tiles;
  std::int32_t* source_row;
  std::int32_t* target_row;
  float* row_weight;
  // fp8 schemes: CTAs from the second on quantise x meanwhile.
  void const* x;  ///< [M, H] bf16
  int hidden;
  std::uint8_t* x_codes;  ///< [M, H] e4m3
  float* x_scales;        ///< [M, H / 128]
};

inline constexpr int kAlignThreads = 1024;
inline constexpr int kAlignWarps = kAlignThreads / 32;

/// Dynamic shared memory of the aligning kernel.
constexpr int align_smem_bytes(int num_experts) { return (kAlignWarps + 4) * num_experts * 4 + 1024; }

namespace detail {

/// Exclusive sum over the first `n` values of `data` (n at most 1024), by the whole CTA; returns the total. `scratch` holds 33 ints.
__device__ inline int exclusive_sum(int value, int* scratch, int* total) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  int sum = value;
#pragma unroll
  for (int offset = 1; offset < 32; offset *= 2) {
    int const other = __shfl_up_sync(0xFFFFFFFFu, sum, offset);
    if (lane >= offset) sum += other;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int warp_sum = scratch[lane];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      int const other = __shfl_up_sync(0xFFFFFFFFu, warp_sum, offset);
      if (lane >= offset) warp_sum += other;
    }
    scratch[lane] = warp_sum;
  }
  __syncthreads();
  int const before = warp == 0 ? 0 : scratch[warp - 1];
  *total = scratch[kAlignWarps - 1];
  __syncthreads();
  return before + sum - value;
}

/// e4m3 codes with one scale per 1×128 group: scale = max(amax, 1e-10) / 448. Sixteen lanes hold one group.
__device__ inline void quantize_groups(AlignArgs const& a, int worker, int workers) {
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  long long const groups = static_cast<long long>(tokens) * (a.hidden / 128);
  long long const step = static_cast<long long>(workers) * (kAlignThreads / 16);
  long long const rounds = (groups + step - 1) / step;
  int const lane = static_cast<int>(threadIdx.x) & 15;
  long long group = static_cast<long long>(worker) * (kAlignThreads / 16) + (static_cast<int>(threadIdx.x) >> 4);
  for (long long r = 0; r < rounds; ++r, group += step) {
    bool const there = group < groups;
    uint4 const words = there ? __ldg(static_cast<uint4 const*>(a.x) + group * 16 + lane) : make_uint4(0, 0, 0, 0);
    std::uint32_t const word[4] = {words.x, words.y, words.z, words.w};
    float v[8];
    float amax = 0.0F;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(word[i] << 16);
      v[2 * i + 1] = __uint_as_float(word[i] & 0xFFFF0000u);
      amax = fmaxf(amax, fmaxf(fabsf(v[2 * i]), fabsf(v[2 * i + 1])));
    }
#pragma unroll
    for (int offset = 1; offset < 16; offset *= 2) amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, offset));
    float const scale = fmaxf(amax, 1e-10F) / 448.0F;
    std::uint32_t code[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) code[i] = pack_e4m3(v[2 * i] / scale, v[2 * i + 1] / scale);
    if (there) {
      reinterpret_cast<uint2*>(a.x_codes)[group * 16 + lane] = make_uint2(code[0] | (code[1] << 16), code[2] | (code[3] << 16));
      if (lane == 0) a.x_scales[group] = scale;
    }
  }
}

}  // namespace detail

__global__ void __launch_bounds__(kAlignThreads, 1) align_kernel(AlignArgs const a) {
  extern __shared__ int align_smem[];
  int* const scratch = align_smem;         // 64
  int* const histogram = align_smem + 64;  // [warps][E]
  int* const row_begin = histogram + kAlignWarps * a.num_experts;
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  int const experts = a.num_experts;
  launch_dependents();
  if (blockIdx.x > 0) {
    wait_for_dependencies();
    detail::quantize_groups(a, static_cast<int>(blockIdx.x) - 1, static_cast<int>(gridDim.x) - 1);
    return;
  }
  for (int i = thread; i < kAlignWarps * experts; i += kAlignThreads) histogram[i] = 0;
  wait_for_dependencies();
  __syncthreads();

  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const slots = a.ids != nullptr ? tokens * a.topk : 0;
  int const chunk = ((slots + kAlignThreads - 1) / kAlignThreads) * 32;  // per warp, whole groups of 32
  int const begin = min(warp * chunk, slots);
  int const end = min(begin + chunk, slots);
  int* const mine = histogram + warp * experts;

  constexpr int kBatch = 4;
  for (int base = begin; base < end; base += 32 * kBatch) {
    int id[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const slot = base + 32 * i + lane;
      id[i] = slot < end ? a.ids[slot] : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      bool const valid = static_cast<unsigned>(id[i]) < static_cast<unsigned>(experts);
      unsigned const peers = __match_any_sync(0xFFFFFFFFu, valid ? id[i] : -1);
      if (valid && lane == __ffs(static_cast<int>(peers)) - 1) mine[id[i]] += __popc(peers);
      __syncwarp();
    }
  }
  __syncthreads();

  // Rows and tiles of each expert; thread e owns expert e (E is at most 1024).
  int rows = 0;
  if (thread < experts) {
    if (a.counts != nullptr) {
      rows = min(max(a.counts[thread], 0), a.capacity);
    } else {
      for (int w = 0; w < kAlignWarps; ++w) {
        int const count = histogram[w * experts + thread];
        histogram[w * experts + thread] = rows;
        rows += count;
      }
    }
  }
  int total_rows = 0;
  int const first_row = detail::exclusive_sum(rows, scratch, &total_rows);
  int const tiles = (rows + a.tile_rows - 1) / a.tile_rows;
  int total_tiles = 0;
  int const first_tile = detail::exclusive_sum(tiles, scratch, &total_tiles);
  if (thread < experts) {
    row_begin[thread] = first_row;
    int const per_tile = tiles > 0 ? ((rows + tiles - 1) / tiles + 7) / 8 * 8 : 0;
    for (int t = 0; t < tiles; ++t) a.tiles[first_tile + t] = TokenTile{thread, first_row, rows, first_tile, tiles, per_tile, {0, 0}};
  }
  for (int i = thread; i < total_tiles; i += kAlignThreads) a.counters[i] = 0;
  int splits[2];
#pragma unroll
  for (int phase = 0; phase < 2; ++phase) {
    int const count = total_tiles * a.space.weight_tiles[phase];
    long long const by_partials = a.partial_floats / (256LL * a.tile_rows);
    splits[phase] = choose_splits(count, a.space.k_steps[phase], a.workers, a.max_splits,
                                  static_cast<int>(min(static_cast<long long>(a.max_units), by_partials)));
    if (splits[phase] > 1) {
      for (int i = thread; i < 2 * count; i += kAlignThreads) a.counters[a.max_tiles + phase * a.max_units + i] = 0;
    }
  }
  if (thread == 0) {
    *a.control = Control{a.workers,
                         total_tiles,
                         {splits[0], splits[1]},
                         {total_tiles * a.space.weight_tiles[0] * splits[0], total_tiles * a.space.weight_tiles[1] * splits[1]},
                         total_rows,
                         slots - total_rows};
  }
  __syncthreads();

  if (a.counts != nullptr) {
    for (int expert = warp; expert < experts; expert += kAlignWarps) {
      int const base = row_begin[expert];
      int const count = min(max(a.counts[expert], 0), a.capacity);
      for (int r = lane; r < count; r += 32) {
        a.source_row[base + r] = expert * a.capacity + r;
        a.target_row[base + r] = expert * a.capacity + r;
        a.row_weight[base + r] = 1.0F;
      }
    }
    return;
  }
  for (int base = begin; base < end; base += 32 * kBatch) {
    int id[kBatch];
    float weight[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const slot = base + 32 * i + lane;
      id[i] = slot < end ? a.ids[slot] : -1;
      weight[i] = slot < end ? a.weights[slot] : 0.0F;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const slot = base + 32 * i + lane;
      bool const valid = static_cast<unsigned>(id[i]) < static_cast<unsigned>(experts);
      unsigned const peers = __match_any_sync(0xFFFFFFFFu, valid ? id[i] : -1);
      int const rank = __popc(peers & ((1u << lane) - 1u));
      int const start = valid ? mine[id[i]] : 0;
      __syncwarp();
      if (valid) {
        int const position = row_begin[id[i]] + start + rank;
        if (rank == 0) mine[id[i]] = start + __popc(peers);
        a.source_row[position] = a.topk == 1 ? slot : slot / a.topk;
        a.target_row[position] = slot;
        a.row_weight[position] = weight[i];
      }
      __syncwarp();
    }
  }
}

}  // namespace moe::hopper
