// SPDX-License-Identifier: Apache-2.0
// quantization/support_level.hpp: how well a GPU computes a scheme.
#pragma once

#include <cstdint>
#include <string_view>

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

}  // namespace moe::quantization
