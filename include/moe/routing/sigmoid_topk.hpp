// SPDX-License-Identifier: Apache-2.0
// routing/sigmoid_topk.hpp: sigmoid of each logit, then the k largest (Cohere2 with sigmoid, LFM2 without bias).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
template <Renormalize R>
struct SigmoidTopKConfig : PlainTopKConfig {
  static constexpr Scoring scoring = Scoring::sigmoid;
  static constexpr Order order = Order::score_then_topk;
  static constexpr Renorm renorm = R == Renormalize::yes ? Renorm::sum : Renorm::none;
};
}  // namespace detail

/// w = sigmoid(z)[ids], ids = topk(w); with Renormalize::yes w / (sum(w) + eps). docs/semantics/routing.md §4 Sigmoid and SigmoidRenorm.
template <Renormalize R>
class SigmoidTopK : public RowRouter<detail::SigmoidTopKConfig<R>> {
 public:
  static constexpr char const* kName = R == Renormalize::yes ? "sigmoid_topk_renormalize" : "sigmoid_topk";
  struct Params {
    int num_experts = 0;
    int topk = 0;
    float renorm_eps = 1e-20F;
    float routed_scaling_factor = 1.0F;
    int num_fused_shared = 0;
    float fused_shared_weight = 1.0F;
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_CONFIG.
  explicit SigmoidTopK(Params const& p) : RowRouter<detail::SigmoidTopKConfig<R>>(config_of(p)) {}

 private:
  static detail::SigmoidTopKConfig<R> config_of(Params const& p) {
    auto c = detail::common_config<detail::SigmoidTopKConfig<R>>(p);
    c.renorm_eps = p.renorm_eps;
    return c;
  }
};

}  // namespace moe::routing
