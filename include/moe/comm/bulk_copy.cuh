// SPDX-License-Identifier: Apache-2.0
// comm/bulk_copy.cuh: the copy engine of sm_90: whole rows between shared memory and any mapped global memory, without registers.
// On older architectures the functions exist and do nothing; launchers refuse there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::comm::detail {

__device__ inline std::uint32_t shared_address(void const* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

__device__ inline void barrier_init(std::uint64_t* bar, int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
#endif
}
/// One arrival that also announces `bytes` to come.
__device__ inline void barrier_expect(std::uint64_t* bar, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
#endif
}
__device__ inline void barrier_arrive(std::uint64_t* bar) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory");
#endif
}
/// Waits until the phase of parity `phase` is over. Bytes are this GPU's own request, and what its own threads wait for before they arrive
/// has a deadline, so none is needed here.
__device__ inline void barrier_wait(std::uint64_t* bar, std::uint32_t phase) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(shared_address(bar)), "r"(phase)
                 : "memory");
  }
#endif
}
/// `bytes`, both addresses: multiples of 16.
__device__ inline void bulk_load(void* shared, void const* global, int bytes, std::uint64_t* bar) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(shared)),
               "l"(global), "r"(bytes), "r"(shared_address(bar))
               : "memory");
#endif
}
__device__ inline void bulk_store(void* global, void const* shared, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(global), "r"(shared_address(shared)), "r"(bytes)
               : "memory");
#endif
}
__device__ inline void bulk_commit() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
/// This thread's stores have read their shared memory.
__device__ inline void bulk_wait_read() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
/// This thread's stores are complete.
__device__ inline void bulk_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
/// Ordinary writes to shared memory before it are seen by the copy engine after it.
__device__ inline void fence_shared_to_bulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
/// Orders all accesses of the copy engine and ordinary ones.
__device__ inline void fence_bulk() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

}  // namespace moe::comm::detail
