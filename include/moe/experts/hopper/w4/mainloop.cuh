// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/mainloop.cuh: the products of the consumer warpgroups of the layer kernel: bricks of codes, converted in
// registers, times rows of activations in shared memory.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "moe/core/ptx/mma.cuh"
#include "moe/core/ptx/wgmma_registers.cuh"
#include "moe/experts/hopper/common/wait.cuh"
#include "moe/experts/hopper/w4/brick_registers.cuh"
#include "moe/experts/hopper/w4/layout.cuh"

namespace moe::hopper::w4 {

/// Every lane arrives, which releases the stage that it has read.
template <class L>
__device__ inline void release(Memory<L> const& memory, int stage) {
  arrive(memory.empty(stage));
  __syncwarp();
}

/// Skips a unit in which this warpgroup has no weight rows.
template <class L>
__device__ inline void skip(Memory<L> const& memory, RingState<L::kStages>& ring, int k_count) {
  for (int k = 0; k < k_count; k += L::kDepth) {
    wait_parity(memory.full(ring.stage), ring.parity);
    release(memory, ring.stage);
    ring.advance();
  }
}

/// total += the warpgroup's brick rows times 8 or 16 activation rows, over the unit's part of K, by products of single warps: for so few
/// rows they take fewer cycles and instructions than products of a warpgroup.
template <W4Scheme S, class L, int N>
__device__ inline void multiply_few(Memory<L> const& memory, RingState<L::kStages>& ring, int group, Span const& span,
                                    float (&total)[N / 2]) {
  static_assert(N == 8 || N == 16);
  constexpr bool kScaled = scales_sums(S);
  constexpr int kLoads = N / 4;  // of four matrices, for a brick: with 8 rows two steps at a time, else one
  int const thread = thread_index() & 127;
  int const lane = thread & 31;
  int const row = N == 8 ? lane & 7 : (lane & 7) + 8 * (lane >> 4);
  int const chunk = N == 8 ? lane >> 3 : (lane >> 3) & 1;
  std::uint32_t const lane_rows = static_cast<std::uint32_t>(row * 128 + ((chunk ^ (row & 7)) << 4));
  auto const compute = [&](BrickRegisters<S> const& brick, std::uint32_t rows) {
    std::uint32_t b[kLoads][4];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) load_matrix_x4(b[i], rows ^ static_cast<std::uint32_t>(i * (128 / kLoads)));
    [[maybe_unused]] float part[kScaled ? N / 2 : 1] = {};
    std::uint32_t a[16];
    brick.template convert<0, 4>(a);
    constexpr int kSteps = 4 / sum_groups(S);  // whose sums have one scale
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      if constexpr (kScaled) {
        if (q > 0 && q % kSteps == 0) {
#pragma unroll
          for (float& v : part) v = 0.0F;
        }
      }
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        std::uint32_t const(&from)[4] = b[N == 8 ? q / 2 : q];
        int const at = N == 8 ? 2 * (q & 1) : 2 * j;
        std::uint32_t const values[4] = {a[4 * q], a[4 * q + 1], a[4 * q + 2], a[4 * q + 3]};
        mma_bf16((kScaled ? part : total) + 4 * j, values, from[at], from[at + 1]);
      }
      if constexpr (kScaled) {
        if (q % kSteps != kSteps - 1) continue;
        float2 const scale = brick.sum_scales(q / kSteps);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          total[4 * j] = fmaf(part[4 * j], scale.x, total[4 * j]);
          total[4 * j + 1] = fmaf(part[4 * j + 1], scale.x, total[4 * j + 1]);
          total[4 * j + 2] = fmaf(part[4 * j + 2], scale.y, total[4 * j + 2]);
          total[4 * j + 3] = fmaf(part[4 * j + 3], scale.y, total[4 * j + 3]);
        }
      }
    }
  };
  for (int k = 0; k < span.k_count; k += L::kDepth) {
    wait_parity(memory.full(ring.stage), ring.parity);
    std::uint32_t const rows = smem_address(memory.rows(ring.stage)) + lane_rows;
    std::uint32_t const bricks = smem_address(memory.bricks(ring.stage)) + static_cast<std::uint32_t>(group * L::kBrickBytes);
    std::uint32_t const step_bytes = static_cast<std::uint32_t>(span.side * L::kBrickBytes);
    int const deep = min(L::kDepth, span.k_count - k);
    if (deep == L::kDepth) {
      BrickRegisters<S> brick[2];
      brick[0].load(bricks, thread);
#pragma unroll
      for (int d = 0; d < L::kDepth; ++d) {
        if (d + 1 < L::kDepth) brick[(d + 1) & 1].load(bricks + static_cast<std::uint32_t>(d + 1) * step_bytes, thread);
        compute(brick[d & 1], rows + static_cast<std::uint32_t>(d * L::kRowBytes));
      }
    } else {
      for (int d = 0; d < deep; ++d) {
        BrickRegisters<S> brick;
        brick.load(bricks + static_cast<std::uint32_t>(d) * step_bytes, thread);
        compute(brick, rows + static_cast<std::uint32_t>(d * L::kRowBytes));
      }
    }
    release(memory, ring.stage);
    ring.advance();
  }
}

