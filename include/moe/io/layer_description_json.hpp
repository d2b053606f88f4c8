// SPDX-License-Identifier: Apache-2.0
// io/layer_description_json.hpp: a layer description as JSON.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "moe/io/layer_description.hpp"

namespace moe::io {

/// All fields as JSON, for reports and comparisons.
inline nlohmann::ordered_json to_json(LayerDescription const& d) {
  using routing::Renorm;
  auto const act = [](ActivationChoice const& a) {
    nlohmann::ordered_json out{{"kind", activation::name(a.kind)}};
    using activation::Kind;
    if (a.kind == Kind::swigluoai || a.kind == Kind::swigluoai_halves) out["alpha"] = a.constants.alpha, out["beta"] = a.constants.beta;
    if (a.constants.limit < 1e30F) out["limit"] = a.constants.limit;
    if (a.kind == Kind::situ) out["situ_gate"] = a.constants.situ_gate, out["situ_up"] = a.constants.situ_up;
    return out;
  };
  routing::RouterConfig const& r = d.router;
  constexpr std::string_view renorms[] = {"none", "sum", "floor", "p_norm"};
  constexpr std::string_view selections[] = {"topk", "hash_table", "sparsemixer"};
  nlohmann::ordered_json out{
      {"hidden", d.hidden},
      {"intermediate", d.intermediate},
      {"latent", d.latent},
      {"latent_norm", d.latent_norm},
      {"latent_in_norm", d.latent_in_norm},
      {"num_experts", r.num_experts},
      {"topk", r.topk},
      {"scoring", routing::name(r.scoring)},
      {"order", r.order == routing::Order::score_then_topk ? "score_then_topk" : "topk_then_score"},
      {"selection", selections[static_cast<int>(r.selection)]},
      {"renorm", renorms[static_cast<int>(r.renorm)]},
      {"renorm_eps", r.renorm == Renorm::sum || r.renorm == Renorm::floor ? r.renorm_eps : 0.0F},
      {"renorm_p", r.renorm == Renorm::p_norm ? r.renorm_p : 1.0F},
      {"routed_scaling_factor", r.routed_scaling_factor},
      {"num_expert_group", r.num_expert_group},
      {"topk_group", r.topk_group},
      {"group_score", r.num_expert_group == 0                     ? "none"
                      : r.group_score == routing::GroupScore::max ? "max"
                                                                  : "top2_sum"},
      {"logit_softcap", r.logit_softcap},
      {"sparsemixer_eps", r.selection == routing::Selection::sparsemixer ? r.sparsemixer_eps : 0.0F},
      {"num_zero_experts", r.num_zero_experts},
      {"zero_expert", r.num_zero_experts == 0                                   ? "none"
                      : r.zero_expert_kind == routing::ZeroExpertKind::identity ? "identity"
                                                                                : "skip"},
      {"num_joint_shared", r.num_joint_shared},
      {"router_input", name(d.router_input)},
      {"router_bias", d.router_bias},
      {"correction_bias", d.correction_bias},
      {"per_expert_scale", d.per_expert_scale},
      {"weight_on", name(d.weight_on)},
      {"output_scaling_factor", d.output_scaling_factor},
      {"activation", act(d.activation)},
      {"expert_bias", d.expert_bias},
      {"post_norm", d.post_norm},
      {"output_bias", d.output_bias},
      {"rms_norm_eps", d.post_norm || d.latent_norm || d.latent_in_norm || d.router_input != RouterInput::hidden ? d.rms_norm_eps : 0.0F},
      {"layout", name(d.layout)},
  };
  if (d.tokens != Tokens::all) out["tokens"] = name(d.tokens);
  if (d.expert_of_id) out["expert_of_id"] = true;
  if (d.own_rows > 0) out["own_rows"] = d.own_rows;
  if (d.expert_norm) out["expert_norm_eps"] = d.expert_norm_eps;
  if (d.router_logit_scale != 1.0F) out["router_logit_scale"] = d.router_logit_scale;
  if (d.router.expert_capacity > 0) out["expert_capacity"] = d.router.expert_capacity;
  if (d.shared.count > 0) {
    out["shared"] = {{"count", d.shared.count},
                     {"intermediate", d.shared.intermediate},
                     {"gate", name(d.shared.gate)},
                     {"activation", act(d.shared.activation)},
                     {"combination", name(d.shared.combination)}};
  }
  return out;
}

}  // namespace moe::io
