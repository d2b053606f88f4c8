// SPDX-License-Identifier: Apache-2.0
// experts/hopper/token/token_kernel.cuh: the whole layer for one token in one kernel, as matrix-vector products. Every warp has two buffers
// in shared memory into which the copy engine loads rows of weights, also during the one grid-wide step between the two products, so that
// memory never idles. The code is kept short: each instruction runs a few times per call, and fetching it costs as much as running it.
//
// All warps have the same role: each processes its block's tasks, those of the first product, then those of the second. A warp waits for
// the copies of its rows, all threads of a block for x, and all blocks for each other once, between the products.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/common/wait.cuh"
#include "moe/experts/hopper/token/tasks.cuh"

namespace moe::hopper {

namespace detail {

/// Converts x (fp8: quantises it) or the intermediate into the form that the products read. Called by all threads of the block.
template <bool kFp8, class Params>
__device__ inline void stage_vector(Params const& p, TokenMemory const& memory, int slots, bool second) {
  int const thread = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  int const lane = thread & 31;
  constexpr int kBatch = 8;
  int const items = (second ? slots * p.shape.intermediate : p.shape.hidden) / 4;
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
          uint2 const raw = reinterpret_cast<uint2 const*>(memory.vector + p.plan.raw_at)[item];
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
        reinterpret_cast<std::uint32_t*>(memory.vector)[item] = code(v[i].x, v[i].y) | code(v[i].z, v[i].w) << 16;
        if (lane == 0) memory.group_scales[item / 32] = divisor;
      } else if (item < items) {  // the high part and, also as bf16, the rest: zero for an infinite value
        auto const high = make_uint2(pack<__nv_bfloat16>(v[i].x, v[i].y), pack<__nv_bfloat16>(v[i].z, v[i].w));
        auto const rest = [](float x, std::uint32_t part) { return x == __uint_as_float(part) ? 0.0F : x - __uint_as_float(part); };
        reinterpret_cast<uint2*>(memory.vector)[item] = high;
        reinterpret_cast<uint2*>(memory.vector + p.plan.plane_bytes)[item] =
            make_uint2(pack<__nv_bfloat16>(rest(v[i].x, high.x << 16), rest(v[i].y, high.x & 0xFFFF0000u)),
                       pack<__nv_bfloat16>(rest(v[i].z, high.y << 16), rest(v[i].w, high.y & 0xFFFF0000u)));
      }
    }
  }
}

/// Between the products: adds the parts of this block's pairs, stores its part of the intermediate, and waits until every block has stored
/// its part. Thread 0 returns how many blocks passed the wait before this one.
template <class Params>
__device__ inline unsigned exchange_intermediate(Params const& p, TokenMemory const& memory, TokenShare const& s, int slots) {
  int const thread = static_cast<int>(threadIdx.x);
  int const threads = static_cast<int>(blockDim.x);
  int const workers = static_cast<int>(gridDim.x);
  int const unit_pairs = p.plan.unit_pairs;
  unsigned order = 0;
  __syncthreads();  // every warp has its sums

  for (int local = thread; local < unit_pairs * s.units; local += threads) {
    int const unit = divide(local, p.plan.per_row[0]);
    float const* part = memory.parts + unit * p.plan.rows[0] * p.plan.segments[0] + local - unit * unit_pairs;
    float gate = 0.0F;
    float up = 0.0F;
    for (int i = 0; i < p.plan.segments[0]; ++i, part += p.plan.rows[0]) {
      gate += part[0];
      up += part[unit_pairs];
    }
    __stcg(p.inter + s.first_unit * unit_pairs + local, evaluate(p.activation, gate, up));
  }
  __syncthreads();

  if (thread == 0 && slots > 0) {
    add_release_gpu(p.arrived, 1);
    for (std::uint32_t spin = 0; load_acquire_gpu(p.arrived) < workers; ++spin) {
      if (spin > 400'000'000u) stop_program();
    }
    order = atomicInc(reinterpret_cast<unsigned*>(p.passed), static_cast<unsigned>(workers - 1));  // wraps to zero after the last block
  }
  __syncthreads();
  return order;
}

