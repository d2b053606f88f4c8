// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/loaders.cuh: the producer warps. One thread draws units and streams weight tiles through the copy engine; three
// warps gather activation rows by index.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/layer/column_blocks.cuh"
#include "moe/experts/hopper/layer/layer_params.cuh"
#include "moe/experts/hopper/layer/quantizing_rows.cuh"
#include "moe/experts/hopper/layer/row_batches.cuh"

namespace moe::hopper {

/// The schedule of blocks of columns: each warpgroup reports for itself.
template <int Cluster>
using LayerColumns = ColumnSchedule<Cluster, false, 2>;

/// Unit `number`, of kernels with or without blocks of columns.
template <int Cluster, class Params>
__device__ inline Unit decode_layer(Params const& p, Control const& control, int number, int rank) {
  UnitSpace const& space = p.align.plan.space;
  TokenTile const* const tiles = p.align.plan.tiles;
  if constexpr (kColumnBlocks<Params>) {
    if (number >= control.units[0]) {
      LayerColumns<Cluster> const columns(p.columns, control, p.align.hidden);
      return columns.decode(p.columns, control, p.align.hidden, number - control.units[0], rank,
                            [&](int of_block, Control const& only, int local) {
                              UnitSpace part = space;
                              part.weight_tiles[1] = of_block;
                              return decode_unit(part, only, tiles, local, Cluster, rank);
                            });
    }
  }
  return decode_unit(space, control, tiles, number, Cluster, rank);
}

/// Draws units, announces each to the other roles, and loads its weight tiles. Weights do not depend on earlier results, so this thread
/// runs ahead of a unit whose rows are not complete yet, as far as the ring holds. In a cluster of two, the first CTA draws for both, and
/// each loads one of the two weight boxes into both.
template <Scheme S, int Stages, int Cluster, class Memory, class Params>
__device__ void load_weights(Params const& p, Memory const& memory, int rank) {
  constexpr int kStep = SchemeTraits<S>::kStepElements;
  Control const control = *memory.control();
  std::uint64_t const once = policy_evict_first();
  std::uint64_t const again = policy_evict_normal();
  RingState<Stages> ring;
  RingState<kUnitEntries> units;
  RingState<kUnitEntries> drawn;
  int number = static_cast<int>(blockIdx.x) / Cluster;
  [[maybe_unused]] int limit = 0;
  if constexpr (kColumnBlocks<Params>) limit = LayerColumns<Cluster>(p.columns, control, p.align.hidden).limit(p.columns, control);
  auto const draw = [&] {
    if constexpr (kColumnBlocks<Params>) return draw_below(limit, p.align.next_unit, number);
    return atomicAdd(p.align.next_unit, 1);
  };
  while (true) {
    Unit const unit = decode_layer<Cluster>(p, control, number, rank);
    if (Cluster == 1 || rank == 0) {
      if (unit.phase >= 0) number = draw();
    }
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
    CUtensorMap const* const map = unit.phase == 0 ? &p.layer.w13 : &p.layer.w2;
    MatrixLayout const& matrix = p.layer.matrix[unit.phase];
    int const dx = matrix.dx;
    int const z0 = matrix.depth * unit.expert;
    int const z1 = z0 + matrix.dz;
    int const y1 = unit.feature + matrix.dy;
    std::uint64_t const policy = unit.shared != 0 ? again : once;
    for (int k = 0; k < unit.k_count; ++k) {
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, memory.full(ring.stage), kWeightBytes);
      char* const stage = memory.stage(ring.stage);
      int const x = (unit.k_begin + k) * kStep;
      if constexpr (Cluster == 1) {
        tma_load(stage, map, memory.full(ring.stage), x, unit.feature, z0, policy);
        tma_load(stage + kWeightBytes / 2, map, memory.full(ring.stage), x + dx, y1, z1, policy);
      } else if (rank == 0) {
        tma_load_multicast(stage, map, memory.full(ring.stage), x, unit.feature, z0, 3, policy);
      } else {
        tma_load_multicast(stage + kWeightBytes / 2, map, memory.full(ring.stage), x + dx, y1, z1, 3, policy);
      }
      ring.advance();
      if (Cluster > 1 && rank == 0 && k == min(1, unit.k_count - 1)) send_number(memory, drawn.stage, number);
    }
    if constexpr (Cluster > 1) receive_number(memory, drawn, rank, number);
  }
}

