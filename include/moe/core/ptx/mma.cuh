// SPDX-License-Identifier: Apache-2.0
// core/ptx/mma.cuh: products of one warp, operands in registers.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::ptx {

/// d[16 x 8] += A[16 x 16] * B[8 x 16]^T in bf16. With r = lane / 4 and c = lane % 4, register i of A holds columns 2c and 2c + 1 (+ 8 for
/// i over 1) of row r (+ 8 for odd i), register i of B columns 2c and 2c + 1 (+ 8 for i = 1) of row r, and d[2 h + b] is row r + 8 h,
/// column 2 c + b (PTX ISA, mma fragments).
__device__ inline void mma_bf16(float* d, std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
/// The same in e4m3 over 32 columns: two 8-bit elements replace each 16-bit element.
__device__ inline void mma_e4m3(float* d, std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace moe::ptx
