// SPDX-License-Identifier: Apache-2.0
// runner/device/linear.cuh: definitions of runner/device/linear.hpp. Needs cuBLAS (CMake: moe::cublas).
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/types.hpp"
#include "moe/runner/device/blas_lt.hpp"
#include "moe/runner/device/exact_weights.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/product_choices.hpp"
#include "moe/runner/device/small_product.cuh"

namespace moe::runner {

namespace device {

/// The product of float32 weights as one of Act, and what was chosen and why. No product: a weight or a size does not allow it.
template <class Act, class Out>
struct NarrowProduct {
  std::shared_ptr<BlasLtProduct<Act, Out>> product;
  std::string choice;
};

/// w [N, K] and bias [N] (or null) on the device. Waits for the copies of w to the host and of its values in Act to the arena.
template <class Act, class Out>
NarrowProduct<Act, Out> narrow_product(Rows<float const> w, float const* bias, std::int64_t max_rows, Arena<space::cuda>& arena) {
  constexpr std::string_view kElement = name(dtype_of<Act>);
  moe::detail::check_rows("linear: weights", w);
  std::int64_t const n = w.extent(0);
  std::int64_t const k = w.extent(1);
  auto const float32 = [](auto const&... why) { return NarrowProduct<Act, Out>{nullptr, text("float32 products: ", why...)}; };
  if (k % (kAlignment / static_cast<std::int64_t>(sizeof(Act))) != 0) {
    return float32("rows of ", k, " ", kElement, " are not a multiple of ", kAlignment, " bytes");
  }
  if (bias != nullptr && !std::is_same_v<Out, float>) return float32("cuBLASLt adds a bias to float32 outputs only");
  std::vector<Act> values;
  auto const read = [&](std::int64_t first, std::int64_t count, float* to) {
    bool const dense = w.stride(0) == k;
    std::int64_t const piece = dense ? count : 1;
    for (std::int64_t r = 0; r < count; r += piece) {
      Memory<space::cuda>::copy_to_host(to + r * k, row_ptr(w, first + r), static_cast<std::size_t>(piece * k) * sizeof(float));
    }
  };
  if (auto const inexact = convert_exactly<Act>(n, k, read, values)) {
    return float32(describe(*inexact, dtype_of<Act>));
  }
  Act* const copy = arena.template take<Act>(n * k);
  Memory<space::cuda>::copy_from_host(copy, values.data(), values.size() * sizeof(Act));
  try {
    Rows<Act const> const narrow = make_rows(static_cast<Act const*>(copy), n, k);
    auto product = std::make_shared<BlasLtProduct<Act, Out>>(narrow, bias, Sums::per_row, max_rows, arena);
    if (!product->takes_all_rows())
      return float32("cuBLASLt's algorithm for ", n, " outputs of ", k, " inputs is refused for some numbers of rows");
    return {std::move(product),
            text(kElement, " products with float32 sums, through cuBLASLt: every float32 weight is a value of ", kElement)};
  } catch (Error const& e) {
    if (e.code() != ErrorCode::unsupported) throw;
    return float32(e.message());
  }
}

}  // namespace device

template <class Weight, class Act, class Out>
Linear<space::cuda, Weight, Act, Out>::Linear(Rows<Weight const> w, float const* bias, Sums sums, std::int64_t max_rows,
                                              [[maybe_unused]] Arena<space::cuda>& arena, [[maybe_unused]] WeightReads reads)
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
  if constexpr (kNarrows) {
    if (w.size() == 0 || max_rows == 0) return;
    if (reads == WeightReads::every_call) {
      choice_ = "float32 products: the weights may change in place";
      return;
    }
    auto narrow = device::narrow_product<Act, Out>(w, bias, max_rows, arena);
    choice_ = std::move(narrow.choice);
    product_ = std::move(narrow.product);
    if (product_ == nullptr) return;
    unread_ = w.data_handle();
    w_ = make_rows(static_cast<float const*>(nullptr), w.extent(0), w.extent(1));
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
    bool const own = device::prefers_small_product(sums_, std::is_same_v<Out, float>, rows, n);
    if (product_ != nullptr && !own) {
      product_->apply(x, y, stream);
      return;
    }
  }
  if constexpr (kNarrows) {
    if (product_ != nullptr) {
      moe::detail::check_alignment("linear: x", x.data_handle(), rows, x.stride(0) * static_cast<std::int64_t>(sizeof(Act)));
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
