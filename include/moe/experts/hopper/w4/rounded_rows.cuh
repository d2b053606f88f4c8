// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/rounded_rows.cuh: the kernels that turn rows in codes into bf16 and round the intermediate between the products, a warp
// for each row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/core/cuda_space.hpp"
#include "moe/experts/hopper/common/schedule.cuh"
#include "moe/experts/hopper/w4/rounded_rows.hpp"
#include "moe/quantization/rows/quantize_row.cuh"

namespace moe::hopper::w4 {

inline constexpr int kRoundingWarps = 4;  ///< of a thread block

/// Parameters of widen_codes.
template <class Rows>
struct WidenArgs {
  W4Codes from;
  std::int32_t const* num_tokens;  ///< standard format: valid rows, or null: all
  std::int32_t const* counts;      ///< batched format: [rows / capacity] valid rows of each block; else null
  std::int32_t const* gather;      ///< batched format: the row of `from` of each row, or null: the same
  int capacity;
  int rows;
  int hidden;      ///< a multiple of 64
  bf16* to;        ///< [rows, hidden]
  float* factors;  ///< [rows], of kHasRowFactors
};

/// The codes of elements [at, at + 8) of a row, in the order of memory.
template <class Codec>
__device__ inline std::uint64_t load_codes8(std::uint8_t const* row, int at) {
  std::uint8_t const* const from = row + at / Codec::kPack;
  if constexpr (Codec::kPack == 2) {
    if (quantization::detail::aligned(row, 4)) return *reinterpret_cast<std::uint32_t const*>(from);
  } else if (quantization::detail::aligned(row, 8)) {
    return *reinterpret_cast<std::uint64_t const*>(from);
  }
  std::uint64_t out = 0;
#pragma unroll
  for (int i = 0; i < 8 / Codec::kPack; ++i) out |= static_cast<std::uint64_t>(from[i]) << (8 * i);
  return out;
}

/// Writes eight elements at a multiple of 16 bytes.
template <class Rows>
__device__ inline void store_elements8(bf16* to, std::uint64_t codes, float part) {
  alignas(16) bf16 values[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) values[i] = exact_element<Rows>(codes, i, part);
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<uint4 const*>(values);
}

template <class Rows>
__global__ void widen_codes(WidenArgs<Rows> const a) {
  using Codec = typename Rows::Codec;
  using Scale = typename Rows::Scale;
  int const lane = static_cast<int>(threadIdx.x) & 31;
  int const rows = a.num_tokens == nullptr ? a.rows : min(a.rows, *a.num_tokens);
  int const step = static_cast<int>(gridDim.x) * kRoundingWarps;
  for (int row = static_cast<int>(blockIdx.x) * kRoundingWarps + static_cast<int>(threadIdx.x) / 32; row < rows; row += step) {
    if (a.counts != nullptr && row % a.capacity >= a.counts[row / a.capacity]) continue;
    long long const source = a.gather != nullptr ? a.gather[row] : row;
    auto const* const codes = static_cast<std::uint8_t const*>(a.from.codes) + source * a.from.stride;
    auto const* const scales = static_cast<Scale const*>(a.from.scales) + source * a.from.scale_stride;
    if constexpr (kHasRowFactors<Rows>) {
      if (lane == 0) a.factors[row] = Codec::factor(scales[0]);
    }
    for (int at = 8 * lane; at < a.hidden; at += 256) {
      Scale const scale = scales[Rows::kActGroup == 0 ? 0 : at / (Rows::kActGroup == 0 ? 1 : Rows::kActGroup)];
      store_elements8<Rows>(a.to + static_cast<long long>(row) * a.hidden + at, load_codes8<Codec>(codes, at), exact_part<Rows>(scale));
    }
  }
}

/// Parameters of round_intermediate.
template <class Rows>
struct RoundArgs {
  Rows scheme;
  float const* from;       ///< [slots, padded]
  int width;               ///< columns that count
  int padded;              ///< a multiple of 64; columns from `width` on become zero
  bf16* to;                ///< [slots, padded]
  float* factors;          ///< [slots], of kHasRowFactors
  Control const* control;  ///< has the number of rows
  int* next_unit;          ///< is set to `workers`, for the second product's kernel
  int workers;
};

/// As Rows::quantize_row and then dequantize_row, but for what exact_part() leaves out.
template <class Rows>
__global__ void round_intermediate(RoundArgs<Rows> const a) {
  using namespace quantization::detail;
  using Codec = typename Rows::Codec;
  int const lane = static_cast<int>(threadIdx.x) & 31;
  if (blockIdx.x == 0 && threadIdx.x == 0) *a.next_unit = a.workers;
  int const rows = a.control->rows;
  int const step = static_cast<int>(gridDim.x) * kRoundingWarps;
  for (int row = static_cast<int>(blockIdx.x) * kRoundingWarps + static_cast<int>(threadIdx.x) / 32; row < rows; row += step) {
    float const* const from = a.from + static_cast<long long>(row) * a.padded;
    bf16* const to = a.to + static_cast<long long>(row) * a.padded;
    float v[kLaneElements];
    [[maybe_unused]] typename Rows::Scale scale{};
    if constexpr (kHasRowFactors<Rows>) {
      std::uint32_t amax = 0;
      for (int at = lane * kLaneElements; at < a.width; at += kWarpElements) {
        load8(from, at, a.width, true, v);
        amax = max(amax, amax8(a.scheme.act, v));
      }
      scale = a.scheme.act.scale(__reduce_max_sync(0xFFFFFFFFU, amax));
      if (lane == 0) a.factors[row] = Codec::factor(scale);
    }
    // All lanes run every step, because the shuffles need them.
    for (int base = 0; base < a.padded; base += kWarpElements) {
      int const at = base + lane * kLaneElements;
      load8(from, at, a.width, true, v);
      if constexpr (!kHasRowFactors<Rows>) {
        constexpr int kLanes = Rows::kActGroup / kLaneElements;
        std::uint32_t amax = amax8(a.scheme.act, v);
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) amax = max(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, offset));
        scale = a.scheme.act.scale(amax);
      }
      if (at >= a.padded) continue;
      std::uint64_t const codes = at < a.width ? encode8<Codec>(v, a.scheme.act.factor(scale)) : 0;
      store_elements8<Rows>(to + at, codes, at < a.width ? exact_part<Rows>(scale) : 1.0F);
    }
  }
}

/// Thread blocks for that many rows, a few on each multiprocessor.
inline unsigned rounding_blocks(long long rows, int workers) {
  return static_cast<unsigned>(std::clamp<long long>((rows + kRoundingWarps - 1) / kRoundingWarps, 1, 16LL * workers));
}

}  // namespace moe::hopper::w4
