// SPDX-License-Identifier: Apache-2.0
// quantization/format/scale_fault.hpp: what is wrong with a scale that first_unpackable_scale() found, for errors.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/weight_scales.hpp"

namespace moe::quantization {

/// "scale 4 is not finite or out of range: nan, magnitude at most 2.26855e+37": the scale `bad` of a weight matrix [rows, cols]. Of schemes
/// that do not state their format without value and bound.
template <class Quant>
std::string scale_fault(typename Quant::WeightScale const* scales, std::int64_t bad, std::int64_t rows, std::int64_t cols) {
  using Scale = typename Quant::WeightScale;
  std::string const fault = text("scale ", bad, " is not finite or out of range");
  if constexpr (!facts::states_format<Quant>()) {
    return fault;
  } else {
    constexpr DType kCodes = Quant::kWeightDType;
    auto const of_float = [&](float value, float top) {
      return text(fault, ": ", value, ", magnitude at most ", std::numeric_limits<float>::max() / top);
    };
    if constexpr (std::is_same_v<Scale, ScaleZero>) {
      ScaleZero const s = scales[bad];
      if (!is_packable(s.scale, kCodes)) return of_float(s.scale, largest_code(kCodes));
      return text(fault, ": its zero point is ", s.zero, ", expected 0 to ", largest_code(kCodes));
    } else if constexpr (!std::is_same_v<Scale, std::uint8_t>) {
      return of_float(static_cast<float>(scales[bad]), largest_code(kCodes));
    } else if constexpr (requires { Quant::weight_global_offset(rows, cols); }) {
      if (bad < rows * Quant::weight_scale_cols(cols)) return text(fault, ": nan");
      return text(of_float(Quant::weight_global(scales, rows, cols), 448.0F * largest_code(DType::e2m1)), ", and above 0");
    } else {
      return text(fault, ": exponent ", int{scales[bad]}, ", at most ", int{largest_exponent(kCodes)});
    }
  }
}

}  // namespace moe::quantization
