// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/launch.cuh: launches of the layer kernel. A program may instantiate layer_launcher once per scheme and activation in
// separate files and declare the instances extern. These files then compile in parallel, and the rest of the program needs no nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/common/tensor_map.cuh"
#include "moe/experts/hopper/layer/block_kernel.cuh"
#include "moe/experts/hopper/layer/launcher.hpp"
#include "moe/experts/hopper/layer/layer_kernel.cuh"

namespace moe::hopper::detail {

template <Scheme S, int Stages, int MaxRows, int Cluster, class Activation, class Params>
inline void launch_layer(Params const& p, int workers, cudaStream_t stream) {
  constexpr int kSmem = SmemLayout<S, Stages, MaxRows>::kBytes;
  constexpr auto* kKernel = layer_kernel<S, Stages, MaxRows, Cluster, Activation, Params>;
  allow_shared_memory<kKernel>(kSmem);
  launch(kKernel, workers / Cluster * Cluster, kLayerThreads, kSmem, Cluster, stream, p);
}

template <int Cluster, class Activation, class Params>
inline void launch_blocks(Params const& p, int workers, cudaStream_t stream) {
  constexpr int kSmem = BlockLayout<4>::kBytes;
  constexpr auto* kKernel = block_kernel<4, Cluster, Activation, Params>;
  allow_shared_memory<kKernel>(kSmem);
  launch(kKernel, workers / Cluster * Cluster, kLayerThreads, kSmem, Cluster, stream, p);
}

/// Tiles of 128 rows in block-scaled fp8: x, x_scales and inter_scales are in the sorted order, which tensor maps describe.
inline BlockParams block_params(LayerParams const& base) {
  AlignArgs const& a = base.align;
  std::int64_t const slots = std::int64_t{a.max_tokens} * a.topk;
  int const intermediate = base.layer.intermediate;
  BlockParams p{};
  p.base = base;
  p.scale_stride = static_cast<int>(scale_stride(slots));
  p.rows[0] = make_tensor_map(base.input.rows, 1, 1, slots, a.hidden, 64);
  p.rows[1] = make_tensor_map(base.inter.rows, 1, 1, slots, intermediate, 64);
  p.scales[0] = make_scale_map(base.input.scales, a.hidden / 128, slots, p.scale_stride, kRowScaleCount);
  p.scales[1] = make_scale_map(base.inter.scales, intermediate / 128, slots, p.scale_stride, kRowScaleCount);
  return p;
}
template <class Activation, class Params>
void launch_blocks_tuned(Params const& p, int workers, int cluster, cudaStream_t stream) {
  if (cluster == 1) {
    launch_blocks<1, Activation>(p, workers, stream);
  } else {
    launch_blocks<2, Activation>(p, workers, stream);
  }
}

/// Whether there is a kernel for clusters of two with the scheme's largest tiles.
template <Scheme S, class Activation>
inline constexpr bool kHasClusters = !is_scaled(S) && Activation::kFineTiles;

/// `t.cluster` is 2 only with tiles of kBlockRows, or with the largest tiles and kHasClusters.
template <Scheme S, class Activation, class Tiles>
void launch_layer_tuned(LayerParams const& p, int workers, Tuning const& t, cudaStream_t stream) {
  constexpr int kStages = Tiles::large_stages(S);
  if (t.tile_rows <= 16) {
    launch_layer<S, Tiles::kSmallStages, 16, 1, Activation>(p, workers, stream);
  } else if (t.tile_rows <= 64) {
    launch_layer<S, Tiles::kMediumStages, 64, 1, Activation>(p, workers, stream);
  } else if (t.tile_rows > kMostRows<S>) {
    if constexpr (kHasBlockKernel<S, Activation>) launch_blocks_tuned<Activation>(block_params(p), workers, t.cluster, stream);
  } else if (t.cluster == 1) {
    launch_layer<S, kStages, kMostRows<S>, 1, Activation>(p, workers, stream);
  } else if constexpr (kHasClusters<S, Activation>) {
    launch_layer<S, kStages, kMostRows<S>, 2, Activation>(p, workers, stream);
  }
}

}  // namespace moe::hopper::detail

namespace moe::hopper {

template <Scheme S, class Activation, class Tiles>
LayerLauncher layer_launcher() {
  static_assert(layer_smem_bytes<S, Tiles>() <= kSharedMemoryLimit, "the tile does not fit in the shared memory of one multiprocessor");
  constexpr bool kClusters = detail::kHasClusters<S, Activation> || kHasBlockKernel<S, Activation>;
  return {&detail::launch_layer_tuned<S, Activation, Tiles>, nullptr, kClusters ? 2 : 1, kHasBlockKernel<S, Activation>};
}

}  // namespace moe::hopper
