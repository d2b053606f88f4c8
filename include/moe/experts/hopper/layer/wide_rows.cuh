// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/wide_rows.cuh: accumulators to memory as they are, 32 bits each: rows of the intermediate that wait for their scale,
// and the parts of K.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/experts/hopper/layer/layer_params.cuh"

namespace moe::hopper {

/// Writes 64 features of N rows as float32, each thread its own elements: the eight lanes of a row write whole sectors. `values` as in
/// store_rows; `to`: feature `feature` of the first row. Features from `width` on are not stored.
template <int N, class Values>
__device__ inline void store_wide_rows(Values values, float* to, int group, int rows, int width, int feature) {
  int const lane = thread_index() & 31;
  int const own = 16 * ((thread_index() & 127) >> 5) + (lane >> 2);
  bool const low = feature + own < width;
  bool const high = feature + own + 8 < width;
  float* at = to + static_cast<long long>(2 * (lane & 3)) * width + own;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    int const row = 8 * j + 2 * (lane & 3);
    float4 const v = values(j);
    if (row < rows) {
      if (low) __stcg(at, v.x);
      if (high) __stcg(at + 8, v.z);
    }
    if (row + 1 < rows) {
      if (low) __stcg(at + width, v.y);
      if (high) __stcg(at + width + 8, v.w);
    }
    at += 8LL * width;
  }
  group_barrier(group);
}

/// Adds the parts of K in order. Each warpgroup writes its part; the last to arrive sums all parts, in an order that does not depend on the
/// arrivals. Returns false in the others, which have then finished the unit. With `Joint` both warpgroups of a CTA get the same answer, as
/// an epilogue that needs both requires.
template <int N, bool Joint, class Sum>
__device__ inline bool sum_splits(LayerParams const& p, Unit const& unit, int group, int* flags, Sum (&total)[2][N / 2]) {
  using Four = std::conditional_t<std::is_same_v<Sum, int>, int4, float4>;
  int const thread = thread_index() & 127;
  long long const part_floats = 128LL * p.align.plan.tile_rows;
  float* const parts = p.partials + (static_cast<long long>(unit.tile) * unit.splits * 2 + group) * part_floats;
  Four* const mine = reinterpret_cast<Four*>(parts + 2LL * unit.split * part_floats) + thread;
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    int const at = 4 * (i % (N / 8));
    Sum const(&v)[N / 2] = total[i / (N / 8)];
    __stcg(mine + i * 128, Four{v[at], v[at + 1], v[at + 2], v[at + 3]});
  }
  auto const barrier = [group] {
    if constexpr (Joint) {
      joint_barrier<2>();
    } else {
      group_barrier(group);
    }
  };
  int const counter = Joint ? 0 : group;
  barrier();
  if (thread == 0 && (!Joint || group == 0)) {
    fence_device();
    int const before = atomicAdd(p.align.counters + p.align.max_tiles + unit.phase * p.align.plan.max_units + 2 * unit.tile + counter, 1);
    fence_device();
    flags[counter] = before;
  }
  barrier();
  int const before = flags[counter];
  barrier();
  if (before + 1 != unit.splits) return false;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    total[0][i] = 0;
    total[1][i] = 0;
  }
  for (int split = 0; split < unit.splits; ++split) {
    Four const* const from = reinterpret_cast<Four const*>(parts + 2LL * split * part_floats) + thread;
#pragma unroll
    for (int i = 0; i < N / 4; ++i) {
      Four const v = __ldcg(from + i * 128);
      int const at = 4 * (i % (N / 8));
      Sum(&t)[N / 2] = total[i / (N / 8)];
      t[at] += v.x;
      t[at + 1] += v.y;
      t[at + 2] += v.z;
      t[at + 3] += v.w;
    }
  }
  return true;
}

}  // namespace moe::hopper
