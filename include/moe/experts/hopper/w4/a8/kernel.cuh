// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/kernel.cuh: both products of one MoE layer with 4-bit weights and e4m3 activations in one persistent kernel: the
// frame of experts/hopper/w4/frame.cuh, with products in e4m3 and an intermediate that GEMM1 stores as codes and scales. Its launches: a
// program may instantiate launch_layer in files of its own and declare the instances extern.
#pragma once

#include <cuda_runtime_api.h>

#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/w4/a8/any_epilogue.cuh"
#include "moe/experts/hopper/w4/a8/epilogue.cuh"
#include "moe/experts/hopper/w4/a8/layout.cuh"
#include "moe/experts/hopper/w4/a8/loaders.cuh"
#include "moe/experts/hopper/w4/a8/mainloop.cuh"
#include "moe/experts/hopper/w4/frame.cuh"

namespace moe::hopper::w4a8 {

template <W4Scheme S, int Sums, int Groups, int Depth, int Stages, int MaxRows, bool Any>
__global__ void __launch_bounds__(Groups * 128 + w4::kProducerThreads, 1) layer_kernel(__grid_constant__ Params const p) {
  using L = Layout<S, Sums, Groups, Depth, Stages, MaxRows, Any>;
  extern __shared__ char w4a8_smem[];
  Memory<L> const memory{{w4a8_smem + ((1024u - (smem_address(w4a8_smem) & 1023u)) & 1023u)}};
  if (threadIdx.x < L::kScaleGroups * MaxRows) memory.amax()[threadIdx.x] = 0;
  if constexpr (has_zero_points(S)) {  // thread i writes word i % 4 of the table of zero point i / 4
    if (int const i = static_cast<int>(threadIdx.x); i < 64) {
      Magnitudes const m = int4_values((i & 2) * 4, i >> 2);
      memory.zeros()[i] = (i & 1) == 0 ? m.low : m.high;
    }
  }
  auto const consume = [&]<int N>(RingState<Stages>& ring, Unit const& unit, int group) {
    auto const multiply_unit = [&](w4::Span const& span, float (&total)[L::kBricks][N / 2]) {
      multiply<L, N>(memory, ring, group, span, total);
    };
    auto const activate = [&](w4::Span const& span, int mine, float (&total)[L::kBricks][N / 2]) {
      int const first = span.first + group * L::kBricks;
      if constexpr (has_row_factors(S)) scale_rows<L, N>(p, unit, first, mine, total);
      if constexpr (Any) {
        activate_any<L, N>(p, memory, unit, first, mine, group, total);
        store_any_codes<L, N>(p, memory, unit, p.any.gated ? kDepth : kBrickRows * span.side, group, total);
      } else {
        store_activated<L, N>(p, memory, unit, first, group, total);
      }
    };
    w4::consume_unit<L, MaxRows, N>(p, memory, ring, unit, group, multiply_unit, activate);
  };
  w4::run_roles<L, MaxRows>(p, memory, [&](int gather_warp) { load_rows<MaxRows, L>(p, memory, gather_warp); }, consume);
}

template <W4Scheme S, int Sums, int Groups, int Depth, int Stages, int MaxRows, bool Any>
inline void launch_tile(Params const& p, int workers, cudaStream_t stream) {
  using L = Layout<S, Sums, Groups, Depth, Stages, MaxRows, Any>;
  constexpr auto* kKernel = layer_kernel<S, Sums, Groups, Depth, Stages, MaxRows, Any>;
  moe::hopper::detail::allow_shared_memory<kKernel>(L::kBytes);
  moe::hopper::detail::launch(kKernel, workers, L::kThreads, L::kBytes, 1, stream, p);
}

template <W4Scheme S, int Sums, bool Any>
inline void launch_sums(Params const& p, int workers, cudaStream_t stream) {
  if (p.align.plan.tile_rows <= 16) {
    launch_tile<S, Sums, 4, 2, 5, 16, Any>(p, workers, stream);
  } else {
    launch_tile<S, Sums, 2, 1, 6, most_tile_rows(S, Any), Any>(p, workers, stream);
  }
}

template <W4Scheme S, bool Any>
void launch_layer(Params const& p, int workers, cudaStream_t stream) {
  if constexpr (is_e2m1(S)) {
    launch_sums<S, 1, Any>(p, workers, stream);
  } else if constexpr (row_words(S) == 2) {
    launch_sums<S, 4, Any>(p, workers, stream);
  } else if (p.sums == 1) {
    launch_sums<S, 1, Any>(p, workers, stream);
  } else {
    launch_sums<S, 2, Any>(p, workers, stream);
  }
}

}  // namespace moe::hopper::w4a8
