// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/block_kernel.cuh: both products of one layer in block-scaled fp8 for many rows per expert, persistent and
// warp-specialised like layer_kernel.cuh. The quantiser writes the codes of x sorted by expert, so that one thread loads everything through
// the copy engine. Gathering rows with cp.async took a third of shared memory's bandwidth, which limits this kernel.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/layer/block_consumer.cuh"
#include "moe/experts/hopper/layer/column_blocks.cuh"
#include "moe/experts/hopper/layer/layer_kernel.cuh"

namespace moe::hopper {

/// Decodes unit `number` for CTA `rank` of its cluster. Clusters of two draw pairs: two token tiles that share a weight tile or, for the
/// last token tile of an expert with an odd number of them, two weight tiles that share the rows. space.weight_tiles then counts pairs of
/// weight tiles, so that an expert has one entry, with this many units, per token tile.
template <int Cluster>
__device__ inline Unit decode_block_unit(UnitSpace const& space, Control const& control, TokenTile const* tiles,
                                         int const (&weight_tiles)[2], int number, int rank) {
  if constexpr (Cluster == 1) return decode_unit(space, control, tiles, number, 1, 0);
  Unit unit{};
  int const phase = number < control.units[0] ? 0 : 1;
  int const local = phase == 0 ? number : number - control.units[0];
  if (phase == 1 && local >= control.units[1]) {
    unit.phase = -1;
    return unit;
  }
  int const half = phase == 0 ? space.weight_tiles[0] : space.weight_tiles[1];
  TokenTile const entry = tiles[local / half];
  int const rest = local - entry.first_tile * half;
  int const pairs = entry.tiles / 2;
  int weight_tile = 0;
  int index = entry.tiles - 1;
  if (rest < 2 * half * pairs) {
    int const per_group = 2 * half * space.raster;
    int const group = pairs <= space.raster ? 0 : rest / per_group;
    int const in_group = min(space.raster, pairs - group * space.raster);
    int const inside = rest - group * per_group;
    weight_tile = inside / in_group;
    index = 2 * (group * space.raster + inside - weight_tile * in_group) + rank;
  } else {
    weight_tile = 2 * (rest - 2 * half * pairs) + rank;
    unit.rows_shared = 1;
  }
  unit.phase = phase;
  unit.splits = 1;
  unit.expert = entry.expert;
  int const before = index * entry.rows_per_tile;
  unit.token_tile = entry.first_tile + index;
  unit.first_row = entry.expert_row + before;
  unit.loaded_rows = max(0, min(entry.rows_per_tile, entry.expert_rows - before));
  unit.rows = weight_tile < (phase == 0 ? weight_tiles[0] : weight_tiles[1]) ? unit.loaded_rows : 0;
  unit.shared = entry.tiles > 1 ? 1 : 0;
  unit.feature = weight_tile * (phase == 0 ? kGateFeatures : kOutputFeatures);
  unit.k_count = phase == 0 ? space.k_steps[0] : space.k_steps[1];
  return unit;
}

/// The schedule of blocks of columns: the publishing warp reports for a CTA.
template <int Cluster>
using BlockColumns = ColumnSchedule<Cluster, Cluster == 2, 1>;

/// Unit `number`, of kernels with or without blocks of columns.
template <int Cluster, class Params>
__device__ inline Unit decode_block(Params const& params, Control const& control, int const (&weight_tiles)[2], int number, int rank) {
  auto const& p = params.base;
  UnitSpace const& space = p.align.plan.space;
  TokenTile const* const tiles = p.align.plan.tiles;
  if constexpr (kColumnBlocks<Params>) {
    if (number >= control.units[0]) {
      BlockColumns<Cluster> const columns(params.columns, control, p.align.hidden);
      return columns.decode(params.columns, control, p.align.hidden, number - control.units[0], rank,
                            [&](int of_block, Control const& only, int local) {
                              UnitSpace part = space;
                              part.weight_tiles[1] = columns.entries(of_block);
                              int const both[2] = {weight_tiles[0], of_block};
                              return decode_block_unit<Cluster>(part, only, tiles, both, local, rank);
                            });
    }
  }
  return decode_block_unit<Cluster>(space, control, tiles, weight_tiles, number, rank);
}

/// Draws units and loads weights, rows and row scales. If GEMM2's rows are not complete yet, weights are loaded ahead as far as the ring
/// holds.
template <int Stages, int Cluster, class Params, class Memory>
__device__ void load_blocks(Params const& params, Memory const& memory, int rank) {
  using Layout = BlockLayout<Stages>;
  auto const& p = params.base;
  Control const control = *memory.control();
  std::uint64_t const once = policy_evict_first();
  std::uint64_t const again = policy_evict_normal();
  int const weight_tiles[2] = {(p.layer.intermediate + kGateFeatures - 1) / kGateFeatures,
                               (p.align.hidden + kOutputFeatures - 1) / kOutputFeatures};
  RingState<Stages> ring;
  RingState<kUnitEntries> units;
  RingState<kUnitEntries> drawn;
  int number = static_cast<int>(blockIdx.x) / Cluster;
  [[maybe_unused]] int limit = 0;
  if constexpr (kColumnBlocks<Params>) {
    limit = BlockColumns<Cluster>(params.columns, control, p.align.hidden).limit(params.columns, control);
  }
  auto const draw = [&] {
    if constexpr (kColumnBlocks<Params>) return draw_below(limit, p.align.next_unit, number);
    return atomicAdd(p.align.next_unit, 1);
  };
  while (true) {
    Unit const unit = decode_block<Cluster>(params, control, weight_tiles, number, rank);
    if ((Cluster == 1 || rank == 0) && unit.phase >= 0) number = draw();
    wait_parity(memory.unit_empty(units.stage), units.parity ^ 1u);
    *memory.unit(units.stage) = unit;
    arrive(memory.unit_full(units.stage));
    units.advance();
    if (unit.phase < 0) return;
    if constexpr (kColumnBlocks<Params>) {
      if (unit.phase == 2) {
        pass_stage(memory, ring);
        if constexpr (Cluster > 1) {
          if (rank == 0) send_number(memory, drawn.stage, number);
          receive_number(memory, drawn, rank, number);
        }
        continue;
      }
    }
    bool const first = unit.phase == 0;
    CUtensorMap const* const map = first ? &p.layer.w13 : &p.layer.w2;
    CUtensorMap const* const rows_map = &params.rows[unit.phase];
    CUtensorMap const* const scales_map = &params.scales[unit.phase];
    int const z0 = first ? 2 * unit.expert : unit.expert;
    int const z1 = first ? z0 + 1 : z0;
    int const y1 = first ? unit.feature : unit.feature + 128;
    std::uint64_t const policy = unit.shared != 0 ? again : once;
    int const rows = Cluster == 1 ? unit.rows : unit.loaded_rows;
    bool const rows_shared = Cluster > 1 && unit.rows_shared != 0;
    std::uint32_t const row_bytes = rows > 64 ? 16384u : rows > 0 ? 8192u : 0u;
    std::uint32_t const bytes = kWeightBytes + row_bytes + (row_bytes > 0 ? 4u * kRowScaleCount : 0u);
    auto const load_weights = [&](int k, int stage) {
      std::uint64_t* const full = memory.full(stage);
      char* const to = memory.stage(stage);
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full, bytes);
      if (Cluster == 1 || rows_shared) {
        tma_load(to, map, full, 128 * k, unit.feature, z0, policy);
        tma_load(to + kWeightBytes / 2, map, full, 128 * k, y1, z1, policy);
      } else if (rank == 0) {
        tma_load_multicast(to, map, full, 128 * k, unit.feature, z0, 3, policy);
      } else {
        tma_load_multicast(to + kWeightBytes / 2, map, full, 128 * k, y1, z1, 3, policy);
      }
    };
    auto const load_rows = [&](int k, int stage) {
      if (row_bytes == 0) return;
      std::uint64_t* const full = memory.full(stage);
      char* const to = memory.stage(stage) + kWeightBytes;
      if (!rows_shared) {
        tma_load(to, rows_map, full, 128 * k, unit.first_row, 0, again);
        if (row_bytes > 8192) tma_load(to + 8192, rows_map, full, 128 * k, unit.first_row + 64, 0, again);
      } else if (64 * rank < rows) {
        tma_load_multicast(to + 8192 * rank, rows_map, full, 128 * k, unit.first_row + 64 * rank, 0, 3, again);
      }
      tma_load(memory.stage(stage) + Layout::kRowScales, scales_map, full, unit.first_row & ~3, k, 0, again);
    };
    auto const send_at = [&](int k) {
      if (Cluster > 1 && rank == 0 && k == min(1, unit.k_count - 1)) send_number(memory, drawn.stage, number);
    };
    int k = 0;
    if ((!first || p.align.copied != nullptr) && rows > 0) {  // beside the dispatch GEMM1's rows come late, too
      int const* const ready = (first ? p.align.copied : p.align.counters) + unit.token_tile;
      int const target = first ? rows : weight_tiles[0];
      if (load_acquire_gpu(ready) < target) {
        RingState<Stages> const begin = ring;
        for (; k < min(Stages, unit.k_count); ++k) {
          wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
          load_weights(k, ring.stage);
          ring.advance();
          send_at(k);
        }
        wait_counter(ready, target);
        ptx::fence_proxy_async();
        RingState<Stages> behind = begin;
        for (int i = 0; i < k; ++i) {
          load_rows(i, behind.stage);
          behind.advance();
        }
      } else {
        ptx::fence_proxy_async();
      }
    }
    for (; k < unit.k_count; ++k) {
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
      load_weights(k, ring.stage);
      load_rows(k, ring.stage);
      ring.advance();
      send_at(k);
    }
    if constexpr (Cluster > 1) receive_number(memory, drawn, rank, number);
  }
}

