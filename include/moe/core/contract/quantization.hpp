// SPDX-License-Identifier: Apache-2.0
// core/contract/quantization.hpp: what a Quantization must have: how weights, activations and the dispatch payload are stored. Kernels
// that are written for formats read further facts of a scheme, with defaults, from quantization/format/facts.hpp.
#pragma once

#include <concepts>
#include <cstdint>
#include <tuple>

#include "moe/core/array.hpp"
#include "moe/core/contract/policy.hpp"
#include "moe/core/rule.hpp"

namespace moe {

template <class Q>
concept QuantizationHasPayload = requires { typename Q::template Payload<float>; };
MOE_MEMBER(QuantizationHasPayload, "the quantization", "template <class Act> using Payload", "element of a quantised row");

template <class Q>
concept QuantizationHasScale = requires { typename Q::Scale; };
MOE_MEMBER(QuantizationHasScale, "the quantization", "using Scale", "element of a row's scales");

template <class Q>
concept QuantizationHasWeightCode = requires { typename Q::template WeightCode<float>; };
MOE_MEMBER(QuantizationHasWeightCode, "the quantization", "template <class Weight> using WeightCode", "element of stored weights");

template <class Q>
concept QuantizationHasWeightScale = requires { typename Q::WeightScale; };
MOE_MEMBER(QuantizationHasWeightScale, "the quantization", "using WeightScale", "element of the weights' scales");

template <class Q>
concept QuantizationHasPayloadCols = requires(std::int64_t n) {
  { Q::payload_cols(n) } -> std::convertible_to<std::int64_t>;
};
MOE_MEMBER(QuantizationHasPayloadCols, "the quantization", "static constexpr int64_t payload_cols(int64_t)",
           "columns of a quantised row of n values");

template <class Q>
concept QuantizationHasScaleCols = requires(std::int64_t n) {
  { Q::scale_cols(n) } -> std::convertible_to<std::int64_t>;
};
MOE_MEMBER(QuantizationHasScaleCols, "the quantization", "static constexpr int64_t scale_cols(int64_t)",
           "scales of a row of n values, 0 if none are sent");

template <class Q>
concept QuantizationHasWeightCodeCols = requires(std::int64_t n) {
  { Q::weight_code_cols(n) } -> std::convertible_to<std::int64_t>;
};
MOE_MEMBER(QuantizationHasWeightCodeCols, "the quantization", "static constexpr int64_t weight_code_cols(int64_t)",
           "columns of stored weights of n columns");

template <class Q>
concept QuantizationHasWeightScaleCount = requires(std::int64_t n) {
  { Q::weight_scale_count(n, n) } -> std::convertible_to<std::int64_t>;
};
MOE_MEMBER(QuantizationHasWeightScaleCount, "the quantization", "static constexpr int64_t weight_scale_count(int64_t rows, int64_t cols)",
           "scales of a weight matrix");

/// Whether it can store rows of these widths; a width of `dynamic` always passes.
template <class Q>
concept QuantizationHasSupports = requires {
  { Q::supports(dynamic, dynamic) } -> std::same_as<bool>;
};
MOE_MEMBER(QuantizationHasSupports, "the quantization", "static constexpr bool supports(int64_t hidden, int64_t intermediate)",
           "whether its groups fit these widths");

template <class Q>
concept QuantizesRows = requires(Q const& q, float const* x, std::int64_t n, typename Q::template Payload<float>* codes,
                                 typename Q::Scale* scales) { q.template quantize_row<float>(x, n, codes, scales); };
MOE_MEMBER(QuantizesRows, "the quantization", "quantize_row<Act>(Act const* x, int64_t n, Payload<Act>* codes, Scale* scales) const",
           "stores one row");

template <class Q>
concept DequantizesRows =
    requires(Q const& q, std::int64_t n, typename Q::template Payload<float> const* codes, typename Q::Scale const* scales, float* out) {
      q.template dequantize_row<float>(codes, scales, n, out);
    };
MOE_MEMBER(DequantizesRows, "the quantization",
           "dequantize_row<Act>(Payload<Act> const* codes, Scale const* scales, int64_t n, float* out) const", "reads one row back");

template <class Q>
concept QuantizesWeights = requires(Q const& q, float const* w, std::int64_t n, typename Q::template WeightCode<float>* codes,
                                    typename Q::WeightScale* scales) { q.template quantize_weight<float>(w, n, n, codes, scales); };
MOE_MEMBER(QuantizesWeights, "the quantization",
           "quantize_weight<Weight>(float const* w, int64_t rows, int64_t cols, WeightCode<Weight>* codes, WeightScale* scales) const",
           "stores a weight matrix");

template <class Q>
concept DequantizesWeights =
    requires(Q const& q, std::int64_t n, typename Q::template WeightCode<float> const* codes, typename Q::WeightScale const* scales,
             float* out) { q.template dequantize_weight_row<float>(codes, scales, n, n, n, out); };
MOE_MEMBER(DequantizesWeights, "the quantization",
           "dequantize_weight_row<Weight>(WeightCode<Weight> const* codes, WeightScale const* scales, int64_t rows, int64_t cols, "
           "int64_t row, float* out) const",
           "reads one row of a weight matrix back");

namespace detail {
template <class Q>
using QuantizationContract =
    std::tuple<Verdict<rules::PolicyHasName, Named<Q>, Q>, Verdict<rules::QuantizationHasPayload, QuantizationHasPayload<Q>, Q>,
               Verdict<rules::QuantizationHasScale, QuantizationHasScale<Q>, Q>,
               Verdict<rules::QuantizationHasWeightCode, QuantizationHasWeightCode<Q>, Q>,
               Verdict<rules::QuantizationHasWeightScale, QuantizationHasWeightScale<Q>, Q>,
               Verdict<rules::QuantizationHasPayloadCols, QuantizationHasPayloadCols<Q>, Q>,
               Verdict<rules::QuantizationHasScaleCols, QuantizationHasScaleCols<Q>, Q>,
               Verdict<rules::QuantizationHasWeightCodeCols, QuantizationHasWeightCodeCols<Q>, Q>,
               Verdict<rules::QuantizationHasWeightScaleCount, QuantizationHasWeightScaleCount<Q>, Q>,
               Verdict<rules::QuantizationHasSupports, QuantizationHasSupports<Q>, Q>, Verdict<rules::QuantizesRows, QuantizesRows<Q>, Q>,
               Verdict<rules::DequantizesRows, DequantizesRows<Q>, Q>, Verdict<rules::QuantizesWeights, QuantizesWeights<Q>, Q>,
               Verdict<rules::DequantizesWeights, DequantizesWeights<Q>, Q>>;
}  // namespace detail

template <class Q>
concept Quantization = detail::kAllHold<detail::QuantizationContract<Q>>;

}  // namespace moe
