// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/launch.cuh: launches of the layer kernel with 4- or 8-bit weights. A program may instantiate w4_launcher once per
// scheme in separate files and declare the instances extern. These files then compile in parallel, and the rest of the program needs no
// nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/w4/kernel.cuh"
#include "moe/experts/hopper/w4/token_kernel.cuh"

namespace moe::hopper {

namespace w4 {

template <W4Scheme S, int Groups, int Depth, int Stages, int MaxRows, bool Any>
inline void launch_layer(Params const& p, int workers, cudaStream_t stream) {
  using L = Layout<S, Groups, Depth, Stages, MaxRows, Any>;
  constexpr auto* kKernel = layer_kernel<S, Groups, Depth, Stages, MaxRows, Any>;
  hopper::detail::allow_shared_memory<kKernel>(L::kBytes);
  hopper::detail::launch(kKernel, workers, L::kThreads, L::kBytes, 1, stream, static_cast<typename L::KernelParams const&>(p));
}

/// The kernel for one token.
template <W4Scheme S>
inline void launch_token(Params const& p, int workers, cudaStream_t stream) {
  hopper::detail::allow_shared_memory<packed_token_kernel<S>>(kSharedMemoryLimit - 4096);
  hopper::detail::launch(packed_token_kernel<S>, workers, 32 * p.token.warps, p.token.bytes, 1, stream, p);
}

/// `Any`: p is the base of an AnyParams.
template <W4Scheme S, bool Any>
void launch_layer_tuned(Params const& p, int workers, cudaStream_t stream) {
  if constexpr (!Any) {
    if (p.token.warps > 0) return launch_token<S>(p, workers, stream);
  }
  constexpr int kMedium = medium_rows(S);
  constexpr bool kBytes = code_bits(S) == 8;  // a stage has twice the weights
  if (p.align.plan.tile_rows <= 16) {
    if constexpr (S == W4Scheme::mxfp8) {  // with its scales three stages of four do not fit
      launch_layer<S, 4, 2, 5, 16, Any>(p, workers, stream);
    } else {
      launch_layer<S, 4, 4, kBytes ? 3 : 4, 16, Any>(p, workers, stream);
    }
  } else if (p.align.plan.tile_rows <= kMedium) {
    constexpr int kDepth = has_zero_points(S) ? 2 : 4;
    constexpr int kStages = kBytes ? 2 : kDepth == 2 ? 7 : scales_sums(S) ? 4 : 3;
    launch_layer<S, 4, kDepth, kStages, kMedium, Any>(p, workers, stream);
  } else {
    constexpr int kDepth = kBytes || scales_sums(S) ? 2 : 4;
    constexpr int kStages = kBytes ? 3 : scales_sums(S) ? 5 : 2;
    launch_layer<S, 2, kDepth, kStages, most_rows(S), Any>(p, workers, stream);
  }
}

}  // namespace w4

template <W4Scheme S>
W4Launcher w4_launcher() {
  return &w4::launch_layer_tuned<S, false>;
}
template <W4Scheme S>
W4Launcher w4_any_launcher() {
  return &w4::launch_layer_tuned<S, true>;
}

}  // namespace moe::hopper
