// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/rows.cuh: how the device exchanges process one choice and one row: where its expert is, how it is
// quantised.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "moe/backends/window/device/common/calls.hpp"
#include "moe/backends/window/device/common/sums.cuh"
#include "moe/comm/symmetric_memory.cuh"
#include "moe/core/ptx/bulk_copy.cuh"

namespace moe::detail {

/// Where the expert of an id is, rank * L + local, or -1.
__device__ inline int expert_of(int id, ExpertTable const& experts) {
  if (id < 0 || id >= experts.num_ids) {
    return -1;
  }
  return experts.place == nullptr ? id : experts.place[id];
}

/// The distance from slot i back to the first choice of the same expert in its token: an expert gets one row per token, even if the token
/// names it twice, so that T rows per source always suffice. 0: slot i is the first. For whole warps whose lanes have consecutive slots;
/// `id` is ids[i], or negative where a lane has none.
__device__ inline int distance_to_first(std::int32_t const* ids, int i, int id, int topk) {
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const before = i % topk;  // earlier choices of the token; the lower lanes of the warp hold them
  unsigned const token = ((1U << lane) - 1U) & ~((1U << (lane - min(before, lane))) - 1U);
  unsigned const same = __match_any_sync(0xffffffffU, id) & token;
  int back = same != 0 ? lane - (__ffs(static_cast<int>(same)) - 1) : 0;
#pragma unroll 1
  for (int j = lane + 1; id >= 0 && j <= before; ++j) {
    back = ids[i - j] == id ? j : back;
  }
  return id >= 0 ? back : 0;
}

/// v * weight, rounded to bf16, for eight values.
__device__ inline uint4 weigh_eight(uint4 v, float weight) {
  __nv_bfloat162* const pairs = reinterpret_cast<__nv_bfloat162*>(&v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float2 const f = __bfloat1622float2(pairs[i]);
    pairs[i] = __floats2bfloat162_rn(weight * f.x, weight * f.y);
  }
  return v;
}

/// The masked ranks, one bit each.
__device__ inline std::uint64_t masked_ranks(comm::WindowView const& w) {
  std::uint32_t const* const masked = comm::detail::own<std::uint32_t>(w, comm::WindowControl::masked);
  std::uint64_t bits = 0;
#pragma unroll 1
  for (int r = 0; r < w.size; ++r) {
    bits |= static_cast<std::uint64_t>(masked[r] != 0 ? 1 : 0) << r;
  }
  return bits;
}

/// Divides by a scale whose reciprocal is known; the result is rounded like x / s: one Newton step on the residual.
__device__ inline float divide_by(float x, float s, float inverse) {
  float const q = x * inverse;
  return fmaf(fmaf(-q, s, x), inverse, q);
}

/// Sixteen bf16 values of a group of 128 that eight neighbouring lanes hold → sixteen e4m3 codes and the group's scale.
/// A group with NaN or infinity: scale and codes NaN. All 32 lanes must call it.
__device__ inline uint4 quantize_sixteen(uint4 const (&v)[2], float amax_floor, bool pow2, float& scale) {
  std::uint32_t m = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    m = __vmaxu2(m, v[i].x & 0x7fff7fffU);
    m = __vmaxu2(m, v[i].y & 0x7fff7fffU);
    m = __vmaxu2(m, v[i].z & 0x7fff7fffU);
    m = __vmaxu2(m, v[i].w & 0x7fff7fffU);
  }
#pragma unroll
  for (int o = 4; o > 0; o >>= 1) {
    m = __vmaxu2(m, __shfl_xor_sync(0xffffffffU, m, o));
  }
  std::uint32_t const amax_bits = max(m & 0xffffU, m >> 16) << 16;
  bool const finite = amax_bits < 0x7f800000U;
  float const s = divide_by(fmaxf(__uint_as_float(amax_bits), amax_floor), 448.0F, 1.0F / 448.0F);
  scale = pow2 ? __uint_as_float((__float_as_uint(s) + 0x7fffffU) & 0xff800000U) : s;
  scale = finite ? scale : __uint_as_float(0x7fc00000U);
  float const inverse = __frcp_rn(scale);
  uint4 out;
  std::uint32_t* const codes = &out.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint4 const& half = v[i / 2];
    std::uint32_t const lo = i % 2 == 0 ? half.x : half.z;
    std::uint32_t const hi = i % 2 == 0 ? half.y : half.w;
    float2 const a =
        make_float2(divide_by(__uint_as_float(lo << 16), scale, inverse), divide_by(__uint_as_float(lo & 0xffff0000U), scale, inverse));
    float2 const b =
        make_float2(divide_by(__uint_as_float(hi << 16), scale, inverse), divide_by(__uint_as_float(hi & 0xffff0000U), scale, inverse));
    codes[i] = static_cast<std::uint32_t>(__nv_cvt_float2_to_fp8x2(a, __NV_SATFINITE, __NV_E4M3)) |
               (static_cast<std::uint32_t>(__nv_cvt_float2_to_fp8x2(b, __NV_SATFINITE, __NV_E4M3)) << 16);
  }
  return out;
}

/// Eight bf16 values times `factor`, one rounding each.
__device__ inline uint4 scale_eight(uint4 v, float factor) {
  float scaled[8] = {};
  accumulate_eight(scaled, v, factor);
  return round_eight(scaled);
}

/// x[0, values) → e4m3 codes and a float scale for each 128, in shared memory, by all lanes of a warp; x times `factor` first if `scaled`.
/// Before it overwrites them, waits until the copy engine has read this warp's earlier values; meanwhile `kBatch` loads per lane are in
/// flight.
template <int kBatch = 4>
__device__ inline void quantize_row(__nv_bfloat16 const* from, int values, ScaleRule const& rule, int lane, unsigned char* codes,
                                    float* scales, bool scaled = false, float factor = 1.0F) {
  uint4 const* const x = reinterpret_cast<uint4 const*>(from);
  int const sixteens = values / 16;
#pragma unroll 1
  for (int u0 = 0; u0 < sixteens; u0 += 32 * kBatch) {
    uint4 v[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const u = u0 + 32 * i + lane;
      v[i][0] = u < sixteens ? x[2 * u] : uint4{};
      v[i][1] = u < sixteens ? x[2 * u + 1] : uint4{};
    }
    if (u0 == 0) {
      ptx::bulk_wait_read();  // after the loads above, so that they are already in flight
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int const u = u0 + 32 * i + lane;
      if (scaled) {
        v[i][0] = scale_eight(v[i][0], factor);
        v[i][1] = scale_eight(v[i][1], factor);
      }
      float scale;
      uint4 const sixteen = quantize_sixteen(v[i], rule.amax_floor, rule.pow2, scale);
      if (u < sixteens) {
        reinterpret_cast<uint4*>(codes)[u] = sixteen;
        if (u % 8 == 0) {
          scales[u / 8] = scale;
        }
      }
    }
  }
  ptx::fence_shared_to_bulk();
  __syncwarp();
}

}  // namespace moe::detail
