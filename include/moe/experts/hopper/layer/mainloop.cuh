// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/mainloop.cuh: the products of the consumer warpgroups. Operands are swapped: 128 weight rows per warpgroup are the M
// side of wgmma and the N rows of activations are its N side, N from 8 to 160. A tile of more than 64 rows wastes at most seven of them
// (int8: fifteen, since its products have N in steps of 16).
#pragma once

#include <cstdint>

#include "moe/experts/hopper/layer/layer_params.cuh"

namespace moe::hopper {

/// Arrivals that release a stage: one per consumer warp of each CTA of the cluster, or one per lane.
template <int Cluster, bool EveryLane>
inline constexpr int kReleases = EveryLane ? kConsumerThreads : kConsumerThreads / 32 * Cluster;

/// Releases a stage to the loaders of every CTA of the cluster. Lane 0 arrives for its warp if only lane 0 and the products have read what
/// cp.async wrote to the stage; otherwise every lane arrives.
template <int Cluster, bool EveryLane, class Memory>
__device__ inline void release_stage(Memory const& memory, int stage) {
  static_assert(!EveryLane || Cluster == 1);
  if (!EveryLane && (thread_index() & 31) != 0) return;
  if constexpr (Cluster == 1) {
    arrive(memory.empty(stage));
  } else {
#pragma unroll
    for (int rank = 0; rank < Cluster; ++rank) arrive_cluster(memory.empty(stage), static_cast<std::uint32_t>(rank));
  }
}

/// Skips a unit in which this CTA has no rows.
template <int Stages, int Cluster, bool EveryLane, class Memory>
__device__ inline void skip(Memory const& memory, RingState<Stages>& ring, int k_count) {
  for (int k = 0; k < k_count; ++k) {
    wait_parity(memory.full(ring.stage), ring.parity);
    release_stage<Cluster, EveryLane>(memory, ring.stage);
    ring.advance();
  }
}

/// total[h] = rows 64 group + [0, 64) of weight box h (128 rows each) times the N activation rows, over the unit's part of K.
template <Scheme S, int Stages, int MaxRows, int Cluster, int N, class Memory>
__device__ inline void multiply(Memory const& memory, RingState<Stages>& ring, int group, int k_count,
                                typename SchemeTraits<S>::Sum (&total)[2][N / 2]) {
  using Traits = SchemeTraits<S>;
  using Mma = typename ProductOf<S, N>::type;
  // A register that is read before it is written counts as live everywhere, so the sums are set to zero first.
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    total[0][i] = 0;
    total[1][i] = 0;
  }
  using Layout = SmemLayout<S, Stages, MaxRows>;
  std::uint32_t const base = descriptor_low(smem_address(memory.stage(0)));
  std::uint32_t const group_offset = uniform(static_cast<std::uint32_t>(group * (8192 / 16)));
  if constexpr (!Traits::kFp8) {
    int previous = -1;
    for (int k = 0; k < k_count; ++k) {
      wait_parity(memory.full(ring.stage), ring.parity);
      ptx::fence_proxy_async(ptx::space_shared);  // rows were written by cp.async, which is not in the async proxy
      std::uint32_t const stage = uniform(base + static_cast<std::uint32_t>(ring.stage * (Layout::kStageBytes / 16)));
      std::uint32_t const a0 = stage + group_offset;
      std::uint32_t const a1 = a0 + kWeightBytes / 32;
      std::uint32_t const b = stage + kWeightBytes / 16;
      pin(total[0]);
      pin(total[1]);
      wgmma_arrive();
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        Mma::run(total[0], descriptor(a0 + 2 * step), descriptor(b + 2 * step), 1);
        Mma::run(total[1], descriptor(a1 + 2 * step), descriptor(b + 2 * step), 1);
      }
      wgmma_commit();
      pin(total[0]);
      pin(total[1]);
      wgmma_wait<1>();
      if (previous >= 0) release_stage<Cluster, false>(memory, previous);
      previous = ring.stage;
      ring.advance();
    }
    wgmma_wait<0>();
    pin(total[0]);
    pin(total[1]);
    release_stage<Cluster, false>(memory, previous);
  } else {
    // The two warpgroups take turns: one multiplies while the other adds its products, with the scales of their blocks, to `total`.
    float part[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) part[i] = 0.0F;
    for (int k = 0; k < k_count; ++k) {
      wait_parity(memory.full(ring.stage), ring.parity);
      ptx::fence_proxy_async(ptx::space_shared);
      std::uint32_t const stage = smem_address(memory.stage(ring.stage));
      std::uint32_t const low = uniform(base + static_cast<std::uint32_t>(ring.stage * (Layout::kStageBytes / 16)));
      // Scales first: once the products run, they use most of shared memory's bandwidth.
      [[maybe_unused]] float2 row_scale[N / 8];
      [[maybe_unused]] float2 weight_scale;  // of the first box, of the second
      if constexpr (Traits::kBlock) {
        std::uint32_t const scales = stage + kWeightBytes + MaxRows * 128;
        weight_scale = load_shared_2(scales + 512);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          row_scale[j] = load_shared_2(scales + static_cast<std::uint32_t>(8 * (thread_index() & 3) + 32 * j));
        }
      }
      std::uint32_t const b = low + kWeightBytes / 16;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t const a = low + group_offset + static_cast<std::uint32_t>(half * (kWeightBytes / 32));
        pin(part);
        wgmma_arrive();
#pragma unroll
        for (int step = 0; step < 4; ++step) Mma::run(part, descriptor(a + 2 * step), descriptor(b + 2 * step), step > 0 ? 1 : 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(part);
        if (half == 1) release_stage<Cluster, Traits::kBlock>(memory, ring.stage);  // every lane has read its scales
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          if constexpr (Traits::kBlock) {
            float const s0 = row_scale[j].x * (half == 0 ? weight_scale.x : weight_scale.y);
            float const s1 = row_scale[j].y * (half == 0 ? weight_scale.x : weight_scale.y);
            total[half][4 * j + 0] = fmaf(part[4 * j + 0], s0, total[half][4 * j + 0]);
            total[half][4 * j + 1] = fmaf(part[4 * j + 1], s1, total[half][4 * j + 1]);
            total[half][4 * j + 2] = fmaf(part[4 * j + 2], s0, total[half][4 * j + 2]);
            total[half][4 * j + 3] = fmaf(part[4 * j + 3], s1, total[half][4 * j + 3]);
          } else {
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; ++i) total[half][i] += part[i];
          }
        }
      }
      ring.advance();
    }
  }
}

}  // namespace moe::hopper
