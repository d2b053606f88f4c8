// SPDX-License-Identifier: Apache-2.0
// quantization/support.hpp: how experts compute a scheme on a GPU, in words and as an error.
#pragma once

#include <string>

#include "moe/core/error.hpp"
#include "moe/quantization/config.hpp"
#include "moe/quantization/support_level.hpp"

namespace moe::quantization {

/// "e4m3 group activations, e4m3 block weights, native on sm_90 with hopper_contiguous"
template <class Quant, class Experts>
std::string describe(int sm) {
  QuantConfig const c = config_of<Quant>();
  return text(QuantConfig::label(c.a1), " activations, ", QuantConfig::label(c.w1), " weights, ",
              name(facts::support_on<Experts, Quant>(sm)), " on sm_", sm, " with ", Experts::kName);
}

/// E_UNSUPPORTED if the experts cannot compute the scheme on that GPU, or, with `strict`, if they emulate it.
template <class Quant, class Experts>
void check_support(int sm, bool strict) {
  Support const s = facts::support_on<Experts, Quant>(sm);
  if (s == Support::none || (strict && s == Support::emulated)) {
    throw Error(ErrorCode::unsupported, text(describe<Quant, Experts>(sm), strict ? "; native execution was required" : ""));
  }
}

}  // namespace moe::quantization
