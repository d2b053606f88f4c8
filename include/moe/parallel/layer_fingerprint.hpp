// SPDX-License-Identifier: Apache-2.0
// parallel/layer_fingerprint.hpp: the choices that must be equal on all ranks of a layer. Exchanges compare part of them, on the device
// only with the first round's words. docs/semantics/parallel.md §4.
#pragma once

#include <cstdio>
#include <string>

#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/policy.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/types.hpp"
#include "moe/parallel/fingerprint.hpp"
#include "moe/parallel/placement.hpp"

namespace moe::detail {

/// Nine digits distinguish every float from its neighbours.
inline std::string digits(float value) {
  char out[32];
  std::snprintf(out, sizeof out, "%.9g", static_cast<double>(value));
  return out;
}

/// The experts policy and the number of tokens may differ between ranks. The other choices affect a token's result.
template <class Config, class Backend, class Quant, class Router>
Fingerprint layer_fingerprint(Shape<Config> const& shape, Router const& router, Quant const& quant,
                              typename Config::Activation const& activation, ExpertPlacement const& placement) {
  using Activation = typename Config::Activation;
  Fingerprint f;
  f.add("backend", Backend::kName).add("quantization", Quant::kName).add("Act", name(dtype_of<typename Config::Act>));
  f.add("hidden", shape.hidden()).add("intermediate", shape.intermediate()).add("num_experts", shape.num_experts());
  f.add("top_k", shape.topk()).add("weight_on_input", shape.weight_on_input());
  if constexpr (Named<Activation>) f.add("activation", Activation::kName);
  if constexpr (facts::chooses_kind<Activation>()) f.add("activation kind", static_cast<int>(activation.kind));
  if constexpr (facts::has_constants<Activation>()) {
    auto const& c = activation.constants;
    f.add("activation alpha", digits(c.alpha)).add("activation beta", digits(c.beta)).add("activation limit", digits(c.limit));
    f.add("activation situ_gate", digits(c.situ_gate)).add("activation situ_up", digits(c.situ_up));
  }
  if constexpr (facts::has_static_scale<Quant>()) f.add("static activation scale", digits(quant.params.scale));
  if constexpr (facts::has_global_scale<Quant>()) f.add("activation global_scale", digits(quant.act.global_scale));
  f.add("router", Router::kName);
  if constexpr (facts::resolves<Router>()) {
    auto const r = router.resolved();
    f.add("scoring", name(r.scoring)).add("order", static_cast<int>(r.order)).add("selection", static_cast<int>(r.selection));
    f.add("renormalisation", static_cast<int>(r.renorm)).add("renorm_eps", digits(r.renorm_eps)).add("renorm_p", digits(r.renorm_p));
    f.add("routed_scaling_factor", digits(r.routed_scaling_factor)).add("logit_softcap", digits(r.logit_softcap));
    f.add("num_expert_group", r.num_expert_group).add("topk_group", r.topk_group).add("group_score", static_cast<int>(r.group_score));
    f.add("sparsemixer_eps", digits(r.sparsemixer_eps)).add("num_zero_experts", r.num_zero_experts);
    f.add("zero_expert_kind", static_cast<int>(r.zero_expert_kind)).add("num_joint_shared", r.num_joint_shared);
    f.add("degenerate", static_cast<int>(r.degenerate)).add("correction_bias", r.correction_bias != nullptr);
    f.add("per_expert_scale", r.per_expert_scale != nullptr).add("vocabulary", r.vocabulary).add("expert_capacity", r.expert_capacity);
  }
  f.add("placement: ranks", placement.ep_size()).add("placement: physical experts", placement.num_physical());
  for (int p = 0; p < placement.num_physical(); ++p) {
    f.add(text("placement of physical expert ", p),
          text("rank ", placement.owner(p), ", its expert ", placement.local(p), ", a replica of ", placement.logical(p)));
  }
  return f;
}

}  // namespace moe::detail
