// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/epilogue.cuh: from accumulators to rows in memory: scales, bias, activation (and quantisation) after GEMM1, bias and
// router weight after GEMM2.
#pragma once

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/layer/layer_params.cuh"
#include "moe/experts/hopper/layer/wide_rows.cuh"

namespace moe::hopper {

/// Calls f(i, row) for row 128 i + thread of a tile of `rows` rows: a thread's part, in a warpgroup, of an array with one value per row.
template <int N, class F>
__device__ inline void for_thread_rows(int rows, F f) {
#pragma unroll
  for (int i = 0; i < (N + 127) / 128; ++i) {
    int const row = 128 * i + (thread_index() & 127);
    if (row < rows) f(i, row);
  }
}
/// This thread's rows of the plan, read before the products.
template <int N>
struct ThreadRows {
  SortedRow row[(N + 127) / 128];
};

/// Row weights of columns 8 j + 2 (lane % 4) and the next, which are rows of the tile.
__device__ inline float2 column_weights(float const* weights, int j) {
  return load_shared_2(smem_address(weights + 8 * j + 2 * (thread_index() & 3)));
}
/// The four accumulators of these columns times their router weights.
__device__ inline float4 scale_columns(float const* weights, int j, float const* v) {
  float2 const w = column_weights(weights, j);
  return make_float4(v[0] * w.x, v[1] * w.y, v[2] * w.x, v[3] * w.y);
}

/// This thread's features: row h of weight box `half` in the arrays of one value per feature. `at` is relative to the expert's first
/// feature, and negative past the last one.
struct ThreadFeatures {
  long long base;
  int at[2][2];  ///< [half][h]
};
__device__ inline ThreadFeatures thread_features(MatrixLayout const& matrix, Unit const& unit, int group) {
  int const thread = thread_index() & 127;
  ThreadFeatures f;
  f.base = static_cast<long long>(unit.expert) * matrix.rows;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int const feature = unit.feature + 64 * group + 16 * (thread >> 5) + ((thread & 31) >> 2) + 8 * h;
      f.at[half][h] = feature + half * matrix.half_features < matrix.limit ? feature * matrix.row_step + half * matrix.half_step : -1;
    }
  }
  return f;
}

/// Adds the bias of each feature, once per slot, because the parts of K are summed before.
template <int N>
__device__ inline void add_bias(float const* bias, MatrixLayout const& matrix, Unit const& unit, int group, float (&total)[2][N / 2]) {
  ThreadFeatures const f = thread_features(matrix, unit, group);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float const low = f.at[half][0] >= 0 ? __ldg(bias + f.base + f.at[half][0]) : 0.0F;
    float const high = f.at[half][1] >= 0 ? __ldg(bias + f.base + f.at[half][1]) : 0.0F;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      total[half][4 * j] += low;
      total[half][4 * j + 1] += low;
      total[half][4 * j + 2] += high;
      total[half][4 * j + 3] += high;
    }
  }
}

/// Writes 64 features of N rows through the warpgroup's staging buffer as whole 16-byte chunks. `values(j)` gives the thread's four
/// elements of rows 8 j to 8 j + 7, in the order of the wgmma fragment. It is called at packing, so that few values are live at a time.
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

/// Accumulators times the factors of their rows, which are in shared memory.
template <int N>
__device__ inline void scale_rows(float const* factors, float (&total)[2][N / 2]) {
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float2 const f = column_weights(factors, j);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      total[half][4 * j] *= f.x;
      total[half][4 * j + 1] *= f.y;
      total[half][4 * j + 2] *= f.x;
      total[half][4 * j + 3] *= f.y;
    }
  }
}

/// Row-scaled: accumulators times the scale of their weight row.
template <int N>
__device__ inline void scale_features(LayerParams const& p, Unit const& unit, int group, float (&total)[2][N / 2]) {
  float const* const scales = unit.phase == 0 ? p.layer.w13_scales : p.layer.w2_scales;
  ThreadFeatures const f = thread_features(p.layer.matrix[unit.phase], unit, group);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float const scale = f.at[half][h] < 0 ? 0.0F : __ldg(p.layer.tensor_scales ? scales + unit.expert : scales + f.base + f.at[half][h]);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        total[half][4 * j + 2 * h] *= scale;
        total[half][4 * j + 2 * h + 1] *= scale;
      }
    }
  }
}

