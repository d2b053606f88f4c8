// SPDX-License-Identifier: Apache-2.0
// c/scheme_arrays.hpp: how arrays of moe.h hold the codes and scales of a scheme's weights.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "moe/c/tensor.hpp"
#include "moe/core/types.hpp"
#include "moe/quantization/format/codecs.hpp"
#include "moe/quantization/format/granularity.hpp"

namespace moe::c::detail {

/// The array of a scheme's scales.
template <class Scheme>
struct ScaleArray {
  using Scale = typename Scheme::WeightScale;
  static constexpr bool kHasZero = std::is_same_v<Scale, quantization::ScaleZero>;
  using Element = std::conditional_t<kHasZero, float, Scale>;
  /// A scale with a zero point is two elements of the array, the scale first.
  static constexpr std::int64_t kElements = kHasZero ? 2 : 1;
  static_assert(sizeof(Scale) == kElements * sizeof(Element) && alignof(Scale) == alignof(Element));
  /// Whether the scales of a matrix end with one for all of it, so that they are no [rows, groups].
  static constexpr bool kHasGlobal = requires { Scheme::weight_global_offset(std::int64_t{1}, std::int64_t{1}); };
  static constexpr bool kExponents = std::is_same_v<Scale, std::uint8_t> && !kHasGlobal;
  /// What its elements are, for messages.
  static constexpr char const* kWhat = kHasZero ? "scales and zero points" : kHasGlobal ? "bytes of scales" : "scales";

  static constexpr std::int64_t count(std::int64_t rows, std::int64_t cols) { return Scheme::weight_scale_count(rows, cols) * kElements; }
  /// E_ARG, naming `what`.
  static void check_dtype(char const* what, DLDataType is) {
    if (same(is, dl_type<Element>()) || (kExponents && same(is, {MOE_DL_FLOAT8_E8M0FNU, 8, 1}))) return;
    refuse(what, text("dtype is ", describe(is)), text(describe(dl_type<Element>()), kExponents ? " or float8_e8m0fnu" : ""));
  }
};

/// Whether an array may hold codes of this type: int8 codes as int8, all others as uint8 or as the float8 and float4 types of DLPack.
inline bool holds_codes(DLDataType is, DType code) {
  if (code == DType::i8) return same(is, {kDLInt, 8, 1});
  if (same(is, {kDLUInt, 8, 1})) return true;
  return code == DType::e4m3   ? same(is, {MOE_DL_FLOAT8_E4M3FN, 8, 1})
         : code == DType::e2m1 ? same(is, {MOE_DL_FLOAT4_E2M1FN, 4, 2})
                               : false;
}
/// E_ARG, naming `what`, for an array that cannot hold codes of a scheme whose weights are quantised.
template <class Scheme>
void check_code_dtype(char const* what, DLDataType is) {
  if (holds_codes(is, Scheme::kWeightDType)) return;
  refuse(what, text("dtype is ", describe(is)),
         Scheme::kWeightDType == DType::i8 ? std::string("int8") : text("uint8 or that of ", name(Scheme::kWeightDType), " codes"));
}

template <class Scheme>
constexpr bool quantizes_weights() {
  return Scheme::kWeightGranularity != quantization::ScaleGranularity::none;
}

}  // namespace moe::c::detail
