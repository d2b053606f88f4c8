// SPDX-License-Identifier: Apache-2.0
// experts/hopper/token_kernel.cuh: the whole layer for one token in one kernel, as matrix-vector products. Every warp streams
// weights through a ring of its own in shared memory, across the one grid-wide step between the two products, so that memory never idles.
// The code is kept short: each instruction runs a few times a call, and fetching it costs as much as running it.
#pragma once

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "moe/experts/hopper/activation.hpp"
#include "moe/experts/hopper/layer_params.cuh"

namespace moe::hopper {

inline constexpr int kTokenThreads = 512;
inline constexpr int kTokenWarps = kTokenThreads / 32;
inline constexpr int kTokenLoads = 8;   ///< lines of 16 bytes a lane, in one task of a warp
inline constexpr int kTokenSlots = 32;  ///< most experts of the token

inline constexpr int kTokenTaskBytes = kTokenLoads * 512;

/// How the rows of both products are cut up. A line is 512 bytes of a row, one load of a warp.
struct TokenPlan {
  int lines[2];     ///< of a row
  int segments[2];  ///< tasks of a gate and up row pair; tasks of a row of the second product with more than kTokenLoads lines, or 1
  int pairs;        ///< most row pairs of a thread block
  int depth;        ///< tasks of a warp's ring
  int vector_bytes;
  int bytes;  ///< dynamic shared memory
};

constexpr TokenPlan plan_token(LayerShape const& s, Scheme scheme, int workers) {
  int const element = is_fp8(scheme) ? 1 : 2;
  int const task_bytes = kTokenTaskBytes + (is_fp8(scheme) ? kTokenLoads * 128 : 0);
  TokenPlan p{};
  p.lines[0] = (s.hidden * element + 511) / 512;
  p.lines[1] = (s.intermediate * element + 511) / 512;
  p.segments[0] = (p.lines[0] + kTokenLoads / 2 - 1) / (kTokenLoads / 2);
  p.segments[1] = (p.lines[1] + kTokenLoads - 1) / kTokenLoads;
  p.pairs = s.topk * s.intermediate / workers + 1;
  int const most = p.lines[0] > s.topk * p.lines[1] ? p.lines[0] : s.topk * p.lines[1];
  p.vector_bytes = most * (512 / element * (is_fp8(scheme) ? 2 : 4) + (is_fp8(scheme) ? 16 : 0));
  p.vector_bytes = (p.vector_bytes + 15) / 16 * 16;
  int const parts = p.pairs * p.segments[0] * 8 + (s.hidden / workers + 1) * s.topk * p.segments[1] * 4;
  int const fixed = p.vector_bytes + (parts + 15) / 16 * 16;
  p.depth = (kSharedMemoryLimit - 1024 - fixed) / (kTokenWarps * task_bytes);
  if (p.depth > 3) p.depth = 3;
  p.bytes = fixed + p.depth * kTokenWarps * task_bytes;
  return p;
}

struct TokenParams {
  LayerShape shape;
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
  int* arrived;  ///< thread blocks that have stored their part of `inter`, and that are done: both zero on entry and exit
  int* exits;
  void* out;  ///< [H]
};

namespace detail {

/// Elements of 16 bytes of weights times those of the vector, which lies in shared memory as planes of 16 bytes of every chunk: float32,
/// or with fp8 the codes / 256 as fp16, which holds them and the sums of a few products.
template <Scheme S>
struct TokenDot {
  static constexpr bool kFp8 = SchemeTraits<S>::kFp8;
  uint4 v[2];
  __device__ void load(uint4 const* vector, int plane_chunks, int chunk) {
    v[0] = vector[chunk];
    v[1] = vector[plane_chunks + chunk];
  }
  __device__ float operator()(uint4 const& w) const {
    std::uint32_t const word[4] = {w.x, w.y, w.z, w.w};
    std::uint32_t const x[8] = {v[0].x, v[0].y, v[0].z, v[0].w, v[1].x, v[1].y, v[1].z, v[1].w};
    if constexpr (kFp8) {
      __half2 low = __floats2half2_rn(0.0F, 0.0F);
      __half2 high = low;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        low = __hfma2(pair(static_cast<std::uint16_t>(word[i] & 0xFFFFu)), *reinterpret_cast<__half2 const*>(&x[2 * i]), low);
        high = __hfma2(pair(static_cast<std::uint16_t>(word[i] >> 16)), *reinterpret_cast<__half2 const*>(&x[2 * i + 1]), high);
      }
      float2 const a = __half22float2(low);
      float2 const b = __half22float2(high);
      return (a.x + a.y) + (b.x + b.y);
    } else {
      float even = 0.0F;
      float odd = 0.0F;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float2 const e = make_float2(__uint_as_float(word[i] << 16), __uint_as_float(word[i] & 0xFFFF0000u));
        even = fmaf(e.x, __uint_as_float(x[2 * i]), even);
        odd = fmaf(e.y, __uint_as_float(x[2 * i + 1]), odd);
      }
      return even + odd;
    }
  }
  __device__ static __half2 pair(std::uint16_t codes) {
    __half2_raw const raw = __nv_cvt_fp8x2_to_halfraw2(codes, __NV_E4M3);
    return *reinterpret_cast<__half2 const*>(&raw);
  }
};

