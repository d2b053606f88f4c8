// SPDX-License-Identifier: Apache-2.0
// quantization/format/facts.hpp: optional facts of a Quantization about its format, each with its default. Those that need no format are in
// core/contract/facts.hpp. The base classes of quantization/rows/rows.hpp and quantization/format/ state all of them.
#pragma once

#include "moe/quantization/format/granularity.hpp"

namespace moe::facts {

/// Quantization::kQuantizesActivations: whether rows are codes, not values of the activations' type. Default: they are, so rows go through
/// quantize_row() and dequantize_row().
template <class Quant>
constexpr bool quantizes_activations() {
  if constexpr (requires { Quant::kQuantizesActivations; }) {
    return Quant::kQuantizesActivations;
  } else {
    return true;
  }
}

/// Quantization::kActGranularity: what one scale of a row covers; `none`: rows are not quantised. Default: a group, so the activated rows
/// of experts go through quantize_row() and dequantize_row(), too.
template <class Quant>
constexpr quantization::ScaleGranularity act_granularity() {
  if constexpr (requires { Quant::kActGranularity; }) {
    return Quant::kActGranularity;
  } else {
    return quantization::ScaleGranularity::group;
  }
}

/// Quantization::kWeightGranularity: what one scale of a weight matrix covers; `none`: weights are not quantised. Default: a group, so
/// weights are read through dequantize_weight_row().
template <class Quant>
constexpr quantization::ScaleGranularity weight_granularity() {
  if constexpr (requires { Quant::kWeightGranularity; }) {
    return Quant::kWeightGranularity;
  } else {
    return quantization::ScaleGranularity::group;
  }
}

/// Whether the scheme states its whole format: the three facts above, kPayloadDType, kActGroup, kWeightDType, kWeightPack, kWeightGroupRows
/// and kWeightGroupCols. Kernels and checkpoint readers that work by format do not take a scheme that leaves one out.
template <class Quant>
constexpr bool states_format() {
  return requires {
    Quant::kQuantizesActivations;
    Quant::kActGranularity;
    Quant::kPayloadDType;
    Quant::kActGroup;
    Quant::kWeightGranularity;
    Quant::kWeightDType;
    Quant::kWeightPack;
    Quant::kWeightGroupRows;
    Quant::kWeightGroupCols;
  };
}

}  // namespace moe::facts
