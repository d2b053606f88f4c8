// SPDX-License-Identifier: Apache-2.0
// core/ptx/wgmma_int8.cuh: products of a warpgroup in int8, both operands in shared memory, one specialisation per N. Sums are int32 and
// exact. The instruction has N of 8, 24 and multiples of 16; 24 and those above 128, the most rows of a tile, are left out.
#pragma once

#include "moe/core/ptx/wgmma.cuh"

namespace moe::ptx {

/// As pin() of float accumulators.
template <int N>
__device__ inline void pin(int (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

/// d[64 x N] (+)= A[64 x 32] * B[N x 32]^T. Operands lie as those of e4m3, and a thread holds the same elements of d (wgmma.cuh).
template <int N>
struct WgmmaInt8;

#define MOE_WGMMA_INT8(N, REGISTERS, A, B, P, ...)                                                                                 \
  template <>                                                                                                                      \
  struct WgmmaInt8<N> {                                                                                                            \
    __device__ static void run(int (&d)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {                                \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.s32.s8.s8 {" REGISTERS \
                   "}, %" A ", %" B ", p;\n}\n"                                                                                    \
                   : __VA_ARGS__                                                                                                   \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                             \
    }                                                                                                                              \
  };

#define MOE_D4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define MOE_D8(i) MOE_D4(i), MOE_D4(i + 4)
// clang-format off
MOE_WGMMA_INT8(8,
          "%0, %1, %2, %3",
          "4", "5", "6",
          MOE_D4(0))
MOE_WGMMA_INT8(16,
          "%0, %1, %2, %3, %4, %5, %6, %7",
          "8", "9", "10",
          MOE_D8(0))
MOE_WGMMA_INT8(32,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
          "16", "17", "18",
          MOE_D8(0), MOE_D8(8))
MOE_WGMMA_INT8(48,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23",
          "24", "25", "26",
          MOE_D8(0), MOE_D8(8), MOE_D8(16))
MOE_WGMMA_INT8(64,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
          "32", "33", "34",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24))
MOE_WGMMA_INT8(80,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39",
          "40", "41", "42",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32))
MOE_WGMMA_INT8(96,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
          "48", "49", "50",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40))
MOE_WGMMA_INT8(112,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55",
          "56", "57", "58",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48))
MOE_WGMMA_INT8(128,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
          "64", "65", "66",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48), MOE_D8(56))
// clang-format on

#undef MOE_D8
#undef MOE_D4
#undef MOE_WGMMA_INT8

}  // namespace moe::ptx
