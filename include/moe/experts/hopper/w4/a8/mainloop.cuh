// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/mainloop.cuh: the products of the consumer warpgroups: bricks of e2m1 codes, converted to e4m3 in registers, times
// rows of e4m3 activations in shared memory, promoted to float32 every 128 of K. While the products of a brick run, the next is converted.
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

/// 2^(byte - 127); that of 0 is subnormal.
__device__ inline float power_of_two(std::uint32_t byte) { return __uint_as_float(max(byte << 23, 0x00400000u)); }

/// The scales of a thread's rows r and r + 8 of the brick at that address in shared memory.
struct ScaleWords {
  std::uint32_t row;
  std::uint32_t row_8;
  __device__ ScaleWords(std::uint32_t brick, int thread) {
    std::uint32_t const at = brick + kCodeBytes + 4 * static_cast<std::uint32_t>(16 * (thread >> 5) + ((thread & 31) >> 2));
    row = ptx::load_shared_word(at);
    row_8 = ptx::load_shared_word(at + 32);
  }
  /// Byte i of both.
  template <int I>
  __device__ std::uint32_t bytes() const {
    return ptx::permute(row, row_8, I | (4 + I) << 4);
  }
};

/// A thread's part of one brick, converted: the A fragments of its four steps and, in the lower bytes, the factors of rows r and r + 8.
struct BrickOperand {
  std::uint32_t a[16];
  std::uint32_t factors;
  std::uint32_t kind;  ///< the same in all threads

  /// Reads the brick at that address in shared memory.
  __device__ void convert(std::uint32_t brick, int thread) {
    ScaleWords const words(brick, thread);
    std::uint32_t const scales[2] = {words.row, words.row_8};
    factors = words.bytes<2>();
    kind = __shfl_sync(0xFFFFFFFFu, ptx::load_shared_word(brick + kCodeBytes + kScaleBytes), 0);
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {  // of steps: all at once would take too many registers
      uint4 const codes = ptx::load_shared_words(brick + static_cast<std::uint32_t>(pair * (kCodeBytes / 2) + thread * 16));
      std::uint32_t const word[4] = {codes.x, codes.y, codes.z, codes.w};
      Magnitudes table[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) table[i] = normal_magnitudes(scale_index(scales[i & 1], 2 * pair + (i >> 1)));
      if (kind != kNormalBrick) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          table[i] = magnitudes(kind == kWideBrick ? -kLeastShift : scale_index(scales[i & 1], 2 * pair + (i >> 1)));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t const select = word[i] & 0x77777777u;
        std::uint32_t* const to = a + 8 * pair + 4 * (i >> 1) + (i & 1);
        to[0] = ptx::permute(table[i].low, table[i].high, select) | (word[i] & 0x80808080u);
        to[2] = ptx::permute(table[i].low, table[i].high, select >> 16) | ((word[i] << 4) & 0x80808080u);
      }
    }
  }
};

