// SPDX-License-Identifier: Apache-2.0
// core/ptx/mbarrier.cuh: barriers in shared memory that count arrivals and bytes. On architectures before sm_90 the functions exist and do
// nothing; launchers refuse there.
#pragma once

#include "moe/core/ptx/shared_address.cuh"

namespace moe::ptx {

__device__ inline void barrier_init([[maybe_unused]] std::uint64_t* barrier, [[maybe_unused]] int arrivals) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(barrier)), "r"(arrivals) : "memory");
#endif
}
/// One arrival that also adds `bytes` to the bytes that the phase waits for.
__device__ inline void barrier_expect([[maybe_unused]] std::uint64_t* barrier, [[maybe_unused]] int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(bytes) : "memory");
#endif
}
__device__ inline void arrive([[maybe_unused]] std::uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(barrier)) : "memory");
#endif
}
/// Arrives `count` times at once. Only for sm_90.
__device__ inline void arrive(std::uint64_t* barrier, std::uint32_t count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(barrier)), "r"(count) : "memory");
}
/// Waits until the phase of `parity` is over, without a deadline. For bytes that this GPU's copy engine delivers, and for arrivals of
/// threads whose waits have a deadline.
__device__ inline void barrier_wait([[maybe_unused]] std::uint64_t* barrier, [[maybe_unused]] std::uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(smem_address(barrier)), "r"(parity)
                 : "memory");
  }
#endif
}
/// The same for bytes that other blocks of the cluster store, which are visible afterwards. Waits for the barrier's first phase.
__device__ inline void barrier_wait_cluster([[maybe_unused]] std::uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  std::uint32_t done = 0;
  while (done == 0) {
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done)
                 : "r"(smem_address(barrier))
                 : "memory");
  }
#endif
}

}  // namespace moe::ptx
