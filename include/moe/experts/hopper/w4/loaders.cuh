// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/loaders.cuh: the producer warps of the layer kernel. One thread draws units and copies bricks, three warps gather
// rows of activations.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/slots.cuh"
#include "moe/experts/hopper/common/wait.cuh"
#include "moe/experts/hopper/w4/layout.cuh"

namespace moe::hopper::w4 {

/// One thread: draws units, announces each, and copies its bricks. Weights do not depend on earlier results, so it runs ahead of the rows.
template <class L>
__device__ void load_weights(Params const& p, Memory<L> const& memory) {
  Control const control = *memory.control();
  std::uint64_t const once = policy_evict_first();
  std::uint64_t const again = policy_evict_normal();
  RingState<L::kStages> ring;
  RingState<kUnitEntries> units;
  int number = static_cast<int>(blockIdx.x);
  while (true) {
    Unit const unit = decode_unit(p.align.plan.space, control, p.align.plan.tiles, number, 1, 0);
    if (unit.phase >= 0) number = atomicAdd(p.align.next_unit, 1);
    wait_parity(memory.unit_empty(units.stage), units.parity ^ 1u);
    *memory.unit(units.stage) = unit;
    arrive(memory.unit_full(units.stage));
    units.advance();
    if (unit.phase < 0) return;
    Span const span = span_of<L>(p, unit);
    bool const first = unit.phase == 0;
    long long const steps = first ? p.layer.steps[0] : p.layer.steps[1];
    long long const matrix = steps * (first ? p.layer.bricks[0] : p.layer.bricks[1]);
    int const step_bytes = span.side * L::kBrickBytes;
    std::uint8_t const* from =
        (first ? p.layer.weights[0] : p.layer.weights[1]) +
        (matrix * unit.expert + steps * span.first + static_cast<long long>(span.k_begin) * span.side) * L::kBrickBytes;
    std::uint64_t const policy = unit.shared != 0 ? again : once;
    for (int k = 0; k < span.k_count; k += L::kDepth) {
      int const bytes = min(L::kDepth, span.k_count - k) * step_bytes;
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, memory.full(ring.stage),
                                     static_cast<std::uint32_t>(bytes));
      bulk_load(memory.bricks(ring.stage), from, static_cast<std::uint32_t>(bytes), memory.full(ring.stage), policy);
      from += bytes;
      ring.advance();
    }
  }
}

/// Three warps: rows of x by token in phase 0, rows of the intermediate in phase 1 once all their columns are complete. Eight lanes fetch
/// the 128 bytes of a row, in the 128-byte swizzle that wgmma reads.
template <int MaxRows, class L>
__device__ void load_rows(Params const& p, Memory<L> const& memory, int gather_warp) {
  constexpr int kFetches = (MaxRows / 4 + kGatherWarps - 1) / kGatherWarps;  // of 4 rows, per warp
  int const lane = thread_index() & 31;
  int const first_row = 4 * gather_warp + (lane >> 3);
  int const chunk = lane & 7;
  // Rows of this lane are an odd multiple of 4 apart, so they alternate between two positions in the swizzle.
  std::uint32_t const even = static_cast<std::uint32_t>(first_row * 128 + ((chunk ^ (first_row & 7)) << 4));
  std::uint32_t const odd = static_cast<std::uint32_t>(first_row * 128 + ((chunk ^ ((first_row + 4) & 7)) << 4));
  RingState<L::kStages> ring;
  RingState<kUnitEntries> units;
  while (true) {
    Unit const unit = next_unit(memory, units);
    __syncwarp();
    if (unit.phase < 0) return;
    Span const span = span_of<L>(p, unit);
    bool const first = unit.phase == 0;
    long long const width = 2 * (first ? p.x_stride : p.layer.intermediate);
    char const* const base = static_cast<char const*>(first ? p.x : p.inter) + chunk * 16 + span.k_begin * 128;
    int const mine = (unit.rows - first_row + 4 * kGatherWarps - 1) / (4 * kGatherWarps);  // rows of this lane
    char const* source[kFetches];
#pragma unroll
    for (int g = 0; g < kFetches; ++g) {
      int const row = unit.first_row + first_row + 4 * kGatherWarps * g;
      source[g] = g < mine ? base + (first ? input_row(p.gather, p.align.sorted_rows[row].slot, p.align.per_token) : row) * width : nullptr;
    }
    if (!first) {
      if (lane == 0) {
        int const target = L::kGroups * p.align.plan.space.weight_tiles[0];
        wait_counter(p.align.counters + unit.token_tile, target);
      }
      __syncwarp();
    }
    for (int k = 0; k < span.k_count; k += L::kDepth) {
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
#pragma unroll
      for (int d = 0; d < L::kDepth; ++d) {
        if (k + d >= span.k_count) break;
        std::uint32_t const target = smem_address(memory.rows(ring.stage) + d * L::kRowBytes);
#pragma unroll
        for (int g = 0; g < kFetches; ++g) {
          if (g < mine)
            cp_async_16(target + ((g & 1) != 0 ? odd : even) + static_cast<std::uint32_t>(g * 4 * kGatherWarps * 128), source[g]);
          source[g] += 128;
        }
      }
      cp_async_arrive(memory.full(ring.stage));
      ring.advance();
    }
  }
}

}  // namespace moe::hopper::w4
