// SPDX-License-Identifier: Apache-2.0
// core/ptx/wgmma_registers.cuh: products of a warpgroup with 64 rows of A in registers and N rows of B in shared memory, one specialisation
// per N.
#pragma once

#include "moe/core/ptx/wgmma.cuh"

namespace moe::ptx {

/// d[64 x N] (+)= A[64 x 16] * B[N x 16]^T in bf16, A in registers, B in shared memory, in 128-byte swizzled rows of which `b` is the low
/// word of the matrix descriptor (descriptor_low); `accumulate` 0 overwrites d. Fragments as PTX ISA gives them: with r = lane / 4
/// and c = lane % 4, register i of A holds columns 2c and 2c + 1 (+ 8 for i over 1) of row r (+ 8 for odd i) of the warp's 16 rows, and
/// d[4 j + 2 h + b] is row r + 8 h, column 8 j + 2 c + b.
template <int N>
struct WgmmaFromRegisters;

/// The same in e4m3, 32 of K: register i of A holds columns 4 c to 4 c + 3 (+ 16 for i over 1) of row r (+ 8 for odd i).
template <int N>
struct WgmmaE4m3FromRegisters;

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
  };                                                                                                                        \
  template <>                                                                                                               \
  struct WgmmaE4m3FromRegisters<N> {                                                                                        \
    __device__ static void run(float (&d)[N / 2], std::uint32_t const* a, std::uint32_t b, int accumulate) {                \
      asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nsetp.ne.b32 p, %" P ", 0;\nmov.b64 b, {%" B                             \
                   ", 0x40000040};\n"                                                                                       \
                   "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, {" A "}, b, p, 1, 1;\n}\n"    \
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
MOE_WGMMA_RS(24, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11",
             "%12, %13, %14, %15", "16", "17", MOE_D8(0), MOE_D4(8))
MOE_WGMMA_RS(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
             "%16, %17, %18, %19", "20", "21", MOE_D8(0), MOE_D8(8))
MOE_WGMMA_RS(40, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
             "%16, %17, %18, %19",
             "%20, %21, %22, %23", "24", "25", MOE_D8(0), MOE_D8(8), MOE_D4(16))
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

}  // namespace moe::ptx
