// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/brick_registers.cuh: from packed 4-bit codes to the bf16 fragments of a product's A operand, in registers.
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
  uint4 codes;
  std::uint32_t scales;        // int4
  std::uint32_t zeros;         // int4_zero
  std::uint32_t exponents[4];  // mxfp4: row r, both groups; row r + 8

  /// `thread` of the warpgroup; `brick` as in problem.hpp.
  __device__ void load(std::uint32_t brick, int thread) {
    codes = ptx::load_shared_words(brick + static_cast<std::uint32_t>(thread) * 16);
    std::uint32_t const word = brick + kBrickCodeBytes + static_cast<std::uint32_t>(thread >> 2) * 4;
    if constexpr (S == W4Scheme::mxfp4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) exponents[i] = ptx::load_shared_byte(word + static_cast<std::uint32_t>(i));
    } else {
      scales = ptx::load_shared_word(word);
    }
    if constexpr (S == W4Scheme::int4_zero) zeros = ptx::load_shared_word(word + 128);
  }

  /// The A fragments of the brick's steps of 16 from `First` on, which is even: a[4 q + i].
  template <int First, int Steps>
  __device__ void convert(std::uint32_t (&a)[4 * Steps]) const {
    std::uint32_t const all[4] = {codes.x, codes.y, codes.z, codes.w};
    if constexpr (S == W4Scheme::mxfp4) {
#pragma unroll
      for (int pair = 0; pair < Steps / 2; ++pair) {
        int const group = First / 2 + pair;
        // The exponent fields of rows r and r + 8, as two bf16 each.
        std::uint32_t const scale[2] = {exponents[group] * 0x00800080u, exponents[2 + group] * 0x00800080u};
#pragma unroll
        for (int f = 0; f < 8; ++f) {
          std::uint32_t const value = unpack_e2m1(all[First + 2 * pair], all[First + 2 * pair + 1], f);
          a[8 * pair + f] = ptx::multiply_bf16x2(value, scale[f & 1]);
        }
      }
    } else {
      // A code in the low mantissa bits of 128 is 128 + code; the difference to 128 + zero point is exact. Scales are for the sums.
      bool const asymmetric = S == W4Scheme::int4_zero;
      std::uint32_t const zero[2] = {asymmetric ? __byte_perm(zeros, 0, 0x1010) : 0x43084308u,
                                     asymmetric ? __byte_perm(zeros, 0, 0x3232) : 0x43084308u};
#pragma unroll
      for (int q = 0; q < Steps; ++q) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          std::uint32_t const biased = ((all[First + q] >> (4 * i)) & 0x000F000Fu) | 0x43004300u;
          a[4 * q + i] = ptx::subtract_bf16x2(biased, zero[i & 1]);
        }
      }
    }
  }

  /// int4: the factors for the sums of rows r and r + 8.
  __device__ float2 sum_scales() const { return __half22float2(*reinterpret_cast<__half2 const*>(&scales)); }
};

}  // namespace moe::hopper
