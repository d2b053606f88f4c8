// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/token_units.cuh: the units of the one-token kernel of packed weights (token_plan.hpp): the loads of their bricks, and
// their products.
#pragma once

#include <cstdint>

#include "moe/core/ptx/bulk_copy.cuh"
#include "moe/core/ptx/mma.cuh"
#include "moe/experts/hopper/common/wait.cuh"
#include "moe/experts/hopper/w4/brick_registers.cuh"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/token_plan.hpp"

namespace moe::hopper::w4 {

/// 1 at the end of a matrix with an odd number of bricks of rows, else 2.
__device__ inline int bricks_of(Params const& p, TokenUnit const& u) {
  return min(2, (u.phase == 0 ? p.layer.bricks[0] : p.layer.bricks[1]) - 2 * u.pair);
}

/// Starts the load of a unit's bricks, which lie side by side, by lane 0.
template <W4Scheme S>
__device__ inline void fetch_unit(Params const& p, TokenUnit const& u, int expert, char* buffer, std::uint64_t* full,
                                  std::uint64_t policy) {
  if ((thread_index() & 31) != 0) return;
  int const bricks = u.phase == 0 ? p.layer.bricks[0] : p.layer.bricks[1];
  int const steps = u.phase == 0 ? p.layer.steps[0] : p.layer.steps[1];
  int const tile = 2 * u.pair / kTileBricks * kTileBricks;  // bricks from here to the end of the tile lie side by side
  int const side = min(kTileBricks, bricks - tile);
  long long const brick =
      static_cast<long long>(expert) * bricks * steps + static_cast<long long>(tile) * steps + u.step * side + 2 * u.pair - tile;
  auto const bytes = static_cast<std::uint32_t>(bricks_of(p, u) * brick_bytes(S));
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, full, bytes);
  bulk_load(buffer, (u.phase == 0 ? p.layer.weights[0] : p.layer.weights[1]) + brick * brick_bytes(S), bytes, full, policy);
}

/// A lane's sums of a pair of bricks: [4 brick + warp of 16 rows] of rows lane / 4 and lane / 4 + 8. The four lanes of a row have the same.
struct PairSums {
  float of[2][4][2];
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < 16; ++i) of[i / 8][i / 2 % 4][i % 2] = 0.0F;
  }
};

/// sums += the bricks of a unit times 64 elements of the vector. The tensor core multiplies 16 rows with eight columns that are all the
/// vector; all bricks run through one piece of code, since fetching an instruction here costs as much as running it.
template <W4Scheme S>
__device__ inline void multiply_unit(char const* buffer, int bricks, char const* vector, PairSums& sums) {
  int const lane = thread_index() & 31;
  std::uint32_t const brick_at = smem_address(buffer);
  std::uint32_t const vector_at = smem_address(vector) + static_cast<std::uint32_t>(4 * (lane & 3));
  std::uint32_t b[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) b[i] = ptx::load_shared_word(vector_at + static_cast<std::uint32_t>(16 * i));
#pragma unroll 1
  for (int brick = 0; brick < 2; ++brick) {
    if (brick < bricks) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        BrickRegisters<S> registers;
        registers.load(brick_at + static_cast<std::uint32_t>(brick * brick_bytes(S)), 32 * quarter + lane);
        std::uint32_t a[16];
        registers.template convert<0, 4>(a);
        float c[4] = {};
        constexpr int kSteps = 4 / sum_groups(S);  // whose sums have one scale
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          std::uint32_t const values[4] = {a[4 * q], a[4 * q + 1], a[4 * q + 2], a[4 * q + 3]};
          mma_bf16(c, values, b[2 * q], b[2 * q + 1]);
          if constexpr (scales_sums(S)) {
            if (q % kSteps != kSteps - 1) continue;
            float2 const scale = registers.sum_scales(q / kSteps);
            sums.of[0][quarter][0] = fmaf(c[0], scale.x, sums.of[0][quarter][0]);
            sums.of[0][quarter][1] = fmaf(c[2], scale.y, sums.of[0][quarter][1]);
#pragma unroll
            for (float& v : c) v = 0.0F;
          }
        }
        if constexpr (!scales_sums(S)) {
          sums.of[0][quarter][0] += c[0];
          sums.of[0][quarter][1] += c[2];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {  // the other brick's turn
      float const first = sums.of[0][i / 2][i % 2];
      sums.of[0][i / 2][i % 2] = sums.of[1][i / 2][i % 2];
      sums.of[1][i / 2][i % 2] = first;
    }
  }
  __syncwarp();  // every lane has read the buffer
}

}  // namespace moe::hopper::w4
