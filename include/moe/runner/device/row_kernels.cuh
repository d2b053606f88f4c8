// SPDX-License-Identifier: Apache-2.0
// runner/device/row_kernels.cuh: definitions of runner/device/row_kernels.hpp.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "moe/activation/activation.hpp"
#include "moe/quantization/rows/quantize_rows.cuh"
#include "moe/routing/row/score.hpp"
#include "moe/routing/zero_experts.hpp"
#include "moe/runner/device/row_kernels.hpp"
#include "moe/runner/device/row_values.cuh"

namespace moe::runner::device {

template <class T>
struct RowsArg {
  T* data;
  std::int64_t stride;
  bool wide;
  __device__ T* row(std::int64_t r) const { return data + r * stride; }
};
template <class T>
RowsArg<T> rows_arg(Rows<T> const& v) {
  return {v.extent(0) == 0 ? nullptr : v.data_handle(), v.extent(0) == 0 ? 0 : v.stride(0), is_wide(v)};
}

// ---- one pass over the routed output

template <class X, class S>
struct FinishArgs {
  RowsArg<X const> routed;
  RowsArg<X> output;
  RowsArg<S const> shared;  ///< data null: none
  RowsArg<X const> x;       ///< data null: no zero experts
  RowsArg<std::int32_t const> ids;
  RowsArg<float const> weights;
  float const* bias;
  float const* norm;
  bool vectors_wide;
  std::int64_t rows;
  std::int64_t width;
  float scale;
  float zero_scale;
  float shared_scale;
  float factor;
  float eps;
  int num_experts;
  int topk;
};

/// zero_scale times routing::zero_expert_factor() of a row, by a whole warp in the same order.
template <class X, class S>
__device__ float zero_factor(FinishArgs<X, S> const& a, std::int64_t row) {
  if (a.x.data == nullptr) return 0.0F;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  float v = lane < a.topk && routing::is_zero_expert(a.ids.row(row)[lane], a.num_experts) ? a.weights.row(row)[lane] : 0.0F;
#pragma unroll
  for (int half = 16; half > 0; half /= 2) v = __fadd_rn(v, __shfl_down_sync(0xffffffffU, v, static_cast<unsigned>(half)));
  return __fmul_rn(a.zero_scale, __shfl_sync(0xffffffffU, v, 0));
}

/// The sum of a row's eight columns, before the norm: the order of operations of the host's.
template <class X, class S>
__device__ void finish_values(FinishArgs<X, S> const& a, std::int64_t row, std::int64_t col, float zero, float (&v)[kOctet]) {
  load_values(a.routed.row(row), col, a.width, a.routed.wide, v);
  if (zero != 0.0F) {  // 0 x NaN adds nothing
    float x[kOctet];
    load_values(a.x.row(row), col, a.width, a.x.wide, x);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = __fadd_rn(v[i], __fmul_rn(zero, x[i]));
  }
#pragma unroll
  for (int i = 0; i < kOctet; ++i) v[i] = __fmul_rn(v[i], a.scale);
  if (a.shared.data != nullptr) {
    float s[kOctet];
    load_values(a.shared.row(row), col, a.width, a.shared.wide, s);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = __fmul_rn(a.factor, __fadd_rn(v[i], __fmul_rn(a.shared_scale, s[i])));
  }
  if (a.bias != nullptr) {
    float b[kOctet];
    load_values(a.bias, col, a.width, a.vectors_wide, b);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) v[i] = __fadd_rn(v[i], b[i]);
  }
}

/// A block per strip of a row, every thread eight columns.
template <class X, class S>
__global__ void __launch_bounds__(kStripThreads) finish_kernel(FinishArgs<X, S> a) {
  std::int64_t const col = blockIdx.x * kStrip + static_cast<std::int64_t>(threadIdx.x) * kOctet;
  for (std::int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    float const zero = zero_factor(a, row);
    if (col >= a.width) continue;
    float v[kOctet];
    finish_values(a, row, col, zero, v);
    store_values(a.output.row(row), col, a.width, a.output.wide, v);
  }
}