/// Row-scaled: the scale of row `row` of the unit's activations.
__device__ inline float activation_scale(LayerParams const& p, Unit const& unit, int row) {
  if (p.layer.static_scale > 0.0F) return p.layer.static_scale;
  if (unit.phase == 1) return __ldcg(p.inter.scales + unit.first_row + row);
  return p.input.scales[input_row(p, p.align.sorted_rows[unit.first_row + row].slot) * p.input.scale_stride];
}

/// Writes 64 features of N rows as e4m3 codes with one scale per row over the 128 features from `feature` on (both warpgroups).
/// `meet`: the other warpgroup may still be reading its staging buffer for its previous store.
template <int N, int PassRows>
__device__ inline void store_quantized(LayerParams const& p, Unit const& unit, int feature, float (&v)[N / 2], char* staging_of_both,
                                       char* staging, int group, bool meet) {
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const warp = thread >> 5;
  float* const partial = reinterpret_cast<float*>(staging_of_both);  // [8 warps][N]
  if (meet) joint_barrier<2>();
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
  joint_barrier<2>();
  float* const scales = partial + 8 * N + group * N;  // each warpgroup makes its own copy
  if (thread < N) {
    float amax = 0.0F;
#pragma unroll
    for (int w = 0; w < 8; ++w) amax = fmaxf(amax, partial[w * N + thread]);
    float const scale = fmaxf(e4m3_scale(amax), p.layer.scale_floor);
    scales[thread] = scale;
    if (group == 0 && thread < unit.rows) {
      p.inter.scales[static_cast<long long>(unit.first_row + thread) * (p.layer.intermediate / 128) + feature / 128] = scale;
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
  joint_barrier<2>();  // the staging buffers are free again
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
        char* const to = static_cast<char*>(p.inter.rows) + static_cast<long long>(unit.first_row + row) * p.layer.intermediate + feature +
                         64 * group + 16 * chunk;
        *reinterpret_cast<uint4*>(to) = codes;
      }
    }
    group_barrier(group);
  }
}

