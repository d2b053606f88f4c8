// SPDX-License-Identifier: Apache-2.0
// c/weights.hpp: moe_weights to the view of weights that a layer takes, without a copy.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/c/scheme_arrays.hpp"
#include "moe/c/tensor.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/space.hpp"
#include "moe/core/tokens.hpp"
#include "moe/quantization/format/shape.hpp"

namespace moe::c {

/// The dtypes of hidden states by their name in moe.h.
constexpr char const* name_of(DType type) {
  return type == DType::f32 ? "float32" : type == DType::bf16 ? "bfloat16" : type == DType::f16 ? "float16" : "?";
}

/// Whether experts compute from a copy of the weights in a layout of their own: those whose kernel rebuilds it (weights_changed()).
template <class Kernel>
constexpr bool packs_weights() {
  return facts::copies_weights<Kernel, Stream<space::cuda>>();
}

namespace detail {

struct MatrixNames {
  char const* codes;
  char const* scale;
  char const* bias;
};

template <class Quant, class Code>
Code const* codes_of(char const* what, DLTensor const* given, std::int64_t experts, std::int64_t rows, std::int64_t cols, Device device) {
  DLTensor const& t = *not_null(what, given);
  check_frame(what, t, 3, device);
  if constexpr (quantizes_weights<Quant>()) {
    check_code_dtype<Quant>(what, t.dtype);
  } else if (!same(t.dtype, dl_type<Code>())) {
    refuse_dtype(what, t.dtype, dl_type<Code>());
  }
  std::int64_t const code_cols = Quant::weight_code_cols(cols);
  if (t.shape[0] != experts || t.shape[1] != rows || t.shape[2] != code_cols) {
    refuse_shape(what, t, text("[", experts, ", ", rows, ", ", code_cols, "]"));
  }
  return contiguous_data<Code>(what, t);
}

/// [experts, ...], `per_expert` elements each, however they are divided.
template <class Quant>
typename Quant::WeightScale const* scales_of(char const* what, DLTensor const* given, std::int64_t experts, std::int64_t per_expert,
                                             Device device) {
  using Array = ScaleArray<Quant>;
  DLTensor const& t = *not_null(what, given);
  std::string const expected = text("[", experts, ", ...] with ", per_expert, " ", Array::kWhat, " of an expert");
  if (t.ndim < 2 || t.ndim > 4) refuse_shape(what, t, expected);
  check_frame(what, t, t.ndim, device);
  Array::check_dtype(what, t.dtype);
  if (t.shape[0] != experts || count(t) != experts * per_expert) refuse_shape(what, t, expected);
  return reinterpret_cast<typename Quant::WeightScale const*>(contiguous_data<typename Array::Element>(what, t));
}

template <class Quant, class Matrix>
Matrix matrix_of(MatrixNames names, DLTensor const* codes, DLTensor const* scale, DLTensor const* bias, std::int64_t experts,
                 std::int64_t rows, std::int64_t cols, Device device) {
  using Code = std::remove_const_t<typename decltype(Matrix::codes)::element_type>;
  using Scale = std::remove_const_t<typename decltype(Matrix::scales)::element_type>;
  Matrix m;
  m.rows = rows;
  m.cols = cols;
  m.codes =
      make_blocks(codes_of<Quant, Code>(names.codes, codes, experts, rows, cols, device), experts, rows, Quant::weight_code_cols(cols));
  std::int64_t const scales = Quant::weight_scale_count(rows, cols);
  if (scales > 0) {
    m.scales = make_rows(scales_of<Quant>(names.scale, scale, experts, ScaleArray<Quant>::count(rows, cols), device), experts, scales);
  } else if (scale != nullptr) {
    throw Error(ErrorCode::argument, text(names.scale, ": is given, but quantization ", Quant::kName, " has no scales"));
  } else {
    m.scales = make_rows(static_cast<Scale const*>(nullptr), experts, 0);
  }
  if (bias != nullptr) {
    check_frame(names.bias, *bias, 2, device);
    if (!same(bias->dtype, dl_type<float>())) refuse_dtype(names.bias, bias->dtype, dl_type<float>());
    if (bias->shape[0] != experts || bias->shape[1] != rows) refuse_shape(names.bias, *bias, text("[", experts, ", ", rows, "]"));
    m.bias = make_rows(static_cast<float const*>(contiguous_data<float>(names.bias, *bias)), experts, rows);
  }
  return m;
}

}  // namespace detail

/// `experts`: of this rank. E_ARG, naming the array; E_CONFIG for sizes that the scheme cannot take.
template <class Config, class Quant>
WeightsOf<Config, Quant> weights_of(moe_weights const& w, Device device, std::int64_t experts, Shape<Config> const& shape, bool gated) {
  if constexpr (facts::has_shape_multiple<Quant>()) quantization::check_shape<Quant>(shape.hidden(), shape.intermediate());
  if ((w.w13_bias == nullptr) != (w.w2_bias == nullptr)) {
    throw Error(ErrorCode::argument, text(w.w13_bias == nullptr ? "w13_bias" : "w2_bias", ": is NULL, but the other matrix has a bias"));
  }
  using Matrix = decltype(WeightsOf<Config, Quant>::w13);
  return {detail::matrix_of<Quant, Matrix>({"w13", "w13_scale", "w13_bias"}, w.w13, w.w13_scale, w.w13_bias, experts,
                                           (gated ? 2 : 1) * shape.intermediate(), shape.hidden(), device),
          detail::matrix_of<Quant, Matrix>({"w2", "w2_scale", "w2_bias"}, w.w2, w.w2_scale, w.w2_bias, experts, shape.hidden(),
                                           shape.intermediate(), device)};
}

}  // namespace moe::c