/// total[b] += the warpgroup's brick rows b times the N activation rows, over the unit's part of K. Only whole stages are released, and a
/// brick's fragments are overwritten only after the wait for the products that read them.
template <class L, int N>
__device__ inline void multiply(Memory<L> const& memory, RingState<L::kStages>& ring, int group, w4::Span const& span,
                                float (&total)[L::kBricks][N / 2]) {
  static_assert(L::kDepth * L::kBricks == 2, "a stage has two bricks of a warpgroup");
  int const thread = thread_index() & 127;
  std::uint32_t const second_brick = static_cast<std::uint32_t>((L::kBricks == 2 ? 1 : span.side) * L::kBrickBytes);
  float part[N / 2];
#pragma unroll
  for (float& v : part) v = 0.0F;
  BrickOperand operand[2];

  auto const bricks_of = [&](int stage) {
    return smem_address(memory.bricks(stage)) + static_cast<std::uint32_t>(group * L::kBricks * L::kBrickBytes);
  };
  auto const wait_stage = [&](RingState<L::kStages> const& at) {
    wait_parity(memory.full(at.stage), at.parity);
    ptx::fence_proxy_async(ptx::space_shared);  // rows were written by cp.async, which is not in the async proxy
  };
  // Starts the products of steps First … of a brick.
  auto const start = [&]<int First, int Steps>(BrickOperand const& brick, std::uint32_t rows) {
    pin(part);
    wgmma_arrive();
#pragma unroll
    for (int q = First; q < First + Steps; ++q)
      WgmmaE4m3FromRegisters<N>::run(part, brick.a + 4 * q, rows + static_cast<std::uint32_t>(2 * q), q == First ? 0 : 1);
    wgmma_commit();
    pin(part);
  };
  // Waits for them and adds them to `sum`, times the rows' factors and the scales of the activations.
  auto const finish = [&](float (&sum)[N / 2], std::uint32_t x_scale, std::uint32_t factors) {
    wgmma_wait<0>();
    pin(part);
    float const scale = power_of_two(factors & 255u);
    float const scale_8 = power_of_two((factors >> 8) & 255u);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
      float const x0 = ptx::load_shared(x_scale + static_cast<std::uint32_t>(128 * j));
      float const x1 = ptx::load_shared(x_scale + static_cast<std::uint32_t>(128 * j + 16));
      sum[4 * j] = fmaf(part[4 * j] * x0, scale, sum[4 * j]);
      sum[4 * j + 1] = fmaf(part[4 * j + 1] * x1, scale, sum[4 * j + 1]);
      sum[4 * j + 2] = fmaf(part[4 * j + 2] * x0, scale_8, sum[4 * j + 2]);
      sum[4 * j + 3] = fmaf(part[4 * j + 3] * x1, scale_8, sum[4 * j + 3]);
    }
  };
  // The products of the brick at `from`; `meanwhile` runs beside them.
  auto const run = [&](BrickOperand& brick, std::uint32_t from, float (&sum)[N / 2], std::uint32_t rows, std::uint32_t x_scale,
                       auto const& meanwhile) {
    if (brick.kind == kWideBrick) {
      ScaleWords const scales(from, thread);
      auto const step = [&]<int Q>() {
        start.template operator()<Q, 1>(brick, rows);
        finish(sum, x_scale, scales.bytes<Q>());
#pragma unroll
        for (int i = 0; i < 4; ++i) brick.a[4 * Q + i] = 0;
      };
      step.template operator()<0>();
      step.template operator()<1>();
      step.template operator()<2>();
      // The last step is multiplied below, with zeros in the other three: a branch while products run would make ptxas serialise them.
      brick.factors = scales.bytes<3>();
    }
    start.template operator()<0, 4>(brick, rows);
    meanwhile();
    finish(sum, x_scale, brick.factors);
  };

  if (span.k_count > 0) {
    wait_stage(ring);
    operand[0].convert(bricks_of(ring.stage), thread);
  }
  for (int k = 0; k < span.k_count; k += L::kDepth) {
    // Broadcast, so that the compiler knows that all lanes have the same value and keeps descriptors in uniform registers.
    std::uint32_t const rows = __shfl_sync(0xFFFFFFFFu, descriptor_low(smem_address(memory.rows(ring.stage))), 0);
    std::uint32_t const bricks = bricks_of(ring.stage);
    bool const both = L::kBricks == 2 || k + 1 < span.k_count;
    auto const x_scale = [&](int d) {
      return smem_address(memory.row_scales(ring.stage, d)) +
             static_cast<std::uint32_t>(32 * (thread & 3) + 4 * ((span.k_begin + k + d) & 3));
    };
    RingState<L::kStages> next = ring;
    next.advance();
    run(operand[0], bricks, total[0], rows, x_scale(0), [&] {
      if (both) operand[1].convert(bricks + second_brick, thread);
    });
    if (both) {
      constexpr int kStep = L::kDepth - 1;  // along K, of the second brick
      run(operand[1], bricks + second_brick, total[L::kBricks - 1], rows + static_cast<std::uint32_t>(kStep * (L::kRowBytes / 16)),
          x_scale(kStep), [&] {
            if (k + L::kDepth >= span.k_count) return;
            wait_stage(next);
            operand[0].convert(bricks_of(next.stage), thread);
          });
    }
    w4::release(memory, ring.stage);
    ring = next;
  }
}

}  // namespace moe::hopper::w4a8
