// SPDX-License-Identifier: Apache-2.0
// core/ptx/named_barrier.cuh: barriers among some of a thread block's warps.
#pragma once

#include <cuda_runtime.h>

namespace moe::ptx {

/// Barrier over `threads` threads (whole warps) with hardware barrier number `id` (1 to 15; 0 is that of __syncthreads()).
__device__ inline void named_barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }

}  // namespace moe::ptx
