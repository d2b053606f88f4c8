// SPDX-License-Identifier: Apache-2.0
// io/family_fields.hpp: the fields that many model families share, read into a layer description.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string_view>

#include "moe/io/hf_config.hpp"
#include "moe/io/layer_description.hpp"

namespace moe::io::detail::families {

using activation::Kind;
using routing::GroupScore;
using routing::Order;
using routing::Renorm;
using routing::Scoring;
using routing::Selection;
using Fields = std::initializer_list<std::string_view>;
using Config = HfConfig const&;
using Out = LayerDescription&;

/// The three shapes every family has, and the gated activation that the configuration names.
inline void shapes(Config c, Out d, Fields topk, Fields intermediate, std::string_view act = "hidden_act") {
  d.hidden = c.integer("hidden_size");
  d.intermediate = c.integer(intermediate);
  d.router.num_experts = static_cast<int>(c.integer({"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}, 1, 65536));
  d.router.topk = static_cast<int>(c.integer(topk, 1, kMaxTopK));
  d.activation.kind = act.empty() ? Kind::silu : gated_kind(c.string(act), c.label());
}
inline void renormalise(Out d, bool yes, float eps = 0.0F) {
  d.router.renorm = yes ? Renorm::sum : Renorm::none;
  d.router.renorm_eps = eps;
}
inline void shared(Out d, std::int64_t count, std::int64_t intermediate, SharedGate gate = SharedGate::none) {
  if (count == 0) return;
  d.shared.count = static_cast<int>(count);
  d.shared.intermediate = intermediate;
  d.shared.gate = gate;
  d.shared.activation = d.activation;
}
/// `n` shared experts as wide as a routed one; null means none. E_CONFIG if no field is there, unless the family then has none.
inline void shared_of_routed_width(Config c, Out d, Fields fields, bool may_be_absent = false) {
  bool stated = may_be_absent;
  for (std::string_view f : fields) {
    stated = stated || c.json().contains(f);
    if (!c.has(f)) continue;
    std::int64_t const n = c.integer(f, 0, 1024);
    return shared(d, n, n * d.intermediate);
  }
  if (!stated) (void)c.integer(fields);  // the error that names them
}
/// The first of `fields` that is stated; the first one if none is.
inline std::string_view first_stated(Config c, Fields fields) {
  for (std::string_view f : fields) {
    if (c.has(f)) return f;
  }
  return *fields.begin();
}
/// A factor or limit that older releases leave to the family's code.
inline float positive_or(Config c, std::string_view field, float unstated) { return c.has(field) ? c.positive(field) : unstated; }
inline void swigluoai(Out d, float alpha, float limit) {
  d.activation.kind = Kind::swigluoai_halves;
  d.activation.constants.alpha = alpha;
  d.activation.constants.beta = 1.0F;
  d.activation.constants.limit = limit;
}
/// Gate and up are clamped at swiglu_limit before silu.
inline void clamped_silu(Config c, Out d) {
  d.activation.kind = Kind::silu_clamped;
  d.activation.constants.limit = c.positive("swiglu_limit");
}
inline void groups(Config c, Out d, std::string_view group_field, std::string_view kept_field, GroupScore score) {
  d.router.num_expert_group = static_cast<int>(c.integer(group_field, 1, 65536));
  d.router.topk_group = static_cast<int>(c.integer(kept_field, 1, 65536));
  d.router.group_score = score;
  if (d.router.num_expert_group == 1) d.router.num_expert_group = d.router.topk_group = 0;
}

}  // namespace moe::io::detail::families
