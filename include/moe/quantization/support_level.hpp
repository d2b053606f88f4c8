// SPDX-License-Identifier: Apache-2.0
// quantization/support_level.hpp: how well a GPU computes a scheme.
#pragma once

#include <cstdint>
#include <string_view>

#include "moe/core/space.hpp"

namespace moe::quantization {

/// How a GPU computes the products of a scheme, worst first. Experts of the CUDA space state it (facts::support_on()).
enum class Support : std::uint8_t {
  none,       ///< refused on that GPU
  emulated,   ///< the rounding of the scheme, more work: products of float32, or of rows in codes widened to bf16 on the tensor cores
  converted,  ///< weights become bf16 or e4m3 in registers on the way to the tensor cores
  native,     ///< the tensor cores take the stored values
};
constexpr std::string_view name(Support s) {
  return s == Support::native ? "native" : s == Support::converted ? "converted" : s == Support::emulated ? "emulated" : "unsupported";
}

}  // namespace moe::quantization

namespace moe::facts {

/// Experts::support_on<Quant>(sm): how they compute a scheme on a GPU of compute capability sm (80, 89, 90, 100, ...). Default: emulated by
/// experts of the CUDA space that take the scheme, on every GPU; else none.
template <class Experts, class Quant>
constexpr quantization::Support support_on([[maybe_unused]] int sm) {
  using quantization::Support;
  if constexpr (requires { Experts::template support_on<Quant>(sm); }) {
    return Experts::template support_on<Quant>(sm);
  } else if constexpr (Experts::Space::kKind == SpaceKind::cuda) {
    return Experts::template supports_quantization<Quant>() ? Support::emulated : Support::none;
  } else {
    return Support::none;
  }
}

}  // namespace moe::facts
