// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/epilogue.cuh: from sums to rows in memory: bias and activation after GEMM1, bias and router weight after GEMM2, and
// the ordered sum of the parts of K before either.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/w4/layout.cuh"

namespace moe::hopper::w4 {

/// (clamp(up, ±limit) + beta) · g σ(alpha g), g = min(gate, limit), with the hardware's exponential and division: relative error about
/// 2^-21, far below the rounding that follows.
__device__ inline float activate(W4Activation const& a, float gate, float up) {
  float const g = fminf(gate, a.limit);
  float const u = fminf(fmaxf(up, -a.limit), a.limit) + a.beta;
  return __fdividef(g * u, 1.0F + __expf(-a.alpha * g));
}

/// What the sums of an expert's weights are multiplied with: `phase` 0 of w13, 1 of w2.
template <class L>
class SumFactors {
 public:
  __device__ SumFactors(Params const& p, int phase, int expert) {
    if constexpr (has_row_factors(L::kScheme)) {
      int const thread = thread_index() & 127;
      rows_ = p.layer.factor[phase] + static_cast<long long>(expert) * p.layer.bricks[phase] * kBrickRows + 16 * (thread >> 5) +
              ((thread & 31) >> 2);
    } else {
      common_ = p.layer.factor[phase][expert];
    }
  }
  /// Of the thread's rows r and r + 8 of a brick.
  __device__ float2 of(int brick) const {
    if constexpr (has_row_factors(L::kScheme)) {
      return make_float2(rows_[kBrickRows * brick], rows_[kBrickRows * brick + 8]);
    } else {
      return make_float2(common_, common_);
    }
  }

 private:
  float const* rows_ = nullptr;
  float common_ = 0.0F;
};

/// Writes 8 · Chunks features (a warp has 8 · Chunks / 4 of them) of `rows` rows through the warpgroup's staging buffer as 16-byte chunks.
/// `values(j, halves)` gives the packed elements of rows 8 j + 2 (lane % 4) and the next: one word (Chunks 4: feature lane / 4 of the
/// warp's 8) or two (Chunks 8: features lane / 4 and + 8 of its 16). `row_pointer(row)` is the address of feature 0 of a row.
template <int N, int PassRows, int Chunks, class Values, class RowPointer>
__device__ inline void store_rows(Values values, char* staging, int group, int rows, RowPointer row_pointer) {
  constexpr int kHalves = Chunks / 4;
  constexpr int kPart = N < PassRows ? N : PassRows;
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const warp = thread >> 5;
  std::uint32_t const base = smem_address(staging);
  auto const offset = [](int row, int chunk) {
    int const swizzled = Chunks == 8 ? chunk ^ (row & 7) : chunk ^ ((row >> 1) & 3);
    return row * (Chunks * 16) + swizzled * 16;
  };
#pragma unroll
  for (int first = 0; first < N; first += kPart) {
    if (first >= rows) break;
#pragma unroll
    for (int local = 0; local < kPart; local += 16) {
      if (first + local >= N) break;
      int const j = (first + local) / 8;
      int const matrix = lane >> 3;
      int const row = local + 8 * (matrix / kHalves) + (lane & 7);
      std::uint32_t const address = base + static_cast<std::uint32_t>(offset(row, kHalves * warp + matrix % kHalves));
      std::uint32_t v[2][kHalves];
      values(j, v[0]);
      if (local + 8 < kPart && first + local + 8 < N) {
        values(j + 1, v[1]);
        if constexpr (kHalves == 2) {
          store_matrix_transposed_x4(address, v[0][0], v[0][1], v[1][0], v[1][1]);
        } else {
          store_matrix_transposed_x2(address, v[0][0], v[1][0]);
        }
      } else if constexpr (kHalves == 2) {
        store_matrix_transposed_x2(address, v[0][0], v[0][1]);
      } else {
        store_matrix_transposed_x1(address, v[0][0]);
      }
    }
    group_barrier(group);
    int const chunk = thread % Chunks;
#pragma unroll
    for (int pass = 0; pass < (kPart * Chunks + 127) / 128; ++pass) {
      int const local = thread / Chunks + pass * (128 / Chunks);
      if (local < kPart && first + local < rows) {
        uint4 const value = *reinterpret_cast<uint4 const*>(staging + offset(local, chunk));
        *reinterpret_cast<uint4*>(row_pointer(first + local) + 8 * chunk) = value;
      }
    }
    group_barrier(group);
  }
}

/// Adds the parts of K in order. Every CTA writes its part; the last to arrive sums all parts, in an order that does not depend on the
/// arrivals. Returns false in the others, which have then finished the unit.
template <class L, int N>
__device__ inline bool sum_splits(Params const& p, Memory<L> const& memory, Unit const& unit, int group, bool any,
                                  float (&total)[L::kBricks][N / 2]) {
  int const thread = thread_index() & 127;
  long long const part_floats = 256LL * p.align.plan.tile_rows;
  float* const parts =
      p.partials + static_cast<long long>(unit.tile) * unit.splits * part_floats + group * L::kBricks * kBrickRows * p.align.plan.tile_rows;
  if (any) {
    float4* const mine = reinterpret_cast<float4*>(parts + unit.split * part_floats) + thread;
#pragma unroll
    for (int b = 0; b < L::kBricks; ++b) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        float const* const v = &total[b][4 * i];
        __stcg(mine + (b * (N / 8) + i) * 128, make_float4(v[0], v[1], v[2], v[3]));
      }
    }
  }
  joint_barrier<L::kGroups>();
  if (thread == 0 && group == 0) {
    fence_device();
    int* const counter = p.layer.split_counters + unit.phase * (W4Workspace::kMaxSplitUnits / 2) + unit.tile;
    int const before = atomicAdd(counter, 1);
    if (before + 1 == unit.splits) *counter = 0;
    fence_device();
    *memory.flag() = before;
  }
  joint_barrier<L::kGroups>();
  int const before = *memory.flag();
  joint_barrier<L::kGroups>();
  if (before + 1 != unit.splits) return false;
  if (!any) return true;
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[b][i] = 0.0F;
  }
  for (int split = 0; split < unit.splits; ++split) {
    float4 const* const from = reinterpret_cast<float4 const*>(parts + split * part_floats) + thread;
#pragma unroll
    for (int b = 0; b < L::kBricks; ++b) {
#pragma unroll
      for (int i = 0; i < N / 8; ++i) {
        float4 const v = __ldcg(from + (b * (N / 8) + i) * 128);
        total[b][4 * i] += v.x;
        total[b][4 * i + 1] += v.y;
        total[b][4 * i + 2] += v.z;
        total[b][4 * i + 3] += v.w;
      }
    }
  }
  return true;
}

