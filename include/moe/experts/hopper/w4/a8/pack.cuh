// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/pack.cuh: rearranges mxfp4 weights into bricks for products in e4m3, when a layer is constructed.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/w4/a8/codes.hpp"
#include "moe/experts/hopper/w4/a8/problem.hpp"
#include "moe/experts/hopper/w4/pack.cuh"

namespace moe::hopper::w4a8 {

/// One brick a block of 128 threads: grid (steps of 128 along K, bricks along the rows, experts). `a.largest` is not used.
static __global__ void pack_bricks(W4PackArgs const a) {
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
  std::uint8_t* const brick = a.packed + expert * packed_bytes(a.packed_rows, a.packed_cols) + index * kBrickBytes;
  std::uint8_t const* const codes = a.codes + expert * a.rows * (a.cols / 2);
  auto const code = [&](int row, int k) -> std::uint32_t {
    if (row < 0 || k >= a.cols) return 0;
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
  std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(brick + kCodeBytes);
  if (thread < kBrickRows) words[thread] = wide ? wide_scales(exponent, used) : folded.word;
  if (thread < 4) words[kBrickRows + thread] = thread != 0 ? 0 : wide ? kWideBrick : kind;
  if (step == 0 && tile == 0 && thread == 0) a.factor[expert] = 1.0F;
}

}  // namespace moe::hopper::w4a8
