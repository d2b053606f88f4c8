// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/epilogue.cuh: from sums to rows of the intermediate in e4m3: bias, activation, and one scale for a row's 128
// features.
#pragma once

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/w4/a8/layout.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"

namespace moe::hopper::w4a8 {

static_assert(kGateFeatures == kDepth, "a weight tile of GEMM1 is one scale group of the intermediate");

/// int4: multiplies GEMM1's sums by the powers of two of their rows. `mine`: bricks of the warpgroup, or fewer than one.
template <class L, int N>
__device__ inline void scale_rows(Params const& p, Unit const& unit, int first, int mine, float (&total)[L::kBricks][N / 2]) {
  w4::SumFactors<L> const factors(p, 0, unit.expert);
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
    if (b >= mine) break;
    float2 const factor = factors.of(first + b);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[b][i] *= (i & 2) == 0 ? factor.x : factor.y;
  }
}

/// Stores the activated rows of a tile's 128 features as codes and scales, then advances the tile's counter. Every warpgroup calls it; each
/// has kBricks bricks from `first` on. scale = max(amax, 1e-10) / 448.
template <class L, int N>
__device__ inline void store_activated(Params const& p, Memory<L> const& memory, Unit const& unit, int first, int group,
                                       float (&total)[L::kBricks][N / 2]) {
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const feature_of_thread = 8 * (thread >> 5) + (lane >> 2);
  int* const amax = memory.amax();
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
    int const feature = 32 * (first + b) + feature_of_thread;
    float gate_bias = 0.0F;
    float up_bias = 0.0F;
    if (p.layer.bias[0] != nullptr && feature < p.layer.bias_width) {
      float const* const bias = p.layer.bias[0] + 2LL * unit.expert * p.layer.bias_width + feature;
      gate_bias = bias[0];
      up_bias = bias[p.layer.bias_width];
    }
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float* const t = &total[b][4 * j];
      t[0] = w4::activate(p.layer.activation, t[0] + gate_bias, t[2] + up_bias);
      t[1] = w4::activate(p.layer.activation, t[1] + gate_bias, t[3] + up_bias);
    }
  }
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = 0.0F;
#pragma unroll
      for (int b = 0; b < L::kBricks; ++b) most = fmaxf(most, fabsf(total[b][4 * j + i]));
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
      if (lane < 4) atomicMax(amax + 8 * j + 2 * lane + i, __float_as_int(most));  // floats >= 0 compare as their bits
    }
  }
  joint_barrier<L::kGroups>();
  char* const staging = memory.staging(0);
  long long const blocks = p.scale_blocks;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = 8 * j + 2 * (lane & 3) + i;
      float const scale = e4m3_scale(fmaxf(__int_as_float(amax[row]), 1e-10F));
      float const inverse = 1.0F / scale;
#pragma unroll
      for (int b = 0; b < L::kBricks; ++b) {
        std::uint32_t const code = pack_e4m3(quotient(total[b][4 * j + i], scale, inverse), 0.0F);
        staging[row * 128 + 32 * (group * L::kBricks + b) + feature_of_thread] = static_cast<char>(code & 0xFFu);
      }
      if (group == 0 && thread < 4 && row < unit.rows) {
        __stcg(p.inter_scales + (unit.first_row + row) * blocks + unit.feature / kDepth, scale);
      }
    }
  }
  joint_barrier<L::kGroups>();
  int const all = thread_index();  // consumers are the first threads
  for (int i = all; i < N; i += L::kConsumers) amax[i] = 0;
  for (int i = all; i < unit.rows * 8; i += L::kConsumers) {
    uint4 const codes = reinterpret_cast<uint4 const*>(staging)[i];
    char* const to = static_cast<char*>(p.inter) + static_cast<long long>(unit.first_row + (i >> 3)) * p.layer.intermediate + unit.feature;
    reinterpret_cast<uint4*>(to)[i & 7] = codes;
  }
  joint_barrier<L::kGroups>();
  if (all == 0) {  // the barrier ordered the other threads' stores before this fence
    fence_device();
    atomicAdd(p.align.counters + unit.token_tile, 1);
  }
}

}  // namespace moe::hopper::w4a8
