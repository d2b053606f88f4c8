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
  bool expert_norm = false;       ///< an expert's output goes through a norm before the weighted sum
  bool refuse_emulation = false;  ///< true: experts that only emulate the scheme on this device are refused
};

/// Why experts that take the types do not compute this layer; empty if they do.
template <class Experts, class Quant, class Act>
std::string experts_obstacle(ExpertsNeeds const& n) {
  auto const because = [](auto const&... words) { return text(Experts::kName, ": ", words...); };
  quantization::Support const support = facts::support_on<Experts, Quant>(n.architecture);
  if (support == quantization::Support::none) {
    return because("not for ", Quant::kName, " on a device of architecture ", n.architecture);
  }
  if (n.refuse_emulation && support == quantization::Support::emulated) {
    return because(Quant::kName, " is emulated on a device of architecture ", n.architecture, ", and native execution was required");
  }
  if constexpr (ExpertsHaveFitsShape<Experts, RuntimeLayer<Act, Act>, Quant>) {
    using Takes = moe::detail::ExpertsTake<Experts, RuntimeLayer<Act, Act>, Quant>;
    constexpr int kHidden = moe::detail::hidden_multiple<Takes>(), kInner = moe::detail::intermediate_multiple<Takes>();
    if (n.hidden % kHidden != 0) return because("hidden ", n.hidden, " is not a multiple of ", kHidden);
    if (n.intermediate % kInner != 0) return because("intermediate ", n.intermediate, " is not a multiple of ", kInner);
  }
  if (n.expert_norm && !facts::normalises_output<Experts>()) return because("no norm of an expert's output before the weighted sum");
  if (!facts::takes<Experts>(n.activation, n.weight_on_input)) {
    return because("not for the activation ", activation::name(n.activation),
                   n.weight_on_input ? " with the router weight on the input" : "");
  }
  return {};
}

}  // namespace moe::models
