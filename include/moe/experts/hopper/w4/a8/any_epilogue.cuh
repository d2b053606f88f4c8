// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/any_epilogue.cuh: GEMM1's sums to rows of the intermediate in e4m3 under any activation, gated or not, with the
// router weight on either side. The formulas together are a lot of code, so they are in kernels of their own.
#pragma once

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/common/activation.cuh"
#include "moe/experts/hopper/w4/a8/layout.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"

namespace moe::hopper::w4a8 {

static_assert(kOutputFeatures == 2 * kDepth, "a weight tile of GEMM1 without gates is two scale groups of the intermediate");

/// Any activation, with the router weight on either side, in place: total[b][4 j + i] becomes the result of row 8 j + 2 (lane % 4) + i,
/// without gates total[b][4 j + 2 + i], too, of the feature 8 further on. `mine`: bricks of the warpgroup, or fewer than one.
template <class L, int N>
__device__ inline void activate_any(Params const& p, Memory<L> const& memory, Unit const& unit, int first, int mine, int group,
                                    float (&total)[L::kBricks][N / 2]) {
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  bool const gated = p.any.gated;
  float* const weights = memory.factors(group, L::kMaxRows);
  if (p.weight_on_input) {
    if (thread < L::kMaxRows) weights[thread] = thread < unit.rows ? p.align.sorted_rows[unit.first_row + thread].weight : 0.0F;
    group_barrier(group);
  }
  int const width = p.layer.bias_width;
  AnyActivation const activation(p.any);
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
    if (b >= mine) break;
    int const feature = (gated ? 32 : kBrickRows) * (first + b) + (gated ? 8 : 16) * (thread >> 5) + (lane >> 2);
    float bias[2] = {0.0F, 0.0F};
    if (p.layer.bias[0] != nullptr) {
      float const* const from = p.layer.bias[0] + (gated ? 2LL : 1LL) * unit.expert * width + feature;
      if (feature < width) bias[0] = from[0];
      if (feature + (gated ? 0 : 8) < width) bias[1] = from[gated ? width : 8];
    }
    float value[2][N / 4];  // gate and up, or two results
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float2 const w = p.weight_on_input ? *reinterpret_cast<float2 const*>(weights + 8 * j + 2 * (lane & 3)) : make_float2(1.0F, 1.0F);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        value[h][2 * j] = fmaf(total[b][4 * j + 2 * h], w.x, bias[h]);
        value[h][2 * j + 1] = fmaf(total[b][4 * j + 2 * h + 1], w.y, bias[h]);
      }
    }
    activation.apply(value[0], value[1]);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[b][i] = value[(i >> 1) & 1][2 * (i >> 2) + (i & 1)];
  }
}

/// Stores the activated rows of a tile as codes and scales, then advances the tile's counter. Every warpgroup calls it. `features` of the
/// tile: 128, without gates 128 or 256. scale = max(amax, 1e-10) / 448.
template <class L, int N>
__device__ inline void store_any_codes(Params const& p, Memory<L> const& memory, Unit const& unit, int features, int group,
                                       float const (&total)[L::kBricks][N / 2]) {
  int const lane = thread_index() & 31;
  bool const gated = p.any.gated;
  int const brick_features = gated ? 32 : kBrickRows;
  int const feature = (gated ? 8 : 16) * ((thread_index() & 127) >> 5) + (lane >> 2) + brick_features * group * L::kBricks;  // of the tile
  int const scale_group = gated ? 0 : group * L::kBricks / 2;
  int* const amax = memory.amax() + scale_group * L::kMaxRows;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = 0.0F;
#pragma unroll
      for (int b = 0; b < L::kBricks; ++b) {
        most = fmaxf(most, fabsf(total[b][4 * j + i]));
        if (!gated) most = fmaxf(most, fabsf(total[b][4 * j + 2 + i]));
      }
#pragma unroll
      for (int offset = 4; offset < 32; offset *= 2) most = fmaxf(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
      if (lane < 4) atomicMax(amax + 8 * j + 2 * lane + i, __float_as_int(most));  // not negative: ordered as their bits
    }
  }
  joint_barrier<L::kGroups>();
  char* const staging = memory.staging(0) + scale_group * L::kMaxRows * kDepth + feature % kDepth;  // [scale group, row, 128]
  // One thread of four of the first warpgroup of a scale group stores the scales of its rows.
  bool const stores_scale = feature % kDepth == 0 && scale_group * kDepth < features;
  float* const scales = p.inter_scales + static_cast<long long>(unit.first_row) * p.scale_blocks + unit.feature / kDepth + scale_group;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int const row = 8 * j + 2 * (lane & 3) + i;
      float const scale = e4m3_scale(fmaxf(__int_as_float(amax[row]), 1e-10F));
      float const inverse = 1.0F / scale;
#pragma unroll
      for (int b = 0; b < L::kBricks; ++b) {
        std::uint32_t const codes =
            pack_e4m3(quotient(total[b][4 * j + i], scale, inverse), quotient(total[b][4 * j + 2 + i], scale, inverse));
        char* const to = staging + row * kDepth + brick_features * b;
        to[0] = static_cast<char>(codes & 0xFFu);
        if (!gated) to[8] = static_cast<char>(codes >> 8);
      }
      if (stores_scale && row < unit.rows) __stcg(scales + row * p.scale_blocks, scale);
    }
  }
  joint_barrier<L::kGroups>();
  int const all = thread_index();  // consumers are the first threads
#pragma unroll
  for (int g = 0; g < 2; ++g) {
    for (int i = all; i < N; i += L::kConsumers) memory.amax()[g * L::kMaxRows + i] = 0;
  }
  int const shift = features == kDepth ? 3 : 4;  // log2 of a row's vectors of 16 codes
  for (int i = all; i < unit.rows << shift; i += L::kConsumers) {
    int const row = i >> shift;
    int const vector = i & ((1 << shift) - 1);
    char const* const from = memory.staging(0) + ((vector >> 3) * L::kMaxRows + row) * kDepth;
    char* const to = static_cast<char*>(p.inter) + static_cast<long long>(unit.first_row + row) * p.layer.intermediate + unit.feature;
    reinterpret_cast<uint4*>(to)[vector] = reinterpret_cast<uint4 const*>(from)[vector & 7];
  }
  joint_barrier<L::kGroups>();
  if (all == 0) {  // the barrier ordered the other threads' stores before this fence
    fence_device();
    atomicAdd(p.align.counters + unit.token_tile, 1);
  }
}

}  // namespace moe::hopper::w4a8
