// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/mainloop.cuh: the products of the consumer warpgroups: bricks of 4-bit codes, converted to e4m3 in registers, times
// rows of e4m3 activations in shared memory, promoted to float32 for each group of scales, at most 128 of K. While the products of a brick
// run, the next is converted.
#pragma once

#include <cuda_fp16.h>

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

/// Words of a thread's rows r and r + 8 at that address in shared memory, where each row of a brick has one.
struct RowWords {
  std::uint32_t row;
  std::uint32_t row_8;
  __device__ RowWords(std::uint32_t words, int thread) {
    std::uint32_t const at = words + 4 * static_cast<std::uint32_t>(16 * (thread >> 5) + ((thread & 31) >> 2));
    row = ptx::load_shared_word(at);
    row_8 = ptx::load_shared_word(at + 32);
  }
  /// Byte i of both.
  template <int I>
  __device__ std::uint32_t bytes() const {
    return ptx::permute(row, row_8, I | (4 + I) << 4);
  }
};

/// A thread's part of one brick of mxfp4, converted: the A fragments of its four steps and, in the lower bytes, the factors of rows r and
/// r + 8.
template <W4Scheme S>
struct BrickOperand {
  std::uint32_t a[16];
  std::uint32_t factors;
  std::uint32_t kind;  ///< the same in all threads