/// A warp that loads the scales of each unit's two weight boxes, chunk by chunk. Tried: each scale by cp.async into
/// its stage, which put two more arrivals into every step.
template <int Stages, bool Columns, class Memory>
__device__ void load_box_scales(LayerParams const& p, Memory const& memory) {
  int const lane = thread_index() & 31;
  RingState<kUnitEntries> units;
  RingState<kScaleChunks> chunk;
  while (true) {
    wait_parity(memory.unit_full(units.stage), units.parity);
    Unit const unit = *memory.unit(units.stage);
    arrive(memory.unit_empty(units.stage));
    units.advance();
    if (unit.phase < 0) return;
    if (Columns && unit.phase == 2) continue;
    bool const first = unit.phase == 0;
    int const blocks = (first ? p.align.hidden : p.layer.intermediate) / 128;
    int const out_blocks = (first ? 2 * p.layer.intermediate : p.align.hidden) / 128;
    int const box0 = unit.feature / 128;
    int const box1 = min(box0 + (first ? p.layer.intermediate / 128 : 1), out_blocks - 1);  // past H: zeros
    float const* const of_expert =
        (first ? p.layer.w13_scales : p.layer.w2_scales) + static_cast<long long>(unit.expert) * out_blocks * blocks;
    float const* const from0 = of_expert + static_cast<long long>(min(box0, out_blocks - 1)) * blocks;
    float const* const from1 = of_expert + static_cast<long long>(box1) * blocks;
    for (int begin = 0; begin < unit.k_count; begin += kScaleSteps) {
      wait_parity(memory.scales_empty(chunk.stage), chunk.parity ^ 1u);
      float2* const to = memory.scales(chunk.stage);
      int const steps = min(unit.k_count - begin, kScaleSteps);
      for (int k = lane; k < steps; k += 32) to[k] = make_float2(__ldg(from0 + begin + k), __ldg(from1 + begin + k));
      arrive(memory.scales_full(chunk.stage));
      chunk.advance();
    }
  }
}

