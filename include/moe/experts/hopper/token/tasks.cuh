// SPDX-License-Identifier: Apache-2.0
// experts/hopper/token/tasks.cuh: the tasks of the one-token kernel: those of a block, the loads of their rows, and their products.
#pragma once

#include <cstdint>

#include "moe/core/ptx/mma.cuh"
#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/common/divide.cuh"
#include "moe/experts/hopper/common/matrix_layout.hpp"
#include "moe/experts/hopper/common/wait.cuh"
#include "moe/experts/hopper/token/plan.hpp"

namespace moe::hopper {

/// The functions below take it, or a type that hides sizes by constants (bench/fixed_sizes_bench.cu).
struct TokenParams {
  LocalShape shape;
  TokenPlan plan;
  MatrixLayout matrix;  ///< of w13
  void const* w13;
  void const* w2;
  float const* w13_scales;  ///< fp8_block
  float const* w2_scales;
  float scale_floor;
  ActivationParams activation;
  void const* x;  ///< [H]
  std::int32_t const* ids;
  float const* weights;
  std::int32_t const* num_tokens;
  float* inter;  ///< [k, I]
  int* arrived;  ///< thread blocks that have stored their part of `inter`; `passed`: that have passed the wait. Zero on entry and exit
  int* passed;
  void* out;  ///< [H]
};

namespace detail {

/// One warp's view of shared memory.
struct TokenMemory {
  char* vector;         ///< x or the intermediate, in the form that the products read
  float* group_scales;  ///< fp8: of the vector's groups of 128
  float* parts;         ///< sums of the block's tasks
  char* buffers;        ///< [kTokenDepth] of this warp
  std::uint64_t* full;  ///< [kTokenDepth] of this warp: the rows of a task are in their buffer
  std::uint64_t* x_full;
  float* weight_of;  ///< [kTokenSlots] router weights of the slots that have an expert here
};

/// A block's share of both products: tasks are numbered over both.
struct TokenShare {
  int first_unit;  ///< first unit of pairs of a gate and an up row
  int units;
  int first_column;  ///< first column of the output
  int columns;
  int groups;       ///< groups of columns, for each slot
  float per_group;  ///< 1 / groups
  int tasks0;       ///< tasks of the first product
  int tasks;        ///< tasks of both products
};

/// One warp's work at a time: some rows of one expert.
struct TokenTask {
  int slot;
  int row;        ///< first row in the matrix of its expert
  int rows;       ///< 0: no task
  int offset;     ///< byte offset in the row
  int bytes;      ///< of each row
  int vector_at;  ///< where the part of the vector begins that the rows are multiplied with
  int boundary;   ///< rows from here on are up rows, or rows of the next block of scales
  float scale;    ///< fp8, of a block of weights: lanes 0 to 15: rows before the boundary, the others: rows after it
};

/// One product of the tensor cores: 16 rows of 32 bytes times 8 columns.
template <bool kFp8>
__device__ inline void multiply(float (&c)[4], char const* rows, std::uint32_t const* columns) {
  uint4 const words = *reinterpret_cast<uint4 const*>(rows);
  std::uint32_t const a[4] = {words.x, words.y, words.z, words.w};
  if constexpr (kFp8) {
    mma_e4m3(c, a, columns[0], columns[2]);
  } else {
    mma_bf16(c, a, columns[0], columns[2]);
  }
}

/// This block's share, for a token of that many slots. Pairs are long and do not divide evenly; the columns balance the blocks.
template <class Params>
__device__ inline TokenShare token_share(Params const& p, int slots) {
  TokenShare s{};
  unsigned const count = gridDim.x;
  unsigned const pair_units = static_cast<unsigned>(slots * p.shape.intermediate / p.plan.unit_pairs);
  bool const even = pair_units >= 4 * count;
  auto const column_of = [&](unsigned w, unsigned unit) {
    unsigned const column = (even ? 3u : 1u) * static_cast<unsigned>(p.shape.hidden) * w / count;
    return static_cast<int>(even ? column - 2u * static_cast<unsigned>(p.shape.hidden) * unit / pair_units : column);
  };
  unsigned const w = blockIdx.x;
  unsigned const begin = pair_units * w / count;
  unsigned const end = pair_units * (w + 1) / count;
  s.first_unit = static_cast<int>(begin);
  s.units = static_cast<int>(end - begin);
  s.first_column = column_of(w, begin);
  s.columns = max(0, column_of(w + 1, end) - s.first_column);  // with few columns, rounding can make this negative
  s.groups = (s.columns + p.plan.rows[1] - 1) / p.plan.rows[1];
  s.per_group = __fdividef(1.0F, static_cast<float>(s.groups));
  s.tasks0 = s.units * p.plan.segments[0];
  s.tasks = s.tasks0 + slots * s.groups * p.plan.segments[1];
  return s;
}

/// Task `number` of the block.
template <class Params>
__device__ inline TokenTask token_task(Params const& p, TokenShare const& s, int number) {
  int const unit_pairs = p.plan.unit_pairs;
  TokenTask task{};
  if (number >= s.tasks) return task;
  int const second = number >= s.tasks0 ? 1 : 0;
  int const n = number - (second != 0 ? s.tasks0 : 0);
  int const tile = divide(n, p.plan.per_segment[second]);
  task.offset = (n - tile * p.plan.segments[second]) * p.plan.segment_bytes[second];
  task.bytes = min(p.plan.segment_bytes[second], p.plan.row_bytes[second] - task.offset);
  if (second != 0) {
    task.slot = divide(tile, s.per_group);
    int const column = (tile - task.slot * s.groups) * p.plan.rows[1];
    task.row = s.first_column + column;
    task.rows = min(p.plan.rows[1], s.columns - column);
    task.vector_at = task.slot * p.plan.row_bytes[1] + task.offset;
    task.boundary = 128 - task.row % 128;
  } else {
    int const pair = (s.first_unit + tile) * unit_pairs;
    task.slot = divide(pair, p.plan.per_feature);
    task.row = pair - task.slot * p.shape.intermediate;
    task.rows = p.plan.rows[0];
    task.vector_at = task.offset;
    task.boundary = unit_pairs;
  }
  return task;
}

/// Starts the loads of a task's rows: the copy engine fills buffer `stage` and completes on its barrier. fp8: each lane also loads the
/// scale of its part. `expert` is the expert of the slot with this lane's number.
template <bool kFp8, class Params>
__device__ inline void fetch_rows(Params const& p, TokenMemory const& memory, TokenTask& task, bool second, int stage, int expert,
                                  std::uint64_t policy) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const unit_pairs = p.plan.unit_pairs;
  if (task.rows == 0) return;
  int const row_bytes = p.plan.row_bytes[second ? 1 : 0];
  int const piece_rows = p.plan.piece_rows[second ? 1 : 0];
  int const first = lane * piece_rows;
  int const row = __shfl_sync(0xFFFFFFFFu, expert, task.slot) * (second ? p.shape.hidden : p.matrix.rows) + task.row;
  int const up = second ? 0 : p.matrix.half_step - unit_pairs;
  if (lane == 0) {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, memory.full + stage,
                                   static_cast<std::uint32_t>(task.rows * task.bytes));
  }
  __syncwarp();
  if (first < task.rows) {
    char const* const from = static_cast<char const*>(second ? p.w2 : p.w13) + task.offset;
    bulk_load(memory.buffers + stage * kTokenBuffer + first * task.bytes,
              from + static_cast<long long>(row + first + (first >= unit_pairs ? up : 0)) * row_bytes,
              static_cast<std::uint32_t>(min(piece_rows, task.rows - first) * task.bytes), memory.full + stage, policy);
  }
  if constexpr (kFp8) {
    int const blocks = second ? (row + task.rows - 1) / 128 - row / 128 : p.matrix.half_step / 128;
    float const* const scales = (second ? p.w2_scales : p.w13_scales) + task.offset / 128 + (lane & 15);
    if (128 * (lane & 15) < task.bytes) {
      task.scale = __ldg(scales + static_cast<long long>(row / 128 + (lane >> 4) * blocks) * (row_bytes / 128));
    }
  }
}

