// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/pack.cuh: rearranges 4-bit weights into bricks for products in e4m3, when a layer is constructed.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "moe/experts/hopper/w4/a8/codes.hpp"
#include "moe/experts/hopper/w4/a8/problem.hpp"
#include "moe/experts/hopper/w4/pack.cuh"

namespace moe::hopper::w4a8 {

namespace detail {

/// The scales of one brick of mxfp4, by 128 threads. `code(row, k)`: a code of the matrix.
template <class Code>
__device__ inline void pack_powers(W4PackArgs const& a, long long expert, int step, int tile, std::uint32_t* words, Code const& code) {
  int const thread = static_cast<int>(threadIdx.x);
  std::uint32_t exponent[4] = {0, 0, 0, 0};
  bool used[4] = {false, false, false, false};
  FoldedScales folded{0, false};
  bool subnormal = false;
  if (thread < kBrickRows) {
    int const row = moe::hopper::detail::source_row(a, tile, thread);
    for (int g = 0; g < 4; ++g) {
      int const first = step * kDepth + 32 * g;
      if (row < 0 || first >= a.cols) continue;
      exponent[g] = static_cast<std::uint8_t const*>(a.scales)[(expert * a.rows + row) * (a.cols / 32) + first / 32];
      for (int k = first; k < first + 32 && !used[g]; ++k) used[g] = (code(row, k) & 7u) != 0;
    }
    folded = fold_scales(exponent, used);
    subnormal = !folded.wide && has_subnormals(folded.word);
  }
  bool const wide = __syncthreads_or(folded.wide ? 1 : 0) != 0;
  std::uint32_t const kind = __syncthreads_or(subnormal ? 1 : 0) == 0 ? kNormalBrick : kSubnormalBrick;
  if (thread < kBrickRows) words[thread] = wide ? wide_scales(exponent, used) : folded.word;
  if (thread < 4) words[kBrickRows + thread] = thread != 0 ? 0 : wide ? kWideBrick : kind;
}

/// The scales, zero points and factor of one brick of int4, by 128 threads. Scales are relative to the row's power of two; the brick's
/// factor is the power of two over which the largest of them is in [2^14, 2^15).
template <W4Scheme S>
__device__ inline void pack_group_scales(W4PackArgs const& a, long long expert, int step, int tile, std::uint32_t* words) {
  constexpr int kGroups = 2 * row_words(S);
  int const thread = static_cast<int>(threadIdx.x);
  float scale[kGroups] = {};
  std::uint32_t points = 0;
  int most = 0;
  if (int const row = thread < kBrickRows ? moe::hopper::detail::source_row(a, tile, thread) : -1; row >= 0) {
    int const exponent = exponent_of(a.factor[expert * a.packed_rows + tile * kBrickRows + thread]);
    for (int g = 0; g < 4; ++g) {  // of 32
      int const k = step * kDepth + 32 * g;
      if (k >= a.cols) continue;
      long long const at = (expert * a.rows + row) * (a.cols / a.group) + k / a.group;
      if constexpr (has_zero_points(S)) points |= static_cast<std::uint32_t>(static_cast<float2 const*>(a.scales)[at].y) << (8 * g);
      float const value = ldexpf(moe::hopper::detail::group_scale<S>(a, at), -exponent);
      scale[g * kGroups / 4] = value;
      most = larger_scale(most, __float_as_uint(value));
    }
  }
  __shared__ int largest;
  if (thread == 0) largest = 0;
  __syncthreads();
  atomicMax(&largest, most);
  __syncthreads();
  int const common = wide_exponent(largest);
  if (thread < kBrickRows) {
    for (int i = 0; i < row_words(S); ++i) {
      std::uint32_t const first = __half_as_ushort(scale_over(scale[2 * i], common));
      std::uint32_t const second = __half_as_ushort(scale_over(scale[2 * i + 1], common));
      words[i * kBrickRows + thread] = first | second << 16;
    }
    if constexpr (has_zero_points(S)) words[row_words(S) * kBrickRows + thread] = points;
  }
  if (thread < 4) words[scale_bytes(S) / 4 + thread] = thread == 0 ? __float_as_uint(ldexpf(1.0F, common)) : 0;
}

}  // namespace detail

/// One brick a block of 128 threads: grid (steps of 128 along K, bricks along the rows, experts). `a.largest` is not used; int4's
/// `a.factor` has been written by find_row_factors<S, true>.
template <W4Scheme S>
__global__ void pack_bricks(W4PackArgs const a) {
  int const step = static_cast<int>(blockIdx.x);
  int const steps = static_cast<int>(gridDim.x);
  int const tile = static_cast<int>(blockIdx.y);
  int const tiles = static_cast<int>(gridDim.y);
  long long const expert = blockIdx.z;
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  int const side = min(kTileBricks, tiles - tile / kTileBricks * kTileBricks);
  long long const index = static_cast<long long>(tile / kTileBricks * kTileBricks) * steps + step * side + tile % kTileBricks;
  std::uint8_t* const brick = a.packed + expert * w4a8::bricks_bytes(S, a.packed_rows, a.packed_cols) + index * stored_brick_bytes(S);
  std::uint8_t const* const codes = a.codes + expert * a.rows * (a.cols / 2);
  auto const code = [&](int row, int k) -> std::uint32_t {
    if (row < 0 || k >= a.cols) return is_e2m1(S) ? 0u : 8u;
    std::uint32_t const pair = codes[static_cast<long long>(row) * (a.cols / 2) + k / 2];
    return (k & 1) != 0 ? pair >> 4 : pair & 15u;
  };

  std::uint32_t word[8];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const row = moe::hopper::detail::source_row(a, tile, 16 * warp + (lane >> 2) + 8 * half);
      int const k = step * kDepth + 32 * q + 4 * (lane & 3);
      std::uint32_t eight[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) eight[i] = code(row, k + (i & 3) + (i < 4 ? 0 : 16));
      word[2 * q + half] = pack_word(eight);
    }
  }
  reinterpret_cast<uint4*>(brick)[thread] = make_uint4(word[0], word[1], word[2], word[3]);
  reinterpret_cast<uint4*>(brick + kCodeBytes / 2)[thread] = make_uint4(word[4], word[5], word[6], word[7]);

  std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(brick + kCodeBytes);
  if constexpr (is_e2m1(S)) {
    detail::pack_powers(a, expert, step, tile, words, code);
    if (step == 0 && tile == 0 && thread == 0) a.factor[expert] = 1.0F;
  } else {
    detail::pack_group_scales<S>(a, expert, step, tile, words);
  }
}

}  // namespace moe::hopper::w4a8
