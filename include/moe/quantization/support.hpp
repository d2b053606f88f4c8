// SPDX-License-Identifier: Apache-2.0
// quantization/support.hpp: how experts compute a scheme on a GPU, as the experts policies state it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/quantization/config.hpp"

namespace moe::quantization {

/// How a GPU computes the products of a scheme, worst first. Experts of the CUDA space state it:
/// `template <class Quant> static constexpr Support support_on(int sm)`, for compute capability sm (80, 89, 90, 100, ...).
enum class Support : std::uint8_t {
  none,       ///< refused on that GPU
  emulated,   ///< dequantised to float32 before the products: the rounding of the scheme, more work, no tensor cores
  converted,  ///< weights widened to 16 bits in registers on the way to the tensor cores
  native,     ///< the tensor cores take the stored values
};
constexpr std::string_view name(Support s) {
  return s == Support::native ? "native" : s == Support::converted ? "converted" : s == Support::emulated ? "emulated" : "unsupported";
}

/// "e4m3 group activations, e4m3 block weights, native on sm_90 with hopper_contiguous"
template <class Quant, class Experts>
std::string describe(int sm) {
  QuantConfig const c = config_of<Quant>();
  return text(QuantConfig::label(c.a1), " activations, ", QuantConfig::label(c.w1), " weights, ",
              name(Experts::template support_on<Quant>(sm)), " on sm_", sm, " with ", Experts::kName);
}

/// E_UNSUPPORTED if the experts cannot compute the scheme on that GPU, or, with `strict`, if they emulate it.
template <class Quant, class Experts>
void check_support(int sm, bool strict) {
  Support const s = Experts::template support_on<Quant>(sm);
  if (s == Support::none || (strict && s == Support::emulated)) {
    throw Error(ErrorCode::unsupported, text(describe<Quant, Experts>(sm), strict ? "; native execution was required" : ""));
  }
}

}  // namespace moe::quantization