/// A block per row, whose sums wait in shared memory [width] for their norm.
template <class X, class S>
__global__ void __launch_bounds__(kRowThreads) finish_norm_kernel(FinishArgs<X, S> a) {
  extern __shared__ float4 row_memory[];
  auto* const sums = reinterpret_cast<float*>(row_memory);
  std::int64_t const step = std::int64_t{kRowThreads} * kOctet;
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float const zero = zero_factor(a, row);
    float squares = 0.0F;
    for (std::int64_t col = static_cast<std::int64_t>(threadIdx.x) * kOctet; col < a.width; col += step) {
      float v[kOctet];
      finish_values(a, row, col, zero, v);
      for (float f : v) squares = fmaf(f, f, squares);  // values past the width are zero
      store_values(sums, col, a.width, true, v);
    }
    float const inverse = 1.0F / sqrtf(block_sum<kRowThreads>(squares) / static_cast<float>(a.width) + a.eps);
    for (std::int64_t col = static_cast<std::int64_t>(threadIdx.x) * kOctet; col < a.width; col += step) {
      float v[kOctet];
      load_values(static_cast<float const*>(sums), col, a.width, true, v);
#pragma unroll
      for (float& f : v) f = __fmul_rn(f, inverse);
      if (a.norm != nullptr) {
        float w[kOctet];
        load_values(a.norm, col, a.width, a.vectors_wide, w);
#pragma unroll
        for (int i = 0; i < kOctet; ++i) v[i] = __fmul_rn(v[i], w[i]);
      }
      store_values(a.output.row(row), col, a.width, a.output.wide, v);
    }
  }
}

// ---- the other kernels

/// Parameters of rms_norm_kernel.
template <class X, class Y>
struct RmsNormArgs {
  RowsArg<X const> x;   ///< [rows, width]
  RowsArg<Y> y;         ///< [rows, width]
  float const* weight;  ///< device [width], or null: ones
  bool weight_wide;     ///< is_wide() of weight
  float eps;
  float scale;  ///< multiplies the weights
  std::int64_t rows;
  std::int64_t width;
};

template <class X, class Y>
__global__ void __launch_bounds__(kRowThreads) rms_norm_kernel(RmsNormArgs<X, Y> const a) {
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    X const* const from = a.x.row(row);
    float const mean = block_dot<kRowThreads>(from, a.x.wide, from, a.x.wide, a.width) / static_cast<float>(a.width);
    float const inverse = 1.0F / sqrtf(mean + a.eps);
    for (std::int64_t col = static_cast<std::int64_t>(threadIdx.x) * kOctet; col < a.width; col += std::int64_t{kRowThreads} * kOctet) {
      float v[kOctet];
      load_values(from, col, a.width, a.x.wide, v);
      float w[kOctet] = {1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F, 1.0F};
      if (a.weight != nullptr) load_values(a.weight, col, a.width, a.weight_wide, w);
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], inverse), __fmul_rn(w[i], a.scale));
      store_values(a.y.row(row), col, a.width, a.y.wide, v);
    }
  }
}

template <class X>
__global__ void __launch_bounds__(kStripThreads) gelu_kernel(RowsArg<X> x, std::int64_t rows, std::int64_t width) {
  std::int64_t const col = blockIdx.x * kStrip + static_cast<std::int64_t>(threadIdx.x) * kOctet;
  if (col >= width) return;
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float v[kOctet];
    load_values(static_cast<X const*>(x.row(row)), col, width, x.wide, v);
#pragma unroll
    for (float& f : v) f = activation::detail::gelu(f);
    store_values(x.row(row), col, width, x.wide, v);
  }
}

/// Parameters of sigmoid_gate_kernel.
template <class X>
struct SigmoidGateArgs {
  RowsArg<X const> x;  ///< [rows, width]
  float const* v;      ///< device [width]
  bool v_wide;         ///< is_wide() of v
  RowsArg<float> out;  ///< [rows, columns]
  std::int64_t rows;
  std::int64_t width;
  std::int64_t columns;  ///< copies of a row's gate
};