/// total[b] += the warpgroup's brick rows b times the N activation rows, over the unit's part of K. A piece is half a brick: two steps of
/// 16. Within a stage, a piece is converted while the products of the one before it run. Scaled sums have two sets of registers, so that
/// one is added to `total` while products run into the other, or one where two do not fit.
template <W4Scheme S, class L, int N>
__device__ inline void multiply(Memory<L> const& memory, RingState<L::kStages>& ring, int group, Span const& span,
                                float (&total)[L::kBricks][N / 2]) {
  constexpr bool kScaled = scales_sums(S);
  constexpr bool kTwoGroups = kScaled && sum_groups(S) == 2;  // a group of scaled sums is a piece, else a brick
  int const thread = thread_index() & 127;
  constexpr int kParts = kTwoGroups && L::kBricks * N > 128 ? 1 : 2;
  [[maybe_unused]] float part[kParts][kScaled ? N / 2 : 1];
  [[maybe_unused]] std::uint32_t scales[2];  // of the parts
  if constexpr (kScaled) {
#pragma unroll
    for (int i = 0; i < kParts * N / 2; ++i) part[i % kParts][i / kParts] = 0.0F;
  }
  auto const add = [&](int slot, float (&sum)[N / 2]) {
    if constexpr (kScaled) {
      float2 const scale = __half22float2(*reinterpret_cast<__half2 const*>(&scales[slot]));
      pin(part[slot]);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        sum[4 * j] = fmaf(part[slot][4 * j], scale.x, sum[4 * j]);
        sum[4 * j + 1] = fmaf(part[slot][4 * j + 1], scale.x, sum[4 * j + 1]);
        sum[4 * j + 2] = fmaf(part[slot][4 * j + 2], scale.y, sum[4 * j + 2]);
        sum[4 * j + 3] = fmaf(part[slot][4 * j + 3], scale.y, sum[4 * j + 3]);
      }
    }
  };
  std::uint32_t const step_bytes = static_cast<std::uint32_t>(span.side * L::kBrickBytes);
  // The products of `Depth` bricks along K, with those addresses of their rows and bricks.
  auto const run_bricks = [&]<int Depth>(std::uint32_t rows, std::uint32_t bricks) {
    constexpr int kPieces = 2 * Depth * L::kBricks;
    std::uint32_t a[2][8];  // the fragments of two pieces
    BrickRegisters<S> brick;
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      int const half = piece % 2;
      int const deep = piece / 2 / L::kBricks;
      int const b = piece / 2 % L::kBricks;
      int const slot = (kTwoGroups ? half : piece / 2 % 2) % kParts;
      bool const begins = kTwoGroups || half == 0;  // a group
      if (half == 0) {
        brick.load(bricks + static_cast<std::uint32_t>(deep) * step_bytes + static_cast<std::uint32_t>(b * L::kBrickBytes), thread);
        brick.template convert<0, 2>(a[0]);
      } else {
        brick.template convert<2, 2>(a[1]);
      }
      float (&sum)[N / 2] = [&]() -> float (&)[N / 2] {
        if constexpr (kScaled) {
          return part[slot];
        } else {
          return total[b];
        }
      }();
      pin(sum);
      wgmma_arrive();
#pragma unroll
      for (int q = 0; q < 2; ++q) {
        std::uint32_t const at = rows + static_cast<std::uint32_t>(deep * (L::kRowBytes / 16) + 4 * half + 2 * q);
        WgmmaFromRegisters<N>::run(sum, a[half] + 4 * q, at, kScaled && begins && q == 0 ? 0 : 1);
      }
      wgmma_commit();
      pin(sum);
      if constexpr (kParts == 2) {
        if (piece > 0) {
          wgmma_wait<1>();
          if (begins) add(1 - slot, total[(piece - 1) / 2 % L::kBricks]);
        }
      }
      if constexpr (kScaled) {
        if (begins) scales[slot] = brick.scales[kTwoGroups ? half : 0];
      }
      if constexpr (kParts == 1) {
        if (piece + 1 < kPieces) {
          wgmma_wait<0>();
          add(0, total[b]);
        }
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < L::kBricks; ++b) pin(total[b]);
    add((kTwoGroups ? 1 : (kPieces - 1) / 2) % kParts, total[L::kBricks - 1]);
  };
  for (int k = 0; k < span.k_count; k += L::kDepth) {
    wait_parity(memory.full(ring.stage), ring.parity);
    ptx::fence_proxy_async(ptx::space_shared);  // rows were written by cp.async, which is not in the async proxy
    // Broadcast, so that the compiler knows that all lanes have the same value and keeps descriptors in uniform registers.
    std::uint32_t const rows = __shfl_sync(0xFFFFFFFFu, descriptor_low(smem_address(memory.rows(ring.stage))), 0);
    std::uint32_t const bricks = smem_address(memory.bricks(ring.stage)) + static_cast<std::uint32_t>(group * L::kBricks * L::kBrickBytes);
    int const deep = span.k_count - k;
    if (deep >= L::kDepth) {
      run_bricks.template operator()<L::kDepth>(rows, bricks);
    } else {
      for (int d = 0; d < deep; ++d)
        run_bricks.template operator()<1>(rows + static_cast<std::uint32_t>(d * (L::kRowBytes / 16)),
                                          bricks + static_cast<std::uint32_t>(d) * step_bytes);
    }
    release(memory, ring.stage);
    ring.advance();
  }
}

}  // namespace moe::hopper::w4
