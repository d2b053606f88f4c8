// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/pack.cuh: rearranges weights into bricks, once, when a layer is constructed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "moe/core/cuda_space.hpp"
#include "moe/experts/hopper/w4/codes.hpp"
#include "moe/experts/hopper/w4/problem.hpp"
#include "moe/experts/hopper/w4/row_factors.hpp"

namespace moe::hopper {

/// One matrix of every expert.
struct W4PackArgs {
  std::uint8_t const* codes;  ///< [E, rows, cols / 2], of 8 bits [E, rows, cols]
  void const* scales;         ///< [E, rows, cols / group], see W4Weights
  int rows;                   ///< 2I (ungated I) or H
  int cols;                   ///< H or I
  int packed_rows;            ///< the same with I a multiple of 64: rows and columns beyond the matrix become zero weights
  int packed_cols;
  int group;
  bool gate_up;   ///< gated w13: pair gate and up rows
  int* largest;   ///< mxfp4, mxfp8 [E], between the two kernels: see find_largest_exponent
  float* factor;  ///< [E] out: the factor of the sums; of has_row_factors() [E, packed_rows]
  std::uint8_t* packed;
};

namespace w4 {

/// Those of w13 or w2 of a layer, without the sizes of the packed matrix and where it lies.
inline W4PackArgs pack_args(LocalShape const& shape, bool gated, bool down) {
  W4PackArgs a{};
  a.rows = down ? shape.hidden : (gated ? 2 : 1) * shape.intermediate;
  a.cols = down ? shape.intermediate : shape.hidden;
  a.gate_up = !down && gated;
  return a;
}
/// The same of a layer's weights.
inline W4PackArgs pack_args(LocalShape const& shape, bool gated, bool down, W4Weights const& w) {
  W4PackArgs a = pack_args(shape, gated, down);
  a.codes = down ? w.w2 : w.w13;
  a.scales = down ? w.w2_scales : w.w13_scales;
  a.group = down ? w.w2_group : w.w13_group;
  return a;
}
/// The layer's shape, or that of a part of one matrix.
inline LocalShape staged_shape(LocalShape shape, W4StagedMatrix const& m) {
  if (m.part.given()) (m.down ? shape.hidden : shape.intermediate) = m.part.count;
  return shape;
}
/// The same of staged weights, to be packed as the first experts of `to`. `shape`: staged_shape().
inline W4PackArgs pack_args(LocalShape const& shape, bool gated, W4StagedMatrix const& m, W4Packed const& to) {
  W4PackArgs a = pack_args(shape, gated, m.down);
  a.codes = m.codes;
  a.scales = m.scales;
  a.group = m.group;
  a.largest = static_cast<int*>(m.scratch);
  a.factor = to.factor[m.down ? 1 : 0];
  a.packed = to.bricks[m.down ? 1 : 0];
  return a;
}

}  // namespace w4

/// Powers of two, one block per expert: its largest exponent byte below 255.
template <W4Scheme S>
  requires(has_exponents(S))
__global__ void find_largest_exponent(W4PackArgs const a) {
  __shared__ int largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  long long const count = static_cast<long long>(a.rows) * (a.cols / a.group);
  long long const first = blockIdx.x * count;
  int mine = 0;
  for (long long i = first + threadIdx.x; i < first + count; i += blockDim.x) {
    int const exponent = static_cast<std::uint8_t const*>(a.scales)[i];
    mine = max(mine, exponent == 255 ? 0 : exponent);
  }
  mine = static_cast<int>(__reduce_max_sync(0xFFFFFFFFu, static_cast<unsigned>(mine)));
  if ((threadIdx.x & 31) == 0) atomicMax(&largest, mine);
  __syncthreads();
  if (threadIdx.x == 0) a.largest[blockIdx.x] = largest;
}

namespace detail {

/// The matrix row that is row `p` of brick `tile`; -1 beyond the matrix.
__device__ inline int source_row(W4PackArgs const& a, int tile, int p) {
  if (!a.gate_up) return tile * kBrickRows + p < a.rows ? tile * kBrickRows + p : -1;
  int const feature = tile * 32 + (p >> 4) * 8 + (p & 7);
  if (feature >= a.rows / 2) return -1;
  return (p & 8) != 0 ? a.rows / 2 + feature : feature;
}

/// The exponent of the multiplier of codes as read (codes.hpp) under a power of two of 0.
template <W4Scheme S>
inline constexpr int kCodeBias = is_e2m1(S) ? kE2m1Bias : kE4m3Bias;
/// The exponent of the power of two over which an expert's multipliers are stored: brings the largest under 2^128.
template <W4Scheme S>
__device__ inline int common_exponent(int largest) {
  return max(0, largest + kCodeBias<S> - 254);
}

/// int4: scale `at` of the matrices.
template <W4Scheme S>
__device__ inline float group_scale(W4PackArgs const& a, long long at) {
  if constexpr (has_zero_points(S)) {
    return static_cast<float2 const*>(a.scales)[at].x;
  } else {
    return static_cast<float const*>(a.scales)[at];
  }
}

/// nvfp4: the bytes of one expert's scales, whose last four are its float32 scale.
__device__ inline std::uint8_t const* nvfp4_scales(W4PackArgs const& a, long long expert, long long& global_offset) {
  global_offset = (static_cast<long long>(a.rows) * (a.cols / 16) + 3) / 4 * 4;
  return static_cast<std::uint8_t const*>(a.scales) + expert * (global_offset + 4);
}
__device__ inline std::uint32_t nvfp4_scale(W4PackArgs const& a, long long expert, int row, int group) {
  long long offset = 0;
  return nvfp4_scales(a, expert, offset)[static_cast<long long>(row) * (a.cols / 16) + group];
}

/// The scales of one brick of nvfp4: thread 32 h + i writes those of row r + 8 h of word i. The thread of the expert's first word also
/// writes the expert's factor.
__device__ inline void pack_nvfp4_scales(W4PackArgs const& a, long long expert, int step, int tile, std::uint32_t* words) {
  int const thread = static_cast<int>(threadIdx.x);
  if (thread >= 64) return;
  int const source = source_row(a, tile, 16 * ((thread & 31) >> 3) + (thread & 7) + 8 * (thread >> 5));
  std::uint32_t word = 0;
#pragma unroll
  for (int g = 0; g < 4; ++g) {
    int const group = step * 4 + g;
    if (source < 0 || group * 16 >= a.cols) continue;
    std::uint32_t const scale = nvfp4_scale(a, expert, source, group);
    word |= nvfp4_scale_byte(scale) << (8 * g);
  }
  words[thread] = word;
  if (step != 0 || tile != 0 || thread != 0) return;
  long long offset = 0;
  std::uint8_t const* const at = nvfp4_scales(a, expert, offset);
  std::uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= static_cast<std::uint32_t>(at[offset + i]) << (8 * i);
  a.factor[expert] = __uint_as_float(bits) * kNvfp4Factor;
}

}  // namespace detail

/// int4: writes the factors of the packed rows, a warp each: grid (packed rows / warps of a block, experts). `Unit`: 2^unit_exponent(),
/// else 2^wide_exponent().
template <W4Scheme S, bool Unit>
__global__ void find_row_factors(W4PackArgs const a) {
  int const row = static_cast<int>(blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
  if (row >= a.packed_rows) return;
  long long const expert = blockIdx.y;
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const source = detail::source_row(a, row / kBrickRows, row % kBrickRows);
  int const groups = source < 0 ? 0 : a.cols / a.group;
  int most = 0;
  for (int g = lane; g < groups; g += 32) {
    most = larger_scale(most, __float_as_uint(detail::group_scale<S>(a, (expert * a.rows + source) * groups + g)));
  }
  most = static_cast<int>(__reduce_max_sync(0xFFFFFFFFu, static_cast<unsigned>(most)));
  if (lane == 0) a.factor[expert * a.packed_rows + row] = ldexpf(1.0F, Unit ? unit_exponent(most) : wide_exponent(most));
}

/// Enqueues it. Rows are a multiple of 64.
template <W4Scheme S, bool Unit>
inline void launch_row_factors(W4PackArgs const& a, int experts, cudaStream_t stream) {
  constexpr int kWarps = 8;
  dim3 const grid(static_cast<unsigned>(a.packed_rows / kWarps), static_cast<unsigned>(experts));
  find_row_factors<S, Unit><<<grid, 32 * kWarps, 0, stream>>>(a);
  check_cuda(cudaGetLastError(), "find_row_factors");
}

namespace detail {

/// The codes of a brick, of 8 bits.
__device__ inline void pack_byte_codes(W4PackArgs const& a, long long expert, int step, int tile, std::uint8_t* brick) {
  int const thread = static_cast<int>(threadIdx.x);
  std::uint8_t const* const codes = a.codes + expert * a.rows * a.cols;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      std::uint32_t registers[2] = {0, 0};
#pragma unroll
      for (int f = 0; f < 2; ++f) {
        int const i = 2 * (w % 2) + f;  // register of the fragment of step 2 half + w / 2
        int const row = source_row(a, tile, 16 * (thread >> 5) + ((thread & 31) >> 2) + 8 * (i & 1));
        int const k = step * kBrickDepth + 16 * (2 * half + w / 2) + 2 * (thread & 3) + 8 * (i >> 1);
        if (row < 0) continue;
        std::uint8_t const* const at = codes + static_cast<long long>(row) * a.cols + k;
        if (k < a.cols) registers[f] = at[0];
        if (k + 1 < a.cols) registers[f] |= static_cast<std::uint32_t>(at[1]) << 8;
      }
      word[w] = pack_bytes(registers);
    }
    reinterpret_cast<uint4*>(brick)[128 * half + thread] = make_uint4(word[0], word[1], word[2], word[3]);
  }
}
/// One scale a row: the first brick along K writes the factors of its rows.
__device__ inline void pack_row_scales(W4PackArgs const& a, long long expert, int step, int tile) {
  int const thread = static_cast<int>(threadIdx.x);
  if (step != 0 || thread >= kBrickRows) return;
  int const row = source_row(a, tile, thread);
  float const scale = row < 0 ? 0.0F : static_cast<float const*>(a.scales)[expert * a.rows + row];
  a.factor[expert * a.packed_rows + tile * kBrickRows + thread] = scale;
}
/// The codes of a brick, of 4 bits.
template <W4Scheme S>
__device__ inline void pack_nibble_codes(W4PackArgs const& a, long long expert, int step, int tile, std::uint8_t* brick) {
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  std::uint8_t const* const codes = a.codes + expert * a.rows * (a.cols / 2);
  constexpr std::uint32_t kZeroPair = is_e2m1(S) ? 0x00u : 0x88u;

  std::uint32_t word[4] = {0, 0, 0, 0};
  std::uint32_t pairs[2][8];  // e2m1
#pragma unroll
  for (int q = 0; q < 4; ++q) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const row = source_row(a, tile, 16 * warp + (lane >> 2) + 8 * (i & 1));
      int const k = step * kBrickDepth + 16 * q + 2 * (lane & 3) + 8 * (i >> 1);
      bool const there = row >= 0 && k < a.cols;
      std::uint32_t pair = there ? codes[static_cast<long long>(row) * (a.cols / 2) + k / 2] : kZeroPair;
      if constexpr (S == W4Scheme::nvfp4) {  // a scale's sign goes to the codes, and so does its being zero
        std::uint32_t const scale = there ? nvfp4_scale(a, expert, row, k / 16) : 0;
        pair = (scale & 0x7Fu) == 0 ? 0 : (scale & 0x80u) != 0 ? pair ^ 0x88u : pair;
      }
      if constexpr (is_e2m1(S)) {
        pairs[q / 2][4 * (q & 1) + i] = pair;
      } else {
        word[q] |= ((pair & 15u) << (4 * i)) | ((pair >> 4) << (16 + 4 * i));
      }
    }
  }
  if constexpr (is_e2m1(S)) {
    pack_e2m1(pairs[0], word[0], word[1]);
    pack_e2m1(pairs[1], word[2], word[3]);
  }
  reinterpret_cast<uint4*>(brick)[thread] = make_uint4(word[0], word[1], word[2], word[3]);
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
  int const side = min(kTileBricks, tiles - tile / kTileBricks * kTileBricks);
  long long const index = static_cast<long long>(tile / kTileBricks * kTileBricks) * steps + step * side + tile % kTileBricks;
  std::uint8_t* const brick = a.packed + expert * bricks_bytes(S, a.packed_rows, a.packed_cols) + index * brick_bytes(S);
  if constexpr (code_bits(S) == 8) {
    detail::pack_byte_codes(a, expert, step, tile, brick);
  } else {
    detail::pack_nibble_codes<S>(a, expert, step, tile, brick);
  }

  if constexpr (scales_rows(S)) {
    detail::pack_row_scales(a, expert, step, tile);
    return;
  }
  if constexpr (S == W4Scheme::nvfp4) {
    detail::pack_nvfp4_scales(a, expert, step, tile, reinterpret_cast<std::uint32_t*>(brick + brick_code_bytes(S)));
    return;
  }
  if (thread < scale_words(S)) {
    int const pair = thread & 31;
    int const part = thread >> 5;  // int4_32: of the two groups
    std::uint32_t scales = 0;
    std::uint32_t zeros = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int const position = 16 * (pair >> 3) + (pair & 7) + 8 * half;
      int const source = detail::source_row(a, tile, position);
      if (source < 0) continue;  // scales of zero
      long long const at = (expert * a.rows + source) * (a.cols / a.group) + step * kBrickDepth / a.group + part;
      if constexpr (has_exponents(S)) {
        int const common = detail::common_exponent<S>(a.largest[expert]);
#pragma unroll
        for (int g = 0; g < 2; ++g) {
          if (step * kBrickDepth + 32 * g >= a.cols) continue;
          int const exponent = static_cast<std::uint8_t const*>(a.scales)[at + g];
          int const field = exponent == 255 ? 255 : max(0, exponent + detail::kCodeBias<S> - common);
          scales |= static_cast<std::uint32_t>(field) << (16 * half + 8 * g);
        }
      } else {
        int const exponent = exponent_of(a.factor[expert * a.packed_rows + tile * kBrickRows + position]);
        f16 const scale = scale_over(detail::group_scale<S>(a, at), exponent);
        scales |= static_cast<std::uint32_t>(__half_as_ushort(scale)) << (16 * half);
        if constexpr (has_zero_points(S)) {
          float const zero = static_cast<float2 const*>(a.scales)[at].y;
          zeros |= static_cast<std::uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(128.0F + zero))) << (16 * half);
        }
      }
    }
    std::uint32_t* const words = reinterpret_cast<std::uint32_t*>(brick + brick_code_bytes(S));
    words[thread] = scales;
    if constexpr (S == W4Scheme::int4_zero) words[32 + thread] = zeros;
    if constexpr (S == W4Scheme::int4_32_zero) {
      std::uint8_t* const bytes = reinterpret_cast<std::uint8_t*>(words + 64) + 4 * pair + part;
      bytes[0] = static_cast<std::uint8_t>(zeros);  // the mantissa of 128 + zero point
      bytes[2] = static_cast<std::uint8_t>(zeros >> 16);
    }
  }
  if constexpr (has_exponents(S)) {
    if (step == 0 && tile == 0 && thread == 0) a.factor[expert] = ldexpf(1.0F, detail::common_exponent<S>(a.largest[expert]));
  }
}

}  // namespace moe::hopper