/// With blocks of columns: a warp tells the other CTAs which rows of the intermediate are complete, and reports units of GEMM2 and of sums.
template <class Params, class Memory>
__device__ void publish_columns(Params const& params, Memory const& memory) {
  LayerParams const& p = params.base;
  Control const* const control = memory.control();
  tell_without_tokens(params.columns, control);
  RingState<kUnitEntries> units;
  while (true) {
    wait_parity(memory.unit_full(units.stage), units.parity);
    Unit const unit = *memory.unit(units.stage);
    if (unit.phase < 0) return;
    wait_parity(memory.stored(units.stage), units.parity);
    if (unit.phase == 2) {
      report_sums(params.columns, control, unit);
    } else if (unit.phase == 1) {
      report_products(params.columns, unit.block, 1);
    } else if ((thread_index() & 31) == 0 && unit.rows > 0) {
      fence_device();
      atomicAdd(p.align.counters + unit.token_tile, 1);
    }
    arrive(memory.unit_empty(units.stage));
    units.advance();
  }
}

/// Whether a scheme and activation have this kernel.
template <Scheme S, class Activation>
inline constexpr bool kHasBlockKernel = S == Scheme::fp8_block && Activation::kFineTiles && Activation::kGating == 1;

template <int Stages, int Cluster, class Activation, class Params = BlockParams>
__global__ void __launch_bounds__(kLayerThreads, 1) block_kernel(__grid_constant__ Params const params) {
  constexpr bool kColumns = kColumnBlocks<Params>;
  auto const& p = params.base;
  extern __shared__ char block_smem[];
  BlockShared<Stages> const memory{block_smem + ((1024u - (smem_address(block_smem) & 1023u)) & 1023u)};
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  int const rank = Cluster > 1 ? static_cast<int>(ptx::get_sreg_cluster_ctarank()) : 0;
  if (threadIdx.x == 0) {
    prefetch_tensor_map(&p.layer.w13);
    prefetch_tensor_map(&p.layer.w2);
    for (int s = 0; s < Stages; ++s) {
      ptx::mbarrier_init(memory.full(s), 1);
      ptx::mbarrier_init(memory.empty(s), kReleases<Cluster, false>);
    }
    for (int s = 0; s < kUnitEntries; ++s) {
      ptx::mbarrier_init(memory.unit_full(s), 1);
      ptx::mbarrier_init(memory.unit_empty(s), kConsumerThreads + 32 + (kColumns ? 32 : 1));  // consumers, box scales, publisher
      ptx::mbarrier_init(memory.stored(s), 8);
      ptx::mbarrier_init(memory.number_full(s), 1);
    }
    for (int s = 0; s < kScaleChunks; ++s) {
      ptx::mbarrier_init(memory.scales_full(s), 32);
      ptx::mbarrier_init(memory.scales_empty(s), kConsumerThreads);
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

  if (threadIdx.x == 0) *memory.control() = control_of(params, p.align);
  if (blockIdx.x == 0 && threadIdx.x == 0 && !p.align.beside_dispatch) *p.align.sorted = 0;  // the next call's sort needs it zero
  ptx::fence_proxy_async();                                                                  // x was quantised by ordinary stores
  __syncthreads();

  if (warp >= kConsumerThreads / 32) {
    give_registers<40>();  // 40 · 128 + 232 · 256 registers are those of 384 threads at launch, 168 each
    // Waits for room in the ring, for a free entry to announce a unit and, in phase 1, for rows that any CTA publishes; beside the
    // dispatch, in phase 0, for rows that CTAs of the aligning kernel copy.
    if (threadIdx.x == kConsumerThreads) load_blocks<Stages, Cluster>(params, memory, rank);
    // Waits for announced units and, in phase 0, with blocks of columns in all phases, until both warpgroups have stored the unit.
    if constexpr (kColumns) {
      if (warp == kConsumerThreads / 32 + 2) publish_columns(params, memory);
    } else {
      if (threadIdx.x == kConsumerThreads + 64) publish_blocks(p, memory);
    }
    // Waits for announced units and for a free chunk.
    if (warp == kConsumerThreads / 32 + 1) load_box_scales<Stages, kColumns>(p, memory);
  } else {
    // Wait for announced units and for full stages of the ring; release each stage to all loaders of the cluster. Units of sums: wait for
    // GEMM2 of the block by any CTA.
    take_registers<232>();
    int const group = static_cast<int>(uniform(static_cast<std::uint32_t>(warp >> 2)));
    if constexpr (!kColumns) {
      if (p.align.topk == 1 && memory.control()->missing > 0)
        detail::zero_rows<__nv_bfloat16, kConsumerThreads / 32>(p.align, p.out, false);
    }

    RingState<Stages> ring;
    RingState<kScaleChunks> chunk;
    RingState<kUnitEntries> units;
    for (ConsumerUnit unit = next_consumer_unit(memory, units); unit.phase >= 0; unit = next_consumer_unit(memory, units)) {
      if constexpr (kColumns) {
        if (unit.phase == 2) {
          skip<Stages, Cluster, false>(memory, ring, 1);
          sum_columns<__nv_bfloat16>(p, params.columns, *memory.unit(unit.entry), group);  // the publisher holds the entry
          arrive_stored(memory, unit.entry);
          continue;
        }
      }
      consume_blocks<Stages, Cluster, Activation, kColumns>(p, params.scale_stride, memory, ring, chunk, unit, group);
    }
  }
  if constexpr (Cluster > 1) {  // no CTA leaves while the other may still write or arrive here
    __syncwarp();
    cluster_arrive_release();
    cluster_wait();
  }
  detail::end_beside_dispatch(p);
}

}  // namespace moe::hopper