/// Multiplies a task's rows, which are loaded by now, with the vector. A lane reads 16 bytes of one of four rows, so a warp reads 128 bytes
/// of each row. The tensor core takes these as 16 rows of its first operand. The columns of its second operand are parts of the vector:
/// column n = lane / 4 is the high or low part (bf16), one half of the 128 bytes, the even or odd words of each 16 bytes.
template <bool kFp8, class Params>
__device__ inline void multiply_rows(Params const& p, TokenMemory const& memory, TokenTask const& task, char const* weights, float* to) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const n = lane >> 2;
  char const* const a = weights + (n & 1) * 64 + (lane & 3) * 16;
  char const* const b =
      memory.vector + task.vector_at + (kFp8 ? 0 : (n >> 2) * p.plan.plane_bytes) + (n >> 1 & 1) * 64 + (lane & 3) * 16 + (n & 1) * 4;
  for (int first = 0; first < task.rows; first += 4) {
    int const row = first + (lane >> 3);
    char const* const from = a + min(row, task.rows - 1) * task.bytes;
    float sum = 0.0F;
    if constexpr (kFp8) {
      int const half = row >= task.boundary ? 16 : 0;
#pragma unroll 4
      for (int i = 0; i < task.bytes; i += 128) {
        std::uint32_t const* const v = reinterpret_cast<std::uint32_t const*>(b + i);
        float c[4]{};
        multiply<true>(c, from + i, v);
        sum = fmaf(c[0] + c[3], __shfl_sync(0xFFFFFFFFu, task.scale, half + i / 128), sum);
      }
    } else {
      float c[4][4]{};
#pragma unroll 1
      for (int i = 0; i < task.bytes; i += 512) {
#pragma unroll
        for (int h = 0; h < 4; ++h) {
          if (i + 128 * h < task.bytes) {
            std::uint32_t const* const v = reinterpret_cast<std::uint32_t const*>(b + i + 128 * h);
            multiply<false>(c[h], from + i + 128 * h, v);
          }
        }
      }
#pragma unroll
      for (int h = 0; h < 4; ++h) sum += c[h][0] + c[h][3];
    }
    sum = (lane & (kFp8 ? 3 : 1)) == (n & 1) ? sum : 0.0F;  // else the sum of another column
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
    sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 4);
    if ((lane & 7) == 0 && row < task.rows) to[row] = sum;
  }
  __syncwarp();
}

}  // namespace detail

}  // namespace moe::hopper
