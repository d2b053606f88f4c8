// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/beside_dispatch.cuh: how a layer kernel begins and ends beside the dispatch that brings its rows. Kernels before it
// in its stream are not over when it begins: the aligning kernel may still copy rows, the exchange brings them.
#pragma once

#include "moe/experts/hopper/common/wait.cuh"
#include "moe/experts/hopper/layer/layer_params.cuh"

namespace moe::hopper::detail {

/// All threads: waits for what the kernels before have prepared. Beside the dispatch that is the sort alone, by a counter: to wait for the
/// end of the aligning kernel could mean to wait for all rows.
__device__ inline void wait_for_plan(LayerParams const& p) {
  if (!p.align.beside_dispatch) {
    wait_for_dependencies();
    return;
  }
  if (threadIdx.x == 0) wait_counter(p.align.sorted, kAlignCluster);
  __syncthreads();
}

/// Thread 0, as its last work. Beside the dispatch it waits for the end of the aligning kernel, so that the kernel after this one has both
/// behind it. The last CTA clears the counter of the sort, which every CTA and every copying CTA has read by then.
__device__ inline void end_beside_dispatch(LayerParams const& p) {
  if (!p.align.beside_dispatch || threadIdx.x != 0) return;
  wait_for_dependencies();
  fence_device();
  if (atomicAdd(p.exits, 1) + 1 == static_cast<int>(gridDim.x)) {
    *p.exits = 0;
    *p.align.sorted = 0;
  }
}

}  // namespace moe::hopper::detail
