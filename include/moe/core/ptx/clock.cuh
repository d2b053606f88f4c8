// SPDX-License-Identifier: Apache-2.0
// core/ptx/clock.cuh: the clock for deadlines.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::ptx {

/// Nanoseconds of the GPU's global timer.
__device__ inline std::uint64_t now_ns() {
  std::uint64_t v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
  return v;
}

}  // namespace moe::ptx
