// SPDX-License-Identifier: Apache-2.0
// models/experts_obstacle.hpp: whether experts on the device compute a layer whose sizes are known at run time, with the reason if they do
// not. Plain host C++.
#pragma once

#include <cstdint>
#include <string>

#include "moe/activation/activation.hpp"
#include "moe/core/contract/check.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/support_level.hpp"

namespace moe::models {

/// What decides at run time whether experts compute a layer.
struct ExpertsNeeds {
  int architecture = 0;  ///< of the device, 90 for 9.0
  std::int64_t hidden = 0;
  std::int64_t intermediate = 0;
  activation::Kind activation = activation::Kind::silu;
  bool weight_on_input = false;
};

namespace detail {

template <class Act, int Hidden, int Intermediate>
struct SizedLayer : RuntimeLayer<Act, Act> {
  static constexpr int hidden = Hidden, intermediate = Intermediate;
};
/// The least power of two that experts take as a dimension; what they take are its multiples.
template <class Experts, class Quant, class Act, int Unit = 1>
constexpr int hidden_unit() {
  if constexpr (Unit >= 4096 || Experts::template fits_shape<SizedLayer<Act, Unit, dynamic>, Quant>()) {
    return Unit;
  } else {
    return hidden_unit<Experts, Quant, Act, 2 * Unit>();
  }
}
template <class Experts, class Quant, class Act, int Unit = 1>
constexpr int intermediate_unit() {
  if constexpr (Unit >= 4096 || Experts::template fits_shape<SizedLayer<Act, dynamic, Unit>, Quant>()) {
    return Unit;
  } else {
    return intermediate_unit<Experts, Quant, Act, 2 * Unit>();
  }
}

}  // namespace detail

/// Why experts that take the types do not compute this layer; empty if they do.
template <class Experts, class Quant, class Act>
std::string experts_obstacle(ExpertsNeeds const& n) {
  auto const because = [](auto const&... words) { return text(Experts::kName, ": ", words...); };
  if (facts::support_on<Experts, Quant>(n.architecture) == quantization::Support::none) {
    return because("not for ", Quant::kName, " on a device of architecture ", n.architecture);
  }
  if constexpr (ExpertsHaveFitsShape<Experts, RuntimeLayer<Act, Act>, Quant>) {
    constexpr int kHidden = detail::hidden_unit<Experts, Quant, Act>(), kInner = detail::intermediate_unit<Experts, Quant, Act>();
    if (n.hidden % kHidden != 0) return because("hidden ", n.hidden, " is not a multiple of ", kHidden);
    if (n.intermediate % kInner != 0) return because("intermediate ", n.intermediate, " is not a multiple of ", kInner);
  }
  if (!facts::takes<Experts>(n.activation, n.weight_on_input)) {
    return because("not for the activation ", activation::name(n.activation),
                   n.weight_on_input ? " with the router weight on the input" : "");
  }
  return {};
}

}  // namespace moe::models
