// SPDX-License-Identifier: Apache-2.0
// models/fused_shared.hpp: the shared experts of a block as further experts of its layer: columns that the router adds to every row, and
// weights behind those of the routed experts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/host_layer_weights.hpp"

namespace moe::models {

/// Why the shared experts cannot be further experts of the layer; empty if they can.
template <class T>
std::string fusing_obstacle(io::HostLayerWeights<T> const& w) {
  io::LayerDescription const& d = w.description;
  auto const same = [](io::ActivationChoice const& a, io::ActivationChoice const& b) {
    auto const& x = a.constants;
    auto const& y = b.constants;
    return a.kind == b.kind && x.alpha == y.alpha && x.beta == y.beta && x.limit == y.limit && x.situ_gate == y.situ_gate &&
           x.situ_up == y.situ_up;
  };
  if (w.shared.count == 0) return "there are no shared experts";
  if (d.shared.gate == io::SharedGate::sigmoid) return "a sigmoid gate is not a routing weight";
  if (d.shared.combination == io::Combination::average) return "the output is an average of routed and shared output";
  if (!same(d.activation, d.shared.activation)) return "their activation is not that of the routed experts";
  if (d.expert_norm) return "the routed experts' outputs go through a norm";
  if (d.latent > 0) return text("the routed experts have the latent width ", d.latent);
  if (d.router.num_zero_experts > 0) return "the router chooses zero experts";
  if (d.weight_on == io::WeightOn::expert_input && d.output_scaling_factor != 1.0F)
    return "the weights are on the input, the factor is not";
  if (w.shared.count * w.shared.intermediate != d.shared.intermediate) return "this rank has a part of the shared experts";
  if (w.intermediate != d.intermediate) return "this rank has a part of each expert";
  bool const whole = d.shared.gate == io::SharedGate::routing_weight ? w.shared.intermediate == w.intermediate
                                                                     : w.shared.intermediate % w.intermediate == 0;
  if (!whole) return text("their width ", w.shared.intermediate, " is not that of routed experts, ", w.intermediate);
  return {};
}

/// The block with its shared experts as experts E, E + 1, …, which every row chooses: a wide one is cut into several. The layer then has
/// num_experts + num_fused_shared experts and num_slots() columns. On one rank its placement is of all of them; on several, of the routed
/// experts alone, and every rank has the shared ones behind its own (docs/semantics/runner.md §6). E_UNSUPPORTED with fusing_obstacle()'s
/// sentence.
template <class T>
io::HostLayerWeights<T> with_fused_shared(io::HostLayerWeights<T> w) {
  if (std::string const why = fusing_obstacle(w); !why.empty()) throw Error(ErrorCode::unsupported, text("fused shared experts: ", why));
  io::LayerDescription& d = w.description;
  std::int64_t const h = d.hidden, inner = w.intermediate, wide = w.shared.intermediate, parts = d.activation.gated() ? 2 : 1;
  int fused = 0;
  for (std::int64_t s = 0; s < w.shared.count; ++s) {
    T const* const from13 = w.shared.w13.data() + s * parts * wide * h;
    T const* const from2 = w.shared.w2.data() + s * h * wide;
    for (std::int64_t first = 0; first < wide; first += inner, ++fused) {
      for (std::int64_t part = 0; part < parts; ++part) {
        T const* const rows = from13 + (part * wide + first) * h;
        w.w13.insert(w.w13.end(), rows, rows + inner * h);
      }
      for (std::int64_t row = 0; row < h; ++row) w.w2.insert(w.w2.end(), from2 + row * wide + first, from2 + row * wide + first + inner);
      w.experts.push_back(d.router.num_experts + fused);
    }
  }
  if (d.expert_bias) {
    w.w13_bias.resize(w.experts.size() * static_cast<std::size_t>(parts * inner), 0.0F);
    w.w2_bias.resize(w.experts.size() * static_cast<std::size_t>(h), 0.0F);
  }
  d.router.num_fused_shared = fused;
  d.router.fused_shared_weight = 1.0F / d.output_scaling_factor;
  d.shared = {};
  w.shared = {};
  return w;
}

}  // namespace moe::models
