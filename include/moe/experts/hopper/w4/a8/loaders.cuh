// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/loaders.cuh: the warps that gather rows of e4m3 activations and their scales. Bricks come through
// w4::load_weights().
#pragma once

#include <cstdint>

#include "moe/experts/hopper/w4/a8/layout.cuh"
#include "moe/experts/hopper/w4/loaders.cuh"

namespace moe::hopper::w4a8 {

/// Three warps: rows of x by token in phase 0, rows of the intermediate in phase 1 once all their columns are complete. Eight lanes fetch
/// the 128 codes of a row, in the 128-byte swizzle that wgmma reads; the first of them also fetches the scale. Past the row's end they
/// write zeros.
template <int MaxRows, class L>
__device__ void load_rows(Params const& p, Memory<L> const& memory, int gather_warp) {
  constexpr int kStep = 4 * w4::kGatherWarps;
  constexpr int kFetches = (MaxRows / 4 + w4::kGatherWarps - 1) / w4::kGatherWarps;
  int const lane = thread_index() & 31;
  int const first_row = 4 * gather_warp + (lane >> 3);
  int const chunk = lane & 7;
  std::uint32_t const even = static_cast<std::uint32_t>(first_row * 128 + ((chunk ^ (first_row & 7)) << 4));
  std::uint32_t const odd = static_cast<std::uint32_t>(first_row * 128 + ((chunk ^ ((first_row + 4) & 7)) << 4));
  RingState<L::kStages> ring;
  RingState<kUnitEntries> units;
  while (true) {
    Unit const unit = next_unit(memory, units);
    __syncwarp();
    if (unit.phase < 0) return;
    w4::Span const span = w4::span_of<L>(p, unit);
    bool const first = unit.phase == 0;
    int const columns = first ? p.align.hidden : p.layer.intermediate;
    long long const width = first ? p.x_stride : p.layer.intermediate;
    char const* const base = static_cast<char const*>(first ? p.x : p.inter) + chunk * 16;
    float const* const scales = first ? p.x_scales : p.inter_scales;
    long long const scale_width = first ? p.x_scale_stride : p.scale_blocks;
    int const mine = (unit.rows - first_row + kStep - 1) / kStep;  // rows of this lane
    char const* source[kFetches];
    float const* scale_source[kFetches];
#pragma unroll
    for (int g = 0; g < kFetches; ++g) {
      int const row = unit.first_row + first_row + kStep * g;
      long long from = row;
      if (g >= mine) {
        from = 0;
      } else if (first) {
        int const slot = p.align.sorted_rows[row].slot;
        from = p.gather != nullptr ? p.gather[slot] : slot / p.align.topk;  // input_row() makes tiles of 80 rows spill
      }
      source[g] = base + from * width;
      scale_source[g] = scales + from * scale_width;
    }
    if (!first) {
      if (lane == 0) wait_counter(p.align.counters + unit.token_tile, p.align.plan.space.weight_tiles[0]);
      __syncwarp();
    }
    for (int k = 0; k < span.k_count; k += L::kDepth) {
      wait_parity(memory.empty(ring.stage), ring.parity ^ 1u);
#pragma unroll
      for (int d = 0; d < L::kDepth; ++d) {
        if (k + d >= span.k_count) break;
        int const block = span.k_begin + k + d;
        std::uint32_t const target = smem_address(memory.rows(ring.stage) + d * L::kRowBytes);
        std::uint32_t const scale_target = smem_address(memory.row_scales(ring.stage, d));
        std::uint32_t const bytes = block * 128 + chunk * 16 < columns ? 16 : 0;
#pragma unroll
        for (int g = 0; g < kFetches; ++g) {
          if (g >= mine) continue;
          cp_async_16(target + ((g & 1) != 0 ? odd : even) + static_cast<std::uint32_t>(g * kStep * 128),
                      source[g] + (bytes != 0 ? block * 128 : 0), bytes);
          if (chunk != 0) continue;
          // Scales of the intermediate change during the kernel, so they must not come through L1: only 16 bytes can go past it.
          std::uint32_t const to = scale_target + static_cast<std::uint32_t>((first_row + kStep * g) * 16);
          if (first) {
            cp_async_4(to + static_cast<std::uint32_t>((block & 3) * 4), scale_source[g] + block);
          } else {
            cp_async_16(to, scale_source[g] + (block & ~3));
          }
        }
      }
      cp_async_arrive(memory.full(ring.stage));
      ring.advance();
    }
  }
}

}  // namespace moe::hopper::w4a8
