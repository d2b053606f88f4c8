// SPDX-License-Identifier: Apache-2.0
// core/ptx/thread.cuh: a thread of a warp: its index, values that stay in registers, one lane of all.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::ptx {

/// threadIdx.x, read at the point of use: values computed from it are not hoisted out of the loop over units, where they would occupy
/// registers during the products.
__device__ inline int thread_index() {
  int index = 0;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

/// Keeps a value in a register and hides from the compiler how it was computed.
__device__ inline void keep(std::uint32_t& value) { asm volatile("" : "+r"(value)); }

/// True in one lane of a warp; all lanes must call it.
__device__ inline bool elect_one() {
  int elected = 0;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;\n}\n" : "=r"(elected)::"memory");
  return elected != 0;
}

/// A value that is the same in all lanes, in a form that tells the compiler so.
__device__ inline std::uint32_t uniform(std::uint32_t value) { return __shfl_sync(0xFFFFFFFFu, value, 0); }

}  // namespace moe::ptx
