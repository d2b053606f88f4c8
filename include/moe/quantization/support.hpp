// SPDX-License-Identifier: Apache-2.0
// quantization/support.hpp: on which GPUs a scheme runs natively and where it is emulated. Spec 02 §10.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/quantization/config.hpp"

namespace moe::quantization {

/// How a GPU runs a scheme.
enum class Support : std::uint8_t {
  native,       ///< on the tensor cores, or dequantised in registers on the way to them
  emulated,     ///< dequantised to bf16 with the native rounding of the activations: same result, more work
  weight_only,  ///< weights stay quantised, activations in 16 bits
  none,
};
constexpr std::string_view name(Support s) {
  return s == Support::native ? "native" : s == Support::emulated ? "emulated" : s == Support::weight_only ? "weight-only" : "unsupported";
}

/// Support on compute capability `sm` (80, 89, 90, 100, …).
inline Support support_on(QuantConfig const& c, int sm) {
  if (sm < 80) return Support::none;
  if (!c.a1.dtype) return Support::native;  // unquantised, or weights widened in registers
  Support const blackwell = sm >= 100 ? Support::native : Support::emulated;
  DType const act = *c.a1.dtype, weight = *c.w1.dtype;
  if (act == DType::i8) return sm >= 100 ? Support::emulated : Support::native;
  if (act == DType::e2m1 || weight == DType::e2m1) return blackwell;  // mxfp4 and nvfp4 with quantised activations
  if (c.a1.group_shape == group_of(32)) return blackwell;             // mxfp8
  if (weight == DType::u4) return sm >= 90 ? Support::native : sm == 89 ? Support::emulated : Support::none;
  return sm >= 89 ? Support::native : Support::weight_only;
}

/// "e4m3 group activations, e4m3 block weights, native on sm_90"
inline std::string describe(QuantConfig const& c, int sm) {
  return text(QuantConfig::label(c.a1), " activations, ", QuantConfig::label(c.w1), " weights, ", name(support_on(c, sm)), " on sm_", sm);
}

/// E_UNSUPPORTED if the GPU cannot run the scheme, or, with `strict`, if it can only emulate it.
inline void check_support(QuantConfig const& c, int sm, bool strict) {
  Support const s = support_on(c, sm);
  if (s == Support::none || (strict && s != Support::native)) {
    throw Error(ErrorCode::unsupported, text(describe(c, sm), strict ? "; native execution was required" : ""));
  }
}

}  // namespace moe::quantization
