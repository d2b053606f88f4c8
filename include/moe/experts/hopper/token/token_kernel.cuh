// SPDX-License-Identifier: Apache-2.0
// experts/hopper/token/token_kernel.cuh: the whole layer for one token in one kernel, as matrix-vector products. Every warp has two
// buffers in shared memory into which the copy engine brings rows of weights, across the one grid-wide step between the two products, so
// that memory never idles. The code is kept short: each instruction runs a few times a call, and fetching it costs as much as running it.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/core/ptx/mma.cuh"
#include "moe/core/ptx/sm90.cuh"
#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/common/matrix_layout.hpp"
#include "moe/experts/hopper/common/problem.hpp"

namespace moe::hopper {

inline constexpr int kTokenWarps = 12;  ///< at most
inline constexpr int kTokenDepth = 2;   ///< buffers of a warp
inline constexpr int kTokenBuffer = 8192;
inline constexpr int kTokenSharedMemory = kSharedMemoryLimit - 2048;  ///< dynamic, at most; the rest is for what the kernel declares
inline constexpr int kTokenSlots = 32;                                ///< most experts of the token

/// How both products are cut into tasks, one warp's work at a time: some rows of one expert, whole or, where they are long, four rows'
/// parts. Index 0 is the first product, whose tasks have as many gate rows as up rows.
struct TokenPlan {
  int row_bytes[2];
  int rows[2];           ///< of a task, at most 16
  int piece_rows[2];     ///< of one copy: rows that lie one behind the other
  int segments[2];       ///< parts of a row
  int segment_bytes[2];  ///< of all parts but the last, a multiple of 128
  float per_segment[2];  ///< 1 / segments
  float per_row[2];      ///< 1 / row pairs of a task, 1 / rows of a task
  float per_feature;     ///< 1 / intermediate
  int warps;             ///< 0: the kernel cannot take this shape
  int plane_bytes;       ///< of one form of the vector, which lies first in shared memory
  int raw_at, scales_at, parts_at, buffers_at;
  int bytes;  ///< dynamic shared memory
};

constexpr TokenPlan plan_token(LocalShape const& s, Scheme scheme, int workers) {
  bool const fp8 = is_fp8(scheme);
  TokenPlan p{};
  long long const products = static_cast<long long>(s.hidden) * s.topk * s.intermediate;
  int const columns = s.hidden / workers + 1;
  for (int i = 0; i < 2; ++i) {
    p.row_bytes[i] = (i == 0 ? s.hidden : s.intermediate) * (fp8 ? 1 : 2);
    constexpr int most = kTokenBuffer / 4;
    static_assert(most % 128 == 0 && most <= 2048, "half a warp holds the scales of a task's columns");
    p.segments[i] = (p.row_bytes[i] + most - 1) / most;
    p.segment_bytes[i] = ((p.row_bytes[i] + p.segments[i] - 1) / p.segments[i] + 127) / 128 * 128;
    p.segments[i] = (p.row_bytes[i] + p.segment_bytes[i] - 1) / p.segment_bytes[i];
    p.per_segment[i] = 1.0F / static_cast<float>(p.segments[i]);
    int const fit = kTokenBuffer / p.row_bytes[i];
    int rows = fit >= 16 ? 16 : i == 1 ? fit : fit >= 8 ? 8 : 4;
    if (i == 1 && rows > 0) {  // groups of columns of one size
      int const groups = (columns + rows - 1) / rows;
      rows = (columns + groups - 1) / groups;
    }
    p.rows[i] = p.segments[i] > 1 ? 4 : rows;
    p.piece_rows[i] = p.segments[i] > 1 ? 1 : i == 0 ? rows / 2 : rows;
    p.per_row[i] = 1.0F / static_cast<float>(i == 0 ? p.rows[0] / 2 : p.rows[1]);
  }
  p.per_feature = 1.0F / static_cast<float>(s.intermediate);
  int const vector = std::max(p.row_bytes[0], s.topk * p.row_bytes[1]);
  p.plane_bytes = (vector + 127) / 128 * 128;
  int const units = s.topk * s.intermediate / (p.rows[0] / 2) / workers + 1;
  int const groups = (2 * columns + 2) / p.rows[1] + 1;
  int const parts = 4 * std::max(units * p.segments[0] * p.rows[0], s.topk * groups * p.segments[1] * p.rows[1]);
  p.raw_at = p.plane_bytes * (fp8 ? 1 : 2);
  p.scales_at = p.raw_at + (fp8 ? 2 * s.hidden : 0);
  p.parts_at = p.scales_at + (fp8 ? (vector / 128 * 4 + 15) / 16 * 16 : 0);
  p.buffers_at = (p.parts_at + parts + 127) / 128 * 128;
  p.warps = std::clamp((kTokenSharedMemory - p.buffers_at) / (kTokenDepth * kTokenBuffer), 0, kTokenWarps);
  p.bytes = p.buffers_at + p.warps * kTokenDepth * kTokenBuffer;
  bool const fits = p.row_bytes[0] % 128 == 0 && p.row_bytes[1] % 128 == 0 && products < 1LL << 29;
  if (!fits || p.warps < 6) p.warps = 0;  // with few buffers the layer kernel is faster
  return p;
}

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
  int* arrived;  ///< thread blocks that have stored their part of `inter`, and that are past the wait for all: both zero on entry and exit
  int* passed;
  void* out;  ///< [H]
};

