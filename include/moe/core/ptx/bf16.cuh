// SPDX-License-Identifier: Apache-2.0
// core/ptx/bf16.cuh: arithmetic on pairs of bf16 numbers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::ptx {

/// Two bf16 products or differences, each to nearest even.
__device__ inline std::uint32_t multiply_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d = 0;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ inline std::uint32_t subtract_bf16x2(std::uint32_t a, std::uint32_t b) {
  std::uint32_t d = 0;
  asm("sub.rn.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

}  // namespace moe::ptx