/// After the products of a unit of phase 0: `total` to rows of the intermediate. `weights`: this warpgroup's shared memory for MaxRows
/// router weights. `close`: the unit has so few steps of K that the other warpgroup may be in the unit before.
template <Scheme S, int N, int PassRows, class Activation>
__device__ inline void finish_gate_up(LayerParams const& p, Unit const& unit, int group, float (&total)[2][N / 2], float* weights,
                                      ThreadRows<N> const& sorted, char* staging_of_both, char* staging, bool close) {
  using Output = typename SchemeTraits<S>::Output;
  bool const weighted = !kPlainKernels<Activation> && p.weight_on_input;
  if (SchemeTraits<S>::kRowScaled || weighted) {  // the sums are linear up to here, so weighted sums equal those of a weighted input
    for_thread_rows<N>(unit.rows, [&](int i, int row) {
      float const scale = SchemeTraits<S>::kRowScaled ? activation_scale(p, unit, row) : 1.0F;
      weights[row] = weighted ? scale * sorted.row[i].weight : scale;
    });
    group_barrier(group);
    scale_rows<N>(weights, total);
  }
  if constexpr (SchemeTraits<S>::kRowScaled) scale_features<N>(p, unit, group, total);
  if constexpr (!kPlainKernels<Activation>) {
    if (p.layer.w13_bias != nullptr) add_bias<N>(p.layer.w13_bias, p.layer.matrix[0], unit, group, total);
  }

  Activation const activation(p.layer.activation);
  if constexpr (!Activation::kElementwise) activation.apply(total[0], total[1]);
  bool const both = Activation::kGating == 0 || (Activation::kGating < 0 && !p.layer.activation.gated);  // both halves are results
  if constexpr (SchemeTraits<S>::kBlock) {
    if constexpr (Activation::kElementwise) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) total[0][i] = activation(total[0][i], total[1][i]);
    }
    store_quantized<N, PassRows>(p, unit, unit.feature, total[0], staging_of_both, staging, group, close);
    if constexpr (Activation::kGating != 1) {
      if (both && unit.feature + 128 < p.layer.intermediate) {
        store_quantized<N, PassRows>(p, unit, unit.feature + 128, total[1], staging_of_both, staging, group, true);
      }
    }
  } else {
    using Stored = std::conditional_t<SchemeTraits<S>::kInt8, float, Output>;
    Stored* const rows = static_cast<Stored*>(SchemeTraits<S>::kRowScaled ? p.inter.wide : p.inter.rows) +
                         static_cast<long long>(unit.first_row) * p.layer.intermediate;
    auto const store = [&](auto values, int feature) {
      if constexpr (SchemeTraits<S>::kInt8) {
        store_wide_rows<N>(values, rows + feature, group, unit.rows, p.layer.intermediate, feature);
      } else {
        store_rows<Output, N, PassRows>(values, staging, group, unit.rows, p.layer.intermediate - feature,
                                        [&](int row) { return rows + static_cast<long long>(row) * p.layer.intermediate + feature; });
      }
    };
    int const feature = unit.feature + 64 * group;
    if constexpr (Activation::kElementwise) {
      store(
          [&](int j) {
            float const* const gate = &total[0][4 * j];
            float const* const up = &total[1][4 * j];
            return make_float4(activation(gate[0], up[0]), activation(gate[1], up[1]), activation(gate[2], up[2]),
                               activation(gate[3], up[3]));
          },
          feature);
    } else {
      store([&](int j) { return make_float4(total[0][4 * j], total[0][4 * j + 1], total[0][4 * j + 2], total[0][4 * j + 3]); }, feature);
      if constexpr (Activation::kGating != 1) {
        if (both && feature + 128 < p.layer.intermediate) {
          store([&](int j) { return make_float4(total[1][4 * j], total[1][4 * j + 1], total[1][4 * j + 2], total[1][4 * j + 3]); },
                feature + 128);
        }
      }
    }
  }
}

/// After the products of a unit of phase 1: `total` to weighted rows of the slots. `targets`: MaxRows slots in shared memory.
template <Scheme S, int N, int PassRows, class Activation>
__device__ inline void finish_down(LayerParams const& p, Unit const& unit, int group, float (&total)[2][N / 2], float* weights,
                                   int* targets, ThreadRows<N> const& sorted, char* staging) {
  using Output = typename SchemeTraits<S>::Output;
  if constexpr (SchemeTraits<S>::kRowScaled) {
    for_thread_rows<N>(unit.rows, [&](int, int row) { weights[row] = activation_scale(p, unit, row); });
    group_barrier(group);
    scale_rows<N>(weights, total);
    scale_features<N>(p, unit, group, total);
    group_barrier(group);
  }
  if constexpr (!kPlainKernels<Activation>) {
    if (p.layer.w2_bias != nullptr) add_bias<N>(p.layer.w2_bias, p.layer.matrix[1], unit, group, total);
  }
  for_thread_rows<N>(unit.rows, [&](int i, int row) {
    targets[row] = sorted.row[i].slot;
    weights[row] = !kPlainKernels<Activation> && p.weight_on_input ? 1.0F : sorted.row[i].weight;
  });
  group_barrier(group);
  Output* const out = static_cast<Output*>(p.rows_out);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    int const column = unit.feature + 64 * group + 128 * half;
    if (column < p.align.hidden) {
      store_rows<Output, N, PassRows>([&](int j) { return scale_columns(weights, j, &total[half][4 * j]); }, staging, group, unit.rows,
                                      p.align.hidden - column,
                                      [&](int row) { return out + static_cast<long long>(targets[row]) * p.align.hidden + column; });
    }
  }
}

}  // namespace moe::hopper
