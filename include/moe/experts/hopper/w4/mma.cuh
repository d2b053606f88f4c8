// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/mma.cuh: wgmma with 64 rows of 4-bit weights in registers: packed codes to bf16 fragments, and the products.
#pragma once

#include <cstdint>

#include "moe/core/ptx/sm90.cuh"
#include "moe/experts/hopper/w4/codes.hpp"
#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::hopper {

/// d[64 x N] (+)= A[64 x 16] * B[N x 16]^T in bf16, A in registers, B in shared memory, in 128-byte swizzled rows of which `b` is the low
/// word of the matrix descriptor (low_descriptor); `accumulate` 0 overwrites d. Fragments as PTX ISA gives them: with r = lane / 4
/// and c = lane % 4, register i of A holds columns 2c and 2c + 1 (+ 8 for i over 1) of row r (+ 8 for odd i) of the warp's 16 rows, and
/// d[4 j + 2 h + b] is row r + 8 h, column 8 j + 2 c + b.
template <int N>
struct WgmmaFromRegisters;

/// The low word of matrix_descriptor(); the high word is the same for every such operand.
__device__ inline std::uint32_t low_descriptor(std::uint32_t smem) { return ((smem & 0x3FFFFu) >> 4) | (1u << 16); }

#define MOE_WGMMA_RS(N, REGISTERS, A, B, P, ...)                                                                            \
  template <>                                                                                                               \
  struct WgmmaFromRegisters<N> {                                                                                            \
    __device__ static void run(float (&d)[N / 2], std::uint32_t const* a, std::uint32_t b, int accumulate) {                \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" P ", 0;\nmov.b64 b, {%" B                             \
                   ", 0x40000040};\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, {" A "}, b, p, 1, 1, 0;\n}\n" \
                   : __VA_ARGS__                                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(accumulate));                                  \
    }                                                                                                                       \
  };
#define MOE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOE_D8(i) MOE_D4(i), MOE_D4(i + 4)
// clang-format off
MOE_WGMMA_RS(8, "%0, %1, %2, %3",
             "%4, %5, %6, %7", "8", "9", MOE_D4(0))
MOE_WGMMA_RS(16, "%0, %1, %2, %3, %4, %5, %6, %7",
             "%8, %9, %10, %11", "12", "13", MOE_D8(0))
MOE_WGMMA_RS(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
             "%16, %17, %18, %19", "20", "21", MOE_D8(0), MOE_D8(8))
MOE_WGMMA_RS(48, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23",
             "%24, %25, %26, %27", "28", "29", MOE_D8(0), MOE_D8(8), MOE_D8(16))
MOE_WGMMA_RS(64, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
             "%32, %33, %34, %35", "36", "37", MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24))
MOE_WGMMA_RS(80, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
             "%32, %33, %34, %35, %36, %37, %38, %39",
             "%40, %41, %42, %43", "44", "45", MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32))
MOE_WGMMA_RS(96, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
             "%48, %49, %50, %51", "52", "53", MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40))
MOE_WGMMA_RS(112, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55",
             "%56, %57, %58, %59", "60", "61", MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48))
MOE_WGMMA_RS(128, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
             "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
             "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
             "%64, %65, %66, %67", "68", "69", MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48), MOE_D8(56))
// clang-format on
#undef MOE_D8
#undef MOE_D4
#undef MOE_WGMMA_RS

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

/// What a thread reads of one brick: its codes and the parameters of its rows r and r + 8.
template <W4Scheme S>
struct BrickRegisters {
  uint4 codes;
  std::uint32_t scales;        // int4
  std::uint32_t zeros;         // int4_zero
  std::uint32_t exponents[4];  // mxfp4: row r, both groups; row r + 8

  /// `thread` of the warpgroup; `brick` as in problem.hpp.
  __device__ void load(std::uint32_t brick, int thread) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(codes.x), "=r"(codes.y), "=r"(codes.z), "=r"(codes.w)
                 : "r"(brick + static_cast<std::uint32_t>(thread) * 16));
    std::uint32_t const word = brick + kBrickCodeBytes + static_cast<std::uint32_t>(thread >> 2) * 4;
    if constexpr (S == W4Scheme::mxfp4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        asm volatile("ld.shared.u8 %0, [%1];" : "=r"(exponents[i]) : "r"(word + static_cast<std::uint32_t>(i)));
      }
    } else {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(scales) : "r"(word));
    }
    if constexpr (S == W4Scheme::int4_zero) {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(zeros) : "r"(word + 128));
    }
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
          a[8 * pair + f] = multiply_bf16x2(value, scale[f & 1]);
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
          a[4 * q + i] = subtract_bf16x2(biased, zero[i & 1]);
        }
      }
    }
  }

  /// int4: what the sums of rows r and r + 8 must be multiplied with.
  __device__ float2 sum_scales() const { return __half22float2(*reinterpret_cast<__half2 const*>(&scales)); }
};

/// d[16 x 8] += A[16 x 16] * B[8 x 16]^T in bf16, of one warp; fragments lie as those of WgmmaFromRegisters do.
__device__ inline void multiply_16x8(float* d, std::uint32_t const (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void load_matrix_x4(std::uint32_t (&v)[4], std::uint32_t smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(smem)
               : "memory");
}

}  // namespace moe::hopper