/// Gathers rows: in phase 0 rows of x by token, in phase 1 rows of the intermediate, once all their columns are complete. Eight lanes fetch
/// the 128 bytes of a row, in the 128-byte swizzle that wgmma reads. Rows of x that are not quantised yet go through quantize_rows.
template <Scheme S, int Stages, int MaxRows, class Memory, class Params>
__device__ void load_rows(Params const& p, Memory const& memory, int gather_warp) {
  using Traits = SchemeTraits<S>;
  constexpr int kGroups = (MaxRows / 4 + kGatherWarps - 1) / kGatherWarps;  // of 4 rows, per warp
  RingState<Stages> ring;
  RingState<kUnitEntries> units;
  [[maybe_unused]] int own = gather_warp;
  while (true) {
    Unit const unit = next_unit(memory, units);
    __syncwarp();
    if (unit.phase < 0) return;
    if constexpr (kColumnBlocks<Params>) {
      if (unit.phase == 2) {
        pass_stage(memory, ring);
        continue;
      }
    }
    if constexpr (kQuantizesRows<S, MaxRows>) {
      if (unit.phase == 0 && p.self_align && p.align.x != nullptr) {
        quantize_rows<Stages, MaxRows>(p, memory, unit, ring, own);
        continue;
      }
    }

    // Here few registers are live across the call.
    if constexpr (Traits::kElementBytes == 2 || Traits::kBlock) {
      if (unit.phase == 0 && p.align.beside_dispatch && unit.rows > 0) comm::detail::wait_arrivals(p.align.arrivals, unit.expert);
    }
    int const lane = thread_index() & 31;  // read here, so that it takes no registers in quantize_rows
    int const first_row = 4 * gather_warp + (lane >> 3);
    int const chunk = lane & 7;
    // Rows of this lane are an odd multiple of 4 apart, so they alternate between two positions in the swizzle.
    std::uint32_t const even = static_cast<std::uint32_t>(first_row * 128 + ((chunk ^ (first_row & 7)) << 4));
    std::uint32_t const odd = static_cast<std::uint32_t>(first_row * 128 + ((chunk ^ ((first_row + 4) & 7)) << 4));
    bool const first = unit.phase == 0;
    int const row_bytes = (first ? p.align.hidden : p.layer.intermediate) * Traits::kElementBytes;
    long long const width = first ? p.input.row_bytes : row_bytes;
    // The last step of K may reach past the row: zeros are written there, and nothing is read.
    int const last_byte = (unit.k_begin + unit.k_count) * 128;
    int const tail = last_byte > row_bytes ? unit.k_count - 1 : -1;
    bool const past = chunk * 16 >= row_bytes - (last_byte - 128);
    char const* const base = static_cast<char const*>(first ? p.input.rows : p.inter.rows) + chunk * 16 + unit.k_begin * 128;
    int const mine = (unit.rows - first_row + 4 * kGatherWarps - 1) / (4 * kGatherWarps);  // rows of this lane
    char const* source[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      int const row = unit.first_row + first_row + 4 * kGatherWarps * g;
      source[g] = g < mine ? base + (first ? input_row(p, p.align.sorted_rows[row].slot) : row) * width : nullptr;
    }
    constexpr int kScales = (MaxRows + 32 * kGatherWarps - 1) / (32 * kGatherWarps);  // of rows, per lane
    [[maybe_unused]] float const* row_scale[kScales];
    [[maybe_unused]] float const* weight_scale = nullptr;
    if constexpr (Traits::kBlock) {
      int const blocks = ((first ? p.align.hidden : p.layer.intermediate) + 127) / 128;
      long long const scale_stride = first ? p.input.scale_stride : blocks;
#pragma unroll
      for (int i = 0; i < kScales; ++i) {
        int const row = 32 * (gather_warp + kGatherWarps * i) + lane;
        row_scale[i] = nullptr;
        if (row < unit.rows) {
          long long const from = first ? input_row(p, p.align.sorted_rows[unit.first_row + row].slot) : unit.first_row + row;
          row_scale[i] = (first ? p.input.scales : p.inter.scales) + from * scale_stride + unit.k_begin;
        }
      }
      if (gather_warp == 0 && lane < 2) {
        weight_scale = box_scales(first ? p.layer.w13_scales : p.layer.w2_scales, p.layer.matrix[unit.phase], unit, lane, blocks);
      }
    }
    if (!first && unit.rows > 0) {
      if (lane == 0) {
        if constexpr (Traits::kRowScaled) {
          wait_reports(p.align.counters + unit.token_tile, stored_reports(p) + unit.rows);  // all rows quantised
        } else {
          wait_counter(p.align.counters + unit.token_tile, 2 * p.align.plan.space.weight_tiles[0]);
        }
      }
      __syncwarp();
    }
    for (int k = 0; k < unit.k_count; ++k) {
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
      std::uint32_t const target = smem_address(memory.stage(ring.stage) + kWeightBytes);
      std::uint32_t const bytes = k == tail && past ? 0 : 16;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (g < mine) {
          cp_async_16(target + ((g & 1) != 0 ? odd : even) + static_cast<std::uint32_t>(g * 4 * kGatherWarps * 128), source[g], bytes);
        }
        source[g] += 128;
      }
      if constexpr (Traits::kBlock) {
        std::uint32_t const scales = target + MaxRows * 128;
#pragma unroll
        for (int i = 0; i < kScales; ++i) {
          if (row_scale[i] != nullptr) {
            cp_async_4(scales + static_cast<std::uint32_t>(32 * (gather_warp + kGatherWarps * i) + lane) * 4, row_scale[i] + k);
          }
        }
        if (weight_scale != nullptr) cp_async_4(scales + 512 + static_cast<std::uint32_t>(lane) * 4, weight_scale + k);
      }
      cp_async_arrive(memory.full(ring.stage));
      ring.advance();
    }
  }
}

}  // namespace moe::hopper
