// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/quantize_rows.cuh: rows of x for fp8_block: e4m3 codes and scales of groups of 128, in the order of x or in the
// sorted order.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "moe/core/ptx/convert.cuh"
#include "moe/experts/hopper/common/align_args.cuh"
#include "moe/experts/hopper/common/wait.cuh"

namespace moe::hopper {

namespace detail {

/// The larger magnitude of each half of two pairs of bf16 numbers.
__device__ inline std::uint32_t max_magnitudes(std::uint32_t a, std::uint32_t b) {
  __nv_bfloat162 const m =
      __hmax2(__habs2(*reinterpret_cast<__nv_bfloat162 const*>(&a)), __habs2(*reinterpret_cast<__nv_bfloat162 const*>(&b)));
  return *reinterpret_cast<std::uint32_t const*>(&m);
}

/// e4m3 codes of a 1×128 group of bf16 numbers, sixteen in each of eight neighbouring lanes, and the group's scale = max(amax, 1e-10) /
/// 448. Codes come from the correctly rounded quotient (values of few bits often lie midway between two codes).
__device__ inline float quantize_group(std::uint32_t const (&word)[8], std::uint32_t (&code)[4]) {
  std::uint32_t most = max_magnitudes(word[0], word[1]);
#pragma unroll
  for (int i = 2; i < 8; ++i) most = max_magnitudes(most, word[i]);
#pragma unroll
  for (int offset = 1; offset < 8; offset *= 2) most = max_magnitudes(most, __shfl_xor_sync(0xFFFFFFFFu, most, offset));
  float const amax = fmaxf(__uint_as_float(most << 16), __uint_as_float(most & 0xFFFF0000u));
  float const scale = e4m3_scale(fmaxf(amax, 1e-10F));
  float const inverse = 1.0F / scale;
  auto const two = [&](std::uint32_t w) {
    return pack_e4m3(quotient(__uint_as_float(w << 16), scale, inverse), quotient(__uint_as_float(w & 0xFFFF0000u), scale, inverse));
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) code[i] = two(word[2 * i]) | (two(word[2 * i + 1]) << 16);
  return scale;
}

/// Codes and scales of all groups of x. Each of a group's eight lanes has the chunks `lane` and `lane + 8` of eight numbers.
template <int Threads>
__device__ inline void quantize_groups(AlignArgs const& a, int worker, int workers) {
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  unsigned const blocks = static_cast<unsigned>(a.hidden) / 128;
  long long const groups = static_cast<long long>(tokens) * blocks;
  long long const step = static_cast<long long>(workers) * (Threads / 8);
  int const lane = static_cast<int>(threadIdx.x) & 7;
  constexpr int kBatch = 2;
  struct Batch {
    uint4 words[kBatch][2];
    int position[kBatch];  ///< of slot `lane` of the group's token
  };
  Batch now;
  Batch next;
  auto const load = [&](Batch& to, long long base) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      long long const group = base + b * step;
      uint4 const* const from = static_cast<uint4 const*>(a.x) + group * 16 + lane;
      to.words[b][0] = group < groups ? __ldcs(from) : make_uint4(0, 0, 0, 0);
      to.words[b][1] = group < groups ? __ldcs(from + 8) : make_uint4(0, 0, 0, 0);
    }
  };
  auto const load_positions = [&](Batch& to, long long base) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      long long const group = base + b * step;
      bool const there = group < groups && lane < a.topk;
      to.position[b] = there ? __ldcg(a.positions + static_cast<long long>(static_cast<unsigned>(group) / blocks) * a.topk + lane) : -1;
    }
  };
  int const own = static_cast<int>(threadIdx.x) >> 3;
  long long base = static_cast<long long>(worker) * (Threads / 8) + own;
  load(now, base);
  if (a.positions != nullptr) {
    if (threadIdx.x == 0) wait_counter(a.sorted, kAlignCluster);
    __syncthreads();
    load_positions(now, base);
  }
  for (; base - own < groups; base += kBatch * step) {
    load(next, base + kBatch * step);  // in flight while this batch is converted
    if (a.positions != nullptr) load_positions(next, base + kBatch * step);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      long long const group = base + b * step;
      std::uint32_t const word[8] = {now.words[b][0].x, now.words[b][0].y, now.words[b][0].z, now.words[b][0].w,
                                     now.words[b][1].x, now.words[b][1].y, now.words[b][1].z, now.words[b][1].w};
      std::uint32_t code[4];
      float const scale = quantize_group(word, code);
      auto const store = [&](long long row, unsigned block, float* scale_to) {
        uint2* const to = reinterpret_cast<uint2*>(a.x_codes) + (row * blocks + block) * 16 + lane;
        to[0] = make_uint2(code[0], code[1]);
        to[8] = make_uint2(code[2], code[3]);
        if (lane == 0) *scale_to = scale;
      };
      if (a.positions == nullptr) {
        if (group < groups) store(0, static_cast<unsigned>(group), a.x_scales + group);
        continue;
      }
      unsigned const token = static_cast<unsigned>(group) / blocks;
      unsigned const block = static_cast<unsigned>(group) - token * blocks;
      for (int first = 0; first < a.topk; first += 8) {
        int position = now.position[b];
        if (first > 0) {
          bool const there = group < groups && first + lane < a.topk;
          position = there ? __ldcg(a.positions + static_cast<long long>(token) * a.topk + first + lane) : -1;
        }
        for (int j = 0; j < min(8, a.topk - first); ++j) {
          int const at = __shfl_sync(0xFFFFFFFFu, position, j, 8);
          if (at >= 0) store(at, block, a.x_scales + static_cast<long long>(block) * a.scale_stride + at);
        }
      }
    }
    now = next;
  }
}