  /// Reads the brick at that address in shared memory.
  __device__ void convert(std::uint32_t brick, int thread, std::uint32_t /*zeros*/) {
    RowWords const words(brick + kCodeBytes, thread);
    std::uint32_t const scales[2] = {words.row, words.row_8};
    factors = words.bytes<2>();
    kind = __shfl_sync(0xFFFFFFFFu, ptx::load_shared_word(brick + kCodeBytes + scale_bytes(S)), 0);
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

/// The same of int4. The values of codes 0 to 7 are one table, those of 8 to 15 another; a code's highest bit, spread over a byte, chooses.
template <W4Scheme S>
  requires(!is_e2m1(S))
struct BrickOperand<S> {
  std::uint32_t a[16];

  /// `zeros`: the address of Memory::zeros().
  __device__ void convert(std::uint32_t brick, int thread, [[maybe_unused]] std::uint32_t zeros) {
    [[maybe_unused]] std::uint32_t points[2] = {0, 0};  // of rows r and r + 8, four bytes each
    if constexpr (has_zero_points(S)) {
      RowWords const words(brick + kCodeBytes + row_words(S) * kWordBytes, thread);
      points[0] = words.row;
      points[1] = words.row_8;
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {  // steps
      uint2 const codes =
          ptx::load_shared_word_pair(brick + static_cast<std::uint32_t>((q >> 1) * (kCodeBytes / 2) + thread * 16 + (q & 1) * 8));
      std::uint32_t const word[2] = {codes.x, codes.y};
#pragma unroll
      for (int i = 0; i < 2; ++i) {  // rows
        Magnitudes below = int4_values(0, 8);
        Magnitudes above = int4_values(8, 8);
        if constexpr (has_zero_points(S)) {
          std::uint32_t const point = (points[i] >> (8 * q)) & 15u;
          uint4 const table = ptx::load_shared_words(zeros + 16 * point);
          below = {table.x, table.y};
          above = {table.z, table.w};
        }
        auto const values = [&](std::uint32_t select, std::uint32_t highest) {
          std::uint32_t const mask = ptx::permute(highest, 0, 0xBA98u);
          return (ptx::permute(above.low, above.high, select) & mask) | (ptx::permute(below.low, below.high, select) & ~mask);
        };
        std::uint32_t const select = word[i] & 0x77777777u;
        a[4 * q + i] = values(select, word[i]);
        a[4 * q + i + 2] = values(select >> 16, word[i] << 4);
      }
    }
  }
};

/// The scales of a thread's rows r and r + 8 of the int4 brick at that address in shared memory.
template <W4Scheme S>
struct GroupScales {
  std::uint32_t word[2][row_words(S)];  ///< two fp16 scales each
  float factor;
  __device__ GroupScales(std::uint32_t brick, int thread) {
#pragma unroll
    for (int i = 0; i < row_words(S); ++i) {
      RowWords const words(brick + static_cast<std::uint32_t>(kCodeBytes + i * kWordBytes), thread);
      word[0][i] = words.row;
      word[1][i] = words.row_8;
    }
    factor = __uint_as_float(ptx::load_shared_word(brick + kCodeBytes + scale_bytes(S)));
  }
  /// Of row r or, with half 1, r + 8 in group `g`.
  __device__ float of(int half, int g) const {
    float2 const two = __half22float2(*reinterpret_cast<__half2 const*>(&word[half][g / 2]));
    return (g % 2 == 0 ? two.x : two.y) * factor;
  }
  /// Both of as many groups as `scale` has, from group `first` on.
  template <int Parts>
  __device__ void read(int first, float (&scale)[Parts][2]) const {
#pragma unroll
    for (int n = 0; n < Parts; ++n) {
      scale[n][0] = of(0, first + n);
      scale[n][1] = of(1, first + n);
    }
  }
};

/// Adds the parts to `sum`, times their scales of rows r and r + 8 and the scales of the activations at `x_scale`.
template <int Parts, int N>
__device__ inline void add_scaled(float const (&part)[Parts][N], float const (&scale)[Parts][2], std::uint32_t x_scale, float (&sum)[N]) {
#pragma unroll
  for (int j = 0; j < N / 4; ++j) {
    float const x[2] = {ptx::load_shared(x_scale + static_cast<std::uint32_t>(128 * j)),
                        ptx::load_shared(x_scale + static_cast<std::uint32_t>(128 * j + 16))};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float const first = scale[0][i / 2];
      if constexpr (Parts == 1) {
        sum[4 * j + i] = fmaf(part[0][4 * j + i] * x[i % 2], first, sum[4 * j + i]);
      } else {
        float scaled = part[0][4 * j + i] * first;
#pragma unroll
        for (int n = 1; n < Parts; ++n) scaled = fmaf(part[n][4 * j + i], scale[n][i / 2], scaled);
        sum[4 * j + i] = fmaf(scaled, x[i % 2], sum[4 * j + i]);
      }
    }
  }
}

/// total[b] += the warpgroup's brick rows b times the N activation rows, over the unit's part of K. Only whole stages are released, and a
/// brick's fragments are overwritten only after the wait for the products that read them.
template <class L, int N>
__device__ inline void multiply(Memory<L> const& memory, RingState<L::kStages>& ring, int group, w4::Span const& span,
                                float (&total)[L::kBricks][N / 2]) {
  static_assert(L::kDepth * L::kBricks == 2, "a stage has two bricks of a warpgroup");
  int const thread = thread_index() & 127;
  std::uint32_t const second_brick = static_cast<std::uint32_t>((L::kBricks == 2 ? 1 : span.side) * L::kBrickBytes);
  std::uint32_t zeros = 0;
  if constexpr (has_zero_points(L::kScheme)) zeros = smem_address(memory.zeros());
  constexpr int kParts = L::kSums == 1 ? 1 : N <= 16 ? L::kSums : 2;  // sums that are scaled apart, at a time
  float part[kParts][N / 2];
#pragma unroll
  for (int n = 0; n < kParts; ++n) {
#pragma unroll
    for (float& v : part[n]) v = 0.0F;
  }
  using Operand = BrickOperand<L::kScheme>;
  Operand operand[2];

  auto const bricks_of = [&](int stage) {
    return smem_address(memory.bricks(stage)) + static_cast<std::uint32_t>(group * L::kBricks * L::kBrickBytes);
  };
  auto const wait_stage = [&](RingState<L::kStages> const& at) {
    wait_parity(memory.full(at.stage), at.parity);
    ptx::fence_proxy_async(ptx::space_shared);  // rows were written by cp.async, which is not in the async proxy
  };
  auto const pin_parts = [&] {
#pragma unroll
    for (int n = 0; n < kParts; ++n) pin(part[n]);
  };
  // Starts the products of Steps steps from First on into each of the parts.
  auto const start = [&]<int First, int Steps>(Operand const& brick, std::uint32_t rows) {
    pin_parts();
    wgmma_arrive();
#pragma unroll
    for (int q = 0; q < kParts * Steps; ++q)
      WgmmaE4m3FromRegisters<N>::run(part[q / Steps], brick.a + 4 * (First + q), rows + static_cast<std::uint32_t>(2 * (First + q)),
                                     q % Steps == 0 ? 0 : 1);
    wgmma_commit();
    pin_parts();
  };
  // Waits for them and adds them to `sum`, times the parts' scales of rows r and r + 8 and those of the activations.
  auto const finish = [&](float (&sum)[N / 2], std::uint32_t x_scale, float const(&scale)[kParts][2]) {
    wgmma_wait<0>();
    pin_parts();
    add_scaled(part, scale, x_scale, sum);
  };
  auto const finish_powers = [&](float (&sum)[N / 2], std::uint32_t x_scale, std::uint32_t factors) {
    finish(sum, x_scale, {{power_of_two(factors & 255u), power_of_two((factors >> 8) & 255u)}});
  };
  // The products of the brick at `from`; `meanwhile` runs beside them, or beside the last of them.
  auto const run = [&](Operand& brick, std::uint32_t from, float (&sum)[N / 2], std::uint32_t rows, std::uint32_t x_scale,
                       auto const& meanwhile) {
    if constexpr (is_e2m1(L::kScheme)) {
      if (brick.kind == kWideBrick) {
        RowWords const scales(from + kCodeBytes, thread);
        auto const step = [&]<int Q>() {
          start.template operator()<Q, 1>(brick, rows);
          finish_powers(sum, x_scale, scales.bytes<Q>());
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
      finish_powers(sum, x_scale, brick.factors);
    } else {
      constexpr int kSteps = 4 / L::kSums;
      constexpr int kRounds = L::kSums / kParts;
      static_assert(kRounds <= 2);
      auto const add = [&]<int Round>() {
        float scale[kParts][2];
        GroupScales<L::kScheme>(from, thread).read(Round * kParts, scale);  // late: registers are scarce while products run
        finish(sum, x_scale, scale);
      };
      auto const round = [&]<int Round>() {
        start.template operator()<Round * kParts * kSteps, kSteps>(brick, rows);
        if constexpr (Round == kRounds - 1) meanwhile();
        add.template operator()<Round>();
      };
      round.template operator()<0>();
      if constexpr (kRounds > 1) round.template operator()<1>();
    }
  };

  if (span.k_count > 0) {
    wait_stage(ring);
    operand[0].convert(bricks_of(ring.stage), thread, zeros);
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
      if (both) operand[1].convert(bricks + second_brick, thread, zeros);
    });
    if (both) {
      constexpr int kStep = L::kDepth - 1;  // along K, of the second brick
      run(operand[1], bricks + second_brick, total[L::kBricks - 1], rows + static_cast<std::uint32_t>(kStep * (L::kRowBytes / 16)),
          x_scale(kStep), [&] {
            if (k + L::kDepth >= span.k_count) return;
            wait_stage(next);
            operand[0].convert(bricks_of(next.stage), thread, zeros);
          });
    }
    w4::release(memory, ring.stage);
    ring = next;
  }
}

}  // namespace moe::hopper::w4a8
