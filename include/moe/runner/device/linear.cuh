// SPDX-License-Identifier: Apache-2.0
// runner/device/linear.cuh: definitions of runner/device/linear.hpp. Needs cuBLAS (CMake: moe::cublas).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <type_traits>

#include "moe/runner/device/blas_lt.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/small_product.cuh"

namespace moe::runner {

template <class Weight, class Act, class Out>
Linear<space::cuda, Weight, Act, Out>::Linear(Rows<Weight const> w, float const* bias, Sums sums, std::int64_t max_rows,
                                              [[maybe_unused]] Arena<space::cuda>& arena)
    : w_(w), bias_(bias), sums_(sums), max_rows_(max_rows) {
  for (std::int64_t const size : {w.extent(0), w.extent(1), max_rows}) {
    if (size > std::numeric_limits<std::int32_t>::max()) {
      throw Error(ErrorCode::capacity, text("linear: ", size, " rows, inputs or outputs, at most 2^31 - 1"));
    }
  }
  if constexpr (kBlas) {
    bool const adds_bias = bias == nullptr || std::is_same_v<Out, float>;
    if (adds_bias && w.size() > 0 && max_rows > 0) {
      product_ = std::make_shared<device::BlasLtProduct<Act, Out>>(w, bias, sums, max_rows, arena);
    }
  }
}

template <class Weight, class Act, class Out>
void Linear<space::cuda, Weight, Act, Out>::apply(Rows<Act const> x, Rows<Out> y, cudaStream_t stream) const {
  std::int64_t const rows = x.extent(0);
  std::int64_t const n = w_.extent(0);
  std::int64_t const k = w_.extent(1);
  if (rows > max_rows_ || y.extent(0) != rows || x.extent(1) != k || y.extent(1) != n) {
    throw Error(ErrorCode::argument, text("linear: x ", rows, " x ", x.extent(1), ", y ", y.extent(0), " x ", y.extent(1),
                                          "; expected at most ", max_rows_, " rows of ", k, " and as many of ", n));
  }
  if (rows == 0 || n == 0) return;
  if constexpr (kBlas) {
    bool const gate = std::is_same_v<Out, float> && sums_ == Sums::blocked && device::prefers_small_product(rows, n);
    if (product_ != nullptr && !gate) {
      product_->apply(x, y, stream);
      return;
    }
  }
  device::SmallProduct<Act, Weight, Out> const product{.x = x.data_handle(),
                                                       .x_stride = x.stride(0),
                                                       .w = w_.data_handle(),
                                                       .w_stride = w_.stride(0),
                                                       .bias = bias_,
                                                       .y = y.data_handle(),
                                                       .y_stride = y.stride(0),
                                                       .rows = static_cast<int>(rows),
                                                       .n = static_cast<int>(n),
                                                       .k = static_cast<int>(k),
                                                       .log_cluster = 0};
  device::small_product(product, device::choose_small_product(rows, n, k), stream);
}

}  // namespace moe::runner
