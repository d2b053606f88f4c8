// SPDX-License-Identifier: Apache-2.0
// core/ptx/convert.cuh: float pairs to packed 16-bit and 8-bit numbers.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace moe::ptx {

/// Two floats to two bf16 or fp16 numbers, to nearest even; `low` in the low half.
template <class T>
__device__ inline std::uint32_t pack(float low, float high) {
  std::uint32_t bits = 0;
  if constexpr (std::is_same_v<T, __half>) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  }
  return bits;
}

/// Two floats to two e4m3 codes, saturating; `low` in the low byte.
__device__ inline std::uint32_t pack_e4m3(float low, float high) {
  std::uint16_t bits = 0;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(high), "f"(low));
  return bits;
}

/// x / divisor, correctly rounded: the product with the reciprocal, corrected by its remainder. Quotients of bf16 numbers often lie midway
/// between two codes.
__device__ inline float quotient(float x, float divisor, float reciprocal) {
  float const q = x * reciprocal;
  return fmaf(fmaf(-q, divisor, x), reciprocal, q);
}

/// amax / 448; infinity stays infinity.
__device__ inline float e4m3_scale(float amax) { return amax <= 3.4e38F ? quotient(amax, 448.0F, 1.0F / 448.0F) : amax; }

}  // namespace moe::ptx