/// e4m3 codes / 256, as fp16, of four values of each of 32 lanes that hold one group of 128, and the scale of the group.
__device__ inline uint2 quantize_group(float4 v, float floor, float* scale_out) {
  float const amax = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
  float const most = __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(amax)));
  float const scale = fmaxf(__fdiv_rn(most, 448.0F), floor);
  auto const codes = [=](float a, float b) {
    __half2_raw const raw = __nv_cvt_fp8x2_to_halfraw2(
        __nv_cvt_float2_to_fp8x2(make_float2(__fdiv_rn(a, scale), __fdiv_rn(b, scale)), __NV_SATFINITE, __NV_E4M3), __NV_E4M3);
    __half2 const scaled = __hmul2(*reinterpret_cast<__half2 const*>(&raw), __floats2half2_rn(1.0F / 256.0F, 1.0F / 256.0F));
    return *reinterpret_cast<std::uint32_t const*>(&scaled);
  };
  *scale_out = scale * 256.0F;
  return make_uint2(codes(v.x, v.y), codes(v.z, v.w));
}

__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) v += __shfl_xor_sync(0xFFFFFFFFu, v, offset);
  return v;
}

}  // namespace detail

/// `S` is bf16 or fp8_block; gated, without biases, weights of slots on the output.
template <Scheme S>
__global__ void __launch_bounds__(kTokenThreads, 1) token_kernel(__grid_constant__ TokenParams const p) {
  constexpr bool kFp8 = SchemeTraits<S>::kFp8;
  constexpr int kChunk = kFp8 ? 16 : 8;  // elements in 16 bytes
  constexpr int kTaskBytes = kTokenTaskBytes + (kFp8 ? kTokenLoads * 128 : 0);
  extern __shared__ uint4 token_smem[];
  __shared__ int slot_count;
  __shared__ int slot_expert[kTokenSlots];
  __shared__ float slot_weight[kTokenSlots];
  uint4* const vector = token_smem;
  int const thread = static_cast<int>(threadIdx.x);
  int const lane = thread & 31;
  int const warp = thread >> 5;
  int const worker = static_cast<int>(blockIdx.x);
  int const workers = static_cast<int>(gridDim.x);
  int const hidden = p.shape.hidden;
  int const intermediate = p.shape.intermediate;
  int const depth = p.plan.depth;
  char* const ring = reinterpret_cast<char*>(token_smem) + p.plan.vector_bytes + warp * depth * kTaskBytes;
  float* const part0 =
      reinterpret_cast<float*>(reinterpret_cast<char*>(token_smem) + p.plan.vector_bytes + kTokenWarps * depth * kTaskBytes);
  float* const part1 = part0 + 2 * p.plan.pairs * p.plan.segments[0];

  launch_dependents();
  wait_for_dependencies();
  if (p.num_tokens != nullptr && *p.num_tokens < 1) return;
  if (warp == 0) {
    int const id = lane < p.shape.topk ? p.ids[lane] : -1;
    float const weight = lane < p.shape.topk ? p.weights[lane] : 0.0F;
    unsigned const valid = __ballot_sync(0xFFFFFFFFu, static_cast<unsigned>(id) < static_cast<unsigned>(p.shape.num_experts));
    if ((valid >> lane & 1u) != 0) {
      int const place = __popc(valid & ((1u << lane) - 1u));
      slot_expert[place] = id;
      slot_weight[place] = weight;
    }
    if (lane == 0) slot_count = __popc(valid);
  }
  __syncthreads();
  int const slots = slot_count;

  // This block's share of both products.
  int const all_pairs = slots * intermediate;
  int const first_pair = static_cast<int>(static_cast<long long>(all_pairs) * worker / workers);
  int const pairs = static_cast<int>(static_cast<long long>(all_pairs) * (worker + 1) / workers) - first_pair;
  int const first_column = static_cast<int>(static_cast<long long>(hidden) * worker / workers);
  int const columns = static_cast<int>(static_cast<long long>(hidden) * (worker + 1) / workers) - first_column;
  int const lines0 = p.plan.lines[0];
  int const lines1 = p.plan.lines[1];
  int const segments0 = p.plan.segments[0];
  int const segments1 = p.plan.segments[1];
  int const rows_a_task = lines1 >= kTokenLoads ? 1 : kTokenLoads / lines1;
  int const column_tasks = segments1 > 1 ? slots * segments1 : (slots + rows_a_task - 1) / rows_a_task;
  int const chunks0 = hidden / kChunk;
  int const chunks1 = intermediate / kChunk;
  int const tasks0 = pairs * segments0;
  int const tasks1 = columns * column_tasks;
  int const own0 = tasks0 > warp ? (tasks0 - warp + kTokenWarps - 1) / kTokenWarps : 0;
  int const own1 = tasks1 > warp ? (tasks1 - warp + kTokenWarps - 1) / kTokenWarps : 0;
  auto const group_scales = [&](int plane) { return reinterpret_cast<float*>(vector + 2 * plane); };

  // Load i of a task goes to its place in the ring; `from` null where there is nothing: such a place is not read.
  auto const load = [&](char* task, int i, char const* from, float const* scale) {
    if (from == nullptr) return;
    cp_async_16(smem_address(task + 512 * i + 16 * lane), from, 16);
    if constexpr (kFp8) cp_async_4(smem_address(task + kTokenTaskBytes + 128 * i + 4 * lane), scale);
  };
  auto const fetch = [&](int number, int place) {
    char* const to = ring + place * kTaskBytes;
    if (number < own0) {
      int const task = warp + number * kTokenWarps;
      int const local = task / segments0;
      int const pair = first_pair + local;
      int const slot = pair / intermediate;
      int const feature = pair - slot * intermediate;
      long long const expert = slot_expert[slot];
      long long const row = expert * p.matrix.rows + feature * p.matrix.row_step;
      int const first_line = (task - local * segments0) * (kTokenLoads / 2);
      char const* from = static_cast<char const*>(p.w13) + 16 * (row * chunks0 + 32 * first_line + lane);
      char const* const up = from + 16LL * p.matrix.half_step * chunks0;
      float const* scale = nullptr;
      if constexpr (kFp8) {  // gate rows come first
        scale = p.w13_scales + (expert * (p.matrix.rows / 128) + feature / 128) * (hidden / 128) + 4 * first_line + lane / 8;
      }
      int const up_scale = intermediate / 128 * (hidden / 128);
#pragma unroll
      for (int i = 0; i < kTokenLoads / 2; ++i) {
        if (32 * (first_line + i) + lane < chunks0) {
          load(to, 2 * i, from + 512 * i, scale + 4 * i);
          load(to, 2 * i + 1, up + 512 * i, scale + up_scale + 4 * i);
        }
      }
    } else if (number - own0 < own1) {
      int const task = warp + (number - own0) * kTokenWarps;
      int const local = task / column_tasks;
      int const column = first_column + local;
      int const inside = task - local * column_tasks;
      int row = segments1 > 1 ? inside / segments1 : inside * rows_a_task;
      int line = segments1 > 1 ? (inside - row * segments1) * kTokenLoads : 0;
      int const loads = segments1 > 1 ? min(kTokenLoads, lines1 - line) : min(rows_a_task, slots - row) * lines1;
#pragma unroll 2
      for (int i = 0; i < loads; ++i) {
        int const chunk = 32 * line + lane;
        if (chunk < chunks1) {
          long long const expert = slot_expert[row];
          float const* scale = nullptr;
          if constexpr (kFp8) {
            scale = p.w2_scales + (expert * ((hidden + 127) / 128) + column / 128) * (intermediate / 128) + chunk / 8;
          }
          load(to, i, static_cast<char const*>(p.w2) + 16 * ((expert * hidden + column) * chunks1 + chunk), scale);
        }
        if (++line == lines1) {
          line = 0;
          ++row;
        }
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  auto const use = [&](int number, int place) {
    char const* const from = ring + place * kTaskBytes;
    detail::TokenDot<S> dot;
    auto const weights = [&](int i) { return *reinterpret_cast<uint4 const*>(from + 512 * i + 16 * lane); };
    auto const scale = [&](int i) { return *reinterpret_cast<float const*>(from + kTokenTaskBytes + 128 * i + 4 * lane); };
    if (number < own0) {
      int const task = warp + number * kTokenWarps;
      int const first_line = task % segments0 * (kTokenLoads / 2);
      float gate = 0.0F;
      float up = 0.0F;
#pragma unroll
      for (int i = 0; i < kTokenLoads / 2; ++i) {
        int const chunk = 32 * (first_line + i) + lane;
        if (chunk < chunks0) {
          dot.load(vector, 32 * lines0, chunk);
          float const g = dot(weights(2 * i));
          float const u = dot(weights(2 * i + 1));
          if constexpr (kFp8) {
            float const group = group_scales(32 * lines0)[chunk / 8];
            gate = fmaf(g, scale(2 * i) * group, gate);
            up = fmaf(u, scale(2 * i + 1) * group, up);
          } else {
            gate += g;
            up += u;
          }
        }
      }
      gate = detail::warp_sum(gate);
      up = detail::warp_sum(up);
      if (lane == 0) *reinterpret_cast<float2*>(part0 + 2 * task) = make_float2(gate, up);
    } else {
      int const task = warp + (number - own0) * kTokenWarps;
      int const inside = task % column_tasks;
      int row = segments1 > 1 ? inside / segments1 : inside * rows_a_task;
      int line = segments1 > 1 ? (inside - row * segments1) * kTokenLoads : 0;
      int const loads = segments1 > 1 ? min(kTokenLoads, lines1 - line) : min(rows_a_task, slots - row) * lines1;
      float sum = 0.0F;
#pragma unroll 2
      for (int i = 0; i < loads; ++i) {
        int const chunk = 32 * line + lane;
        if (chunk < chunks1) {
          dot.load(vector, 32 * lines1 * slots, 32 * lines1 * row + chunk);
          float weight = slot_weight[row];
          if constexpr (kFp8) weight *= scale(i) * group_scales(32 * lines1 * slots)[4 * lines1 * row + chunk / 8];
          sum = fmaf(dot(weights(i)), weight, sum);
        }
        if (++line == lines1) {
          line = 0;
          ++row;
        }
      }
      sum = detail::warp_sum(sum);
      if (lane == 0) part1[task] = sum;
    }
  };
  // Elements 4 i to 4 i + 3 of row `row` of a vector, in planes of `plane` chunks; with fp8 a warp brings a group of 128.
  auto const store_vector = [&](float4 v, float floor, int plane, int row_chunks, int i) {
    if constexpr (kFp8) {
      float scale = 0.0F;
      uint2 const codes = detail::quantize_group(v, floor, &scale);
      reinterpret_cast<uint2*>(vector)[2 * ((i / 2 & 1) * plane + row_chunks + i / 4) + (i & 1)] = codes;
      if (lane == 0) group_scales(plane)[(row_chunks + i / 4) / 8] = scale;
    } else {
      vector[(i & 1) * plane + row_chunks + i / 2] =
          make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
    }
  };

  for (int i = 0; i < depth; ++i) fetch(i, i);
  for (int i = thread; 4 * (i - lane) < hidden; i += kTokenThreads) {
    float4 v = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
    if (4 * i < hidden) {
      uint2 const raw = __ldg(static_cast<uint2 const*>(p.x) + i);
      v = make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xFFFF0000u), __uint_as_float(raw.y << 16),
                      __uint_as_float(raw.y & 0xFFFF0000u));
    }
    if (kFp8 || 4 * i < hidden) store_vector(v, 1e-10F / 448.0F, 32 * lines0, 0, i);
  }
  __syncthreads();

  int place = 0;
  for (int number = 0;; ++number) {
    if (number == own0) {  // between the products
      __syncthreads();
      for (int local = thread; local < pairs; local += kTokenThreads) {
        float gate = 0.0F;
        float up = 0.0F;
        for (int s = 0; s < segments0; ++s) {
          float2 const part = *reinterpret_cast<float2 const*>(part0 + 2 * (local * segments0 + s));
          gate += part.x;
          up += part.y;
        }
        __stcg(p.inter + first_pair + local, evaluate(p.activation, gate, up));
      }
      __syncthreads();
      if (thread == 0) {
        fence_device();
        atomicAdd(p.arrived, 1);
        if (slots > 0) {
          for (std::uint32_t spin = 0; load_acquire(p.arrived) < workers; ++spin) {
            if (spin > 400'000'000u) stop_program();
          }
        }
      }
      __syncthreads();
      int const quarters = (chunks1 * (kChunk / 4) + 31) / 32 * 32;  // of a row, whole warps
      for (int i = thread; i < quarters * slots; i += kTokenThreads) {
        int const row = i / quarters;
        int const local = i - quarters * row;
        float4 v = make_float4(0.0F, 0.0F, 0.0F, 0.0F);
        if (4 * local < intermediate)
          v = __ldcg(reinterpret_cast<float4 const*>(p.inter + static_cast<long long>(row) * intermediate) + local);
        if (kFp8 || 4 * local < intermediate) store_vector(v, p.scale_floor, 32 * lines1 * slots, 32 * lines1 * row, local);
      }
      __syncthreads();
    }
    if (number == own0 + own1) break;
    if (depth == 3) {
      asm volatile("cp.async.wait_group 2;" ::: "memory");
    } else if (depth == 2) {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    use(number, place);
    fetch(number + depth, place);
    place = place + 1 == depth ? 0 : place + 1;
  }
  __syncthreads();
  for (int local = thread; local < columns; local += kTokenThreads) {
    float sum = 0.0F;
    for (int t = 0; t < column_tasks; ++t) sum += part1[local * column_tasks + t];
    int const column = first_column + local;
    static_cast<__nv_bfloat16*>(p.out)[column] = __float2bfloat16_rn(sum);
  }
  if (thread == 0 && atomicAdd(p.exits, 1) + 1 == workers) {  // every block is past its wait: leave the counters as they were
    *p.arrived = 0;
    *p.exits = 0;
  }
}

}  // namespace moe::hopper
