// SPDX-License-Identifier: Apache-2.0
// c/quantize.hpp: the schemes of moe.h by name, the layout of a matrix in each, and quantising one.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "moe/c/scheme_arrays.hpp"
#include "moe/c/status.hpp"
#include "moe/c/tensor.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/moe.h"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"

namespace moe::c {

/// Calls f(scheme) for each scheme of moe.h.
template <class F>
void for_each_scheme(F const& f) {
  f(quantization::None{});
  f(quantization::Fp8Block<>{});
  f(quantization::Fp8PerToken<>{});
  f(quantization::Fp8PerChannel<>{});
  f(quantization::WNa16<4, 32>{});
  f(quantization::WNa16<4, 64>{});
  f(quantization::WNa16<4, 128>{});
  f(quantization::Int4Group128Zero{});
  f(quantization::Int8PerChannel{});
  f(quantization::Int8PerToken{});
  f(quantization::Mxfp8<>{});
  f(quantization::Mxfp8W8A16<>{});
  f(quantization::Mxfp4W4A16<>{});
  f(quantization::Mxfp4Fp8<>{});
  f(quantization::Nvfp4W4A16{});
  f(quantization::Int4Fp8<32>{});
  f(quantization::Int4Fp8<64>{});
  f(quantization::Int4Fp8<128>{});
  f(quantization::Int4Fp8<128, true>{});
}
/// Calls f(scheme) for the scheme of that name. E_CONFIG listing the names on any other.
template <class F>
void with_scheme(char const* wanted, F const& f) {
  std::string_view const name = not_null("quantization", wanted);
  bool found = false;
  std::string known;
  for_each_scheme([&](auto scheme) {
    using Scheme = decltype(scheme);
    known += text(known.empty() ? "" : ", ", Scheme::kName);
    if (name != Scheme::kName) return;
    found = true;
    f(scheme);
  });
  if (!found) throw Error(ErrorCode::config, text("quantization: unknown name \"", name, "\"; known: ", known));
}

namespace detail {

struct CodeLayout {
  std::int64_t code_cols, scale_rows, scale_cols;
};
/// E_CONFIG for columns that the scheme cannot take: a matrix has either the layer's hidden or its intermediate size as columns.
template <class Scheme>
CodeLayout code_layout(std::int64_t rows, std::int64_t cols) {
  if (rows < 1 || cols < 1 || rows > kMostSize || cols > kMostSize) {
    throw Error(ErrorCode::config, text("quantization: a matrix of ", rows, " x ", cols, ", expected extents of [1, ", kMostSize, "]"));
  }
  if (!Scheme::supports(cols, -1)) {
    throw Error(ErrorCode::config,
                text("quantization: ", Scheme::kName, " needs columns to be a multiple of ", Scheme::kShapeMultiple, ", got ", cols));
  }
  std::int64_t const scales = ScaleArray<Scheme>::count(rows, cols);
  if (scales == 0) return {Scheme::weight_code_cols(cols), 0, 0};
  if (ScaleArray<Scheme>::kHasGlobal) return {Scheme::weight_code_cols(cols), 1, scales};
  std::int64_t const scale_rows = Scheme::kWeightGroupRows <= 1 ? rows : (rows + Scheme::kWeightGroupRows - 1) / Scheme::kWeightGroupRows;
  return {Scheme::weight_code_cols(cols), scale_rows, scales / scale_rows};
}

template <class Scheme, class Code, class Source>
void quantize_matrices(Scheme const& scheme, Source const* source, std::int64_t matrices, std::int64_t rows, std::int64_t cols, Code* codes,
                       typename Scheme::WeightScale* scales) {
  CodeLayout const layout = code_layout<Scheme>(rows, cols);
  std::vector<float> wide(static_cast<std::size_t>(rows * cols));
  for (std::int64_t m = 0; m < matrices; ++m) {
    for (std::int64_t i = 0; i < rows * cols; ++i) wide[static_cast<std::size_t>(i)] = to_float(source[m * rows * cols + i]);
    scheme.template quantize_weight<Source>(wide.data(), rows, cols, codes + m * rows * layout.code_cols,
                                            scales + m * Scheme::weight_scale_count(rows, cols));
  }
}

template <class Scheme, class Source>
void quantize_as(Scheme const& scheme, DLTensor const& matrix, DLTensor const* codes, DLTensor const* scales) {
  using Code = typename Scheme::template WeightCode<Source>;
  using Scales = ScaleArray<Scheme>;
  std::int64_t const n = matrix.ndim == 3 ? matrix.shape[0] : 1;
  std::int64_t const rows = matrix.shape[matrix.ndim - 2];
  std::int64_t const cols = matrix.shape[matrix.ndim - 1];
  CodeLayout const layout = code_layout<Scheme>(rows, cols);
  check_frame("codes", *not_null("codes", codes), matrix.ndim, {});
  if constexpr (quantizes_weights<Scheme>()) {
    check_code_dtype<Scheme>("codes", codes->dtype);
  } else if (!same(codes->dtype, dl_type<Code>())) {
    refuse_dtype("codes", codes->dtype, dl_type<Code>());
  }
  if (count(*codes) != n * rows * layout.code_cols || codes->shape[matrix.ndim - 1] != layout.code_cols ||
      codes->shape[matrix.ndim - 2] != rows) {
    refuse_shape("codes", *codes, text("[", matrix.ndim == 3 ? text(n, ", ") : "", rows, ", ", layout.code_cols, "]"));
  }
  typename Scheme::WeightScale* scale_data = nullptr;
  if (std::int64_t const per_matrix = layout.scale_rows * layout.scale_cols; per_matrix > 0) {
    DLTensor const& t = *not_null("scales", scales);
    std::string const expected = text("[", matrix.ndim == 3 ? text(n, ", ") : "", layout.scale_rows, ", ", layout.scale_cols,
                                      "] or its elements in one dimension less");
    if (t.ndim != matrix.ndim && t.ndim != matrix.ndim - 1) refuse_shape("scales", t, expected);
    check_frame("scales", t, t.ndim, {});
    Scales::check_dtype("scales", t.dtype);
    if (count(t) != n * per_matrix || (matrix.ndim == 3 && t.shape[0] != n)) refuse_shape("scales", t, expected);
    scale_data = reinterpret_cast<typename Scheme::WeightScale*>(contiguous_data<typename Scales::Element>("scales", t));
  }
  quantize_matrices(scheme, contiguous_data<Source const>("matrix", matrix), n, rows, cols, contiguous_data<Code>("codes", *codes),
                    scale_data);
}

}  // namespace detail

inline void layout_of(char const* quantization, std::int64_t rows, std::int64_t cols, moe_quantized_layout& out) {
  with_scheme(quantization, [&](auto scheme) {
    using Scheme = decltype(scheme);
    detail::CodeLayout const layout = detail::code_layout<Scheme>(rows, cols);
    bool const stored = detail::quantizes_weights<Scheme>();
    out.code_cols = layout.code_cols;
    out.scale_rows = layout.scale_rows;
    out.scale_cols = layout.scale_cols;
    out.code_dtype = stored ? dl_type<typename Scheme::template WeightCode<float>>() : DLDataType{0, 0, 0};
    out.scale_dtype = stored ? dl_type<typename detail::ScaleArray<Scheme>::Element>() : DLDataType{0, 0, 0};
  });
}

inline void quantize(char const* quantization, DLTensor const* matrix, DLTensor const* codes, DLTensor const* scales) {
  with_scheme(quantization, [&](auto scheme) {
    DLTensor const& m = *not_null("matrix", matrix);
    if (m.ndim != 2 && m.ndim != 3) detail::refuse_shape("matrix", m, "[rows, cols] or [n, rows, cols]");
    detail::check_frame("matrix", m, m.ndim, {});
    if (same(m.dtype, dl_type<float>())) return detail::quantize_as<decltype(scheme), float>(scheme, m, codes, scales);
    if (same(m.dtype, dl_type<bf16>())) return detail::quantize_as<decltype(scheme), bf16>(scheme, m, codes, scales);
    if (same(m.dtype, dl_type<f16>())) return detail::quantize_as<decltype(scheme), f16>(scheme, m, codes, scales);
    detail::refuse("matrix", text("dtype is ", describe(m.dtype)), "float32, bfloat16 or float16");
  });
}

}  // namespace moe::c
