// SPDX-License-Identifier: Apache-2.0
// core/ptx/wgmma.cuh: products of a warpgroup: 64 rows of A by N rows of B, both in shared memory, one specialisation per N; their order
// and operand descriptors.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::ptx {

__device__ inline void wgmma_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int Pending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Keeps the compiler from moving accumulator registers across an asynchronous product.
template <int N>
__device__ inline void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

/// The low word of the matrix descriptor of a K-major operand in 128-byte swizzled rows, of which 8 are one 1024-byte atom (PTX ISA,
/// "matrix descriptor": start address in 16 bytes; stride offset 1024 >> 4 at bit 32, swizzle mode 1 at bit 62). `smem` is 1024-byte
/// aligned up to the offset along K; offsets in 16 bytes may be added.
__device__ inline std::uint32_t descriptor_low(std::uint32_t smem) { return (smem >> 4) | (1u << 16); }
/// The whole descriptor.
__device__ inline std::uint64_t descriptor(std::uint32_t low) {
  std::uint64_t whole = 0;
  asm("mov.b64 %0, {%1, %2};" : "=l"(whole) : "r"(low), "r"(0x40000040u));
  return whole;
}

/// Operand types of a product; a K step is 32 bytes of each operand's row.
enum class MmaType : std::uint8_t { bf16, f16, e4m3 };

/// d[64 x N] (+)= A[64 x k] * B[N x k]^T; `accumulate` 0 overwrites d. Thread t of the warpgroup holds in d[4 j + 2 h + c] the element
/// of row 16 (t / 32) + (t % 32) / 4 + 8 h and column 8 j + 2 (t % 4) + c (PTX ISA, wgmma register fragments).
template <MmaType Type, int N>
struct Wgmma;

#define MOE_WGMMA(N, REGISTERS, A, B, P, ...)                                                                                          \
  template <>                                                                                                                          \
  struct Wgmma<MmaType::bf16, N> {                                                                                                     \
    __device__ static void run(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {                                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS \
                   "}, %" A ", %" B ", p, 1, 1, 0, 0;\n}\n"                                                                            \
                   : __VA_ARGS__                                                                                                       \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                                 \
    }                                                                                                                                  \
  };                                                                                                                                   \
  template <>                                                                                                                          \
  struct Wgmma<MmaType::f16, N> {                                                                                                      \
    __device__ static void run(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {                                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS   \
                   "}, %" A ", %" B ", p, 1, 1, 0, 0;\n}\n"                                                                            \
                   : __VA_ARGS__                                                                                                       \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                                 \
    }                                                                                                                                  \
  };                                                                                                                                   \
  template <>                                                                                                                          \
  struct Wgmma<MmaType::e4m3, N> {                                                                                                     \
    __device__ static void run(float (&d)[N / 2], std::uint64_t a, std::uint64_t b, int accumulate) {                                  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS \
                   "}, %" A ", %" B ", p, 1, 1;\n}\n"                                                                                  \
                   : __VA_ARGS__                                                                                                       \
                   : "l"(a), "l"(b), "r"(accumulate));                                                                                 \
    }                                                                                                                                  \
  };

#define MOE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MOE_D8(i) MOE_D4(i), MOE_D4(i + 4)
// clang-format off
MOE_WGMMA(8,
          "%0, %1, %2, %3",
          "4", "5", "6",
          MOE_D4(0))
MOE_WGMMA(16,
          "%0, %1, %2, %3, %4, %5, %6, %7",
          "8", "9", "10",
          MOE_D8(0))
MOE_WGMMA(32,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
          "16", "17", "18",
          MOE_D8(0), MOE_D8(8))
MOE_WGMMA(48,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23",
          "24", "25", "26",
          MOE_D8(0), MOE_D8(8), MOE_D8(16))
MOE_WGMMA(64,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
          "32", "33", "34",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24))
MOE_WGMMA(72,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35",
          "36", "37", "38",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D4(32))
MOE_WGMMA(80,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39",
          "40", "41", "42",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32))
MOE_WGMMA(88,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43",
          "44", "45", "46",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D4(40))
MOE_WGMMA(96,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
          "48", "49", "50",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40))
MOE_WGMMA(104,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51",
          "52", "53", "54",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D4(48))
MOE_WGMMA(112,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55",
          "56", "57", "58",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48))
MOE_WGMMA(120,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59",
          "60", "61", "62",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48), MOE_D4(56))
MOE_WGMMA(128,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
          "64", "65", "66",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48), MOE_D8(56))
MOE_WGMMA(136,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
          "%64, %65, %66, %67",
          "68", "69", "70",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48), MOE_D8(56), MOE_D4(64))
MOE_WGMMA(144,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
          "%64, %65, %66, %67, %68, %69, %70, %71",
          "72", "73", "74",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48), MOE_D8(56), MOE_D8(64))
MOE_WGMMA(152,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
          "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75",
          "76", "77", "78",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48), MOE_D8(56), MOE_D8(64), MOE_D4(72))
MOE_WGMMA(160,
          "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
          "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
          "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
          "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
          "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79",
          "80", "81", "82",
          MOE_D8(0), MOE_D8(8), MOE_D8(16), MOE_D8(24), MOE_D8(32), MOE_D8(40), MOE_D8(48), MOE_D8(56), MOE_D8(64), MOE_D8(72))
// clang-format on

#undef MOE_D8
#undef MOE_D4
#undef MOE_WGMMA

}  // namespace moe::ptx
