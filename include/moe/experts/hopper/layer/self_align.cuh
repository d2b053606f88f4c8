// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/self_align.cuh: the aligning kernel's work by one CTA of the layer kernel, for at most kSelfAlignSlots slots in the
// standard format. Every CTA does all of it, writes the same values to the same addresses, and reads only its own writes. So no kernel runs
// before and no CTA waits for another.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/common/align_args.cuh"
#include "moe/experts/hopper/common/slots.cuh"

namespace moe::hopper {

inline constexpr int kSelfAlignSlots = 128;

/// One warp plans for at most 32 slots: it finds positions by comparing all pairs of lanes, without a histogram. All lanes return the plan.
__device__ inline Control self_align_warp(AlignArgs const& a) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const slots = tokens * a.topk;
  int id = lane < slots ? slot_value(a.ids, lane, a.topk, a.id_gap) : -1;
  float const weight = lane < slots ? slot_value(a.weights, lane, a.topk, a.weight_gap) : 0.0F;
  bool const valid = static_cast<unsigned>(id) < static_cast<unsigned>(a.num_experts);
  if (!valid) id = 0x7FFFFFFF;
  unsigned const peers = __match_any_sync(0xFFFFFFFFu, id);
  int const earlier = __popc(peers & ((1u << lane) - 1u));
  int const rows = __popc(peers);
  int const tiles = valid ? (rows + a.plan.tile_rows - 1) / a.plan.tile_rows : 0;
  int first_row = 0;
  int first_tile = 0;
#pragma unroll
  for (int other = 0; other < 32; ++other) {
    int const other_id = __shfl_sync(0xFFFFFFFFu, id, other);
    int const other_tiles = __shfl_sync(0xFFFFFFFFu, earlier == 0 ? tiles : 0, other);
    if (other_id < id) {
      ++first_row;
      first_tile += other_tiles;
    }
  }
  Control control{};
  control.rows = __popc(__ballot_sync(0xFFFFFFFFu, valid));
  control.missing = slots - control.rows;
  control.token_tiles = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, earlier == 0 ? static_cast<unsigned>(tiles) : 0u));
  if (valid) {
    a.sorted_rows[first_row + earlier] = SortedRow{lane, weight};
    if (earlier == 0) {
      int const step = a.plan.row_step;
      int const per_tile = ((rows + tiles - 1) / tiles + step - 1) / step * step;
      for (int t = 0; t < tiles; ++t) a.plan.tiles[first_tile + t] = TokenTile{id, first_row, rows, first_tile, tiles, per_tile, {0, 0}};
    }
  }
  detail::plan_units(a.plan, control);
  return control;
}

/// The same by all threads of the CTA, with a histogram in shared memory.
template <int Threads>
__device__ inline Control self_align(AlignArgs const& a, int* shared_ids, int* counts, int* scratch) {
  int const thread = static_cast<int>(threadIdx.x);
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const slots = tokens * a.topk;
  constexpr int kOwn = (kSelfAlignSlots + Threads - 1) / Threads;
  int id[kOwn];
  float weight[kOwn];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const slot = thread + i * Threads;
    id[i] = slot < slots ? slot_value(a.ids, slot, a.topk, a.id_gap) : -1;
    weight[i] = slot < slots ? slot_value(a.weights, slot, a.topk, a.weight_gap) : 0.0F;
  }
  if (thread < a.num_experts) counts[thread] = 0;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const slot = thread + i * Threads;
    if (static_cast<unsigned>(id[i]) >= static_cast<unsigned>(a.num_experts)) id[i] = -1;
    if (slot < kSelfAlignSlots) shared_ids[slot] = id[i];
    if (id[i] >= 0) atomicAdd(&counts[id[i]], 1);
  }
  __syncthreads();
  int first_row = 0;
  int const rows = thread < a.num_experts ? counts[thread] : 0;
  Control const control = detail::plan_tiles<Threads>(a.plan, rows, slots, true, scratch, first_row);
  if (thread < a.num_experts) counts[thread] = first_row;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    int const slot = thread + i * Threads;
    if (id[i] < 0) continue;
    int earlier = 0;
    for (int other = 0; other < slot; ++other) earlier += shared_ids[other] == id[i] ? 1 : 0;
    a.sorted_rows[counts[id[i]] + earlier] = SortedRow{slot, weight[i]};
  }
  __syncthreads();
  return control;
}

}  // namespace moe::hopper
