// SPDX-License-Identifier: Apache-2.0
// runner/device/dense_shared.cuh: definitions of runner/device/dense_shared.hpp.
#pragma once

#include <cuda_runtime.h>

#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/row_values.cuh"

namespace moe::runner::device {

template <class T>
struct ActivateShared {
  activation::Any activation;
  T const* gate_up;  ///< [M, S (2 or 1) I]: for each expert gate columns, then up columns
  T* inter;          ///< [M, S I]
  T const* x;        ///< [M, H], for the sigmoid gate
  std::int64_t x_stride;
  bool x_wide;
  float const* gate;  ///< [H] or null
  bool gate_wide;
  float const* joint;  ///< [M, S] or null
  std::int64_t joint_stride;
  std::int64_t rows;
  std::int64_t hidden;
  std::int64_t count;
  std::int64_t width;  ///< I
};

/// A block per strip of the activated row, every thread eight columns. The sigmoid gate of a row is computed by each of its blocks.
template <class T>
__global__ void __launch_bounds__(kStripThreads) activate_shared_kernel(ActivateShared<T> a) {
  std::int64_t const col = blockIdx.x * kStrip + static_cast<std::int64_t>(threadIdx.x) * kOctet;
  std::int64_t const cols = a.count * a.width;
  std::int64_t const parts = a.activation.gated() ? 2 : 1;
  bool const wide = a.width % kOctet == 0;  // eight columns are of one expert, and rows lie at multiples of 16 bytes
  for (std::int64_t row = blockIdx.y; row < a.rows; row += gridDim.y) {
    float factor = 1.0F;
    if (a.gate != nullptr) {
      float const z = block_dot<kStripThreads>(a.x + row * a.x_stride, a.x_wide, a.gate, a.gate_wide, a.hidden);
      factor = activation::detail::sigmoid(z);
    }
    if (col >= cols) continue;
    T const* const from = a.gate_up + row * parts * cols;
    float v[kOctet];
    if (wide) {
      std::int64_t const expert = col / a.width;
      std::int64_t const base = col + (parts - 1) * expert * a.width;
      float up[kOctet] = {};
      load_values(from, base, parts * cols, true, v);
      if (parts == 2) load_values(from, base + a.width, parts * cols, true, up);
      float const g = a.joint == nullptr ? factor : factor * a.joint[row * a.joint_stride + expert];
#pragma unroll
      for (int i = 0; i < kOctet; ++i) v[i] = g * a.activation(v[i], up[i]);
    } else {
#pragma unroll 1
      for (int i = 0; i < kOctet; ++i) {
        std::int64_t const c = col + i < cols ? col + i : cols - 1;
        std::int64_t const expert = c / a.width;
        T const* const pair = from + c + (parts - 1) * expert * a.width;
        float const g = a.joint == nullptr ? factor : factor * a.joint[row * a.joint_stride + expert];
        float const value = g * a.activation(to_float(pair[0]), parts == 2 ? to_float(pair[a.width]) : 0.0F);
        if (col + i < cols) a.inter[row * cols + c] = from_float<T>(value);
      }
      continue;
    }
    store_values(a.inter + row * cols, col, cols, true, v);
  }
}

template <class Act>
Rows<Act const> DenseShared<Act>::joined_down(ExpertWeights<Act, float> const& w, Arena<space::cuda>& arena) {
  std::int64_t const count = w.w2.codes.extent(0);
  Act const* const from = w.w2.codes.data_handle();
  if (count <= 1) return make_rows(from, w.w2.rows, w.w2.cols);
  Act* const to = arena.template take<Act>(count * w.w2.rows * w.w2.cols);
  auto const width = static_cast<std::size_t>(w.w2.cols) * sizeof(Act);
  for (std::int64_t s = 0; s < count; ++s) {
    check_cuda(cudaMemcpy2D(to + s * w.w2.cols, static_cast<std::size_t>(count) * width, from + s * w.w2.rows * w.w2.cols, width, width,
                            static_cast<std::size_t>(w.w2.rows), cudaMemcpyDeviceToDevice),
               "cudaMemcpy2D");
  }
  Memory<space::cuda>::synchronize(nullptr);  // the copies do not wait for themselves
  return make_rows(static_cast<Act const*>(to), w.w2.rows, count * w.w2.cols);
}

template <class Act>
DenseShared<Act>::DenseShared(DenseSharedParams<Act> const& params, std::int64_t hidden, std::int64_t max_rows, Arena<space::cuda>& arena)
    : params_(params),
      hidden_(hidden),
      count_(params.weights.w13.codes.extent(0)),
      intermediate_(params.weights.w2.cols),
      gate_up_(arena.template take<Act>(max_rows * count_ * params.weights.w13.rows)),
      inter_(arena.template take<Act>(max_rows * count_ * intermediate_)),
      y_(arena.template take<Act>(max_rows * hidden)),
      up_(make_rows(params.weights.w13.codes.data_handle(), count_ * params.weights.w13.rows, hidden), nullptr, params.sums, max_rows,
          arena),
      down_(joined_down(params.weights, arena), nullptr, params.sums, max_rows, arena) {
  auto const& w = params.weights;
  std::int64_t const rows13 = (params.activation.gated() ? 2 : 1) * intermediate_;
  if (w.w13.cols != hidden || w.w2.rows != hidden || w.w13.rows != rows13 || w.w2.codes.extent(0) != count_) {
    throw Error(ErrorCode::argument,
                text("shared experts: w13 ", count_, " x ", w.w13.rows, " x ", w.w13.cols, ", w2 ", w.w2.codes.extent(0), " x ", w.w2.rows,
                     " x ", w.w2.cols, "; expected hidden ", hidden, " and ", rows13, " rows of w13"));
  }
  if (w.w13.has_bias() || w.w2.has_bias()) throw Error(ErrorCode::unsupported, "shared experts: biases");
  activation::validate(params.activation.kind, params.activation.constants);
}

template <class Act>
void DenseShared<Act>::run(Rows<Act const> hidden, Rows<float const> joint, cudaStream_t stream) {
  rows_ = hidden.extent(0);
  if (params_.joint_weights && (joint.extent(0) != rows_ || joint.extent(1) != count_)) {
    throw Error(ErrorCode::argument,
                text("shared experts: weights ", joint.extent(0), " x ", joint.extent(1), ", expected ", rows_, " x ", count_));
  }
  std::int64_t const cols = count_ * intermediate_;
  std::int64_t const cols13 = count_ * params_.weights.w13.rows;
  up_.apply(hidden, make_rows(gate_up_, rows_, cols13), stream);
  if (rows_ == 0) return;
  ActivateShared<Act> a{};
  a.activation = params_.activation;
  a.gate_up = gate_up_;
  a.inter = inter_;
  a.x = hidden.data_handle();
  a.x_stride = hidden.stride(0);
  a.x_wide = is_wide(hidden);
  a.gate = params_.sigmoid_gate;
  a.gate_wide = is_wide(params_.sigmoid_gate, 0);
  if (params_.joint_weights) {
    a.joint = joint.data_handle();
    a.joint_stride = joint.stride(0);
  }
  a.rows = rows_;
  a.hidden = hidden_;
  a.count = count_;
  a.width = intermediate_;
  activate_shared_kernel<<<strip_grid(rows_, cols), kStripThreads, 0, stream>>>(a);
  check_launch("activate_shared_kernel");
  down_.apply(make_rows(static_cast<Act const*>(inter_), rows_, cols), make_rows(y_, rows_, hidden_), stream);
}

}  // namespace moe::runner::device
