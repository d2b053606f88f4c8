// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/brick_registers.cuh: from packed codes to the bf16 fragments of a product's A operand, in registers.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "moe/core/ptx/bf16.cuh"
#include "moe/core/ptx/shared_memory.cuh"
#include "moe/experts/hopper/w4/codes.hpp"
#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::hopper {

/// A thread's part of one brick: its codes and the parameters of its rows r and r + 8.
template <W4Scheme S>
struct BrickRegisters {
  uint4 codes[code_bits(S) / 4];
  std::uint32_t scales[2];      // int4; int4_32: of each 32 of K
  std::uint32_t zeros;          // int4_zero
  std::uint32_t exponents[4];   // mxfp4, mxfp8: row r, both groups; row r + 8
  std::uint32_t row_scales[2];  // nvfp4: row r; row r + 8

  /// `thread` of the warpgroup; `brick` as in problem.hpp.
  __device__ void load(std::uint32_t brick, int thread) {
    codes[0] = ptx::load_shared_words(brick + static_cast<std::uint32_t>(thread) * 16);
    if constexpr (code_bits(S) == 8) codes[1] = ptx::load_shared_words(brick + 2048u + static_cast<std::uint32_t>(thread) * 16);
    [[maybe_unused]] std::uint32_t const word =
        brick + static_cast<std::uint32_t>(brick_code_bytes(S)) + static_cast<std::uint32_t>(thread >> 2) * 4;
    if constexpr (has_exponents(S)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) exponents[i] = ptx::load_shared_byte(word + static_cast<std::uint32_t>(i));
    } else if constexpr (scales_sums(S)) {
#pragma unroll
      for (int i = 0; i < sum_groups(S); ++i) scales[i] = ptx::load_shared_word(word + static_cast<std::uint32_t>(128 * i));
    } else if constexpr (S == W4Scheme::nvfp4) {
      row_scales[0] = ptx::load_shared_word(word);
      row_scales[1] = ptx::load_shared_word(word + 128);
    }
    if constexpr (has_zero_points(S)) zeros = ptx::load_shared_word(word + 4 * scale_words(S));
  }

  /// The A fragments of the brick's steps of 16 from `First` on, which is even: a[4 q + i].
  template <int First, int Steps>
  __device__ void convert(std::uint32_t (&a)[4 * Steps]) const {
    [[maybe_unused]] std::uint32_t const all[4] = {codes[0].x, codes[0].y, codes[0].z, codes[0].w};
    if constexpr (code_bits(S) == 8) {
      convert_bytes<First, Steps>(a);
    } else if constexpr (is_e2m1(S)) {
#pragma unroll
      for (int pair = 0; pair < Steps / 2; ++pair) {
        int const group = First / 2 + pair;
        // The multipliers of rows r and r + 8 for both steps, as two bf16 each: exponent fields, or nvfp4's scales.
        std::uint32_t scale[2][2];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if constexpr (S == W4Scheme::mxfp4) {
            scale[i >> 1][i & 1] = exponents[2 * (i & 1) + group] * 0x00800080u;
          } else {
            std::uint32_t const byte = __byte_perm(row_scales[i & 1], 0, 0x4440u + static_cast<std::uint32_t>(2 * group + (i >> 1)));
            scale[i >> 1][i & 1] = byte * 0x00100010u + kNvfp4ScaleBase * 0x00010001u;
          }
        }
#pragma unroll
        for (int f = 0; f < 8; ++f) {
          std::uint32_t const value = unpack_e2m1(all[First + 2 * pair], all[First + 2 * pair + 1], f);
          a[8 * pair + f] = ptx::multiply_bf16x2(value, scale[f >> 2][f & 1]);
        }
      }
    } else {
      // A code in the low mantissa bits of 128 is 128 + code; the difference to 128 + zero point is exact. Scales are for the sums.
#pragma unroll
      for (int q = 0; q < Steps; ++q) {
        std::uint32_t zero[2] = {0x43084308u, 0x43084308u};
#pragma unroll
        for (std::uint32_t i = 0; i < 2; ++i) {
          if constexpr (S == W4Scheme::int4_zero) zero[i] = __byte_perm(zeros, 0, i == 0 ? 0x1010u : 0x3232u);
          if constexpr (S == W4Scheme::int4_32_zero) {
            zero[i] = __byte_perm(zeros, 0x43u, 0x4040u | ((2 * i + static_cast<std::uint32_t>((First + q) / 2)) * 0x0101u));
          }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          std::uint32_t const biased = ((all[First + q] >> (4 * i)) & 0x000F000Fu) | 0x43004300u;
          a[4 * q + i] = ptx::subtract_bf16x2(biased, zero[i & 1]);
        }
      }
    }
  }

  /// The same for codes of 8 bits.
  template <int First, int Steps>
  __device__ void convert_bytes(std::uint32_t (&a)[4 * Steps]) const {
#pragma unroll
    for (int q = 0; q < Steps; ++q) {
      uint4 const& pair = codes[(First + q) / 2];  // of steps
      std::uint32_t const words[2] = {q % 2 == 0 ? pair.x : pair.z, q % 2 == 0 ? pair.y : pair.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (is_e4m3(S)) {
          std::uint32_t multiplier = kE4m3Multiplier;
          if constexpr (S == W4Scheme::mxfp8) multiplier = exponents[2 * (i & 1) + (First + q) / 2] * 0x00800080u;
          a[4 * q + i] = ptx::multiply_bf16x2(e4m3_values(words[i / 2], i % 2), multiplier);
        } else {
          a[4 * q + i] = ptx::subtract_bf16x2(int8_sums(words[i / 2], i % 2), int8_bases(words[i / 2], i % 2));
        }
      }
    }
  }

  /// int4: the factors for the sums of rows r and r + 8 over group `g` of sum_groups(S).
  __device__ float2 sum_scales(int g) const { return __half22float2(*reinterpret_cast<__half2 const*>(&scales[g])); }
};

}  // namespace moe::hopper