namespace detail {

/// Of small non-negative numbers, by the reciprocal of the divisor.
__device__ inline int divide(int n, float reciprocal) { return __float2int_rz((static_cast<float>(n) + 0.5F) * reciprocal); }

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

}  // namespace detail

/// `S` is bf16 or fp8_block; gated, without biases, weights of slots on the output. A block computes some pairs of a gate and an up row of
/// the first product, a grid-wide step follows, then some columns of the output with all their slots.
template <Scheme S>
__global__ void __launch_bounds__(kTokenWarps * 32, 1) token_kernel(__grid_constant__ TokenParams const p) {
  constexpr bool kFp8 = is_fp8(S);
  // Copies to addresses that are no multiples of 128 bytes take 30 % longer.
  extern __shared__ __align__(1024) uint4 token_smem[];
  __shared__ std::uint64_t full[kTokenWarps][kTokenDepth];
  __shared__ std::uint64_t x_full;
  __shared__ float weight_of[kTokenSlots];
  char* const vector = reinterpret_cast<char*>(token_smem);
  float* const group_scales = reinterpret_cast<float*>(vector + p.plan.scales_at);
  float* const parts = reinterpret_cast<float*>(vector + p.plan.parts_at);
  int const thread = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  int const warps = threads >> 5;
  int const worker = static_cast<int>(blockIdx.x);
  int const workers = static_cast<int>(gridDim.x);
  int const hidden = p.shape.hidden;
  int const intermediate = p.shape.intermediate;
  int const unit_pairs = p.plan.rows[0] / 2;
  char* const buffer = vector + p.plan.buffers_at + warp * kTokenDepth * kTokenBuffer;

  if (lane < kTokenDepth) ptx::mbarrier_init(&full[warp][lane], 1);
  if (thread == 0) ptx::mbarrier_init(&x_full, 1);
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);
  if (worker == 0) {  // into L2: a hint, which may come too early for what the kernel before this one writes
    if (thread * 64 < hidden) prefetch_l2(static_cast<char const*>(p.x) + 128 * thread);
    if (thread == 0) prefetch_l2(p.ids);
    if (thread == 32) prefetch_l2(p.weights);
    if (thread == 64 && p.num_tokens != nullptr) prefetch_l2(p.num_tokens);
  }
  if constexpr (!kFp8) {  // of x there is only the high part
    for (int i = thread; i < hidden / 8; i += threads) reinterpret_cast<uint4*>(vector + p.plan.plane_bytes)[i] = make_uint4(0, 0, 0, 0);
  }
  std::uint64_t const policy = policy_evict_first();
  __syncthreads();
  launch_dependents();

  // This block's share. The columns even out what the pairs, which are long, leave uneven.
  int slots = p.shape.topk;
  int first_unit = 0;
  int units = 0;
  int first_column = 0;
  int columns = 0;
  int groups = 0;
  float per_group = 0.0F;
  int tasks0 = 0;
  int tasks = 0;
  auto const share = [&] {
    unsigned const count = static_cast<unsigned>(workers);
    unsigned const pair_units = static_cast<unsigned>(slots * intermediate / unit_pairs);
    bool const even = pair_units >= 4 * count;
    auto const column_of = [&](unsigned w, unsigned unit) {
      unsigned const column = (even ? 3u : 1u) * static_cast<unsigned>(hidden) * w / count;
      return static_cast<int>(even ? column - 2u * static_cast<unsigned>(hidden) * unit / pair_units : column);
    };
    unsigned const w = static_cast<unsigned>(worker);
    unsigned const begin = pair_units * w / count;
    unsigned const end = pair_units * (w + 1) / count;
    first_unit = static_cast<int>(begin);
    units = static_cast<int>(end - begin);
    first_column = column_of(w, begin);
    columns = max(0, column_of(w + 1, end) - first_column);  // of few columns roundings may cross
    groups = (columns + p.plan.rows[1] - 1) / p.plan.rows[1];
    per_group = __fdividef(1.0F, static_cast<float>(groups));
    tasks0 = units * p.plan.segments[0];
    tasks = tasks0 + slots * groups * p.plan.segments[1];
  };

  struct Task {
    int slot;
    int row;        ///< of its expert
    int rows;       ///< 0: there is no such task
    int offset;     ///< in the row
    int bytes;      ///< of each row
    int vector_at;  ///< where the vector's part is that the rows are multiplied with
    int boundary;   ///< rows from here on are up rows, or of the next block of scales
    float scale;    ///< fp8, of a block of weights: lanes 0 to 15 have those of the rows before the boundary, the others those behind it
  };
  auto const plan = [&](int number) {
    Task task{};
    if (number >= tasks) return task;
    int const second = number >= tasks0 ? 1 : 0;
    int const n = number - (second != 0 ? tasks0 : 0);
    int const tile = detail::divide(n, p.plan.per_segment[second]);
    task.offset = (n - tile * p.plan.segments[second]) * p.plan.segment_bytes[second];
    task.bytes = min(p.plan.segment_bytes[second], p.plan.row_bytes[second] - task.offset);
    if (second != 0) {
      task.slot = detail::divide(tile, per_group);
      int const column = (tile - task.slot * groups) * p.plan.rows[1];
      task.row = first_column + column;
      task.rows = min(p.plan.rows[1], columns - column);
      task.vector_at = task.slot * p.plan.row_bytes[1] + task.offset;
      task.boundary = 128 - task.row % 128;
    } else {
      int const pair = (first_unit + tile) * unit_pairs;
      task.slot = detail::divide(pair, p.plan.per_feature);
      task.row = pair - task.slot * intermediate;
      task.rows = p.plan.rows[0];
      task.vector_at = task.offset;
      task.boundary = unit_pairs;
    }
    return task;
  };

  int expert = 0;  // of the slot that has this lane's number
  auto const fetch = [&](Task& task, bool second, int place) {
    if (task.rows == 0) return;
    int const row_bytes = p.plan.row_bytes[second ? 1 : 0];
    int const piece_rows = p.plan.piece_rows[second ? 1 : 0];
    int const first = lane * piece_rows;
    int const row = __shfl_sync(0xFFFFFFFFu, expert, task.slot) * (second ? hidden : p.matrix.rows) + task.row;
    int const up = second ? 0 : p.matrix.half_step - unit_pairs;
    if (lane == 0) {
      ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &full[warp][place],
                                     static_cast<std::uint32_t>(task.rows * task.bytes));
    }
    __syncwarp();
    if (first < task.rows) {
      char const* const from = static_cast<char const*>(second ? p.w2 : p.w13) + task.offset;
      bulk_load(buffer + place * kTokenBuffer + first * task.bytes,
                from + static_cast<long long>(row + first + (first >= unit_pairs ? up : 0)) * row_bytes,
                static_cast<std::uint32_t>(min(piece_rows, task.rows - first) * task.bytes), &full[warp][place], policy);
    }
    if constexpr (kFp8) {
      int const blocks = second ? (row + task.rows - 1) / 128 - row / 128 : p.matrix.half_step / 128;
      float const* const scales = (second ? p.w2_scales : p.w13_scales) + task.offset / 128 + (lane & 15);
      if (128 * (lane & 15) < task.bytes) {
        task.scale = __ldg(scales + static_cast<long long>(row / 128 + (lane >> 4) * blocks) * (row_bytes / 128));
      }
    }
  };

  // A lane reads 16 bytes of one of four rows, so that a warp reads 128 of each: they are 16 rows of the tensor core's first operand, for
  // which its second has columns of their own: n = lane / 4 is high or low part (bf16), half of the 128 bytes, even or odd words of the 16.
  auto const use = [&](Task const& task, char const* weights, float* to) {
    int const n = lane >> 2;
    char const* const a = weights + (n & 1) * 64 + (lane & 3) * 16;
    char const* const b =
        vector + task.vector_at + (kFp8 ? 0 : (n >> 2) * p.plan.plane_bytes) + (n >> 1 & 1) * 64 + (lane & 3) * 16 + (n & 1) * 4;
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
          detail::multiply<true>(c, from + i, v);
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
              detail::multiply<false>(c[h], from + i + 128 * h, v);
            }
          }
        }
