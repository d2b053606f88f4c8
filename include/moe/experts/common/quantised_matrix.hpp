// SPDX-License-Identifier: Apache-2.0
// experts/common/quantised_matrix.hpp: one matrix of one expert, quantised from floating point in host memory, for the stores of weights.
#pragma once

#include <cstdint>
#include <vector>

#include "moe/core/contract/concepts.hpp"
#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/types.hpp"
#include "moe/quantization/format/scale_fault.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/format/weight_scales.hpp"

namespace moe::experts {

namespace detail {

/// E_CONFIG for sizes other than those that Config fixes, or that the quantisation cannot take.
template <class Config, class Quant>
Quant checked_quantization(Quant quant, std::int64_t hidden, std::int64_t intermediate) {
  moe::detail::expect_fixed("expert weights: hidden", Config::hidden, hidden);
  moe::detail::expect_fixed("expert weights: intermediate", Config::intermediate, intermediate);
  if constexpr (facts::has_shape_multiple<Quant>()) {
    quantization::check_shape<Quant>(hidden, intermediate);
  } else if (!Quant::supports(hidden, intermediate)) {
    throw Error(ErrorCode::config, text(Quant::kName, " does not take hidden ", hidden, " and intermediate ", intermediate));
  }
  return quant;
}
inline void expect_source(char const* name, void const* source, std::int64_t size) {
  if (source == nullptr && size > 0) {
    throw Error(ErrorCode::argument, text("expert weights: ", name, " is a null pointer for ", size, " elements"));
  }
}
/// One matrix of one expert in host memory.
template <class Code, class Scale>
struct QuantisedMatrix {
  std::vector<float> wide;
  std::vector<Code> codes;
  std::vector<Scale> scales;
};
/// Quantises w [rows, cols]. E_ARG, with the expert and the scale, for a scale that is not a number or too large for its codes.
template <class Config, class Quant, class T, class Code, class Scale>
void quantise_expert(Quant const& quant, char const* name, std::int64_t local, T const* w, std::int64_t rows, std::int64_t cols,
                     QuantisedMatrix<Code, Scale>& to) {
  to.wide.resize(static_cast<std::size_t>(rows * cols));
  for (std::size_t i = 0; i < to.wide.size(); ++i) to.wide[i] = to_float(w[i]);
  to.codes.resize(static_cast<std::size_t>(rows * Quant::weight_code_cols(cols)));
  to.scales.resize(static_cast<std::size_t>(Quant::weight_scale_count(rows, cols)));
  quant.template quantize_weight<typename Config::Weight>(to.wide.data(), rows, cols, to.codes.data(), to.scales.data());
  if (std::int64_t const bad = quantization::first_unpackable_scale<Quant>(to.scales.data(), rows, cols); bad >= 0) {
    throw Error(ErrorCode::argument, text("expert weights: ", name, " of expert ", local, " in ", Quant::kName, ": ",
                                          quantization::scale_fault<Quant>(to.scales.data(), bad, rows, cols)));
  }
}

}  // namespace detail

}  // namespace moe::experts
