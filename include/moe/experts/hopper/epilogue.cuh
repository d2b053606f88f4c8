// SPDX-License-Identifier: Apache-2.0
// experts/hopper/epilogue.cuh: from accumulators to rows in memory: activation (and quantisation) after GEMM1, router weight after GEMM2,
// and the ordered sum of the parts of K before either.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/layer_params.cuh"

namespace moe::hopper {

/// SwiGLU with the hardware's exponential and division: relative error about 2^-21, far below the rounding that follows.
struct FastSilu {
  static constexpr char const* kName = "silu";
  __device__ float operator()(float gate, float up) const { return __fdividef(gate * up, 1.0F + __expf(-gate)); }
};

inline constexpr int kGroupBarrier = 1;  ///< named barriers 1 and 2: one per consumer warpgroup; 3: both

__device__ inline void group_barrier(int group) { named_barrier(kGroupBarrier + group, 128); }

/// The four accumulators of columns 8 j + 2 (lane % 4) and the next, times the router weights of these two rows.
__device__ inline float4 scale_columns(float const* weights, int j, float const* v) {
  float2 w;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(w.x), "=f"(w.y) : "r"(smem_address(weights + 8 * j + 2 * (thread_index() & 3))));
  return make_float4(v[0] * w.x, v[1] * w.y, v[2] * w.x, v[3] * w.y);
}

/// Writes 64 features of N rows through the warpgroup's staging buffer as whole 16-byte chunks. `values(j)` gives the thread's four
/// elements of rows 8 j to 8 j + 7, in the order of the wgmma fragment: asked for when they are packed, so that few are alive at a time.
/// `row_pointer(row)` gives the address of feature 0 of a row; features from `feature_limit` on are not stored.
template <class T, int N, int PassRows, class Values, class RowPointer>
__device__ inline void store_rows(Values values, char* staging, int group, int rows, int feature_limit, RowPointer row_pointer) {
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const warp = thread >> 5;
  std::uint32_t const base = smem_address(staging);
  constexpr int kPart = N < PassRows ? N : PassRows;
#pragma unroll
  for (int first = 0; first < N; first += kPart) {
    int const count = N - first < kPart ? N - first : kPart;
    if (first >= rows) break;
#pragma unroll
    for (int local = 0; local < kPart; local += 16) {
      if (local < count) {
        int const j = (first + local) / 8;
        int const matrix = lane >> 3;
        int const row = local + 8 * (matrix >> 1) + (lane & 7);
        int const chunk = 2 * warp + (matrix & 1);
        std::uint32_t const address = base + static_cast<std::uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
        float4 const a = values(j);
        if (local + 8 < count) {
          float4 const b = values(j + 1);
          store_matrix_transposed_x4(address, pack<T>(a.x, a.y), pack<T>(a.z, a.w), pack<T>(b.x, b.y), pack<T>(b.z, b.w));
        } else {
          store_matrix_transposed_x2(address, pack<T>(a.x, a.y), pack<T>(a.z, a.w));
        }
      }
    }
    group_barrier(group);
    int const chunk = thread & 7;
#pragma unroll
    for (int pass = 0; pass < (kPart + 15) / 16; ++pass) {
      int const local = (thread >> 3) + 16 * pass;
      int const row = first + local;
      if (local < count && row < rows && 8 * chunk < feature_limit) {
        uint4 const value = *reinterpret_cast<uint4 const*>(staging + local * 128 + ((chunk ^ (local & 7)) << 4));
        *reinterpret_cast<uint4*>(row_pointer(row) + 8 * chunk) = value;
      }
    }
    group_barrier(group);
  }
}

/// Adds the parts of K in order. Each warpgroup writes its part; the last one to arrive sums all of them, so the sum does not depend on
/// who was last. Returns false in the others, which are then done with the unit.
/// With `Joint` both warpgroups of a CTA get the same answer, which an epilogue that needs both must have.
template <int N, bool Joint, class Params>
__device__ inline bool sum_splits(Params const& p, Unit const& unit, int group, int* flags, float (&total)[2][N / 2]) {
  int const thread = thread_index() & 127;
  long long const part_floats = 128LL * p.tile_rows;
  float* const parts = p.partials + (static_cast<long long>(unit.tile) * unit.splits * 2 + group) * part_floats;
  float4* const mine = reinterpret_cast<float4*>(parts + 2LL * unit.split * part_floats) + thread;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    int const at = 4 * (i % (N / 8));
    float const(&v)[N / 2] = total[i / (N / 8)];
    __stcg(mine + i * 128, make_float4(v[at], v[at + 1], v[at + 2], v[at + 3]));
  }
  auto const barrier = [group] {
    if constexpr (Joint) {
      named_barrier(3, kConsumerThreads);
    } else {
      group_barrier(group);
    }
  };
  int const counter = Joint ? 0 : group;
  barrier();
  if (thread == 0 && (!Joint || group == 0)) {
    fence_device();
    int const before = atomicAdd(p.counters + p.max_tiles + unit.phase * p.max_units + 2 * unit.tile + counter, 1);
    fence_device();
    flags[counter] = before;
  }
  barrier();
  int const before = flags[counter];
  barrier();
  if (before + 1 != unit.splits) return false;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    total[0][i] = 0.0F;
    total[1][i] = 0.0F;
  }
  for (int split = 0; split < unit.splits; ++split) {
    float4 const* const from = reinterpret_cast<float4 const*>(parts + 2LL * split * part_floats) + thread;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float4 const v = __ldcg(from + i * 128);
      int const at = 4 * (i % (N / 8));
      float(&t)[N / 2] = total[i / (N / 8)];
      t[at] += v.x;
      t[at + 1] += v.y;
      t[at + 2] += v.z;
      t[at + 3] += v.w;
    }
  }
  return true;
}

