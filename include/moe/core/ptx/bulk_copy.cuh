// SPDX-License-Identifier: Apache-2.0
// core/ptx/bulk_copy.cuh: the copy engine of sm_90: whole rows between shared memory and any mapped global memory, without registers.
// On older architectures the functions exist and do nothing; launchers refuse there.
#pragma once

#include "moe/core/ptx/shared_address.cuh"

namespace moe::ptx {

/// `bytes` and both addresses are multiples of 16. `barrier` counts the bytes.
__device__ inline void bulk_load([[maybe_unused]] void* shared, [[maybe_unused]] void const* global, [[maybe_unused]] int bytes,
                                 [[maybe_unused]] std::uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(smem_address(shared)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier))
               : "memory");
#endif
}
__device__ inline void bulk_store([[maybe_unused]] void* global, [[maybe_unused]] void const* shared, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(smem_address(shared)), "r"(bytes)
               : "memory");
#endif
}
__device__ inline void bulk_commit() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
/// Waits until this thread's stores have read their shared memory.
__device__ inline void bulk_wait_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
/// Waits until this thread's stores are complete.
__device__ inline void bulk_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
/// Makes earlier ordinary writes to shared memory visible to later accesses of the copy engine.
__device__ inline void fence_shared_to_bulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/// Orders ordinary accesses to any memory with accesses of the copy engine.
__device__ inline void fence_bulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

// The following are for sm_90 only: `policy` is an L2 cache policy.

/// Copy of contiguous bytes (a multiple of 16; both addresses too) by the copy engine, completing on `barrier`. It takes 29 % longer if the
/// target is not 128-byte aligned, and 12 % longer in pieces of 1 KB than in pieces of 2 KB (docs/log/hopper.md, change 27).
__device__ inline void bulk_load(void* smem, void const* global, std::uint32_t bytes, std::uint64_t* barrier, std::uint64_t policy) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   smem_address(smem)),
               "l"(global), "r"(bytes), "r"(smem_address(barrier)), "l"(policy)
               : "memory");
}

__device__ inline std::uint64_t policy_evict_first() {
  std::uint64_t policy = 0;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ inline std::uint64_t policy_evict_normal() {
  std::uint64_t policy = 0;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

}  // namespace moe::ptx