/// Copies rows of codes and their scales to the row positions of their slots; a warp copies one row at a time.
template <int Threads>
__device__ inline void sort_codes(AlignArgs const& a, int worker, int workers) {
  int const tokens = a.num_tokens != nullptr ? min(max(*a.num_tokens, 0), a.max_tokens) : a.max_tokens;
  int const blocks = a.hidden / 128;
  int const chunks = a.hidden / 16;
  int const lane = static_cast<int>(threadIdx.x) & 31;
  constexpr int kWarps = Threads / 32;
  constexpr int kBatch = 7;  // a lane has 14 chunks at 7168 columns
  if (threadIdx.x == 0) wait_counter(a.sorted, kAlignCluster);
  __syncthreads();
  for (int token = worker * kWarps + (static_cast<int>(threadIdx.x) >> 5); token < tokens; token += workers * kWarps) {
    auto const* const row = reinterpret_cast<uint4 const*>(static_cast<char const*>(a.x) + token * a.x_row_bytes);
    float const* const scales = a.given_scales + token * a.given_scale_stride;
    for (int first = 0; first < a.topk; first += 32) {
      int const own = first + lane < a.topk ? __ldcg(a.positions + static_cast<long long>(token) * a.topk + first + lane) : -1;
      unsigned const slots = __ballot_sync(0xFFFFFFFFu, own >= 0);
      if (slots == 0) continue;
      for (int base = lane; base - lane < chunks; base += 32 * kBatch) {
        uint4 held[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (base + 32 * i < chunks) held[i] = __ldcs(row + base + 32 * i);
        }
        for (unsigned rest = slots; rest != 0; rest &= rest - 1) {
          long long const at = __shfl_sync(0xFFFFFFFFu, own, __ffs(static_cast<int>(rest)) - 1);
          uint4* const to = reinterpret_cast<uint4*>(a.x_codes) + at * chunks;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            if (base + 32 * i < chunks) to[base + 32 * i] = held[i];
          }
        }
      }
      for (int block = lane; block - lane < blocks; block += 32) {
        float const scale = block < blocks ? __ldg(scales + block) : 0.0F;
        for (unsigned rest = slots; rest != 0; rest &= rest - 1) {
          int const at = __shfl_sync(0xFFFFFFFFu, own, __ffs(static_cast<int>(rest)) - 1);
          if (block < blocks) a.x_scales[static_cast<long long>(block) * a.scale_stride + at] = scale;
        }
      }
    }
  }
}

}  // namespace detail

}  // namespace moe::hopper
