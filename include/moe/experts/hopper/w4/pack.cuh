// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/pack.cuh: rearranges 4-bit weights into bricks, once, when a layer is constructed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "moe/experts/hopper/w4/codes.hpp"
#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::hopper {

/// One matrix of every expert.
struct W4PackArgs {
  std::uint8_t const* codes;  ///< [E, rows, cols / 2]
  void const* scales;         ///< [E, rows, cols / group], see W4Weights
  int rows;                   ///< 2I or H
  int cols;                   ///< H or I
  int packed_rows;            ///< the same with I a multiple of 64: rows and columns beyond the matrix become zero weights
  int packed_cols;
  int group;
  bool gate_up;    ///< w13: pair gate and up rows
  int* largest;    ///< [E] between the two kernels: see find_largest_scale
  float* factor;   ///< [E] out: the factor of the sums
  int* bad_zeros;  ///< out: set if a zero point is no integer of 0 … 15
  std::uint8_t* packed;
};

/// One block per expert: its largest exponent byte below 255 (mxfp4), or the bits of its largest finite |scale| (int4).
template <W4Scheme S>
__global__ void find_largest_scale(W4PackArgs const a) {
  __shared__ int largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  long long const count = static_cast<long long>(a.rows) * (a.cols / a.group);
  long long const first = blockIdx.x * count;
  int mine = 0;
  for (long long i = first + threadIdx.x; i < first + count; i += blockDim.x) {
    if constexpr (S == W4Scheme::mxfp4) {
      int const exponent = static_cast<std::uint8_t const*>(a.scales)[i];
      mine = max(mine, exponent == 255 ? 0 : exponent);
    } else {
      float const scale = S == W4Scheme::int4 ? static_cast<float const*>(a.scales)[i] : static_cast<float2 const*>(a.scales)[i].x;
      int const bits = __float_as_int(fabsf(scale));
      mine = max(mine, bits < 0x7F800000 ? bits : 0);
    }
  }
  mine = static_cast<int>(__reduce_max_sync(0xFFFFFFFFu, static_cast<unsigned>(mine)));
  if ((threadIdx.x & 31) == 0) atomicMax(&largest, mine);
  __syncthreads();
  if (threadIdx.x == 0) a.largest[blockIdx.x] = largest;
}

namespace detail {

/// The matrix row that is row `p` of brick `tile`; -1 beyond the matrix.
__device__ inline int source_row(W4PackArgs const& a, int tile, int p) {
  if (!a.gate_up) return tile * kBrickRows + p;
  int const feature = tile * 32 + (p >> 4) * 8 + (p & 7);
  if (feature >= a.rows / 2) return -1;
  return (p & 8) != 0 ? a.rows / 2 + feature : feature;
}

/// The exponent of the power of two by which an expert's stored scales are multiplied: brings the largest fp16 scale to [2^14, 2^15), and
/// e2m1 multipliers under 2^128.
template <W4Scheme S>
__device__ inline int common_exponent(int largest) {
  if constexpr (S == W4Scheme::mxfp4) {
    return max(0, largest - 128);
  } else {
    return max(-140, (largest >> 23) - 127 - 14);
  }
}

}  // namespace detail

/// One block of 128 threads per brick: grid (bricks along K, bricks along the rows, experts).
template <W4Scheme S>
__global__ void __launch_bounds__(128) pack_bricks(W4PackArgs const a) {
  int const step = static_cast<int>(blockIdx.x);
  int const tile = static_cast<int>(blockIdx.y);
  int const steps = static_cast<int>(gridDim.x);
  int const tiles = static_cast<int>(gridDim.y);
  long long const expert = blockIdx.z;
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  int const side = min(kTileBricks, tiles - tile / kTileBricks * kTileBricks);
  long long const index = static_cast<long long>(tile / kTileBricks * kTileBricks) * steps + step * side + tile % kTileBricks;
  std::uint8_t* const brick = a.packed + expert * packed_bytes(S, a.packed_rows, a.packed_cols) + index * brick_bytes(S);
  std::uint8_t const* const codes = a.codes + expert * a.rows * (a.cols / 2);
  constexpr std::uint32_t kZeroPair = S == W4Scheme::mxfp4 ? 0x00u : 0x88u;

  std::uint32_t word[4] = {0, 0, 0, 0};
  std::uint32_t pairs[2][8];  // e2m1
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const row = detail::source_row(a, tile, 16 * warp + (lane >> 2) + 8 * (i & 1));
      int const k = step * kBrickDepth + 16 * q + 2 * (lane & 3) + 8 * (i >> 1);
      bool const there = row >= 0 && k < a.cols;
      std::uint32_t const pair = there ? codes[static_cast<long long>(row) * (a.cols / 2) + k / 2] : kZeroPair;
      if constexpr (S == W4Scheme::mxfp4) {
        pairs[q / 2][4 * (q & 1) + i] = pair;
      } else {
        word[q] |= ((pair & 15u) << (4 * i)) | ((pair >> 4) << (16 + 4 * i));
      }
    }
  }
  if constexpr (S == W4Scheme::mxfp4) {
    pack_e2m1(pairs[0], word[0], word[1]);
    pack_e2m1(pairs[1], word[2], word[3]);
  }
  reinterpret_cast<uint4*>(brick)[thread] = make_uint4(word[0], word[1], word[2], word[3]);

  int const common = detail::common_exponent<S>(a.largest[expert]);
  if (thread < 32) {
    std::uint32_t scales = 0;
    std::uint32_t zeros = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const source = detail::source_row(a, tile, 16 * (thread >> 3) + (thread & 7) + 8 * half);
      if (source < 0) continue;  // scales of zero
      long long const at = (expert * a.rows + source) * (a.cols / a.group) + step * kBrickDepth / a.group;
      if constexpr (S == W4Scheme::mxfp4) {
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          if (step * kBrickDepth + 32 * g >= a.cols) continue;
          int const exponent = static_cast<std::uint8_t const*>(a.scales)[at + g];
          int const field = exponent == 255 ? 255 : max(0, exponent + 126 - common);
          scales |= static_cast<std::uint32_t>(field) << (16 * half + 8 * g);
        }
      } else if constexpr (S == W4Scheme::int4) {
        __half const scale = __float2half_rn(ldexpf(static_cast<float const*>(a.scales)[at], -common));
        scales |= static_cast<std::uint32_t>(__half_as_ushort(scale)) << (16 * half);
      } else {
        float2 const pair = static_cast<float2 const*>(a.scales)[at];
        if (!(pair.y >= 0.0F && pair.y <= 15.0F && pair.y == truncf(pair.y))) *a.bad_zeros = 1;
        __half const scale = __float2half_rn(ldexpf(pair.x, -common));
        scales |= static_cast<std::uint32_t>(__half_as_ushort(scale)) << (16 * half);
        zeros |= static_cast<std::uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(128.0F + pair.y))) << (16 * half);
      }
    }
    std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(brick + kBrickCodeBytes);
    words[thread] = scales;
    if constexpr (S == W4Scheme::int4_zero) words[32 + thread] = zeros;
  }
  if (step == 0 && tile == 0 && thread == 0) {
    a.factor[expert] = ldexpf(1.0F, common);
  }
}

}  // namespace moe::hopper
