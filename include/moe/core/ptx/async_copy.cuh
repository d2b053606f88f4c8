// SPDX-License-Identifier: Apache-2.0
// core/ptx/async_copy.cuh: asynchronous copies of 4 and 16 bytes from global to shared memory.
#pragma once

#include "moe/core/ptx/shared_address.cuh"

namespace moe::ptx {

/// The barrier receives one arrival of this thread once all its earlier cp.async copies have landed. (cuda::ptx of CUDA 13.0 names no state
/// space here and passes an address of 32 bits.)
__device__ inline void cp_async_arrive(std::uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(smem_address(barrier)) : "memory");
}

/// Asynchronous 16-byte copy, global to shared, past L1. Reads `bytes` of the source (16 or 0) and writes zeros to the rest of the target.
__device__ inline void cp_async_16(std::uint32_t smem, void const* global, std::uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}

/// The same of all 16 bytes.
__device__ inline void cp_async_16(std::uint32_t smem, void const* global) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(smem), "l"(global) : "memory");
}

/// Asynchronous 4-byte copy, global to shared.
__device__ inline void cp_async_4(std::uint32_t smem, void const* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(smem), "l"(global) : "memory");
}

}  // namespace moe::ptx