/// Waits for the preceding kernel, reads the token's slots and starts the load of x. Lane j of every warp gets the expert of the j-th slot
/// with a local expert. False if there is no token.
template <bool kFp8, class Params>
__device__ inline bool read_token(Params const& p, TokenMemory const& memory, std::uint64_t policy, int& slots, int& expert) {
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  wait_for_dependencies();
  int const tokens = p.num_tokens == nullptr ? 1 : *p.num_tokens;
  int const id = lane < p.shape.topk ? p.ids[lane] : -1;
  float const weight = lane < p.shape.topk ? p.weights[lane] : 0.0F;
  if (tokens < 1) return false;

  if (thread == 0) {
    ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, memory.x_full,
                                   static_cast<std::uint32_t>(2 * p.shape.hidden));
    bulk_load(memory.vector + (kFp8 ? p.plan.raw_at : 0), p.x, static_cast<std::uint32_t>(2 * p.shape.hidden), memory.x_full, policy);
  }
  unsigned const valid = __ballot_sync(0xFFFFFFFFu, static_cast<unsigned>(id) < static_cast<unsigned>(p.shape.num_experts));
  int source = lane;
  if (__popc(valid) != slots) {
    slots = 0;
    for (unsigned rest = valid; rest != 0; rest &= rest - 1) {
      if (slots == lane) source = __ffs(static_cast<int>(rest)) - 1;
      ++slots;
    }
  }
  expert = __shfl_sync(0xFFFFFFFFu, id, source);
  float const own = __shfl_sync(0xFFFFFFFFu, weight, source);
  if (warp == 0) memory.weight_of[lane] = own;
  return true;
}

/// This block's columns of the output: the sums of their tasks, weighted, over all slots. Eight lanes add a column.
template <class Params>
__device__ inline void store_columns(Params const& p, TokenMemory const& memory, TokenShare const& s, int slots) {
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  int const warps = static_cast<int>(blockDim.x) >> 5;
  int const sums = slots * p.plan.segments[1];  // of a column, eight lanes add them
  for (int first = 4 * warp; first < s.columns; first += 4 * warps) {
    int const local = first + (lane >> 3);
    int const group = divide(local, p.plan.per_row[1]);
    float const* const part = memory.parts + group * p.plan.rows[1] * p.plan.segments[1] + local - group * p.plan.rows[1];
    float total = 0.0F;
    for (int i = lane & 7; local < s.columns && i < sums; i += 8) {
      int const slot = divide(i, p.plan.per_segment[1]);
      total = fmaf(part[(slot * (s.groups - 1) * p.plan.segments[1] + i) * p.plan.rows[1]], memory.weight_of[slot], total);
    }
    __syncwarp();
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 1);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 2);
    total += __shfl_xor_sync(0xFFFFFFFFu, total, 4);
    if ((lane & 7) == 0 && local < s.columns) static_cast<__nv_bfloat16*>(p.out)[s.first_column + local] = __float2bfloat16_rn(total);
  }
}

/// Initialises the barriers, prefetches into L2 what all blocks read first and, in bf16, clears the low part of the vector.
template <bool kFp8, class Params>
__device__ inline void open_token(Params const& p, TokenMemory const& memory) {
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  if (lane < kTokenDepth) ptx::mbarrier_init(memory.full + lane, 1);
  if (thread == 0) ptx::mbarrier_init(memory.x_full, 1);
  ptx::fence_mbarrier_init(ptx::sem_release, ptx::scope_cluster);

  if (blockIdx.x == 0) {  // a hint; it may come too early for data that the preceding kernel writes
    if (thread * 64 < p.shape.hidden) prefetch_l2(static_cast<char const*>(p.x) + 128 * thread);
    if (thread == 0) prefetch_l2(p.ids);
    if (thread == 32) prefetch_l2(p.weights);
    if (thread == 64 && p.num_tokens != nullptr) prefetch_l2(p.num_tokens);
  }

  if constexpr (!kFp8) {  // x has only the high part
    uint4* const low = reinterpret_cast<uint4*>(memory.vector + p.plan.plane_bytes);
    for (int i = thread; i < p.shape.hidden / 8; i += static_cast<int>(blockDim.x)) low[i] = make_uint4(0, 0, 0, 0);
  }
}

