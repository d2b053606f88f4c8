// SPDX-License-Identifier: Apache-2.0
// experts/hopper/launch.cuh: launches of the layer kernel. A program may instantiate launch_layer_tuned once per scheme in files of their
// own and declare the instances extern beside experts/hopper_contiguous.cuh, to compile them in parallel.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/experts/hopper/layer_kernel.cuh"
#include "moe/experts/hopper/tensor_map.cuh"

namespace moe::hopper::detail {

/// Launches with programmatic dependent launch: the kernel's prologue overlaps the end of the one before it in the stream.
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

template <Scheme S, int Stages, int MaxRows, int Cluster>
inline void launch_layer(LayerParams<FastSilu> const& p, int workers, cudaStream_t stream) {
  constexpr int kSmem = SmemLayout<S, Stages, MaxRows>::kBytes;
  auto* const kernel = layer_kernel<S, Stages, MaxRows, Cluster, FastSilu>;
  static cudaError_t const ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  check_cuda(ready, "cudaFuncSetAttribute");
  launch(kernel, workers / Cluster * Cluster, kLayerThreads, kSmem, Cluster, stream, p);
}

/// `t.cluster` is 2 only with the scheme's most rows per tile.
template <Scheme S>
void launch_layer_tuned(LayerParams<FastSilu> const& p, int workers, Tuning const& t, cudaStream_t stream) {
  constexpr int kStages = S == Scheme::fp8_block ? 5 : 4;
  if (t.tile_rows <= 16) {
    launch_layer<S, 6, 16, 1>(p, workers, stream);
  } else if (t.tile_rows <= 64) {
    launch_layer<S, 5, 64, 1>(p, workers, stream);
  } else if (t.cluster == 1) {
    launch_layer<S, kStages, kMostRows<S>, 1>(p, workers, stream);
  } else {
    launch_layer<S, kStages, kMostRows<S>, 2>(p, workers, stream);
  }
}

}  // namespace moe::hopper::detail
