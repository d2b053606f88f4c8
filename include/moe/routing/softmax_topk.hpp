// SPDX-License-Identifier: Apache-2.0
// routing/softmax_topk.hpp: softmax over all experts, then the k largest (Mixtral, Qwen2/3-MoE, OLMoE, Jamba, DBRX).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
template <Renormalize R>
struct SoftmaxTopKConfig : PlainTopKConfig {
  static constexpr Scoring scoring = Scoring::softmax;
  static constexpr Order order = Order::score_then_topk;
  static constexpr Renorm renorm = R == Renormalize::yes ? Renorm::sum : Renorm::none;
};
}  // namespace detail

/// w = softmax(z)[ids], ids = topk(w); with Renormalize::yes w / sum(w). docs/semantics/routing.md §4 Default and RenormalizeNaive.
template <Renormalize R>
class SoftmaxTopK : public RowRouter<detail::SoftmaxTopKConfig<R>> {
 public:
  static constexpr char const* kName = R == Renormalize::yes ? "softmax_topk_renormalize" : "softmax_topk";
  struct Params {
    int num_experts = 0;
    int topk = 0;
    float routed_scaling_factor = 1.0F;
    int num_fused_shared = 0;
    float fused_shared_weight = 1.0F;
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
    float const* per_expert_scale = nullptr;  ///< [E] in the router's space (Gemma-4), or null
  };
  /// Throws E_CONFIG.
  explicit SoftmaxTopK(Params const& p) : RowRouter<detail::SoftmaxTopKConfig<R>>(config_of(p)) {}

 private:
  static detail::SoftmaxTopKConfig<R> config_of(Params const& p) {
    auto c = detail::common_config<detail::SoftmaxTopKConfig<R>>(p);
    c.per_expert_scale = p.per_expert_scale;
    return c;
  }
};

}  // namespace moe::routing
