// SPDX-License-Identifier: Apache-2.0
// core/ptx/shared_memory.cuh: loads and stores of shared memory by 32-bit address, and of matrices of 16-bit elements (ldmatrix, stmatrix).
#pragma once

#include "moe/core/ptx/shared_address.cuh"

namespace moe::ptx {

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrix_x4(std::uint32_t (&v)[4], std::uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(smem)
               : "memory");
}

/// Transposing store of four (or two, or one) 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void store_matrix_transposed_x4(std::uint32_t smem, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ inline void store_matrix_transposed_x2(std::uint32_t smem, std::uint32_t a, std::uint32_t b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem), "r"(a), "r"(b) : "memory");
}
__device__ inline void store_matrix_transposed_x1(std::uint32_t smem, std::uint32_t a) {
  asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(smem), "r"(a) : "memory");
}

/// Store of four 8x8 matrices as they lie in the threads: lane l holds elements 2 (l % 4) and the next of row l / 4.
__device__ inline void store_matrix_x4(std::uint32_t smem, std::uint32_t a, std::uint32_t b, std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Volatile, so that they stay in order with each other; the compiler may move other accesses across them.
__device__ inline float load_shared(std::uint32_t smem) {
  float value = 0.0F;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(smem));
  return value;
}
__device__ inline float2 load_shared_2(std::uint32_t smem) {
  float2 value{};
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "r"(smem));
  return value;
}
__device__ inline std::uint32_t load_shared_byte(std::uint32_t smem) {
  std::uint32_t value = 0;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(value) : "r"(smem));
  return value;
}
__device__ inline std::uint32_t load_shared_word(std::uint32_t smem) {
  std::uint32_t value = 0;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(smem));
  return value;
}
__device__ inline uint2 load_shared_word_pair(std::uint32_t smem) {
  uint2 v{};
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(smem));
  return v;
}
__device__ inline uint4 load_shared_words(std::uint32_t smem) {
  uint4 v{};
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem));
  return v;
}

// The compiler moves no access across these.
__device__ inline uint4 load_shared_16(std::uint32_t smem) {
  uint4 v{};
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(smem) : "memory");
  return v;
}

__device__ inline void store_shared(std::uint32_t smem, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(smem), "f"(value) : "memory");
}
__device__ inline void store_shared_8(std::uint32_t smem, std::uint32_t low, std::uint32_t high) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(smem), "r"(low), "r"(high) : "memory");
}

}  // namespace moe::ptx
