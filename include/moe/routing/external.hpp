// SPDX-License-Identifier: Apache-2.0
// routing/external.hpp: the router of a layer whose caller routes: it chooses nothing, the layer has forward_routed() alone.
#pragma once

#include "moe/routing/row/router_config.hpp"
#include "moe/routing/row/validate.hpp"

namespace moe::routing {

/// For engines that route themselves. States how many experts there are and how many a row names; forward_routed() takes ids and weights.
/// Experts that weight their input: set LayerShape::weight_on_input.
class External {
 public:
  static constexpr char const* kName = "external";
  static constexpr bool kWeightOnInput = false;
  static constexpr bool kSelects = false;
  struct Params {
    int num_experts = 0;
    int topk = 0;
    int num_zero_experts = 0;  ///< ids E … E+Z-1 name zero experts, which are not dispatched (routing/zero_experts.hpp)
    ZeroExpertKind zero_expert_kind = ZeroExpertKind::identity;
  };
  /// Throws E_CONFIG.
  explicit External(Params const& p) {
    config_.num_experts = p.num_experts;
    config_.topk = p.topk;
    config_.num_zero_experts = p.num_zero_experts;
    config_.zero_expert_kind = p.zero_expert_kind;
    validate(config_);
  }

  int num_experts() const { return config_.num_experts; }
  int topk() const { return config_.topk; }
  int num_logits() const { return config_.num_logits(); }
  int num_slots() const { return config_.num_slots(); }
  RouterConfig resolved() const { return config_; }

 private:
  RouterConfig config_;
};

}  // namespace moe::routing
