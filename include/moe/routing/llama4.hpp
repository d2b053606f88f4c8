// SPDX-License-Identifier: Apache-2.0
// routing/llama4.hpp: the largest logit's expert, whose sigmoid multiplies the expert's input (Llama-4).
#pragma once

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {
struct Llama4Config : PlainTopKConfig {
  static constexpr int topk = 1;
  static constexpr Scoring scoring = Scoring::sigmoid;
  static constexpr Order order = Order::topk_then_score;
  static constexpr Renorm renorm = Renorm::none;
};
}  // namespace detail

/// id = argmax z, w = sigmoid(z[id]); the weight goes onto the expert's input. docs/semantics/routing.md §7.
class Llama4 : public RowRouter<detail::Llama4Config> {
 public:
  static constexpr char const* kName = "llama4";
  static constexpr bool kWeightOnInput = true;
  struct Params {
    int num_experts = 0;
    int topk = 1;  ///< must be 1
    DegeneratePolicy degenerate = DegeneratePolicy::uniform_first_k;
  };
  /// Throws E_CONFIG.
  explicit Llama4(Params const& p) : RowRouter(config_of(p)) {}

 private:
  static detail::Llama4Config config_of(Params const& p) {
    detail::require(p.topk == 1, ErrorCode::config, "topk must be 1 where the router weight is applied on the input, it is ", p.topk);
    detail::Llama4Config c;
    c.num_experts = p.num_experts;
    c.RouterConfig::topk = 1;
    c.degenerate = p.degenerate;
    return c;
  }
};

}  // namespace moe::routing
