// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/mainloop.cuh: the products of the consumer warpgroups: bricks of e2m1 codes, converted to e4m3 in registers, times
// rows of e4m3 activations in shared memory, promoted to float32 every 128 of K.
#pragma once

#include <cstdint>

#include "moe/core/ptx/permute.cuh"
#include "moe/core/ptx/shared_memory.cuh"
#include "moe/core/ptx/wgmma_registers.cuh"
#include "moe/experts/hopper/common/wait.cuh"
#include "moe/experts/hopper/w4/a8/codes.hpp"
#include "moe/experts/hopper/w4/a8/layout.cuh"
#include "moe/experts/hopper/w4/mainloop.cuh"

namespace moe::hopper::w4a8 {

/// 2^(byte - 127).
__device__ inline float power_of_two(std::uint32_t byte) { return __uint_as_float(byte == 0 ? 0x00400000u : byte << 23); }

/// A thread's part of one brick.
struct BrickRegisters {
  uint4 codes[2];
  std::uint32_t scales[2];  ///< of rows r and r + 8
  bool wide;                ///< the same in all threads

  __device__ void load(std::uint32_t brick, int thread) {
    codes[0] = ptx::load_shared_words(brick + static_cast<std::uint32_t>(thread) * 16);
    codes[1] = ptx::load_shared_words(brick + kCodeBytes / 2 + static_cast<std::uint32_t>(thread) * 16);
    std::uint32_t const row = static_cast<std::uint32_t>(16 * (thread >> 5) + ((thread & 31) >> 2));
    scales[0] = ptx::load_shared_word(brick + kCodeBytes + 4 * row);
    scales[1] = ptx::load_shared_word(brick + kCodeBytes + 4 * row + 32);
    wide = __shfl_sync(0xFFFFFFFFu, ptx::load_shared_word(brick + kCodeBytes + kScaleBytes), 0) != 0;
  }

  /// The A fragments of step q; `table`: address of the tables in shared memory.
  __device__ void convert(int q, std::uint32_t table, std::uint32_t* a) const {
    uint4 const& four = codes[q >> 1];
    std::uint32_t const word[2] = {(q & 1) != 0 ? four.z : four.x, (q & 1) != 0 ? four.w : four.y};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::uint32_t const index = wide ? static_cast<std::uint32_t>(-kLeastShift) : (scales[half] >> (4 * q)) & 15u;
      std::uint32_t const low = ptx::load_shared_word(table + 8 * index);
      std::uint32_t const high = ptx::load_shared_word(table + 8 * index + 4);
      std::uint32_t const select = word[half] & 0x77777777u;
      a[half] = ptx::permute(low, high, select) | (word[half] & 0x80808080u);
      a[2 + half] = ptx::permute(low, high, select >> 16) | ((word[half] << 4) & 0x80808080u);
    }
  }
};

/// total[b] += the warpgroup's brick rows b times the N activation rows, over the unit's part of K.
template <class L, int N>
__device__ inline void multiply(Memory<L> const& memory, RingState<L::kStages>& ring, int group, w4::Span const& span,
                                float (&total)[L::kBricks][N / 2]) {
  int const thread = thread_index() & 127;
  std::uint32_t const table = smem_address(memory.table());
  float part[N / 2];
#pragma unroll
  for (float& v : part) v = 0.0F;
  auto const products = [&]<int First, int Steps>(std::uint32_t rows, std::uint32_t const(&a)[16]) {
    pin(part);
    wgmma_arrive();
#pragma unroll
    for (int q = First; q < First + Steps; ++q)
      WgmmaE4m3FromRegisters<N>::run(part, a + 4 * q, rows + static_cast<std::uint32_t>(2 * q), q == First ? 0 : 1);
    wgmma_commit();
    pin(part);
    wgmma_wait<0>();
    pin(part);
  };
  for (int k = 0; k < span.k_count; k += L::kDepth) {
    wait_parity(memory.full(ring.stage), ring.parity);
    ptx::fence_proxy_async(ptx::space_shared);  // rows were written by cp.async, which is not in the async proxy
    std::uint32_t const rows = __shfl_sync(0xFFFFFFFFu, descriptor_low(smem_address(memory.rows(ring.stage))), 0);
    std::uint32_t const bricks = smem_address(memory.bricks(ring.stage)) + static_cast<std::uint32_t>(group * L::kBricks * L::kBrickBytes);
    std::uint32_t const step_bytes = static_cast<std::uint32_t>(span.side * L::kBrickBytes);
    int const deep = min(L::kDepth, span.k_count - k);
    for (int d = 0; d < deep; ++d) {
      float const* const x_scale = memory.row_scales(ring.stage, d) + 8 * (thread & 3) + ((span.k_begin + k + d) & 3);
      std::uint32_t const rows_at = rows + static_cast<std::uint32_t>(d * (L::kRowBytes / 16));
#pragma unroll
      for (int b = 0; b < L::kBricks; ++b) {
        auto const add = [&](float scale, float scale_8) {
#pragma unroll
          for (int j = 0; j < N / 8; ++j) {
            float const x0 = x_scale[32 * j];
            float const x1 = x_scale[32 * j + 4];
            total[b][4 * j] = fmaf(part[4 * j] * x0, scale, total[b][4 * j]);
            total[b][4 * j + 1] = fmaf(part[4 * j + 1] * x1, scale, total[b][4 * j + 1]);
            total[b][4 * j + 2] = fmaf(part[4 * j + 2] * x0, scale_8, total[b][4 * j + 2]);
            total[b][4 * j + 3] = fmaf(part[4 * j + 3] * x1, scale_8, total[b][4 * j + 3]);
          }
        };
        BrickRegisters brick;
        brick.load(bricks + static_cast<std::uint32_t>(d) * step_bytes + static_cast<std::uint32_t>(b * L::kBrickBytes), thread);
        std::uint32_t a[16];
#pragma unroll
        for (int q = 0; q < 4; ++q) brick.convert(q, table, a + 4 * q);
        if (!brick.wide) {
          products.template operator()<0, 4>(rows_at, a);
          add(power_of_two((brick.scales[0] >> 16) & 255u), power_of_two((brick.scales[1] >> 16) & 255u));
        } else {
          auto const step = [&]<int Q>() {
            products.template operator()<Q, 1>(rows_at, a);
            add(power_of_two((brick.scales[0] >> (8 * Q)) & 255u), power_of_two((brick.scales[1] >> (8 * Q)) & 255u));
          };
          step.template operator()<0>();
          step.template operator()<1>();
          step.template operator()<2>();
          step.template operator()<3>();
        }
      }
    }
    w4::release(memory, ring.stage);
    ring.advance();
  }
}

}  // namespace moe::hopper::w4a8
