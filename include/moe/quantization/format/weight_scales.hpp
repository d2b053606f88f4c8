// SPDX-License-Identifier: Apache-2.0
// quantization/format/weight_scales.hpp: which scales of weights can be packed: those under which every code is a finite number.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "moe/core/types.hpp"
#include "moe/quantization/format/codecs.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/formats.hpp"

namespace moe::quantization {

/// The largest magnitude of a code; with zero points, of a code less its zero point.
MOE_HD constexpr float largest_code(DType codes) {
  return codes == DType::e4m3   ? 448.0F
         : codes == DType::e2m1 ? 6.0F
         : codes == DType::u4   ? 15.0F
         : codes == DType::u8   ? 255.0F
         : codes == DType::i8   ? 128.0F
                                : 1.0F;
}
/// The largest exponent byte under which every code is finite: 252 for e2m1, 246 for e4m3.
MOE_HD constexpr std::uint8_t largest_exponent(DType codes) { return codes == DType::e2m1 ? 252 : 246; }

/// Whether every code is finite under a scale, and a zero point is one of the codes.
MOE_HD constexpr bool is_packable(float scale, DType codes) {
  float const top = (scale < 0 ? -scale : scale) * largest_code(codes);
  return top <= 3.402823466e38F;  // false for NaN, too
}
MOE_HD constexpr bool is_packable(ScaleZero s, DType codes) {
  return is_packable(s.scale, codes) && s.zero >= 0 && s.zero <= largest_code(codes);
}
/// The same of nvfp4's float32 scale of a matrix, with the largest of the e4m3 scales beside it.
MOE_HD constexpr bool is_packable_global(float scale) { return scale > 0 && is_packable(scale * 448.0F, DType::e2m1); }

/// The first of the scales of a weight matrix [rows, cols] that is not packable, -1 if all are. Of nvfp4 the global scale is the one behind
/// the block scales. Schemes that do not state their format are not checked.
template <class Quant>
std::int64_t first_unpackable_scale(typename Quant::WeightScale const* scales, std::int64_t rows, std::int64_t cols) {
  if constexpr (facts::states_format<Quant>()) {
    using Scale = typename Quant::WeightScale;
    std::int64_t count = Quant::weight_scale_count(rows, cols);
    [[maybe_unused]] std::int64_t const all = count;
    if constexpr (requires { Quant::weight_global_offset(rows, cols); }) count = rows * Quant::weight_scale_cols(cols);
    for (std::int64_t i = 0; i < count; ++i) {
      if constexpr (!std::is_same_v<Scale, std::uint8_t>) {
        if (!is_packable(scales[i], Quant::kWeightDType)) return i;
      } else if constexpr (requires { Quant::weight_global_offset(rows, cols); }) {
        if ((scales[i] & 0x7F) == 0x7F) return i;
      } else {
        if (scales[i] > largest_exponent(Quant::kWeightDType)) return i;
      }
    }
    if constexpr (requires { Quant::weight_global_offset(rows, cols); }) {
      float const global = Quant::weight_global(scales, rows, cols);
      if (!is_packable_global(global)) return count;
    }
  }
  return -1;
}

}  // namespace moe::quantization
