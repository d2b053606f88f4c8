// SPDX-License-Identifier: Apache-2.0
// core/ptx/memory.cuh: loads and stores with a memory order and a scope, fences, and accesses that stay out of L1. The name gives the
// scope: `gpu` for the threads of one GPU, `system` for those of all GPUs and the host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::ptx {

__device__ inline std::uint32_t load_acquire_system(std::uint32_t const* p) {
  std::uint32_t v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline std::uint32_t load_relaxed_system(std::uint32_t const* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline std::uint64_t load_relaxed_system(std::uint64_t const* p) {
  std::uint64_t v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_relaxed_system(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ inline void store_relaxed_system(std::uint64_t* p, std::uint64_t v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
/// Orders this thread's accesses, and those that it has observed, for all GPUs and the host.
__device__ inline void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

__device__ inline std::uint32_t load_relaxed_gpu(std::uint32_t const* p) {
  std::uint32_t v;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_relaxed_gpu(std::uint32_t* p, std::uint32_t v) {
  asm volatile("st.relaxed.gpu.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

/// Memory that is read or written once and need not stay in L1. A load never takes the read-only path.
__device__ inline std::uint32_t load_past_l1(std::uint32_t const* p) {
  std::uint32_t v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ inline uint4 load_past_l1(uint4 const* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ inline void store_past_l1(uint4* p, uint4 v) {
  asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

/// Orders this thread's accesses (and those it has observed) for the whole device; lighter than __threadfence(), which is sequentially
/// consistent.
__device__ inline void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

__device__ inline int load_acquire_gpu(int const* p) {
  int value = 0;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(p) : "memory");
  return value;
}

/// Adds to a counter in device memory, after this thread's accesses and those that it has observed.
__device__ inline void add_release_gpu(int* p, int value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(value) : "memory");
}

/// Adds 1 to a counter in device memory, or sets it to 0 if it is `last`, after this thread's accesses and those that it has observed and
/// before its later ones. Returns the value before.
__device__ inline unsigned increment_acq_rel_gpu(unsigned* p, unsigned last) {
  unsigned before = 0;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(last) : "memory");
  return before;
}

/// A hint: brings the line into L2.
__device__ inline void prefetch_l2(void const* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p) : "memory"); }

}  // namespace moe::ptx
