// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/launch.cuh: launches of the layer kernel with 4- or 8-bit weights. A program may instantiate w4_launcher once per
// scheme in separate files and declare the instances extern. These files then compile in parallel, and the rest of the program needs no
// nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/w4/kernel.cuh"
#include "moe/experts/hopper/w4/rounded_kernel.cuh"
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

/// Calls launch<Groups, Depth, Stages, MaxRows>() of the kernel for tiles of that many rows.
template <W4Scheme S, class Launch>
void with_tile(int tile_rows, Launch const& launch) {
  constexpr int kMedium = medium_rows(S);
  constexpr bool kBytes = code_bits(S) == 8;  // a stage has twice the weights
  if (tile_rows <= 16) {
    if constexpr (S == W4Scheme::mxfp8) {  // with its scales three stages of four do not fit
      launch.template operator()<4, 2, 5, 16>();
    } else {
      launch.template operator()<4, 4, kBytes ? 3 : 4, 16>();
    }
  } else if (tile_rows <= kMedium) {
    constexpr int kDepth = has_zero_points(S) ? 2 : 4;
    constexpr int kStages = kBytes ? 2 : kDepth == 2 ? 7 : scales_sums(S) ? 4 : 3;
    launch.template operator()<4, kDepth, kStages, kMedium>();
  } else {
    constexpr int kDepth = kBytes || scales_sums(S) ? 2 : 4;
    constexpr int kStages = kBytes ? 3 : scales_sums(S) ? 5 : 2;
    launch.template operator()<2, kDepth, kStages, most_rows(S)>();
  }
}

/// `Any`: p is the base of an AnyParams.
template <W4Scheme S, bool Any>
void launch_layer_tuned(Params const& p, int workers, cudaStream_t stream) {
  if constexpr (!Any) {
    if (p.token.warps > 0) return launch_token<S>(p, workers, stream);
  }
  with_tile<S>(p.align.plan.tile_rows, [&]<int Groups, int Depth, int Stages, int MaxRows>() {
    launch_layer<S, Groups, Depth, Stages, MaxRows, Any>(p, workers, stream);
  });
}

/// p is the base of a RoundedParams, whose plan has the units of one phase.
template <W4Scheme S>
void launch_rounded_tuned(Params const& p, int workers, cudaStream_t stream) {
  with_tile<S>(p.align.plan.tile_rows, [&]<int Groups, int Depth, int Stages, int MaxRows>() {
    using L = Layout<S, Groups, Depth, Stages, MaxRows, true>;
    constexpr auto* kKernel = rounded_kernel<S, Groups, Depth, Stages, MaxRows>;
    hopper::detail::allow_shared_memory<kKernel>(L::kBytes);
    hopper::detail::launch(kKernel, workers, L::kThreads, L::kBytes, 1, stream, static_cast<RoundedParams const&>(p));
  });
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
template <W4Scheme S>
W4Launcher w4_rounded_launcher() {
  return &w4::launch_rounded_tuned<S>;
}

}  // namespace moe::hopper
