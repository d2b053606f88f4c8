// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/kernel.cuh: both products of one MoE layer with 4- or 8-bit weights in one persistent, warp-specialised kernel.
//
// Consumer warpgroups hold the weight rows of their bricks as wgmma's A operand in registers, converted from codes while the previous
// product runs; the token rows are B in shared memory. One producer warp draws units and copies bricks, three gather rows. GEMM1 writes
// activated rows to `inter`, sorted by expert; a counter per token tile tells GEMM2's loaders when its rows are complete. There are four
// warpgroups with few rows, where converting limits the speed, and two with many, where the products do.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/w4/any_epilogue.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"
#include "moe/experts/hopper/w4/frame.cuh"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/loaders.cuh"
#include "moe/experts/hopper/w4/mainloop.cuh"

namespace moe::hopper::w4 {

template <W4Scheme S, int Groups, int Depth, int Stages, int MaxRows, bool Any>
__global__ void __launch_bounds__(Groups * 128 + kProducerThreads, 1)
    layer_kernel(__grid_constant__ typename Layout<S, Groups, Depth, Stages, MaxRows, Any>::KernelParams const p) {
  using L = Layout<S, Groups, Depth, Stages, MaxRows, Any>;
  extern __shared__ char w4_smem[];
  Memory<L> const memory{w4_smem + ((1024u - (smem_address(w4_smem) & 1023u)) & 1023u)};
  auto const consume = [&]<int N>(RingState<Stages>& ring, Unit const& unit, int group) {
    auto const multiply_unit = [&](Span const& span, float (&total)[L::kBricks][N / 2]) {
      if constexpr (N <= 16 && L::kBricks == 1) {
        multiply_few<S, L, N>(memory, ring, group, span, total[0]);
      } else if constexpr (L::kBricks == 1 && !Any && (N == 64 || (N == 32 && scales_sums(S)))) {
        // The products have fewer columns where that saves time; the rest of the unit is compiled once.
        auto const run = [&]<int Columns>() {
          multiply<S, L, Columns>(memory, ring, group, span, reinterpret_cast<float (&)[1][Columns / 2]>(total));
        };
        constexpr int kFew = N == 64 ? 40 : 24;
        if (unit.rows <= kFew) {
          run.template operator()<kFew>();
        } else if (N == 64 && unit.rows <= 48) {
          run.template operator()<N == 64 ? 48 : N>();
        } else {
          run.template operator()<N>();
        }
      } else {
        multiply<S, L, N>(memory, ring, group, span, total);
      }
    };
    auto const activate = [&](Span const& span, int mine, float (&total)[L::kBricks][N / 2]) {
      int const first = span.first + group * L::kBricks;
      if constexpr (Any) {
        store_any_activated<L, N>(p, memory, unit, first, mine, group, total);
      } else {
        store_activated<L, N>(p, memory, unit, first, mine, group, total);
      }
    };
    consume_unit<L, MaxRows, N>(p, memory, ring, unit, group, multiply_unit, activate);
  };
  run_roles<L, MaxRows>(p, memory, [&](int gather_warp) { load_rows<MaxRows, L>(p, memory, gather_warp); }, consume);
}

}  // namespace moe::hopper::w4
