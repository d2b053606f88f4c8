// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/enqueue.cuh: checked launches in a chain of kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "moe/core/cuda_space.hpp"

namespace moe::hopper::detail {

/// The set of devices on which an action was done; each piece of code with such an action has a static object. On devices 64 and above the
/// action is done at every call.
class OncePerDevice {
 public:
  /// Calls `act` unless it was called on the current device before. An `act` that throws does not count.
  template <class Act>
  void operator()(Act act) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    std::uint64_t const bit = device < 64 ? std::uint64_t{1} << device : 0;
    if ((done_.load(std::memory_order_acquire) & bit) != 0) return;
    act();
    done_.fetch_or(bit, std::memory_order_release);
  }

 private:
  std::atomic<std::uint64_t> done_{0};
};

/// Allows a kernel up to `bytes` of dynamic shared memory, once per device. nvcc gives every translation unit a kernel of its own for each
/// instance of a template; `once` is as local as the kernel, since that is an argument of this template.
template <auto Kernel>
void allow_shared_memory(int bytes) {
  static OncePerDevice once;
  once([&] { check_cuda(cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "cudaFuncSetAttribute"); });
}

/// Launches with programmatic dependent launch: the kernel's prologue overlaps the end of the preceding kernel in the stream.
template <class... Params, class... Args>
inline void launch(void (*kernel)(Params...), int grid, int block, int smem, int cluster, cudaStream_t stream, Args const&... args) {
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = static_cast<std::size_t>(smem);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = cluster > 1 ? 2 : 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "cudaLaunchKernelEx");
}

}  // namespace moe::hopper::detail
