// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/activation.hpp: the activations that the kernels of packed weights compute by one formula. Plain host C++.
#pragma once

#include "moe/activation/activation.hpp"
#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::hopper {

/// The kinds that W4Activation's formula covers.
constexpr bool is_w4_activation(activation::Kind k) {
  using activation::Kind;
  return k == Kind::silu || k == Kind::swigluoai || k == Kind::swigluoai_halves || k == Kind::silu_clamped;
}
/// The formula's constants. `kind` is one of those of is_w4_activation().
constexpr W4Activation w4_activation(activation::Kind kind, activation::Constants const& c) {
  using activation::Kind;
  switch (kind) {
    case Kind::swigluoai:
    case Kind::swigluoai_halves: return {c.alpha, c.beta, c.limit};
    case Kind::silu_clamped: return {1.0F, 0.0F, c.limit};
    default: return {};
  }
}

}  // namespace moe::hopper
