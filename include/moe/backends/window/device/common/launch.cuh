// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/launch.cuh: how the exchanges over device windows launch their kernels.
#pragma once

#include "moe/comm/symmetric_memory.cuh"
#include "moe/core/cuda_space.hpp"

namespace moe::detail {

/// Launches with or without programmatic dependent launch; E_CUDA on failure.
template <class Args>
void launch_exchange(void (*kernel)(Args), char const* name, int blocks, int threads, std::size_t shared, bool programmatic,
                     cudaStream_t stream, Args const& args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args), name);
}

/// Allows the kernel this much dynamic shared memory. Never lowers what an exchange of another size was allowed before. nvcc gives every
/// translation unit kernels of its own, so what allows and what launches must come from the same one. The exchanges' functions that do are
/// neither inlined nor cloned, and every unit that includes them emits all of them, so that the linker takes all from the first.
template <class Kernel>
void allow_dynamic_shared(Kernel* kernel, std::size_t bytes) {
  cudaFuncAttributes facts{};
  check_cuda(cudaFuncGetAttributes(&facts, kernel), "cudaFuncGetAttributes");
  if (static_cast<std::size_t>(facts.maxDynamicSharedSizeBytes) >= bytes) return;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)), "cudaFuncSetAttribute");
}

/// E_UNSUPPORTED unless all `blocks` of the kernel can be resident at once on the current device: they wait for blocks of other ranks.
template <class Kernel>
void expect_resident(Kernel* kernel, char const* name, int blocks, int threads, std::size_t shared) {
  int device = 0;
  int processors = 0;
  int each = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  check_cuda(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, threads, shared),
             "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  if (blocks > processors * each) {
    throw Error(ErrorCode::unsupported, text(name, ": ", blocks, " blocks do not run at once, the device holds ", processors * each));
  }
}

/// One warp: ends the group, and names this rank as the missing one.
static __global__ void abandon_exchange(comm::WindowView const __grid_constant__ w) {
  if (threadIdx.x == 0) {
    comm::detail::fail(w, ErrorCode::peer, comm::ExchangePhase::dispatch_counts, w.rank, 0, 0);
  }
}

inline void enqueue_abandon(comm::WindowView const& window, cudaStream_t stream) {
  abandon_exchange<<<1, 32, 0, stream>>>(window);
  check_launch("abandon_exchange");
}

}  // namespace moe::detail
