// SPDX-License-Identifier: Apache-2.0
// core/contract/monolithic.hpp: experts that route inside: the facts, rules and members of a composition with them, and the shape of the
// rows that its exchange moves.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/core/layer_config.hpp"
#include "moe/core/rule.hpp"

namespace moe {

namespace facts {

/// Experts::kRoutesInside: the kernel gets every expert's logit for each row and chooses itself (monolithic). Its StandardTokens have a
/// column for each logit: topk_weights are the logits, topk_ids the local id of each expert, or kNoExpert. Default: the layer routes.
template <class Experts>
constexpr bool routes_inside() {
  if constexpr (requires { Experts::kRoutesInside; }) {
    return Experts::kRoutesInside;
  } else {
    return false;
  }
}

/// Experts::supports_router<Router>(): whether experts that route inside choose as this router does. Experts without it: every router,
/// since they get its choice.
template <class Experts, class Router>
constexpr bool supports_router() {
  if constexpr (requires { Experts::template supports_router<Router>(); }) {
    return Experts::template supports_router<Router>();
  } else {
    return !routes_inside<Experts>();
  }
}

/// Backend::kFacts.transport: whether rows go to the ranks of the experts that were chosen for them. Default: they do not.
template <class Backend>
constexpr bool follows_routing() {
  if constexpr (requires { Backend::kFacts.transport; }) {
    using Transport = std::remove_cvref_t<decltype(Backend::kFacts.transport)>;
    return Backend::kFacts.transport == Transport::all_to_all;
  } else {
    return false;
  }
}

}  // namespace facts

namespace rules {
MOE_RULE(MonolithicTransport,
         "moe: the experts route inside, and the backend sends rows to the ranks of their experts, which are not known yet. "
         "Fix: no_expert_parallel, naive or allgather_reduce_scatter, or experts that take routed rows (docs/errors.md#monolithic)");
MOE_RULE(MonolithicRouter,
         "moe: the experts route inside, and have no path for this router. "
         "Fix: a router of the library that chooses by a row's logits, or experts that take routed rows (docs/errors.md#monolithic)");
MOE_RULE(MonolithicTakesNoRouting,
         "moe: forward_routed(): the layer's experts route inside. "
         "Fix: call forward() with router_logits, or choose experts that take routed rows (docs/errors.md#monolithic)");
}  // namespace rules

/// Experts that route inside choose as `router`, which outlives the kernel. Called once, after construction.
template <class K, class Router>
concept KernelRoutes = requires(K& k, Router const& router) { k.route_with(router); };
MOE_MEMBER(KernelRoutes, "the kernel of experts that route inside", "template <class Router> void route_with(Router const&)",
           "takes the router whose choice it makes");

/// The configuration of the rows that a layer exchanges whose experts route inside: a column for each logit instead of each choice.
template <class Config>
struct LogitsRows : Config {
  static constexpr int topk = dynamic;
};
template <LayerConfig Config>
class Shape<LogitsRows<Config>> {
 public:
  Shape(Shape<Config> const& layer, int num_logits) : layer_(layer), num_logits_(num_logits) {}
  constexpr std::int64_t hidden() const { return layer_.hidden(); }
  constexpr std::int64_t intermediate() const { return layer_.intermediate(); }
  constexpr int num_experts() const { return layer_.num_experts(); }
  constexpr int topk() const { return num_logits_; }
  constexpr bool weight_on_input() const { return layer_.weight_on_input(); }

 private:
  Shape<Config> layer_;
  int num_logits_;
};

}  // namespace moe