#pragma unroll
        for (int h = 0; h < 4; ++h) sum += c[h][0] + c[h][3];
      }
      sum = (lane & (kFp8 ? 3 : 1)) == (n & 1) ? sum : 0.0F;  // else another column's
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 1);
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 2);
      sum += __shfl_xor_sync(0xFFFFFFFFu, sum, 4);
      if ((lane & 7) == 0 && row < task.rows) to[row] = sum;
    }
    __syncwarp();
  };

  // Brings x (fp8: its codes are made here) or the intermediate into the form that the products take.
  auto const stage = [&](bool second) {
    constexpr int kBatch = 8;
    int const items = (second ? slots * intermediate : hidden) / 4;
    float const floor = second ? p.scale_floor : 1e-10F / 448.0F;
#pragma unroll 1
    for (int base = thread; base - lane < items; base += kBatch * threads) {
      float4 v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int const item = base + i * threads;
        v[i] = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        if (item < items) {
          if (second) {
            v[i] = __ldcg(reinterpret_cast<float4 const*>(p.inter) + item);
          } else {
            uint2 const raw = reinterpret_cast<uint2 const*>(vector + p.plan.raw_at)[item];
            v[i] = make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xFFFF0000u), __uint_as_float(raw.y << 16),
                               __uint_as_float(raw.y & 0xFFFF0000u));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        int const item = base + i * threads;
        if (item - lane >= items) break;
        if constexpr (kFp8) {  // a warp has one group of 128
          float const amax = fmaxf(fmaxf(fabsf(v[i].x), fabsf(v[i].y)), fmaxf(fabsf(v[i].z), fabsf(v[i].w)));
          float const most = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax)));
          float const divisor = fmaxf(e4m3_scale(most), floor);
          float reciprocal = __fdividef(1.0F, divisor);
          reciprocal = fmaf(fmaf(-divisor, reciprocal, 1.0F), reciprocal, reciprocal);
          auto const code = [&](float low, float high) {
            return pack_e4m3(quotient(low, divisor, reciprocal), quotient(high, divisor, reciprocal));
          };
          reinterpret_cast<std::uint32_t*>(vector)[item] = code(v[i].x, v[i].y) | code(v[i].z, v[i].w) << 16;
          if (lane == 0) group_scales[item / 32] = divisor;
        } else if (item < items) {  // the high part and, as bf16 again, the rest: none of an infinite value
          auto const high = make_uint2(pack<__nv_bfloat16>(v[i].x, v[i].y), pack<__nv_bfloat16>(v[i].z, v[i].w));
          auto const rest = [](float x, std::uint32_t part) { return x == __uint_as_float(part) ? 0.0F : x - __uint_as_float(part); };
          reinterpret_cast<uint2*>(vector)[item] = high;
          reinterpret_cast<uint2*>(vector + p.plan.plane_bytes)[item] =
              make_uint2(pack<__nv_bfloat16>(rest(v[i].x, high.x << 16), rest(v[i].y, high.x & 0xFFFF0000u)),
                         pack<__nv_bfloat16>(rest(v[i].z, high.y << 16), rest(v[i].w, high.y & 0xFFFF0000u)));
        }
      }
    }
  };
  // Stores this block's part of the intermediate and waits for all the others'.
  unsigned order = 0;
  auto const exchange = [&] {
    __syncthreads();
    for (int local = thread; local < unit_pairs * units; local += threads) {
      int const unit = detail::divide(local, p.plan.per_row[0]);
      float const* part = parts + unit * p.plan.rows[0] * p.plan.segments[0] + local - unit * unit_pairs;
      float gate = 0.0F;
      float up = 0.0F;
      for (int s = 0; s < p.plan.segments[0]; ++s, part += p.plan.rows[0]) {
        gate += part[0];
        up += part[unit_pairs];
      }
      __stcg(p.inter + first_unit * unit_pairs + local, evaluate(p.activation, gate, up));
    }
    __syncthreads();
    if (thread == 0 && slots > 0) {
      add_release_gpu(p.arrived, 1);
      for (std::uint32_t spin = 0; load_acquire_gpu(p.arrived) < workers; ++spin) {
        if (spin > 400'000'000u) stop_program();
      }
      order = atomicInc(reinterpret_cast<unsigned*>(p.passed), static_cast<unsigned>(workers - 1));  // zero again after the last
    }
    __syncthreads();
  };

  bool stale = true;  // shares are those of another number of slots
  bool known = false;
  int staged = 0;
  int place = 0;
  std::uint32_t parity = 1;
  Task queue[kTokenDepth]{};
  for (int number = warp - kTokenDepth * warps;;) {
    if (stale) share();
    stale = false;
    int const coming = number + kTokenDepth * warps;
    Task next = plan(coming);  // before the wait for the present one, which hides it
    if (number < 0) {
      if (!known) {
        wait_for_dependencies();
        int const tokens = p.num_tokens == nullptr ? 1 : *p.num_tokens;
        int const id = lane < p.shape.topk ? p.ids[lane] : -1;
        float const weight = lane < p.shape.topk ? p.weights[lane] : 0.0F;
        if (tokens < 1) return;
        if (thread == 0) {
          ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &x_full,
                                         static_cast<std::uint32_t>(2 * hidden));
          bulk_load(vector + (kFp8 ? p.plan.raw_at : 0), p.x, static_cast<std::uint32_t>(2 * hidden), &x_full, policy);
        }
        unsigned const valid = __ballot_sync(0xFFFFFFFFu, static_cast<unsigned>(id) < static_cast<unsigned>(p.shape.num_experts));
        int source = lane;
        if (__popc(valid) != slots) {
          slots = 0;
          for (unsigned rest = valid; rest != 0; rest &= rest - 1) {
            if (slots == lane) source = __ffs(static_cast<int>(rest)) - 1;
            ++slots;
          }
          stale = true;
        }
        expert = __shfl_sync(0xFFFFFFFFu, id, source);
        float const own = __shfl_sync(0xFFFFFFFFu, weight, source);
        if (warp == 0) weight_of[lane] = own;
        known = true;
        if (stale) continue;
      }
    } else {
      for (int const need = number >= tasks0 ? 2 : 1; staged < need; ++staged) {
        if (staged == 0) {
          wait_parity(&x_full, 0);
        } else {
          exchange();
        }
        if (kFp8 || staged == 1) {
          stage(staged == 1);
          __syncthreads();
        }
      }
      if (number >= tasks) break;
      bool const second = number >= tasks0;
      if constexpr (kFp8) {
        if (128 * (lane & 15) < queue[0].bytes) queue[0].scale *= group_scales[queue[0].vector_at / 128 + (lane & 15)];
      }
      wait_parity(&full[warp][place], parity);
      use(queue[0], buffer + place * kTokenBuffer, parts + p.plan.rows[second ? 1 : 0] * (number - (second ? tasks0 : 0)));
    }
    fetch(next, coming >= tasks0, place);
