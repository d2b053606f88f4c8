// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/row_quantizer.cuh: one scale per row of the intermediate (fp8_row, int8_row). The largest magnitude of a row is
// known only after GEMM1 has computed all its columns, so GEMM1 stores bf16 (int8_row: float32) rows and the warpgroup that completes a
// token tile quantises the tile's rows.
#pragma once

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/layer/epilogue.cuh"
#include "moe/experts/hopper/layer/row_codes.cuh"

namespace moe::hopper {

namespace detail {

__device__ inline float warp_max(float v) {  // of non-negative numbers, whose order is that of their bits
  return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(v)));
}

/// Rows [first, first + count) of the unit's tile, count · per_row at most kHeld; one warp. per_row: chunks of one lane in a row.
template <Scheme S>
__device__ inline void quantize_short_rows(LayerParams const& p, Unit const& unit, int first, int count, int per_row) {
  using Codes = RowCodes<S>;
  constexpr int kHeld = Codes::kHeld;
  int const lane = thread_index() & 31;
  int const chunks = p.layer.intermediate / Codes::kValues;
  uint4 held[kHeld];
  float amax[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int const r = i / per_row;
    int const chunk = (i - r * per_row) * 32 + lane;
    long long const row = unit.first_row + first + r;
    held[i] = r < count && chunk < chunks ? __ldcg(static_cast<uint4 const*>(p.inter.wide) + row * chunks + chunk) : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int i = 0; i < kHeld; ++i) amax[i] = warp_max(Codes::amax(held[i]));
#pragma unroll
  for (int i = 1; i < kHeld; ++i) amax[i] = i % per_row != 0 ? fmaxf(amax[i], amax[i - 1]) : amax[i];
#pragma unroll
  for (int i = kHeld - 2; i >= 0; --i) amax[i] = (i + 1) % per_row != 0 ? amax[i + 1] : amax[i];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    int const r = i / per_row;
    int const part = i - r * per_row;
    int const chunk = part * 32 + lane;
    long long const row = unit.first_row + first + r;
    if (r < count && chunk < chunks) {
      float const scale = Codes::scale(p.layer, amax[i]);
      static_cast<typename Codes::Chunk*>(p.inter.rows)[row * chunks + chunk] = Codes::codes(held[i], scale, 1.0F / scale);
      if (part == 0 && lane == 0) p.inter.scales[row] = scale;
    }
  }
}

/// One row of any length, read twice; one warp.
template <Scheme S>
__device__ inline void quantize_long_row(LayerParams const& p, long long row) {
  using Codes = RowCodes<S>;
  int const lane = thread_index() & 31;
  int const chunks = p.layer.intermediate / Codes::kValues;
  uint4 const* const from = static_cast<uint4 const*>(p.inter.wide) + row * chunks;
  float amax = 0.0F;
#pragma unroll 8
  for (int chunk = lane; chunk < chunks; chunk += 32) amax = fmaxf(amax, Codes::amax(__ldcg(from + chunk)));
  float const scale = Codes::scale(p.layer, warp_max(amax));
  float const inverse = 1.0F / scale;
#pragma unroll 8
  for (int chunk = lane; chunk < chunks; chunk += 32) {
    static_cast<typename Codes::Chunk*>(p.inter.rows)[row * chunks + chunk] = Codes::codes(__ldcg(from + chunk), scale, inverse);
  }
  if (lane == 0) p.inter.scales[row] = scale;
}

}  // namespace detail

/// A warpgroup reports here that it has stored its features of a unit of phase 0. The one whose report completes the token tile quantises
/// its rows and reports once more; GEMM2's loaders wait for this last report.
template <Scheme S>
__device__ inline void quantize_whole_rows(LayerParams const& p, Unit const& unit, int group, int* flags) {
  int const thread = thread_index() & 127;
  int const warp = thread >> 5;
  if (thread == 0) {  // the barrier at the end of the stores ordered the other threads' stores before this fence
    fence_device();
    flags[group] = atomicAdd(p.align.counters + unit.token_tile, 1) + 1;
    fence_device();
  }
  group_barrier(group);
  bool const last = flags[group] == 2 * p.align.plan.space.weight_tiles[0];
  group_barrier(group);
  if (!last) return;
  constexpr int kHeld = detail::RowCodes<S>::kHeld;
  int const per_row = (p.layer.intermediate / detail::RowCodes<S>::kValues + 31) / 32;
  if (per_row <= kHeld) {
    int const together = kHeld / per_row;
    for (int first = warp * together; first < unit.rows; first += 4 * together) {
      detail::quantize_short_rows<S>(p, unit, first, min(together, unit.rows - first), per_row);
    }
  } else {
    for (int row = warp; row < unit.rows; row += 4) detail::quantize_long_row<S>(p, unit.first_row + row);
  }
  group_barrier(group);
  if (thread == 0) {
    fence_device();
    atomicAdd(p.align.counters + unit.token_tile, 1);
  }
}

}  // namespace moe::hopper
