// SPDX-License-Identifier: Apache-2.0
// experts/common/check_weights.hpp: whether the weights that experts are given are complete for their layer.
#pragma once

#include <cstdint>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/quantization/format/scale_fault.hpp"
#include "moe/quantization/format/weight_scales.hpp"

namespace moe::experts {

namespace detail {

inline void expect_weights(char const* matrix, char const* what, std::int64_t value, std::int64_t wanted) {
  if (value != wanted) {
    throw Error(ErrorCode::argument, text("expert weights: ", matrix, " ", what, " is ", value, ", expected ", wanted));
  }
}
inline void expect_weight_data(char const* matrix, char const* what, void const* data, std::int64_t size) {
  if (size > 0 && data == nullptr) {
    throw Error(ErrorCode::argument, text("expert weights: ", matrix, " ", what, " is a null pointer for ", size, " elements"));
  }
}
/// `packed`: codes and scales are elsewhere.
template <class Quant, class Matrix>
void check_weight_matrix(char const* name, Matrix const& m, std::int64_t rows, std::int64_t cols, bool packed) {
  expect_weights(name, "rows", m.rows, rows);
  expect_weights(name, "columns", m.cols, cols);
  std::int64_t const experts = m.codes.extent(0);
  expect_weights(name, "codes: rows", m.codes.extent(1), rows);
  expect_weights(name, "codes: columns", m.codes.extent(2), Quant::weight_code_cols(cols));
  if (!packed) expect_weight_data(name, "codes", m.codes.data_handle(), static_cast<std::int64_t>(m.codes.size()));
  if (std::int64_t const scales = Quant::weight_scale_count(rows, cols); scales > 0) {
    expect_weights(name, "scales: experts", m.scales.extent(0), experts);
    expect_weights(name, "scales: of one expert", m.scales.extent(1), scales);
    if (!packed) expect_weight_data(name, "scales", m.scales.data_handle(), experts * scales);
  }
  if (m.has_bias()) {
    expect_weights(name, "bias: experts", m.bias.extent(0), experts);
    expect_weights(name, "bias: rows", m.bias.extent(1), rows);
    expect_weight_data(name, "bias", m.bias.data_handle(), experts * rows);
  }
}

}  // namespace detail

/// E_ARG, naming the array, unless the weights are complete for a layer of `Quant`: w13 [L, rows13, H], w2 [L, H, I], equal L, codes and
/// scales of those shapes, and biases of those shapes or none. Packed weights must be for the experts `packs`, which read them; null: the
/// experts read codes and scales.
template <class Quant, class Weights>
void check_weights(Weights const& w, std::int64_t hidden, std::int64_t intermediate, bool gated, char const* packs = nullptr) {
  bool const packed = w.packed.given();
  if (packed && (packs == nullptr || std::string_view(w.packed.policy) != packs)) {
    throw Error(ErrorCode::argument, text("expert weights: packed for the experts ", w.packed.policy, ", these are ",
                                          packs == nullptr ? "others, which read codes and scales" : packs));
  }
  detail::check_weight_matrix<Quant>("w13", w.w13, (gated ? 2 : 1) * intermediate, hidden, packed);
  detail::check_weight_matrix<Quant>("w2", w.w2, hidden, intermediate, packed);
  detail::expect_weights("w2", "experts", w.w2.codes.extent(0), w.w13.codes.extent(0));
}

/// E_ARG, with matrix, expert and position, for the first scale of weights in host memory that is not a number, or under which the largest
/// code is not finite.
template <class Quant, class Weights>
void check_scales(Weights const& w) {
  auto const check = [](char const* name, auto const& m) {
    for (std::int64_t e = 0; e < m.scales.extent(0); ++e) {
      std::int64_t const bad = quantization::first_unpackable_scale<Quant>(row_ptr(m.scales, e), m.rows, m.cols);
      if (bad < 0) continue;
      throw Error(ErrorCode::argument, text("expert weights: ", name, " of expert ", e, " in ", Quant::kName, ": ",
                                            quantization::scale_fault<Quant>(row_ptr(m.scales, e), bad, m.rows, m.cols)));
    }
  };
  if (Quant::weight_scale_count(w.w2.rows, w.w2.cols) == 0) return;
  check("w13", w.w13);
  check("w2", w.w2);
}

}  // namespace moe::experts