template <class X>
__global__ void __launch_bounds__(kRowThreads) sigmoid_gate_kernel(SigmoidGateArgs<X> const a) {
  for (std::int64_t row = blockIdx.x; row < a.rows; row += gridDim.x) {
    float const gate = activation::detail::sigmoid(block_dot<kRowThreads>(a.x.row(row), a.x.wide, a.v, a.v_wide, a.width));
    for (std::int64_t i = threadIdx.x; i < a.columns; i += kRowThreads) a.out.row(row)[i] = gate;
  }
}

template <class X>
__global__ void __launch_bounds__(kStripThreads)
    copy_columns_kernel(RowsArg<X const> from, std::int64_t from_width, RowsArg<X> to, std::int64_t to_width, std::int64_t rows) {
  std::int64_t const col = blockIdx.x * kStrip + static_cast<std::int64_t>(threadIdx.x) * kOctet;
  if (col >= to_width) return;
  for (std::int64_t row = blockIdx.y; row < rows; row += gridDim.y) {
    float v[kOctet];
    load_values(from.row(row), col, from_width, from.wide, v);
    store_values(to.row(row), col, to_width, to.wide, v);
  }
}

/// E_ARG unless `view` has the rows and columns.
template <class View>
void expect_shape(char const* what, View const& view, std::int64_t rows, std::int64_t cols) {
  if (view.extent(0) != rows || view.extent(1) != cols) {
    throw Error(ErrorCode::argument, text(what, ": ", view.extent(0), " x ", view.extent(1), ", expected ", rows, " x ", cols));
  }
}
inline unsigned row_blocks(std::int64_t rows) { return static_cast<unsigned>(std::min<std::int64_t>(rows, 65535)); }

/// Most columns of a row that finish_norm_kernel keeps in shared memory.
inline constexpr std::int64_t kMostNormColumns = 56 * 1024;

template <class X, class S>
FinishArgs<X, S> finish_args(FinishRows<X, S> const& f) {
  std::int64_t const rows = f.output.extent(0);
  std::int64_t const width = f.output.extent(1);
  bool const zeros = f.zero_kind != routing::ZeroExpertKind::none && f.ids.extent(0) > 0;
  expect_shape("finish: routed", f.routed, rows, width);
  if (f.shared.extent(0) > 0) expect_shape("finish: shared output", f.shared, rows, width);
  if (zeros) {
    expect_shape("finish: x of the zero experts", f.x, rows, width);
    if (f.ids.extent(0) != rows || f.weights.extent(0) != rows || f.ids.extent(1) < f.topk || f.weights.extent(1) < f.topk ||
        f.topk > kMaxTopK) {
      throw Error(ErrorCode::argument,
                  text("finish: ids of ", f.ids.extent(0), " x ", f.ids.extent(1), ", expected ", rows, " x ", f.topk));
    }
  }
  FinishArgs<X, S> a{};
  a.routed = rows_arg(f.routed);
  a.output = rows_arg(f.output);
  a.shared = rows_arg(f.shared);
  if (zeros) {
    a.x = rows_arg(f.x);
    a.ids = rows_arg(f.ids);
    a.weights = rows_arg(f.weights);
  }
  a.bias = f.bias;
  a.norm = f.normalise ? f.norm : nullptr;
  a.vectors_wide = is_wide(f.bias, 0) && is_wide(f.norm, 0);
  a.rows = rows;
  a.width = width;
  a.scale = f.scale;
  a.zero_scale = f.zero_scale;
  a.shared_scale = f.shared_scale;
  a.factor = f.factor;
  a.eps = f.eps;
  a.num_experts = f.num_experts;
  a.topk = f.topk;
  return a;
}

}  // namespace moe::runner::device