/// Phase 0: stores activated rows of the bricks from `first` on, `count` of them if positive, then advances the tile's counter.
template <class L, int N>
__device__ inline void store_activated(Params const& p, Memory<L> const& memory, Unit const& unit, int first, int count, int group,
                                       float (&total)[L::kBricks][N / 2]) {
  int const thread = thread_index() & 127;
  int const feature_of_thread = 8 * (thread >> 5) + ((thread & 31) >> 2);
  SumFactors<L> const factors(p, 0, unit.expert);
  W4Activation const activation = p.layer.activation;
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
    if (b >= count) break;
    int const feature = 32 * (first + b);
    float gate_bias = 0.0F;
    float up_bias = 0.0F;
    if (p.layer.bias[0] != nullptr && feature + feature_of_thread < p.layer.bias_width) {
      float const* const bias = p.layer.bias[0] + 2LL * unit.expert * p.layer.bias_width + feature + feature_of_thread;
      gate_bias = bias[0];
      up_bias = bias[p.layer.bias_width];
    }
    float2 const factor = factors.of(first + b);
    auto const values = [&](int j, std::uint32_t (&v)[1]) {
      float const* const t = &total[b][4 * j];
      v[0] = pack<__nv_bfloat16>(activate(activation, fmaf(t[0], factor.x, gate_bias), fmaf(t[2], factor.y, up_bias)),
                                 activate(activation, fmaf(t[1], factor.x, gate_bias), fmaf(t[3], factor.y, up_bias)));
    };
    __nv_bfloat16* const inter =
        static_cast<__nv_bfloat16*>(p.inter) + static_cast<long long>(unit.first_row) * p.layer.intermediate + feature;
    store_rows<N, L::kPassRows, 4>(values, memory.staging(group), group, unit.rows,
                                   [&](int row) { return inter + static_cast<long long>(row) * p.layer.intermediate; });
  }
  if (thread == 0) {  // the barrier at the end of store_rows ordered the other threads' stores before this fence
    fence_device();
    atomicAdd(p.align.counters + unit.token_tile, 1);
  }
}

/// Phase 1: stores weighted rows of the bricks, each to its slot.
template <class L, int MaxRows, int N>
__device__ inline void store_outputs(Params const& p, Memory<L> const& memory, Unit const& unit, int first, int count, int group,
                                     float (&total)[L::kBricks][N / 2]) {
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int* const targets = memory.targets(group, MaxRows);
  float* const weights = memory.factors(group, MaxRows);
  if (thread < MaxRows) {
    SortedRow const sorted = thread < unit.rows ? p.align.sorted_rows[unit.first_row + thread] : SortedRow{0, 0.0F};
    targets[thread] = sorted.slot;
    weights[thread] = sorted.weight;
    if constexpr (L::kAny) {
      if (static_cast<AnyParams const&>(p).weight_on_input) weights[thread] = 1.0F;
    }
  }
  group_barrier(group);
  SumFactors<L> const factors(p, 1, unit.expert);
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
    if (b >= count) break;
    int const feature = kBrickRows * (first + b);
    float bias[2] = {0.0F, 0.0F};
    if (p.layer.bias[1] != nullptr) {
      float const* const from =
          p.layer.bias[1] + static_cast<long long>(unit.expert) * p.align.hidden + feature + 16 * (thread >> 5) + (lane >> 2);
      bias[0] = from[0];
      bias[1] = from[8];
    }
    float2 const factor = factors.of(first + b);
    auto const values = [&](int j, std::uint32_t (&v)[2]) {
      float const* const t = &total[b][4 * j];
      float2 const w = *reinterpret_cast<float2 const*>(weights + 8 * j + 2 * (lane & 3));
      v[0] = pack<__nv_bfloat16>(w.x * fmaf(t[0], factor.x, bias[0]), w.y * fmaf(t[1], factor.x, bias[0]));
      v[1] = pack<__nv_bfloat16>(w.x * fmaf(t[2], factor.y, bias[1]), w.y * fmaf(t[3], factor.y, bias[1]));
    };
    __nv_bfloat16* const out = static_cast<__nv_bfloat16*>(p.rows_out) + feature;
    store_rows<N, L::kPassRows, 8>(values, memory.staging(group), group, unit.rows,
                                   [&](int row) { return out + static_cast<long long>(targets[row]) * p.align.hidden; });
  }
}

}  // namespace moe::hopper::w4
