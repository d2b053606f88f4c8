// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/kernel.cuh: both products of one MoE layer with 4- or 8-bit weights in one persistent, warp-specialised kernel.
//
// Consumer warpgroups hold the weight rows of their bricks as wgmma's A operand in registers, converted from codes while the previous
// product runs; the token rows are B in shared memory. One producer warp draws units and copies bricks, three gather rows. GEMM1 writes
// activated rows to `inter`, sorted by expert; a counter per token tile tells GEMM2's loaders when its rows are complete. There are four
// warpgroups with few rows, where converting limits the speed, and two with many, where the products do.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/experts/hopper/common/reduce.cuh"
#include "moe/experts/hopper/w4/any_epilogue.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/loaders.cuh"
#include "moe/experts/hopper/w4/mainloop.cuh"

namespace moe::hopper::w4 {

/// One unit of a warpgroup: its products, then its rows of the intermediate or of the output. If K is split, the part that finishes last
/// sums all parts and continues.
template <W4Scheme S, class L, int MaxRows, int N>
__device__ inline void consume_unit(Params const& p, Memory<L> const& memory, RingState<L::kStages>& ring, Unit const& unit, int group) {
  Span const span = span_of<L>(p, unit);
  int const mine = span.side - group * L::kBricks;  // bricks of this warpgroup, or fewer than one
  float total[L::kBricks][N / 2];
  // A register that is read before it is written counts as live everywhere, so the sums are set to zero first, on every path.
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[b][i] = 0.0F;
  }
  if (mine > 0) {
    if constexpr (N <= 16 && L::kBricks == 1) {
      multiply_few<S, L, N>(memory, ring, group, span, total[0]);
    } else {
      multiply<S, L, N>(memory, ring, group, span, total);
    }
  } else {
    skip(memory, ring, span.k_count);
  }
  if constexpr (MaxRows <= kMostSplitRows) {
    if (unit.splits > 1 && !sum_splits<L, N>(p, memory, unit, group, mine > 0, total)) return;
  }
  if (unit.phase == 0) {
    if constexpr (L::kAny) {
      store_any_activated<L, N>(static_cast<AnyParams const&>(p), memory, unit, span.first + group * L::kBricks, mine, group, total);
    } else {
      store_activated<L, N>(p, memory, unit, span.first + group * L::kBricks, mine, group, total);
    }
  } else if (mine > 0) {
    store_outputs<L, MaxRows, N>(p, memory, unit, span.first + group * L::kBricks, mine, group, total);
  }
}

template <W4Scheme S, int Groups, int Depth, int Stages, int MaxRows, bool Any>
__global__ void __launch_bounds__(Groups * 128 + kProducerThreads, 1)
    layer_kernel(__grid_constant__ typename Layout<S, Groups, Depth, Stages, MaxRows, Any>::KernelParams const p) {
  using L = Layout<S, Groups, Depth, Stages, MaxRows, Any>;
  extern __shared__ char w4_smem[];
  Memory<L> const memory{w4_smem + ((1024u - (smem_address(w4_smem) & 1023u)) & 1023u)};
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  if (threadIdx.x == 0) {
    for (int s = 0; s < Stages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1 + 32 * kGatherWarps);
      ptx::mbarrier_init(memory.empty(s), 128 * Groups);
    }
    for (int s = 0; s < kUnitEntries; ++s) {
      ptx::mbarrier_init(memory.unit_full(s), 1);
      ptx::mbarrier_init(memory.unit_empty(s), 32 * kGatherWarps + 128 * Groups);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  launch_dependents();
  wait_for_dependencies();

  if (warp == 0) {
    Control const control = split_plan(p);
    if (threadIdx.x == 0) *memory.control() = control;
  }
  __syncthreads();

  // Registers at launch: 168 each of 384 threads, or 96 each of 640.
  if (warp >= 4 * Groups) {
    give_registers<Groups == 2 ? 88 : 56>();
    if (warp == 4 * Groups) {
      // Waits for room in the ring and for a free entry to announce a unit; never for rows.
      if (threadIdx.x == L::kConsumers) load_weights<L>(p, memory);
    } else {
      // Wait for announced units, for room in the ring and, in phase 1, for the consumers of any CTA to have stored the tile's rows.
      load_rows<MaxRows, L>(p, memory, warp - 4 * Groups - 1);
    }
  } else {
    // Wait for announced units and for full stages of the ring; release each stage to both loaders.
    take_registers<Groups == 2 ? 208 : 104>();
    int const group = warp >> 2;
    if (p.standard && p.align.topk == 1 && memory.control()->missing > 0) {
      hopper::detail::zero_rows<__nv_bfloat16, L::kConsumers / 32>(p.align, p.out, false);
    }

    RingState<Stages> ring;
    RingState<kUnitEntries> units;
    while (true) {
      Unit const unit = next_unit(memory, units);
      __syncwarp();
      if (unit.phase < 0) break;
      auto const run = [&]<int N>() {
        if constexpr (N <= MaxRows && (!Any || N <= 64 || N == MaxRows)) consume_unit<S, L, MaxRows, N>(p, memory, ring, unit, group);
      };
      int eights = (unit.rows + 7) / 8;
      if (Any && eights > 8) eights = MaxRows / 8;  // the formulas together are a lot of code, so they have fewer numbers of columns
      switch (eights) {
        case 0:
        case 1: run.template operator()<8>(); break;
        case 2: run.template operator()<16>(); break;
        case 3:
        case 4: run.template operator()<32>(); break;
        case 5:
        case 6:
        case 7:
        case 8: run.template operator()<64>(); break;
        case 9:
        case 10: run.template operator()<80>(); break;
        case 11:
        case 12: run.template operator()<96>(); break;
        default: run.template operator()<128>(); break;
      }
    }
  }
}

}  // namespace moe::hopper::w4
