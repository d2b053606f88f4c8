// SPDX-License-Identifier: Apache-2.0
// runner/device/row_values.cuh: eight neighbouring values of a row as float32, and sums over a thread block, for the kernels of
// row_kernels.cuh and dense_shared.cuh.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "moe/core/array.hpp"
#include "moe/core/types.hpp"

namespace moe::runner::device {

inline constexpr int kRowThreads = 256;  ///< of a block that has a whole row
inline constexpr int kStripThreads = 128;
inline constexpr int kOctet = 8;                                ///< values of a thread
inline constexpr std::int64_t kStrip = kStripThreads * kOctet;  ///< columns of a block that has part of a row

/// Whether eight values from a multiple of 8 on lie at a multiple of 16 bytes, in every row. A null array may.
template <class T>
bool is_wide(T const* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
}
template <class View>
bool is_wide(View const& v) {
  return v.extent(0) == 0 || is_wide(v.data_handle(), v.stride(0));
}

/// values[i] = row[col + i], 0 from `width` on.
template <class T>
__device__ void load_values(T const* row, std::int64_t col, std::int64_t width, bool wide, float (&values)[kOctet]) {
  if (wide && col + kOctet <= width) {
    if constexpr (std::is_same_v<T, float>) {
      float4 const a = *reinterpret_cast<float4 const*>(row + col);
      float4 const b = *reinterpret_cast<float4 const*>(row + col + 4);
      values[0] = a.x;
      values[1] = a.y;
      values[2] = a.z;
      values[3] = a.w;
      values[4] = b.x;
      values[5] = b.y;
      values[6] = b.z;
      values[7] = b.w;
    } else {
      uint4 const words = *reinterpret_cast<uint4 const*>(row + col);
      T narrow[kOctet];
      static_assert(sizeof narrow == sizeof words);
      memcpy(narrow, &words, sizeof words);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) values[i] = to_float(narrow[i]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) values[i] = col + i < width ? to_float(row[col + i]) : 0.0F;
}

/// row[col + i] = values[i], one rounding, up to `width`.
template <class T>
__device__ void store_values(T* row, std::int64_t col, std::int64_t width, bool wide, float const (&values)[kOctet]) {
  if (wide && col + kOctet <= width) {
    if constexpr (std::is_same_v<T, float>) {
      *reinterpret_cast<float4*>(row + col) = make_float4(values[0], values[1], values[2], values[3]);
      *reinterpret_cast<float4*>(row + col + 4) = make_float4(values[4], values[5], values[6], values[7]);
    } else {
      T narrow[kOctet];
#pragma unroll
      for (int i = 0; i < kOctet; ++i) narrow[i] = from_float<T>(values[i]);
      uint4 words;
      memcpy(&words, narrow, sizeof words);
      *reinterpret_cast<uint4*>(row + col) = words;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) {
    if (col + i < width) row[col + i] = from_float<T>(values[i]);
  }
}

/// The sum of `v` over the block, in a fixed order, for every thread. Every thread of the block calls it; `Threads` are at most 1024.
template <int Threads>
__device__ float block_sum(float v) {
  constexpr int kWarps = Threads / 32;
  __shared__ float warps[kWarps];
#pragma unroll
  for (int half = 16; half > 0; half /= 2) v += __shfl_xor_sync(0xffffffffU, v, half);
  __syncthreads();  // the last sum was read
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = 0.0F;
#pragma unroll
  for (int i = 0; i < kWarps; ++i) sum += warps[i];
  return sum;
}

/// Σ a[i] b[i] over a row of `width`, for every thread of the block.
template <int Threads, class A, class B>
__device__ float block_dot(A const* a, bool a_wide, B const* b, bool b_wide, std::int64_t width) {
  float sum = 0.0F;
  for (std::int64_t col = static_cast<std::int64_t>(threadIdx.x) * kOctet; col < width; col += std::int64_t{Threads} * kOctet) {
    float x[kOctet];
    float y[kOctet];
    load_values(a, col, width, a_wide, x);
    load_values(b, col, width, b_wide, y);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) sum = fmaf(x[i], y[i], sum);
  }
  return block_sum<Threads>(sum);
}

/// Blocks of `strips` by rows for a kernel that walks rows with a stride of gridDim.y.
inline dim3 strip_grid(std::int64_t rows, std::int64_t width) {
  return dim3(static_cast<unsigned>((width + kStrip - 1) / kStrip), static_cast<unsigned>(rows < 65535 ? rows : 65535));
}

}  // namespace moe::runner::device
