// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/any_epilogue.cuh: GEMM1's sums to rows of the intermediate under any activation, gated or not, with the router weight
// on either side. The formulas together are a lot of code, so they are in kernels of their own.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/common/activation.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"
#include "moe/experts/hopper/w4/layout.cuh"

namespace moe::hopper::w4 {

/// As store_activated. A thread has rows r and r + 8 of a warp's 16 rows of a brick: gate and up of one feature, or two features.
template <class L, int N>
__device__ inline void store_any_activated(AnyParams const& p, Memory<L> const& memory, Unit const& unit, int first, int count, int group,
                                           float (&total)[L::kBricks][N / 2]) {
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const warp = thread >> 5;
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
    int const base = (gated ? 32 : kBrickRows) * (first + b);
    int const feature = base + (gated ? 8 : 16) * warp + (lane >> 2);
    float bias[2] = {0.0F, 0.0F};
    if (p.layer.bias[0] != nullptr) {
      float const* const from = p.layer.bias[0] + (gated ? 2LL : 1LL) * unit.expert * width + feature;
      if (feature < width) bias[0] = from[0];
      if (feature + (gated ? 0 : 8) < width) bias[1] = from[gated ? width : 8];
    }
    float2 const factor = factors.of(first + b);
    float value[2][N / 4];  // rows r and r + 8: gate and up, or two results
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float const* const t = &total[b][4 * j];
      float2 const w = p.weight_on_input ? *reinterpret_cast<float2 const*>(weights + 8 * j + 2 * (lane & 3)) : make_float2(1.0F, 1.0F);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        value[h][2 * j] = fmaf(t[2 * h] * w.x, h == 0 ? factor.x : factor.y, bias[h]);
        value[h][2 * j + 1] = fmaf(t[2 * h + 1] * w.y, h == 0 ? factor.x : factor.y, bias[h]);
      }
    }
    activation.apply(value[0], value[1]);
    __nv_bfloat16* const inter =
        static_cast<__nv_bfloat16*>(p.inter) + static_cast<long long>(unit.first_row) * p.layer.intermediate + base;
    auto const row_of = [&](int row) { return inter + static_cast<long long>(row) * p.layer.intermediate; };
    if (gated) {
      auto const values = [&](int j, std::uint32_t (&v)[1]) { v[0] = pack<__nv_bfloat16>(value[0][2 * j], value[0][2 * j + 1]); };
      store_rows<N, L::kPassRows, 4>(values, memory.staging(group), group, unit.rows, row_of);
    } else {
      auto const values = [&](int j, std::uint32_t (&v)[2]) {
        v[0] = pack<__nv_bfloat16>(value[0][2 * j], value[0][2 * j + 1]);
        v[1] = pack<__nv_bfloat16>(value[1][2 * j], value[1][2 * j + 1]);
      };
      store_rows<N, L::kPassRows, 8>(values, memory.staging(group), group, unit.rows, row_of);
    }
  }
  group_barrier(group);  // the weights may be overwritten
  if (thread == 0) {     // the barrier ordered the other threads' stores before this fence
    fence_device();
    atomicAdd(p.align.counters + unit.token_tile, 1);
  }
}

}  // namespace moe::hopper::w4
