// SPDX-License-Identifier: Apache-2.0
// experts/hopper/launch.cuh: launches of the layer kernel. A program may instantiate layer_launcher once per scheme and activation in files
// of their own and declare the instances extern, to compile them in parallel and the rest without nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/experts/hopper/enqueue.cuh"
#include "moe/experts/hopper/launcher.hpp"
#include "moe/experts/hopper/layer_kernel.cuh"

namespace moe::hopper::detail {

template <Scheme S, int Stages, int MaxRows, int Cluster, class Activation>
inline void launch_layer(LayerParams const& p, int workers, cudaStream_t stream) {
  constexpr int kSmem = SmemLayout<S, Stages, MaxRows>::kBytes;
  auto* const kernel = layer_kernel<S, Stages, MaxRows, Cluster, Activation>;
  static cudaError_t const ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  check_cuda(ready, "cudaFuncSetAttribute");
  launch(kernel, workers / Cluster * Cluster, kLayerThreads, kSmem, Cluster, stream, p);
}

/// `t.cluster` is 2 only with the scheme's most rows per tile, and at most the launcher's max_cluster.
template <Scheme S, class Activation, class Tiles>
void launch_layer_tuned(LayerParams const& p, int workers, Tuning const& t, cudaStream_t stream) {
  constexpr int kStages = Tiles::large_stages(S);
  if (t.tile_rows <= 16) {
    launch_layer<S, Tiles::kSmallStages, 16, 1, Activation>(p, workers, stream);
  } else if (t.tile_rows <= 64) {
    launch_layer<S, Tiles::kMediumStages, 64, 1, Activation>(p, workers, stream);
  } else if (t.cluster == 1) {
    launch_layer<S, kStages, kMostRows<S>, 1, Activation>(p, workers, stream);
  } else if constexpr (Activation::kFineTiles) {
    launch_layer<S, kStages, kMostRows<S>, 2, Activation>(p, workers, stream);
  }
}

}  // namespace moe::hopper::detail

namespace moe::hopper {

template <Scheme S, class Activation, class Tiles>
LayerLauncher layer_launcher() {
  static_assert(layer_smem_bytes<S, Tiles>() <= kSharedMemoryLimit, "the tile does not fit in the shared memory of one multiprocessor");
  return {&detail::launch_layer_tuned<S, Activation, Tiles>, Activation::kFineTiles ? 2 : 1};
}

}  // namespace moe::hopper