/// The kernel below. `Params`: TokenParams, or a type that hides sizes by constants.
template <Scheme S, class Params>
__device__ inline void run_token(Params const& p) {
  constexpr bool kFp8 = is_fp8(S);
  // Copies to addresses that are not multiples of 128 bytes take longer (core/ptx/bulk_copy.cuh).
  extern __shared__ __align__(1024) uint4 token_smem[];
  __shared__ std::uint64_t full[kTokenWarps][kTokenDepth];
  __shared__ std::uint64_t x_full;
  __shared__ float weight_of[kTokenSlots];
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const warp = static_cast<int>(threadIdx.x) >> 5;
  int const warps = static_cast<int>(blockDim.x) >> 5;
  char* const base = reinterpret_cast<char*>(token_smem);
  TokenMemory const memory{base,
                           reinterpret_cast<float*>(base + p.plan.scales_at),
                           reinterpret_cast<float*>(base + p.plan.parts_at),
                           base + p.plan.buffers_at + warp * kTokenDepth * kTokenBuffer,
                           full[warp],
                           &x_full,
                           weight_of};
  open_token<kFp8>(p, memory);
  std::uint64_t const policy = policy_evict_first();
  __syncthreads();
  launch_dependents();

  int slots = p.shape.topk;
  int expert = 0;  // expert of the slot with this lane's number
  TokenShare share{};
  bool stale = true;  // the share must be computed for the current number of slots
  bool known = false;
  int staged = 0;  // vectors that are ready for the products
  unsigned order = 0;
  int stage = 0;
  std::uint32_t parity = 1;
  TokenTask queue[kTokenDepth]{};
  for (int number = warp - kTokenDepth * warps;;) {  // the first passes only start loads, one per buffer
    if (stale) share = token_share(p, slots);
    stale = false;
    int const coming = number + kTokenDepth * warps;
    TokenTask next = token_task(p, share, coming);  // computed before the wait for the current task, which hides its cost

    if (number < 0) {
      if (!known) {
        int const before = slots;
        if (!read_token<kFp8>(p, memory, policy, slots, expert)) return;
        known = true;
        stale = slots != before;
        if (stale) continue;
      }
    } else {
      for (int const need = number >= share.tasks0 ? 2 : 1; staged < need; ++staged) {
        if (staged == 0) {
          wait_parity(&x_full, 0);
        } else {
          order = exchange_intermediate(p, memory, share, slots);
        }
        if (kFp8 || staged == 1) {
          stage_vector<kFp8>(p, memory, slots, staged == 1);
          __syncthreads();
        }
      }
      if (number >= share.tasks) break;

      bool const second = number >= share.tasks0;
      if constexpr (kFp8) {
        if (128 * (lane & 15) < queue[0].bytes) queue[0].scale *= memory.group_scales[queue[0].vector_at / 128 + (lane & 15)];
      }
      wait_parity(memory.full + stage, parity);
      multiply_rows<kFp8>(p, memory, queue[0], memory.buffers + stage * kTokenBuffer,
                          memory.parts + p.plan.rows[second ? 1 : 0] * (number - (second ? share.tasks0 : 0)));
    }

    fetch_rows<kFp8>(p, memory, next, coming >= share.tasks0, stage, expert, policy);
#pragma unroll
    for (int i = 1; i < kTokenDepth; ++i) queue[i - 1] = queue[i];
    queue[kTokenDepth - 1] = next;
    number += warps;
    if (++stage == kTokenDepth) {
      stage = 0;
      parity ^= 1u;
    }
  }
  __syncthreads();

  store_columns(p, memory, share, slots);
  if (order == gridDim.x - 1) *p.arrived = 0;  // every block is past its wait: leave the counter as it was
}

}  // namespace detail

/// `S` is bf16 or fp8_block; gated, without biases, weights of slots on the output. A block computes some pairs of a gate and an up row of
/// the first product, then, after a grid-wide step, some columns of the output over all their slots.
template <Scheme S>
__global__ void __launch_bounds__(kTokenWarps * 32, 1) token_kernel(__grid_constant__ TokenParams const p) {
  detail::run_token<S>(p);
}

}  // namespace moe::hopper
