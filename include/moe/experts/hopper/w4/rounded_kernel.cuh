// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/rounded_kernel.cuh: one product of a layer whose rows are rounded to codes. The kernel runs twice, with the units of
// one phase each. GEMM1 writes activated rows in float32, since rounded to bf16 first they would be rounded twice; another kernel rounds
// them to codes, as bf16, before GEMM2. Every activation, the router weight on either side.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/w4/any_epilogue.cuh"
#include "moe/experts/hopper/w4/frame.cuh"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/loaders.cuh"
#include "moe/experts/hopper/w4/mainloop.cuh"
#include "moe/experts/hopper/w4/rounded_sums.hpp"

namespace moe::hopper::w4 {

/// The parameters of rounded_kernel, which its launcher takes as Params.
struct RoundedParams : AnyParams {
  float* wide;            ///< [slots, I] activated rows, sorted by expert
  float* row_factors[2];  ///< of the sums of each phase: [M] by row of x, [slots] by sorted row; or null
  float factor;           ///< of all sums
};

/// Multiplies the sums by the factors of their rows, before anything is added to them.
template <class L, int N>
__device__ inline void scale_rows(RoundedParams const& p, Unit const& unit, float (&total)[L::kBricks][N / 2]) {
  float const* const factors = unit.phase == 0 ? p.row_factors[0] : p.row_factors[1];
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    float f[2] = {p.factor, p.factor};
    if (factors != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        int const row = row_of_sum(thread_index(), 2 * j + h);
        if (row >= unit.rows) continue;
        int const sorted = unit.first_row + row;
        f[h] *= factors[unit.phase == 0 ? p.align.per_token.quotient(p.align.sorted_rows[sorted].slot) : sorted];
      }
    }
#pragma unroll
    for (int b = 0; b < L::kBricks; ++b) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        total[b][position_of_sum(0, 2 * j + h)] *= f[h];
        total[b][position_of_sum(1, 2 * j + h)] *= f[h];
      }
    }
  }
}

/// As store_any_activated, but the rows stay float32. Eight lanes write 32 bytes of a row.
template <class L, int N>
__device__ inline void store_wide(RoundedParams const& p, Memory<L> const& memory, Unit const& unit, int first, int count, int group,
                                  float (&total)[L::kBricks][N / 2]) {
  int const thread = thread_index() & 127;
  bool const gated = p.any.gated;
  float* const weights = memory.factors(group, L::kMaxRows);
  if (p.weight_on_input) {
    if (thread < L::kMaxRows) weights[thread] = thread < unit.rows ? p.align.sorted_rows[unit.first_row + thread].weight : 0.0F;
    group_barrier(group);
  }
  SumFactors<L> const factors(p, 0, unit.expert);
  int const width = p.layer.bias_width;
  AnyActivation const activation(p.any);
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
    if (b >= count) break;
    int const feature = (gated ? 32 : kBrickRows) * (first + b) + feature_of_thread(thread, gated);
    float bias[2] = {0.0F, 0.0F};  // of gate and up of one feature, or of two features
    if (p.layer.bias[0] != nullptr) {
      float const* const from = p.layer.bias[0] + (gated ? 2LL : 1LL) * unit.expert * width + feature;
      if (feature < width) bias[0] = from[0];
      if (feature + (gated ? 0 : 8) < width) bias[1] = from[gated ? width : 8];
    }
    float2 const factor = factors.of(first + b);
    float value[2][N / 4];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      float const w = p.weight_on_input ? weights[row_of_sum(thread, i)] : 1.0F;
      value[0][i] = fmaf(total[b][position_of_sum(0, i)] * w, factor.x, bias[0]);
      value[1][i] = fmaf(total[b][position_of_sum(1, i)] * w, factor.y, bias[1]);
    }
    activation.apply(value[0], value[1]);
    float* const to = p.wide + static_cast<long long>(unit.first_row) * p.layer.intermediate + feature;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      int const row = row_of_sum(thread, i);
      if (row >= unit.rows) continue;
      float* const at = to + static_cast<long long>(row) * p.layer.intermediate;
      at[0] = value[0][i];
      if (!gated) at[8] = value[1][i];
    }
  }
  group_barrier(group);  // the weights may be overwritten
}

template <W4Scheme S, int Groups, int Depth, int Stages, int MaxRows>
__global__ void __launch_bounds__(Groups * 128 + kProducerThreads, 1) rounded_kernel(__grid_constant__ RoundedParams const p) {
  using L = Layout<S, Groups, Depth, Stages, MaxRows, true>;
  extern __shared__ char w4_smem[];
  Memory<L> const memory{w4_smem + ((1024u - (smem_address(w4_smem) & 1023u)) & 1023u)};
  auto const consume = [&]<int N>(RingState<Stages>& ring, Unit const& unit, int group) {
    auto const multiply_unit = [&](Span const& span, float (&total)[L::kBricks][N / 2]) {
      if constexpr (N <= 16 && L::kBricks == 1) {
        multiply_few<S, L, N>(memory, ring, group, span, total[0]);
      } else {
        multiply<S, L, N>(memory, ring, group, span, total);
      }
      scale_rows<L, N>(p, unit, total);
    };
    auto const activate = [&](Span const& span, int mine, float (&total)[L::kBricks][N / 2]) {
      store_wide<L, N>(p, memory, unit, span.first + group * L::kBricks, mine, group, total);
    };
    consume_unit<L, MaxRows, N>(p, memory, ring, unit, group, multiply_unit, activate);
  };
  run_roles<L, MaxRows>(p, memory, [&](int gather_warp) { load_rows<MaxRows, L>(p, memory, gather_warp); }, consume);
}

}  // namespace moe::hopper::w4
