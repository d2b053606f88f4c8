// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/layer_kernel.cuh: both products of one MoE layer in one persistent, warp-specialised kernel.
//
// Warps 0-7 are two consumer warpgroups, warp 8 draws units and streams weights, warps 9-11 gather rows. Each warpgroup has half of a
// 256-row weight tile. GEMM1 writes activated rows to `inter`, sorted by expert; a counter per token tile tells GEMM2's loaders when its
// rows are complete. There is no grid-wide barrier, so GEMM2 fills the tail of GEMM1.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/quantize_rows.cuh"
#include "moe/experts/hopper/common/reduce.cuh"
#include "moe/experts/hopper/layer/beside_dispatch.cuh"
#include "moe/experts/hopper/layer/column_blocks.cuh"
#include "moe/experts/hopper/layer/epilogue.cuh"
#include "moe/experts/hopper/layer/loaders.cuh"
#include "moe/experts/hopper/layer/mainloop.cuh"
#include "moe/experts/hopper/layer/row_quantizer.cuh"
#include "moe/experts/hopper/layer/self_align.cuh"

namespace moe::hopper {

namespace detail {

/// For kernels that plan for themselves with topk over 1: the warpgroup that finishes the last unit of its 128 columns adds the rows of
/// each token's slots, in order. `finished` counts units per weight tile and warpgroup.
template <class Output, class Params>
__device__ inline void reduce_columns(Params const& p, Unit const& unit, int group, int token_tiles, int* flags) {
  int const thread = thread_index() & 127;
  group_barrier(group);
  if (thread == 0) {
    fence_device();
    flags[group] = atomicAdd(p.finished + 2 * (unit.feature / kOutputFeatures) + group, 1) + 1;
    fence_device();
  }
  group_barrier(group);
  if (flags[group] != token_tiles) return;
  int const tokens = p.align.num_tokens != nullptr ? min(*p.align.num_tokens, p.align.max_tokens) : p.align.max_tokens;
  int const chunk = thread & 15;  // of 8 columns: 8 in each half of the tile
  int const column = unit.feature + 64 * group + 128 * (chunk >> 3) + 8 * (chunk & 7);
  if (column >= p.align.hidden) return;
  for (int token = thread >> 4; token < tokens; token += 8) {
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
    add_slots<Output>(static_cast<Output const*>(p.rows_out), SlotIds(p.align.ids, p.align.id_gap), token, p.align.topk,
                      p.align.num_experts, p.align.hidden, column, sum);
    store_sum<Output>(static_cast<Output*>(p.out) + static_cast<long long>(token) * p.align.hidden + column, sum);
  }
}

/// One unit of this warpgroup. False if another CTA finishes it, because K is split and this part was not the last.
template <Scheme S, int Stages, int MaxRows, int Cluster, class Activation, int N, class Memory>
__device__ inline bool consume_unit(LayerParams const& p, Memory const& memory, RingState<Stages>& ring, Unit const& unit, int group) {
  using Traits = SchemeTraits<S>;
  using Layout = SmemLayout<S, Stages, MaxRows>;
  char* const staging = memory.base + Layout::kStaging + group * Layout::kStagingBytes;
  int* const targets = reinterpret_cast<int*>(memory.base + Layout::kTargets) + group * MaxRows;
  float* const weights = reinterpret_cast<float*>(memory.base + Layout::kWeights) + group * MaxRows;
  int* const flags = reinterpret_cast<int*>(memory.base + Layout::kFlags);

  ThreadRows<N> sorted{};
  if (unit.phase == 1 || (!kPlainKernels<Activation> && p.weight_on_input)) {
    for_thread_rows<N>(unit.rows, [&](int i, int row) { sorted.row[i] = p.align.sorted_rows[unit.first_row + row]; });
  }
  typename Traits::Sum sums[2][N / 2];
  multiply<S, Stages, MaxRows, Cluster, N>(memory, ring, group, unit.k_count, sums);
  if constexpr (Cluster == 1 && N <= most_split_rows(S)) {
    if (unit.splits > 1 && !sum_splits<N, Traits::kBlock>(p, unit, group, flags, sums)) return false;
  }
  auto const finish = [&](float (&total)[2][N / 2]) {
    if (unit.phase == 0) {
      finish_gate_up<S, N, Layout::kStagingRows, Activation>(p, unit, group, total, weights, sorted, memory.base + Layout::kStaging,
                                                             staging, unit.k_count <= Stages);
    } else {
      finish_down<S, N, Layout::kStagingRows, Activation>(p, unit, group, total, weights, targets, sorted, staging);
    }
  };
  if constexpr (Traits::kInt8) {
    float total[2][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      total[0][i] = static_cast<float>(sums[0][i]);
      total[1][i] = static_cast<float>(sums[1][i]);
    }
    finish(total);
  } else {
    finish(sums);
  }
  return true;
}

/// After a unit that this warpgroup finished: notifies GEMM2's loaders, or sums the columns that are complete.
template <Scheme S, int Stages, int MaxRows, class Memory>
__device__ inline void report_unit(LayerParams const& p, Memory const& memory, Unit const& unit, int group) {
  using Layout = SmemLayout<S, Stages, MaxRows>;
  int* const flags = reinterpret_cast<int*>(memory.base + Layout::kFlags);
  if (unit.phase == 0) {
    if constexpr (SchemeTraits<S>::kRowScaled) {
      report_stored_rows<S>(p, unit, group, reinterpret_cast<int*>(memory.base + Layout::kTargets) + group * MaxRows);
    } else if ((thread_index() & 127) == 0) {  // the barrier at the end of store_rows ordered the other threads' stores before this fence
      fence_device();
      atomicAdd(p.align.counters + unit.token_tile, 1);
    }
  } else if constexpr (MaxRows <= kSelfAlignRows) {
    if (p.self_align && p.align.topk > 1) {
      reduce_columns<typename SchemeTraits<S>::Output>(
          p, unit, group, reinterpret_cast<Control const*>(memory.base + Layout::kControl)->token_tiles, flags);
    }
  }
}

/// A warpgroup's unit of sums.
template <Scheme S, int Stages, int Cluster, class Params, class Memory>
__device__ inline void sum_unit(Params const& p, Memory const& memory, RingState<Stages>& ring, Unit const& unit, int group) {
  skip<Stages, Cluster, SchemeTraits<S>::kBlock>(memory, ring, 1);
  sum_columns<typename SchemeTraits<S>::Output>(p, p.columns, unit, group);
  group_barrier(group);
  if ((thread_index() & 127) < 32) report_sums(p.columns, memory.control(), unit);
}

}  // namespace detail

// Longer than 150 lines: one case for each number of rows, and the end of kernels that plan for themselves: in a function of its own it
// changes the code of all of them.
template <Scheme S, int Stages, int MaxRows, int Cluster, class Activation, class Params = LayerParams>
__global__ void __launch_bounds__(kLayerThreads, 1) layer_kernel(__grid_constant__ Params const p) {
  constexpr bool kColumns = kColumnBlocks<Params>;
  using Layout = SmemLayout<S, Stages, MaxRows>;
  extern __shared__ char layer_smem[];
  Shared<Layout, Stages> const memory{layer_smem + ((1024u - (smem_address(layer_smem) & 1023u)) & 1023u)};
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  int const rank = Cluster > 1 ? static_cast<int>(ptx::get_sreg_cluster_ctarank()) : 0;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.layer.w13);
    prefetch_tensor_map(&p.layer.w2);
    for (int s = 0; s < Stages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1 + 32 * kGatherWarps);
      ptx::mbarrier_init(memory.empty(s), kReleases<Cluster, SchemeTraits<S>::kBlock>);
    }
    for (int s = 0; s < kUnitEntries; ++s) {
      ptx::mbarrier_init(memory.unit_full(s), 1);
      ptx::mbarrier_init(memory.unit_empty(s), 32 * kGatherWarps + kConsumerThreads);
      ptx::mbarrier_init(memory.number_full(s), 1);
    }
    ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
    ptx::fence_proxy_async(ptx::space_shared);
  }
  launch_dependents();
  if constexpr (Cluster > 1) {
    cluster_arrive_release();
    cluster_wait();
  }
  detail::wait_for_plan(p);

  if (MaxRows <= kSelfAlignRows && p.self_align) {
    if (p.align.max_tokens * p.align.topk <= 32) {
      if (warp == 0) {
        Control const control = self_align_warp(p.align);
        if (threadIdx.x == 0) *memory.control() = control;
      }
    } else {
      int* const scratch = reinterpret_cast<int*>(memory.base);
      Control const control = self_align<kLayerThreads>(p.align, scratch + 32 + kLayerThreads, scratch + 32, scratch);
      if (threadIdx.x == 0) *memory.control() = control;
    }
    if constexpr (SchemeTraits<S>::kBlock && !kQuantizesRows<S, MaxRows>) {
      if (p.align.x != nullptr) detail::quantize_groups<kLayerThreads>(p.align, 0, 1);
    }
    ptx::fence_proxy_async(ptx::space_shared);
  } else if (threadIdx.x == 0) {
    *memory.control() = control_of(p, p.align);
  }
  __syncthreads();

  if (warp >= kConsumerThreads / 32) {
    give_registers<88>();  // 88 · 128 + 208 · 256 registers are those of 384 threads at launch, 168 each
    if (warp == kConsumerThreads / 32) {
      // Waits for room in the ring and for a free entry to announce a unit; never for rows.
      if (threadIdx.x == kConsumerThreads) load_weights<S, Stages, Cluster>(p, memory, rank);
    } else {
      // Wait for announced units, for room in the ring and, in phase 1, for the consumers of any CTA to have stored the tile's rows.
      load_rows<S, Stages, MaxRows>(p, memory, warp - kConsumerThreads / 32 - 1);
    }
  } else {
    // Wait for announced units and for full stages of the ring; release each stage to the loaders of every CTA of the cluster. Row-scaled,
    // in phase 1: also for the consumers of any CTA to have stored the tile's rows, unless the loaders already have them. Units of sums:
    // for GEMM2 of the block by any CTA.
    take_registers<208>();
    int const group = warp >> 2;
    bool const nothing = p.self_align && memory.control()->token_tiles == 0;
    if constexpr (kColumns) {
      if (warp == 0) tell_without_tokens(p.columns, memory.control());
    } else if (p.standard && (nothing || (p.align.topk == 1 && memory.control()->missing > 0))) {
      detail::zero_rows<typename SchemeTraits<S>::Output, kConsumerThreads / 32>(p.align, p.out, nothing);
    }

    RingState<Stages> ring;
    RingState<kUnitEntries> units;
    [[maybe_unused]] PendingReports pending;
    while (true) {
      Unit const unit = next_unit(memory, units);
      __syncwarp();
      if constexpr (kColumns) pending.flush(p.columns, unit);
      if (unit.phase < 0) break;
      if constexpr (kColumns) {
        if (unit.phase == 2) {
          detail::sum_unit<S, Stages, Cluster>(p, memory, ring, unit, group);
          continue;
        }
      }
      if constexpr (SchemeTraits<S>::kRowScaled) {
        if (unit.phase == 1) {
          int* const words = reinterpret_cast<int*>(memory.base + Layout::kTargets) + group * MaxRows;
          help_to_quantize<S>(p, unit, group, words, memory.full(ring.stage), ring.parity);
        }
      }
      bool finished = false;
      auto const run = [&]<int N>() {
        if constexpr (N <= MaxRows && kHasColumns<S, N> && (Activation::kFineTiles || N <= 16 || N % 32 == 0 || N == MaxRows))
          finished = detail::consume_unit<S, Stages, MaxRows, Cluster, Activation, N>(p, memory, ring, unit, group);
      };
      constexpr bool kFine = MaxRows > 64;  // tiles of more than 64 rows in steps of 8
      int eights = (unit.rows + 7) / 8;
      if (SchemeTraits<S>::kInt8 && eights > 2) eights = (eights + 1) / 2 * 2;
      if (!Activation::kFineTiles && eights > 2) eights = min((eights + 3) / 4 * 4, MaxRows / 8);
      switch (eights) {
        case 0: skip<Stages, Cluster, SchemeTraits<S>::kBlock>(memory, ring, unit.k_count); break;
        case 1: run.template operator()<8>(); break;
        case 2: run.template operator()<16>(); break;
        case 3:
        case 4: run.template operator()<32>(); break;
        case 5:
        case 6: run.template operator()<48>(); break;
        case 7:
        case 8: run.template operator()<64>(); break;
        case 9: run.template operator()<kFine ? 72 : 80>(); break;
        case 10: run.template operator()<80>(); break;
        case 11: run.template operator()<kFine ? 88 : 96>(); break;
        case 12: run.template operator()<96>(); break;
        case 13: run.template operator()<kFine ? 104 : 112>(); break;
        case 14: run.template operator()<112>(); break;
        case 15: run.template operator()<kFine ? 120 : 128>(); break;
        case 16: run.template operator()<128>(); break;
        case 17: run.template operator()<136>(); break;
        case 18: run.template operator()<144>(); break;
        case 19: run.template operator()<152>(); break;
        default: run.template operator()<160>(); break;
      }
      if (finished) detail::report_unit<S, Stages, MaxRows>(p, memory, unit, group);
      if constexpr (kColumns) {  // also a unit in which this CTA has no rows
        if (unit.phase == 1 && (finished || unit.rows == 0)) pending.add(unit);
      }
    }
  }

  if constexpr (Cluster > 1) {  // no CTA leaves while the other may still write or arrive here
    __syncwarp();
    cluster_arrive_release();
    cluster_wait();
  }
  if (MaxRows <= kSelfAlignRows && p.self_align) {
    __syncwarp();  // a single lane streamed the weights
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
      fence_device();
      last = atomicAdd(p.exits, 1) + 1 == static_cast<int>(gridDim.x);
    }
    if (__syncthreads_or(last ? 1 : 0) != 0) {  // all other CTAs have finished with the counters: reset them
      fence_device();
      Control const control = *memory.control();
      for (int i = static_cast<int>(threadIdx.x); i < control.token_tiles; i += kLayerThreads) p.align.counters[i] = 0;
      for (int phase = 0; phase < 2; ++phase) {
        if (control.splits[phase] == 1) continue;
        int const used = 2 * control.units[phase] / control.splits[phase];
        for (int i = static_cast<int>(threadIdx.x); i < used; i += kLayerThreads)
          p.align.counters[p.align.max_tiles + phase * p.align.plan.max_units + i] = 0;
      }
      for (int i = static_cast<int>(threadIdx.x); i < 2 * p.align.plan.space.weight_tiles[1]; i += kLayerThreads) p.finished[i] = 0;
      if (threadIdx.x == 0) {
        *p.align.next_unit = static_cast<int>(gridDim.x);
        *p.exits = 0;
      }
    }
  }
  detail::end_beside_dispatch(p);
}

}  // namespace moe::hopper
