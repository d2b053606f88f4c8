// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/row_quantizer.cuh: one scale per row of the intermediate (fp8_row, int8_row). The largest magnitude of a row is
// known only after GEMM1 has computed all its columns, so GEMM1 stores bf16 (int8_row: float32) rows, and warpgroups turn them into codes
// once the token tile is complete: the one that completes it, and those of GEMM2's units that find rows left. Each takes batches of rows
// until there are none.
//
// Nothing waits in a circle. A warpgroup waits for a tile's rows to be stored in a unit of phase 1 only; they come from units of phase 0,
// which CTAs have drawn before and which wait for no other CTA. A warpgroup that has taken a batch quantises it without a wait, and the
// warpgroup that completes the tile takes batches until none is left, so GEMM2's loaders get all rows even if no other warpgroup helps.
#pragma once

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/layer/epilogue.cuh"
#include "moe/experts/hopper/layer/row_batches.cuh"
#include "moe/experts/hopper/layer/row_codes.cuh"

namespace moe::hopper {

namespace detail {

/// Rows of a batch.
__device__ inline int batch_rows(IntermediateRows const& inter) { return inter.rows_together > 0 ? 4 * inter.rows_together : 1; }

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

/// One row of any length; one warpgroup. All loads of a part come before its stores, which could alias them. `maxima`: shared memory for
/// one value per warp, 16-byte aligned.
template <Scheme S>
__device__ inline void quantize_long_row(LayerParams const& p, long long row, int group, float* maxima) {
  using Codes = RowCodes<S>;
  constexpr int kHeld = 8;  // with 16, kernels of 128 rows spill
  constexpr int kPart = 128 * kHeld;
  int const thread = thread_index() & 127;
  int const chunks = p.layer.intermediate / Codes::kValues;
  int const last = (chunks - 1) / kPart * kPart;
  uint4 const* const from = static_cast<uint4 const*>(p.inter.wide) + row * chunks;
  auto* const to = static_cast<typename Codes::Chunk*>(p.inter.rows) + row * chunks;
  uint4 held[kHeld];
  auto const load = [&](int part) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      int const chunk = part + 128 * i + thread;
      held[i] = chunk < chunks ? __ldcg(from + chunk) : make_uint4(0, 0, 0, 0);
    }
  };
  float amax = 0.0F;
  int part = 0;
  do {  // at least once: a register that may be read before it is written counts as live everywhere
    load(part);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) amax = fmaxf(amax, Codes::amax(held[i]));
    part += kPart;
  } while (part <= last);
  amax = warp_max(amax);
  if ((thread & 31) == 0) maxima[thread >> 5] = amax;
  group_barrier(group);
  float4 const of_warps = *reinterpret_cast<float4 const*>(maxima);
  float const scale = Codes::scale(p.layer, fmaxf(fmaxf(of_warps.x, of_warps.y), fmaxf(of_warps.z, of_warps.w)));
  float const inverse = 1.0F / scale;
  for (part = last;; load(part)) {  // the last part is still held
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      int const chunk = part + 128 * i + thread;
      if (chunk < chunks) to[chunk] = Codes::codes(held[i], scale, inverse);
    }
    part -= kPart;
    if (part < 0) break;
  }
  if (thread == 0) p.inter.scales[row] = scale;
}

/// Quantises batch words[0] of the unit's tile, then takes others until none is left; one warpgroup, after a barrier behind the write of
/// words[0]. `words`: eight words of shared memory, 16-byte aligned. A barrier must come before the next write of words[0].
template <Scheme S>
__device__ inline void quantize_batches(LayerParams const& p, Unit const& unit, int group, int* words) {
  int const thread = thread_index() & 127;
  int const warp = thread >> 5;
  int next = words[0];
  if (next >= unit.rows) return;  // a batch has at least one row
  int const rows = batch_rows(p.inter);
  int const together = p.inter.rows_together;
  int quantized = 0;
  int turn = 0;  // the words take turns, so that one barrier a batch suffices
  for (int first = next * rows; first < unit.rows; first = next * rows) {
    int taken = 0;
    if (thread == 0) taken = take_batch(p, unit);  // while the rows load
    if (together > 0) {
      int const own = first + warp * together;
      if (own < unit.rows) quantize_short_rows<S>(p, unit, own, min(together, unit.rows - own), p.inter.lane_chunks);
    } else {
      quantize_long_row<S>(p, unit.first_row + first, group, reinterpret_cast<float*>(words + 4));
    }
    quantized += min(rows, unit.rows - first);
    turn ^= 1;
    if (thread == 0) words[turn] = taken;
    group_barrier(group);
    next = words[turn];
  }
  if (thread == 0 && quantized > 0) {  // the barrier ordered the other threads' stores before this fence
    fence_device();
    atomicAdd(p.align.counters + unit.token_tile, quantized);
  }
}

}  // namespace detail

/// A warpgroup reports here that it has stored its features of a unit of phase 0. The one whose report completes the token tile begins to
/// quantise its rows. GEMM2's loaders wait until all are quantised.
template <Scheme S>
__device__ inline void report_stored_rows(LayerParams const& p, Unit const& unit, int group, int* words) {
  if ((thread_index() & 127) == 0) {  // the barrier at the end of the stores ordered the other threads' stores before this fence
    fence_device();
    int const before = atomicAdd(p.align.counters + unit.token_tile, 1);
    fence_device();
    words[0] = row_reports(before) + 1 == stored_reports(p) ? 0 : unit.rows;
  }
  group_barrier(group);
  detail::quantize_batches<S>(p, unit, group, words);
  group_barrier(group);
}

/// Before a unit of phase 1: the warpgroup quantises rows of the unit's tile, as long as some are left. `full` and `parity`: the barrier of
/// the unit's first stage of the ring. If the loaders have filled it, all rows are quantised, and global memory is not read. A barrier
/// comes before the next write of words[0]: every unit has some.
template <Scheme S>
__device__ inline void help_to_quantize(LayerParams const& p, Unit const& unit, int group, int* words, std::uint64_t* full,
                                        std::uint32_t parity) {
  if ((thread_index() & 127) == 0) {
    int batch = unit.rows;
    if (!ptx::mbarrier_test_wait_parity(full, parity)) {
      int const counter = wait_reports(p.align.counters + unit.token_tile, stored_reports(p));
      if (next_batch(counter) * detail::batch_rows(p.inter) < unit.rows) batch = take_batch(p, unit);
    }
    words[0] = batch;
  }
  group_barrier(group);
  detail::quantize_batches<S>(p, unit, group, words);
}

}  // namespace moe::hopper
