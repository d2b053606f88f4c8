// SPDX-License-Identifier: Apache-2.0
// core/ptx/dependent_launch.cuh: programmatic dependent launch.
#pragma once

#include <cuda_runtime.h>

namespace moe::ptx {

/// Programmatic dependent launch: blocks until the kernels that this one depends on have finished and their writes are visible. Does
/// nothing in an ordinary launch.
__device__ inline void wait_for_dependencies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
/// Allows the next kernel to start its own prologue.
__device__ inline void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace moe::ptx
