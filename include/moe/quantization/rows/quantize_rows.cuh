// SPDX-License-Identifier: Apache-2.0
// quantization/rows/quantize_rows.cuh: kernels over all rows, one warp per row, for use if no other kernel can inline the quantisation.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/core/array.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/quantization/format/layouts.hpp"
#include "moe/quantization/rows/quantize_row.cuh"

namespace moe::quantization {

namespace detail {

inline constexpr int kRowsPerBlock = 4;

/// Parameters of quantize_rows_kernel. Strides are elements between rows.
template <class Scheme, class Act>
struct QuantizeRowsArgs {
  Scheme scheme;
  Act const* x;  ///< device [rows, hidden]
  std::int64_t x_stride;
  std::int64_t rows;
  std::int64_t capacity;       ///< rows of a block
  std::int32_t const* counts;  ///< device [rows / capacity] rows of each block that are defined, or null: all
  std::int64_t hidden;
  typename Scheme::template Payload<Act>* q;  ///< device [rows, payload_cols(hidden)]
  std::int64_t q_stride;
  typename Scheme::Scale* s;  ///< device [rows, scale_cols(hidden)], or null: the scheme has no scales
  std::int64_t s_stride;
};

/// Row r is of block e = r / capacity.
template <class Scheme, class Act>
__global__ void quantize_rows_kernel(QuantizeRowsArgs<Scheme, Act> const a) {
  int const lane = static_cast<int>(threadIdx.x) % kWarp;
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * kRowsPerBlock;
  for (std::int64_t r = static_cast<std::int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.x / kWarp; r < a.rows; r += step) {
    if (a.counts != nullptr && r % a.capacity >= a.counts[r / a.capacity]) continue;
    auto* const scales = a.s == nullptr ? nullptr : a.s + r * a.s_stride;
    quantize_row_warp<Scheme, Act>(a.scheme, a.x + r * a.x_stride, a.hidden, a.q + r * a.q_stride, scales, lane);
  }
}

template <class Layout>
__global__ void swizzle_kernel(Layout layout, std::uint8_t const* linear, std::int64_t linear_stride, std::uint8_t* swizzled) {
  std::int64_t const step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  std::int64_t const cols = layout.padded_cols();
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < layout.size(); i += step) {
    std::int64_t const r = i / cols, c = i % cols;
    swizzled[layout.offset(r, c)] = r < layout.rows && c < layout.cols ? linear[r * linear_stride + c] : std::uint8_t{0};
  }
}

inline int quantize_blocks(std::int64_t rows) {
  return static_cast<int>(std::min<std::int64_t>((rows + kRowsPerBlock - 1) / kRowsPerBlock, 1 << 16));
}

}  // namespace detail

/// x [rows, H] → q [rows, payload_cols(H)], s [rows, scale_cols(H)], all in device memory, asynchronous on `stream`. No rows: no launch.
template <class Scheme, class Act>
void quantize_rows_on_device(Scheme const& scheme, Rows<Act const> x, Rows<typename Scheme::template Payload<Act>> q,
                             Rows<typename Scheme::Scale> s, cudaStream_t stream) {
  if (x.extent(0) == 0) return;
  bool const scales = Scheme::scale_cols(x.extent(1)) != 0;
  detail::QuantizeRowsArgs<Scheme, Act> const args{.scheme = scheme,
                                                   .x = x.data_handle(),
                                                   .x_stride = x.stride(0),
                                                   .rows = x.extent(0),
                                                   .capacity = x.extent(0),
                                                   .counts = nullptr,
                                                   .hidden = x.extent(1),
                                                   .q = q.data_handle(),
                                                   .q_stride = q.stride(0),
                                                   .s = scales ? s.data_handle() : nullptr,
                                                   .s_stride = scales ? s.stride(0) : 0};
  detail::quantize_rows_kernel<<<detail::quantize_blocks(args.rows), detail::kRowsPerBlock * detail::kWarp, 0, stream>>>(args);
  check_launch("quantize_rows");
}

/// Batched rows x [L, C, H]: only the first counts[e] rows of expert e, counts [L] in device memory, so that no call waits for the host.
template <class Scheme, class Act>
void quantize_batched_on_device(Scheme const& scheme, Blocks<Act const> x, std::int32_t const* counts,
                                Blocks<typename Scheme::template Payload<Act>> q, Blocks<typename Scheme::Scale> s, cudaStream_t stream) {
  std::int64_t const rows = x.extent(0) * x.extent(1);
  if (rows == 0) return;
  bool const scales = Scheme::scale_cols(x.extent(2)) != 0;
  detail::QuantizeRowsArgs<Scheme, Act> const args{.scheme = scheme,
                                                   .x = x.data_handle(),
                                                   .x_stride = x.extent(2),
                                                   .rows = rows,
                                                   .capacity = x.extent(1),
                                                   .counts = counts,
                                                   .hidden = x.extent(2),
                                                   .q = q.data_handle(),
                                                   .q_stride = q.extent(2),
                                                   .s = scales ? s.data_handle() : nullptr,
                                                   .s_stride = scales ? s.extent(2) : 0};
  detail::quantize_rows_kernel<<<detail::quantize_blocks(rows), detail::kRowsPerBlock * detail::kWarp, 0, stream>>>(args);
  check_launch("quantize_batched");
}

/// Linear block scales [rows, cols], linear_stride bytes apart, → swizzled, padding zero; device memory, asynchronous on `stream`.
inline void swizzle_on_device(SwizzledScales layout, std::uint8_t const* linear, std::int64_t linear_stride, std::uint8_t* swizzled,
                              cudaStream_t stream) {
  if (layout.size() == 0) return;
  auto const blocks = static_cast<int>(std::min<std::int64_t>((layout.size() + 255) / 256, 1 << 16));
  detail::swizzle_kernel<<<blocks, 256, 0, stream>>>(layout, linear, linear_stride, swizzled);
  check_launch("swizzle");
}

}  // namespace moe::quantization
