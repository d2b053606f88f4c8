// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/arriving_rows.cuh: rows of codes that are still coming from other ranks, copied into the sorted order expert by
// expert while the products of the experts before run.
//
// A warp that copies waits for the sort, whose CTAs were placed before its own, and for rows that kernels already running bring. It never
// waits for the products, so their waits for its copies end.
#pragma once

#include <cstdint>

#include "moe/comm/arrivals.cuh"
#include "moe/experts/hopper/common/align_args.cuh"
#include "moe/experts/hopper/common/wait.cuh"

namespace moe::hopper {

/// Clusters of the aligning kernel that copy arriving rows. They hold their multiprocessors until the last row has come, and the products
/// get the others.
inline constexpr int kArrivingClusters = 2;

namespace detail {

/// One warp: the codes and scales of the row at `position` of the sorted order. Peers wrote them while this kernel ran, so that no load may
/// go through the read-only cache. A function of its own and few chunks at a time, since a thread of the aligning kernel has 64 registers.
__device__ __noinline__ inline void copy_arrived_row(AlignArgs const& a, int position) {
  constexpr int kBatch = 4;
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const chunks = a.hidden / 16;
  int const blocks = a.hidden / 128;
  long long const token = a.per_token.quotient(a.sorted_rows[position].slot);
  auto const* const from = reinterpret_cast<uint4 const*>(static_cast<char const*>(a.x) + token * a.x_row_bytes);
  auto* const to = reinterpret_cast<uint4*>(a.x_codes) + static_cast<long long>(position) * chunks;
  for (int base = lane; base < chunks; base += 32 * kBatch) {
    uint4 held[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + 32 * i < chunks) held[i] = __ldcg(from + base + 32 * i);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + 32 * i < chunks) to[base + 32 * i] = held[i];
    }
  }
  float const* const scales = a.given_scales + token * a.given_scale_stride;
  for (int block = lane; block < blocks; block += 32) {
    a.x_scales[static_cast<long long>(block) * a.scale_stride + position] = __ldcg(scales + block);
  }
}

/// The rows of token tile `tile`.
__device__ inline int rows_of_tile(TokenTile const& entry, int tile) {
  return min(entry.rows_per_tile, entry.expert_rows - (tile - entry.first_tile) * entry.rows_per_tile);
}

/// Copies the rows of all token tiles, four rows a warp at a time, in the order in which the products need them, and counts them in
/// `copied`. The parts of a tile are spread over the workers.
template <int Threads>
__device__ inline void copy_arriving_rows(AlignArgs const& a, int worker, int workers) {
  constexpr int kWarps = Threads / 32;
  constexpr int kRows = 4;
  if (threadIdx.x == 0) wait_counter(a.sorted, kAlignCluster);
  __syncthreads();
  int const parts = (a.plan.tile_rows + kRows - 1) / kRows;
  int const tiles = a.control->token_tiles;
  int arrived = -1;  // the expert whose rows this warp knows to be complete
  for (int part = (static_cast<int>(threadIdx.x) >> 5) * workers + worker; part < tiles * parts; part += workers * kWarps) {
    int const tile = part / parts;
    int const first = (part - tile * parts) * kRows;
    // A warp without rows here must not wait: nothing waits for its end, so a peer's next dispatch may change the counts under its wait.
    if (first >= rows_of_tile(a.plan.tiles[tile], tile)) continue;
    if (int const expert = a.plan.tiles[tile].expert; expert != arrived) {  // few registers are live across this call
      comm::detail::wait_arrivals(a.arrivals, expert);
      arrived = expert;
    }
    TokenTile const entry = a.plan.tiles[tile];
    int const before = (tile - entry.first_tile) * entry.rows_per_tile;
    int const rows = rows_of_tile(entry, tile);
    int const last = min(first + kRows, rows);
#pragma unroll 1
    for (int r = first; r < last; ++r) copy_arrived_row(a, entry.expert_row + before + r);
    __syncwarp();
    if ((threadIdx.x & 31) == 0) {
      fence_device();
      atomicAdd(a.copied + tile, last - first);
    }
    __syncwarp();
  }
}

}  // namespace detail

}  // namespace moe::hopper
