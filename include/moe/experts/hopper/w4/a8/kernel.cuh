// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/kernel.cuh: both products of one MoE layer with mxfp4 weights and e4m3 activations in one persistent kernel: the
// frame of experts/hopper/w4/kernel.cuh, with products in e4m3 and an intermediate that GEMM1 stores as codes and scales.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/common/reduce.cuh"
#include "moe/experts/hopper/w4/a8/epilogue.cuh"
#include "moe/experts/hopper/w4/a8/layout.cuh"
#include "moe/experts/hopper/w4/a8/loaders.cuh"
#include "moe/experts/hopper/w4/a8/mainloop.cuh"

namespace moe::hopper::w4a8 {

/// One unit of a warpgroup: its products, then its rows of the intermediate or of the output.
template <class L, int MaxRows, int N>
__device__ inline void consume_unit(Params const& p, Memory<L> const& memory, RingState<L::kStages>& ring, Unit const& unit, int group) {
  w4::Span const span = w4::span_of<L>(p, unit);
  int const mine = span.side - group * L::kBricks;  // bricks of this warpgroup, or fewer than one
  float total[L::kBricks][N / 2];
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[b][i] = 0.0F;
  }
  if (mine > 0) {
    multiply<L, N>(memory, ring, group, span, total);
  } else {
    w4::skip(memory, ring, span.k_count);
  }
  if constexpr (MaxRows <= w4::kMostSplitRows) {
    if (unit.splits > 1 && !w4::sum_splits<L, N>(p, memory, unit, group, mine > 0, total)) return;
  }
  if (unit.phase == 0) {
    store_activated<L, N>(p, memory, unit, span.first + group * L::kBricks, group, total);
  } else if (mine > 0) {
    w4::store_outputs<L, MaxRows, N>(p, memory, unit, span.first + group * L::kBricks, mine, group, total);
  }
}

template <int Groups, int Depth, int Stages, int MaxRows>
__global__ void __launch_bounds__(Groups * 128 + w4::kProducerThreads, 1) layer_kernel(__grid_constant__ Params const p) {
  using L = Layout<Groups, Depth, Stages, MaxRows>;
  extern __shared__ char w4a8_smem[];
  Memory<L> const memory{{w4a8_smem + ((1024u - (smem_address(w4a8_smem) & 1023u)) & 1023u)}};
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1 + 32 * w4::kGatherWarps);
      ptx::mbarrier_init(memory.empty(s), 128 * Groups);
    }
    for (int s = 0; s < kUnitEntries; ++s) {
      ptx::mbarrier_init(memory.unit_full(s), 1);
      ptx::mbarrier_init(memory.unit_empty(s), 32 * w4::kGatherWarps + 128 * Groups);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  if (threadIdx.x < MaxRows) memory.amax()[threadIdx.x] = 0;
  launch_dependents();
  wait_for_dependencies();

  if (warp == 0) {
    Control const control = w4::split_plan(p);
    if (threadIdx.x == 0) *memory.control() = control;
  }
  __syncthreads();

  if (warp >= 4 * Groups) {
    give_registers<Groups == 2 ? 88 : 56>();
    if (warp == 4 * Groups) {
      // Waits for room in the ring and for a free entry to announce a unit; never for rows.
      if (threadIdx.x == L::kConsumers) w4::load_weights<L>(p, memory);
    } else {
      // Wait for announced units, for room in the ring and, in phase 1, for the consumers of any CTA to have stored the tile's rows.
      load_rows<MaxRows, L>(p, memory, warp - 4 * Groups - 1);
    }
  } else {
    // Wait for announced units and for full stages of the ring; release each stage to both loaders.
    take_registers<Groups == 2 ? 208 : 104>();
    int const group = warp >> 2;
    if (p.standard && p.align.topk == 1 && memory.control()->missing > 0) {
      moe::hopper::detail::zero_rows<__nv_bfloat16, L::kConsumers / 32>(p.align, p.out, false);
    }
    RingState<Stages> ring;
    RingState<kUnitEntries> units;
    while (true) {
      Unit const unit = next_unit(memory, units);
      __syncwarp();
      if (unit.phase < 0) break;
      auto const run = [&]<int N>() {
        if constexpr (N <= MaxRows) consume_unit<L, MaxRows, N>(p, memory, ring, unit, group);
      };
      int const eights = (unit.rows + 7) / 8;
      if (eights <= 1) {
        run.template operator()<8>();
      } else if (eights == 2) {
        run.template operator()<16>();
      } else if (eights <= 4) {
        run.template operator()<32>();
      } else if (eights <= 8) {
        run.template operator()<64>();
      } else {
        run.template operator()<80>();
      }
    }
  }
}

template <int Groups, int Depth, int Stages, int MaxRows>
inline void launch_tile(Params const& p, int workers, cudaStream_t stream) {
  using L = Layout<Groups, Depth, Stages, MaxRows>;
  auto* const kernel = layer_kernel<Groups, Depth, Stages, MaxRows>;
  static moe::hopper::detail::OncePerDevice once;
  moe::hopper::detail::allow_shared_memory(kernel, L::kBytes, once);
  moe::hopper::detail::launch(kernel, workers, L::kThreads, L::kBytes, 1, stream, p);
}

[[gnu::used]] inline void launch_layer(Params const& p, int workers, cudaStream_t stream) {
  if (p.align.plan.tile_rows <= 16) {
    launch_tile<4, 2, 5, 16>(p, workers, stream);
  } else {
    launch_tile<2, 1, 6, kMostRows>(p, workers, stream);
  }
}

}  // namespace moe::hopper::w4a8
