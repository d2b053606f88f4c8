// SPDX-License-Identifier: Apache-2.0
// experts/hopper/facts.hpp: the facts that the Hopper policies share, as bases of theirs. Plain host C++.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>

#include "moe/core/cuda_space.hpp"
#include "moe/core/types.hpp"
#include "moe/experts/common/reduction.hpp"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/w4/problem.hpp"
#include "moe/quantization/support_level.hpp"

namespace moe::experts::detail {

/// Policy: the one that derives from this. Level: how its kernels compute a scheme that they support.
template <class Policy, quantization::Support Level>
struct HopperFacts : ReducesByFormat {
  using Space = space::cuda;
  static constexpr int kSharedMemoryLimit = hopper::kSharedMemoryLimit;
  template <class Quant>
  static constexpr quantization::Support support_on(int sm) {
    return sm == 90 && Policy::template supports_quantization<Quant>() ? Level : quantization::Support::none;
  }
};

/// Of policies that pack weights of 4 or 8 bits.
template <class Policy>
struct PackedFacts : HopperFacts<Policy, quantization::Support::converted> {
  /// The stored weights are codes; `Weight` is their type before quantisation.
  template <class Act, class Weight>
  static constexpr bool supports_element() {
    return std::same_as<Act, bf16>;
  }
  template <class Config, class Quant>
  static constexpr int shared_memory_bytes() {
    return hopper::kSharedMemoryLimit;
  }
};

/// The weights (WeightsOf of a layer) as the layers of packed weights take them, without the groups of their scales.
template <class Weights>
hopper::W4Weights stored_weights(Weights const& weights) {
  hopper::W4Weights w{};
  w.w13 = reinterpret_cast<std::uint8_t const*>(weights.w13.codes.data_handle());
  w.w2 = reinterpret_cast<std::uint8_t const*>(weights.w2.codes.data_handle());
  w.w13_scales = weights.w13.scales.data_handle();
  w.w2_scales = weights.w2.scales.data_handle();
  w.b13 = weights.w13.has_bias() ? weights.w13.bias.data_handle() : nullptr;
  w.b2 = weights.w2.has_bias() ? weights.w2.bias.data_handle() : nullptr;
  if (weights.packed.given()) {
    std::copy_n(weights.packed.bricks, 2, w.packed.bricks);
    std::copy_n(weights.packed.factors, 2, w.packed.factor);
  }
  return w;
}

}  // namespace moe::experts::detail
