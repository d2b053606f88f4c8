// SPDX-License-Identifier: Apache-2.0
// experts/hopper/loaders.cuh: the producer warps. One thread draws units and streams weight tiles through the copy engine; three warps
// gather activation rows by index.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/layer_params.cuh"

namespace moe::hopper {

/// Draws units, announces each to the other roles, and loads its weight tiles. Weights depend on nothing, so this thread runs ahead of
/// a unit whose rows are not there yet, by as much as the ring holds.
template <Scheme S, int Stages, class Memory, class Params>
__device__ void load_weights(Params const& p, Memory const& memory) {
  constexpr int kStep = SchemeTraits<S>::kStepElements;
  Control const control = *p.control;
  std::uint64_t const once = policy_evict_first();
  std::uint64_t const again = policy_evict_normal();
  RingState<Stages> ring;
  RingState<kUnitSlots> slot;
  int number = static_cast<int>(blockIdx.x);
  while (true) {
    Unit const unit = decode_unit(p.space, control, p.tiles, number);
    if (unit.phase >= 0) number = atomicAdd(&p.control->next_unit, 1);
    wait_parity(memory.unit_empty(slot.stage), slot.parity ^ 1u);
    *memory.unit(slot.stage) = unit;
    arrive(memory.unit_full(slot.stage));
    slot.advance();
    if (unit.phase < 0) return;
    bool const gate_up = unit.phase == 0;
    CUtensorMap const* const map = gate_up ? &p.w13 : &p.w2;
    int const z0 = gate_up ? 2 * unit.expert : unit.expert;
    int const z1 = gate_up ? z0 + 1 : z0;
    int const y1 = gate_up ? unit.feature : unit.feature + 128;
    std::uint64_t const policy = p.tiles[unit.token_tile].tiles == 1 ? once : again;
    for (int k = 0; k < unit.k_count; ++k) {
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, memory.full(ring.stage), kWeightBytes);
      char* const stage = memory.stage(ring.stage);
      int const x = (unit.k_begin + k) * kStep;
      tma_load(stage, map, memory.full(ring.stage), x, unit.feature, z0, policy);
      tma_load(stage + kWeightBytes / 2, map, memory.full(ring.stage), x, y1, z1, policy);
      ring.advance();
    }
  }
}

/// Gathers rows: in phase 0 rows of x by token, in phase 1 rows of the intermediate, after all its columns are there. Eight lanes fetch
/// the 128 bytes of a row, in the 128-byte swizzle that wgmma reads.
template <Scheme S, int Stages, int MaxRows, class Memory, class Params>
__device__ void load_rows(Params const& p, Memory const& memory, int gather_warp) {
  using Traits = SchemeTraits<S>;
  constexpr int kGroups = (MaxRows / 4 + kGatherWarps - 1) / kGatherWarps;  // of 4 rows, per warp
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const lane_row = lane >> 3;
  std::uint32_t const chunk = static_cast<std::uint32_t>(lane & 7);
  RingState<Stages> ring;
  RingState<kUnitSlots> slot;
  while (true) {
    wait_parity(memory.unit_full(slot.stage), slot.parity);
    Unit const unit = *memory.unit(slot.stage);
    __syncwarp();
    if (lane == 0) arrive(memory.unit_empty(slot.stage));
    slot.advance();
    if (unit.phase < 0) return;

    bool const first = unit.phase == 0;
    int const width = (first ? p.hidden : p.intermediate) * Traits::kElementBytes;
    char const* const base = static_cast<char const*>(first ? p.x : p.inter) + chunk * 16 + unit.k_begin * 128;
    std::uint32_t source[kGroups];
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      int const row = 4 * (gather_warp + kGatherWarps * g) + lane_row;
      source[g] = 0xFFFFFFFFu;
      if (row < unit.rows) source[g] = static_cast<std::uint32_t>(first ? p.source_row[unit.first_row + row] : unit.first_row + row);
    }
    [[maybe_unused]] float const* row_scale[2] = {nullptr, nullptr};
    [[maybe_unused]] float const* weight_scale = nullptr;
    if constexpr (Traits::kBlock) {
      int const blocks = (first ? p.hidden : p.intermediate) / 128;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        int const row = 32 * gather_warp + lane + 96 * i;
        if (row < unit.rows) {
          long long const from = first ? p.source_row[unit.first_row + row] : unit.first_row + row;
          row_scale[i] = (first ? p.x_scales : p.inter_scales) + from * blocks + unit.k_begin;
        }
      }
      if (gather_warp == 0 && lane < 2) {
        int const out_blocks = (first ? 2 * p.intermediate : p.hidden) / 128;
        int block = unit.feature / 128 + (lane == 0 ? 0 : first ? p.intermediate / 128 : 1);
        block = min(block, out_blocks - 1);  // a tile that ends past H multiplies zeros
        weight_scale =
            (first ? p.w13_scales : p.w2_scales) + (static_cast<long long>(unit.expert) * out_blocks + block) * blocks + unit.k_begin;
      }
    }
    if (!first) {
      if (lane == 0) {
        int const* const ready = p.counters + unit.token_tile;
        int const target = 2 * p.space.weight_tiles[0];
        std::uint32_t spin = 0;
        while (load_acquire(ready) < target) {
          __nanosleep(64);
          if (++spin > 40'000'000u) __trap();
        }
      }
      __syncwarp();
    }
    for (int k = 0; k < unit.k_count; ++k) {
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
      std::uint32_t const target = smem_address(memory.stage(ring.stage) + kWeightBytes);
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        int const row = 4 * (gather_warp + kGatherWarps * g) + lane_row;
        if (source[g] != 0xFFFFFFFFu) {
          cp_async_16(target + static_cast<std::uint32_t>(row) * 128 + ((chunk ^ (static_cast<std::uint32_t>(row) & 7u)) << 4),
                      base + static_cast<std::uint64_t>(source[g]) * static_cast<std::uint32_t>(width) + k * 128);
        }
      }
      if constexpr (Traits::kBlock) {
        std::uint32_t const scales = target + MaxRows * 128;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (row_scale[i] != nullptr) {
            cp_async_4(scales + static_cast<std::uint32_t>(32 * gather_warp + lane + 96 * i) * 4, row_scale[i] + k);
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