/// fp8_row: accumulators times the row's and the weight row's scale.
template <int N, class Params>
__device__ inline void apply_row_scales(Params const& p, Unit const& unit, int group, float (&total)[2][N / 2]) {
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const weight_row = unit.feature + 64 * group + 16 * (thread >> 5) + (lane >> 2);
  bool const first = unit.phase == 0;
  float scale[2][2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const row = weight_row + 8 * h + (first ? 0 : 128 * half);
      int const limit = first ? p.intermediate : p.hidden;
      long long const at = first ? (2LL * unit.expert + half) * p.intermediate + row : static_cast<long long>(unit.expert) * p.hidden + row;
      scale[half][h] = row < limit ? (first ? p.w13_scales : p.w2_scales)[at] : 0.0F;
    }
  }
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      int const row = 8 * j + 2 * (lane & 3) + c;
      float row_scale = 0.0F;
      if (row < unit.rows) {
        row_scale = first ? p.x_scales[p.sorted_rows[unit.first_row + row].slot / p.topk] : p.inter_scales[unit.first_row + row];
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        total[half][4 * j + c] *= row_scale * scale[half][0];
        total[half][4 * j + 2 + c] *= row_scale * scale[half][1];
      }
    }
  }
}

/// Writes 64 features of N rows as e4m3 codes with one scale per row over the tile's 128 features (both warpgroups).
template <int N, int PassRows, class Params>
__device__ inline void store_quantized(Params const& p, Unit const& unit, float (&v)[N / 2], char* staging_of_both, char* staging,
                                       int group) {
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const warp = thread >> 5;
  float* const partial = reinterpret_cast<float*>(staging_of_both);  // [8 warps][N]
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float low = fmaxf(fabsf(v[4 * j]), fabsf(v[4 * j + 2]));
    float high = fmaxf(fabsf(v[4 * j + 1]), fabsf(v[4 * j + 3]));
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2) {
      low = fmaxf(low, __shfl_xor_sync(0xFFFFFFFFu, low, offset));
      high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFFu, high, offset));
    }
    if (lane < 4) *reinterpret_cast<float2*>(partial + (4 * group + warp) * N + 8 * j + 2 * lane) = make_float2(low, high);
  }
  named_barrier(3, kConsumerThreads);
  float* const scales = partial + 8 * N + group * N;  // each warpgroup makes its own copy
  if (thread < N) {
    float amax = 0.0F;
#pragma unroll
    for (int w = 0; w < 8; ++w) amax = fmaxf(amax, partial[w * N + thread]);
    float const scale = fmaxf(amax, 1e-10F) * (1.0F / 448.0F);
    scales[thread] = scale;
    if (group == 0 && thread < unit.rows) {
      p.inter_scales[static_cast<long long>(unit.first_row + thread) * (p.intermediate / 128) + unit.feature / 128] = scale;
    }
  }
  group_barrier(group);
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float2 const scale = *reinterpret_cast<float2 const*>(scales + 8 * j + 2 * (lane & 3));
    float const low = __fdividef(1.0F, scale.x);
    float const high = __fdividef(1.0F, scale.y);
    v[4 * j] *= low;
    v[4 * j + 2] *= low;
    v[4 * j + 1] *= high;
    v[4 * j + 3] *= high;
  }
  named_barrier(3, kConsumerThreads);  // the staging buffers are free again
  // One 16-bit element holds the codes of features f and f + 8 of one row, so a transposed 8x8 matrix gives 8 such pairs of a row.
  std::uint32_t const base = smem_address(staging);
  constexpr int kPart = N < PassRows ? N : PassRows;
#pragma unroll
  for (int first = 0; first < N; first += kPart) {
    int const count = N - first < kPart ? N - first : kPart;
    if (first >= unit.rows) break;
#pragma unroll
    for (int local = 0; local < kPart; local += 16) {
      if (local < count) {
        int const j = (first + local) / 8;
        int const row = local + 8 * ((lane >> 3) & 1) + (lane & 7);
        std::uint32_t const address = base + static_cast<std::uint32_t>(row * 64 + ((warp ^ ((row >> 1) & 3)) << 4));
        std::uint32_t const a = pack_e4m3(v[4 * j], v[4 * j + 2]) | (pack_e4m3(v[4 * j + 1], v[4 * j + 3]) << 16);
        std::uint32_t b = 0;
        if (local + 8 < count) b = pack_e4m3(v[4 * j + 4], v[4 * j + 6]) | (pack_e4m3(v[4 * j + 5], v[4 * j + 7]) << 16);
        store_matrix_transposed_x2(address, a, b);
      }
    }
    group_barrier(group);
    int const chunk = thread & 3;
#pragma unroll
    for (int pass = 0; pass < (kPart + 31) / 32; ++pass) {
      int const local = (thread >> 2) + 32 * pass;
      int const row = first + local;
      if (local < count && row < unit.rows) {
        uint4 const pairs = *reinterpret_cast<uint4 const*>(staging + local * 64 + ((chunk ^ ((local >> 1) & 3)) << 4));
        uint4 const codes = make_uint4(__byte_perm(pairs.x, pairs.y, 0x6420), __byte_perm(pairs.z, pairs.w, 0x6420),
                                       __byte_perm(pairs.x, pairs.y, 0x7531), __byte_perm(pairs.z, pairs.w, 0x7531));
        char* const to = static_cast<char*>(p.inter) + static_cast<long long>(unit.first_row + row) * p.intermediate + unit.feature +
                         64 * group + 16 * chunk;
        *reinterpret_cast<uint4*>(to) = codes;
      }
    }
    group_barrier(group);
  }
}

}  // namespace moe::hopper
