// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/frame.cuh: what the layer kernels of packed weights have in common, whatever the format of the activations: barriers,
// the roles of the warps, and the order of work on one unit.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/experts/hopper/common/reduce.cuh"
#include "moe/experts/hopper/w4/epilogue.cuh"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/loaders.cuh"
#include "moe/experts/hopper/w4/mainloop.cuh"

namespace moe::hopper::w4 {

/// One unit of a warpgroup: multiply(span, total), then its rows of the intermediate by activate(span, mine, total), or of the output. If
/// K is split, the part that finishes last sums all parts and continues. `mine`: bricks of this warpgroup, or fewer than one.
template <class L, int MaxRows, int N, class M, class Multiply, class Activate>
__device__ inline void consume_unit(Params const& p, M const& memory, RingState<L::kStages>& ring, Unit const& unit, int group,
                                    Multiply const& multiply, Activate const& activate) {
  Span const span = span_of<L>(p, unit);
  int const mine = span.side - group * L::kBricks;
  float total[L::kBricks][N / 2];
  // A register that is read before it is written counts as live everywhere, so the sums are set to zero first, on every path.
#pragma unroll
  for (int b = 0; b < L::kBricks; ++b) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) total[b][i] = 0.0F;
  }
  if (mine > 0) {
    multiply(span, total);
  } else {
    skip(memory, ring, span.k_count);
  }
  if constexpr (MaxRows <= kMostSplitRows) {
    if (unit.splits > 1 && !sum_splits<L, N>(p, memory, unit, group, mine > 0, total)) return;
  }
  if (unit.phase == 0) {
    activate(span, mine, total);
  } else if (mine > 0) {
    store_outputs<L, MaxRows, N>(p, memory, unit, span.first + group * L::kBricks, mine, group, total);
  }
}

/// The body of a layer kernel. Three warps run load_rows(their number); consumer warpgroups run consume<N>(ring, unit, group) for each
/// unit, N its rows rounded up to a number of columns that is instantiated. Inlined by force: ptxas serialises the wgmma of a function of
/// its own (C7510).
template <class L, int MaxRows, class M, class LoadRows, class Consume>
__device__ __forceinline__ void run_roles(Params const& p, M const& memory, LoadRows const& load_rows, Consume const& consume) {
  constexpr int kGroups = L::kGroups;
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::kStages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1 + 32 * kGatherWarps);
      ptx::mbarrier_init(memory.empty(s), 128 * kGroups);
    }
    for (int s = 0; s < kUnitEntries; ++s) {
      ptx::mbarrier_init(memory.unit_full(s), 1);
      ptx::mbarrier_init(memory.unit_empty(s), 32 * kGatherWarps + 128 * kGroups);
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
  if (warp >= 4 * kGroups) {
    give_registers<kGroups == 2 ? 88 : 56>();
    if (warp == 4 * kGroups) {
      // Waits for room in the ring and for a free entry to announce a unit; never for rows.
      if (threadIdx.x == L::kConsumers) load_weights<L>(p, memory);
    } else {
      // Wait for announced units, for room in the ring and, in phase 1, for the consumers of any CTA to have stored the tile's rows.
      load_rows(warp - 4 * kGroups - 1);
    }
  } else {
    // Wait for announced units and for full stages of the ring; release each stage to both loaders.
    take_registers<kGroups == 2 ? 208 : 104>();
    int const group = warp >> 2;
    if (p.standard && p.align.topk == 1 && memory.control()->missing > 0) {
      hopper::detail::zero_rows<__nv_bfloat16, L::kConsumers / 32>(p.align, p.out, false);
    }

    RingState<L::kStages> ring;
    RingState<kUnitEntries> units;
    while (true) {
      Unit const unit = next_unit(memory, units);
      __syncwarp();
      if (unit.phase < 0) break;
      auto const run = [&]<int N>() {
        if constexpr (N <= MaxRows && (!L::kAny || N <= 64 || N == MaxRows)) consume.template operator()<N>(ring, unit, group);
      };
      int eights = (unit.rows + 7) / 8;
      if (L::kAny && eights > 8) eights = MaxRows / 8;  // the formulas together are a lot of code, so they have fewer numbers of columns
      switch (eights) {
        case 0:
        case 1: run.template operator()<8>(); break;
        case 2: run.template operator()<16>(); break;
        case 3:
        case 4: run.template operator()<32>(); break;
        case 5:
        case 6:
        case 7:
        case 8: run.template operator()<MaxRows == 48 ? 48 : 64>(); break;  // one call: each compiles the whole unit once more
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