namespace moe::runner {

template <class X, class S>
void RowKernels<space::cuda>::finish(FinishRows<X, S> const& f, cudaStream_t stream) {
  using namespace device;
  FinishArgs<X, S> const args = finish_args(f);
  if (args.rows == 0) return;
  if (!f.normalise) {
    finish_kernel<<<strip_grid(args.rows, args.width), kStripThreads, 0, stream>>>(args);
    check_launch("finish_kernel");
    return;
  }
  if (args.width > kMostNormColumns) {
    throw Error(ErrorCode::unsupported, text("finish: a norm of ", args.width, " columns, at most ", kMostNormColumns));
  }
  auto const bytes = static_cast<std::size_t>(args.width) * sizeof(float);
  if (bytes > 48 * 1024) {
    check_cuda(cudaFuncSetAttribute(&finish_norm_kernel<X, S>, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
               "cudaFuncSetAttribute");
  }
  finish_norm_kernel<<<row_blocks(args.rows), kRowThreads, bytes, stream>>>(args);
  check_launch("finish_norm_kernel");
}

template <class X, class Y>
void RowKernels<space::cuda>::rms_norm(Rows<X const> x, float const* weight, float eps, float scale, Rows<Y> y, cudaStream_t stream) {
  using namespace device;
  std::int64_t const rows = x.extent(0);
  expect_shape("rms_norm: y", y, rows, x.extent(1));
  if (rows == 0) return;
  RmsNormArgs<X, Y> const args{.x = rows_arg(x),
                               .y = rows_arg(y),
                               .weight = weight,
                               .weight_wide = is_wide(weight, 0),
                               .eps = eps,
                               .scale = scale,
                               .rows = rows,
                               .width = x.extent(1)};
  rms_norm_kernel<<<row_blocks(rows), kRowThreads, 0, stream>>>(args);
  check_launch("rms_norm_kernel");
}

template <class X>
void RowKernels<space::cuda>::gelu(Rows<X> x, cudaStream_t stream) {
  using namespace device;
  if (x.extent(0) == 0) return;
  gelu_kernel<<<strip_grid(x.extent(0), x.extent(1)), kStripThreads, 0, stream>>>(rows_arg(x), x.extent(0), x.extent(1));
  check_launch("gelu_kernel");
}

template <class X>
void RowKernels<space::cuda>::sigmoid_gate(Rows<X const> x, float const* v, Rows<float> out, cudaStream_t stream) {
  using namespace device;
  std::int64_t const rows = x.extent(0);
  expect_shape("sigmoid_gate: out", out, rows, out.extent(1));
  if (rows == 0) return;
  SigmoidGateArgs<X> const args{.x = rows_arg(x),
                                .v = v,
                                .v_wide = is_wide(v, 0),
                                .out = rows_arg(out),
                                .rows = rows,
                                .width = x.extent(1),
                                .columns = out.extent(1)};
  sigmoid_gate_kernel<<<row_blocks(rows), kRowThreads, 0, stream>>>(args);
  check_launch("sigmoid_gate_kernel");
}

template <class Quant, class X>
void RowKernels<space::cuda>::quantize(Quant const& quant, Rows<X const> x, Rows<typename Quant::template Payload<X>> q,
                                       Rows<typename Quant::Scale> s, cudaStream_t stream) {
  quantization::quantize_rows_on_device<Quant, X>(quant, x, q, s, stream);
}

template <class X>
void RowKernels<space::cuda>::copy_columns(Rows<X const> from, Rows<X> to, cudaStream_t stream) {
  using namespace device;
  std::int64_t const rows = from.extent(0);
  expect_shape("copy_columns: to", to, rows, to.extent(1));
  if (rows == 0 || to.extent(1) == 0) return;
  copy_columns_kernel<<<strip_grid(rows, to.extent(1)), kStripThreads, 0, stream>>>(rows_arg(from), from.extent(1), rows_arg(to),
                                                                                    to.extent(1), rows);
  check_launch("copy_columns_kernel");
}

}  // namespace moe::runner