#pragma unroll
    for (int i = 1; i < kTokenDepth; ++i) queue[i - 1] = queue[i];
    queue[kTokenDepth - 1] = next;
    number += warps;
    if (++place == kTokenDepth) {
      place = 0;
      parity ^= 1u;
    }
  }
  __syncthreads();
  int const sums = slots * p.plan.segments[1];  // of a column, eight lanes add them
  for (int first = 4 * warp; first < columns; first += 4 * warps) {
    int const local = first + (lane >> 3);
    int const group = detail::divide(local, p.plan.per_row[1]);
    float const* const part = parts + group * p.plan.rows[1] * p.plan.segments[1] + local - group * p.plan.rows[1];
    float total = 0.0F;
    for (int i = lane & 7; local < columns && i < sums; i += 8) {
      int const slot = detail::divide(i, p.plan.per_segment[1]);
      total = fmaf(part[(slot * (groups - 1) * p.plan.segments[1] + i) * p.plan.rows[1]], weight_of[slot], total);
    }
    __syncwarp();
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 4);
    if ((lane & 7) == 0 && local < columns) static_cast<__nv_bfloat16*>(p.out)[first_column + local] = __float2bfloat16_rn(total);
  }
  if (order == static_cast<unsigned>(workers - 1)) *p.arrived = 0;  // every block is past its wait: leave the counter as it was
}

}  // namespace moe::hopper
