// SPDX-License-Identifier: Apache-2.0
// core/ptx/sm90.cuh: the instructions of sm_90a: those that the CUDA C++ core libraries wrap, and the others.
#pragma once

#include <cstdint>
#include <cuda/ptx>

#include "moe/core/ptx/async_copy.cuh"
#include "moe/core/ptx/bulk_copy.cuh"
#include "moe/core/ptx/cluster.cuh"
#include "moe/core/ptx/dependent_launch.cuh"
#include "moe/core/ptx/mbarrier.cuh"
#include "moe/core/ptx/memory.cuh"
#include "moe/core/ptx/named_barrier.cuh"
#include "moe/core/ptx/shared_memory.cuh"
#include "moe/core/ptx/tensor_copy.cuh"
#include "moe/core/ptx/thread.cuh"

namespace moe::ptx {

using namespace cuda::ptx;

/// Registers of this warp group from here on: more, or fewer.
template <int Registers>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace moe::ptx
