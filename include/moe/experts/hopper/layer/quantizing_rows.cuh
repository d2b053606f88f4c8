// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/quantizing_rows.cuh: the gathering warps' work if x is bf16 and no kernel ran before this one: they make the e4m3
// codes and scales of GEMM1's rows while writing them into the ring.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/quantize_rows.cuh"
#include "moe/experts/hopper/layer/layer_params.cuh"

namespace moe::hopper {

/// Whether a kernel's gathering warps can quantise: their registers hold four parts of a step in flight, of four rows each.
template <Scheme S, int MaxRows>
inline constexpr bool kQuantizesRows = (S == Scheme::fp8_block) && (MaxRows <= kQuantizingRows);

/// Writes rows, their scales and the weights' scales of a unit of phase 0 into the ring. `own` is this warp's first step in the unit.
///
/// The warps take steps in turn, and the lanes of a step's warp arrive for all three warps, so each has the time of three steps for its own
/// step, loads included. With up to four rows, the usual case, the first twelve steps are in flight at once; with more than eight rows the
/// first three. A warp checks the ring at least every third step, so that it cannot mistake one pass over the ring for the next. Eight
/// lanes convert a row, four rows at a time.
template <int Stages, int MaxRows, class Memory, class Params>
__device__ inline void quantize_rows(Params const& p, Memory const& memory, Unit const& unit, RingState<Stages>& ring, int& own) {
  constexpr int kParts = 4;  // parts in registers; 1, 2 or 4 of them belong to one step
  static_assert(MaxRows <= 4 * kParts && Stages >= kGatherWarps);
  int const lane = thread_index() & 31;
  int const chunk = lane & 7;
  int const parts = unit.rows <= 4 ? 1 : unit.rows <= 8 ? 2 : 4;
  int const stride = kGatherWarps * (kParts / parts);  // steps between two successive contents of a register
  auto const row_of = [&](int part) { return 4 * (part & (parts - 1)) + (lane >> 3); };
  auto const step_of = [&](int part) { return kGatherWarps * (parts == 1 ? part : parts == 2 ? part >> 1 : 0); };

  int const weight_part = lane >> 1;  // the part for which this lane has the weight scale of one of the two boxes
  float const* weight_scales = nullptr;
  if (weight_part < kParts) weight_scales = box_scales(p.layer.w13_scales, p.layer.matrix[0], unit, lane & 1, p.align.hidden / 128);
  // The token of row `lane`.
  int const token = lane < unit.rows ? p.align.per_token.quotient(p.align.sorted_rows[unit.first_row + lane].slot) : 0;
  int row[kParts];  // offset in x of this lane's first 16 bytes in step 0 of the unit, the others 128 bytes on; or -1
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    int const from = __shfl_sync(0xFFFFFFFFu, token, row_of(i)) * (p.align.hidden / 8) + unit.k_begin * 16 + chunk;
    row[i] = row_of(i) < unit.rows ? from : -1;
  }
  uint4 words[kParts][2];
  float weight_scale = 0.0F;
#pragma unroll
  for (int i = 0; i < kParts; ++i) words[i][0] = words[i][1] = make_uint4(0, 0, 0, 0);
  auto const load = [&](int first) {
    int const weight_step = first + step_of(weight_part);
    if (weight_scales != nullptr && weight_step < unit.k_count) weight_scale = __ldg(weight_scales + weight_step);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      int const k = first + step_of(i);
      if (k >= unit.k_count) return;
      if (row[i] >= 0) {
        uint4 const* const from = static_cast<uint4 const*>(p.align.x) + row[i] + k * 16;
        words[i][0] = __ldcg(from);
        words[i][1] = __ldcg(from + 8);
      }
    }
  };
  load(own);
  for (int first = own; first < unit.k_count; first += stride) {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      int const k = first + step_of(i);
      if (k >= unit.k_count) break;
      std::uint32_t const word[8] = {words[i][0].x, words[i][0].y, words[i][0].z, words[i][0].w,
                                     words[i][1].x, words[i][1].y, words[i][1].z, words[i][1].w};
      std::uint32_t code[4];
      float const scale = detail::quantize_group(word, code);
      RingState<Stages> at = ring;
      at.advance(k);
      wait_parity(memory.empty(at.stage), at.parity ^ 1u);
      std::uint32_t const target = smem_address(memory.stage(at.stage) + kWeightBytes);
      std::uint32_t const scales = target + MaxRows * 128;
      if (row[i] >= 0) {
        int const r = row_of(i);
        std::uint32_t const to = target + static_cast<std::uint32_t>(r * 128 + (((chunk >> 1) ^ (r & 7)) << 4) + (chunk & 1) * 8);
        store_shared_8(to, code[0], code[1]);
        store_shared_8(to ^ 64u, code[2], code[3]);
        if (chunk == 0) store_shared(scales + static_cast<std::uint32_t>(r) * 4, scale);
      }
      if (weight_part == i && (i & (parts - 1)) == 0) store_shared(scales + 512 + static_cast<std::uint32_t>(lane & 1) * 4, weight_scale);
      if ((i & (parts - 1)) == parts - 1) {
        ptx::fence_proxy_async(ptx::space_shared);  // a memory barrier: no loads are in flight here that it would wait for
        arrive(memory.full(at.stage), kGatherWarps);
      }
    }
    load(first + stride);
  }
  ring.advance(unit.k_count);
  own = (own + (kGatherWarps - 1) * unit.k_count) % kGatherWarps;
}

}  // namespace moe::hopper
