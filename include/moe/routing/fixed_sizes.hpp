// SPDX-License-Identifier: Apache-2.0
// routing/fixed_sizes.hpp: a router whose numbers of experts are compile-time constants, so that its kernel is compiled for them alone.
#pragma once

#include <concepts>

#include "moe/core/layer_config.hpp"
#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

namespace detail {

/// The choices of Base at the sizes of Sizes, with no fused or joint shared experts: their columns would be further sizes.
template <class Base, class Sizes>
struct FixedSizesConfig : Base {
  static_assert(Sizes::num_experts > 0 && Sizes::topk > 0, "moe: a router of fixed sizes needs num_experts and topk in its configuration");
  static constexpr int num_experts = Sizes::num_experts;
  static constexpr int topk = Sizes::topk;
  static constexpr int num_zero_experts = kNumZeroExperts<Sizes>;
  static constexpr int num_fused_shared = 0;
  static constexpr int num_joint_shared = 0;
  MOE_HD static constexpr int num_logits() { return num_experts + num_zero_experts; }
  MOE_HD static constexpr int num_slots() { return topk; }
};

template <class Config>
inline constexpr bool kHasFixedSizes = false;
template <class Base, class Sizes>
inline constexpr bool kHasFixedSizes<FixedSizesConfig<Base, Sizes>> = true;

/// E_CONFIG if the values of a router are not those of its type.
template <class Base, class Sizes>
FixedSizesConfig<Base, Sizes> fixed_sizes(Base const& config) {
  using Fixed = FixedSizesConfig<Base, Sizes>;
  auto const same = [](char const* what, int value, int fixed) {
    require(value == fixed, ErrorCode::config, what, ": ", value, ", the router is compiled for ", fixed);
  };
  same("num_experts", config.num_experts, Fixed::num_experts);
  same("topk", config.topk, Fixed::topk);
  same("num_zero_experts", config.num_zero_experts, Fixed::num_zero_experts);
  same("num_fused_shared", config.num_fused_shared, Fixed::num_fused_shared);
  same("num_joint_shared", config.num_joint_shared, Fixed::num_joint_shared);
  return {config};
}

}  // namespace detail

/// Whether Router selects by RowRouter's own functions, and its configuration is a type of its own, not RouterConfig.
template <class Router>
concept TakesFixedSizes = facts::chooses_by_row<Router>() && !std::same_as<typename Router::Config, RouterConfig> &&
                          requires(void (RowRouter<typename Router::Config>::*select)(RouteArgs<float> const&, Stream<space::cuda>) const) {
                            select = &Router::template select<float>;
                          };

/// Router at the sizes of a configuration that states num_experts and topk (and num_zero_experts, else 0): the same ids and weights, bit
/// for bit, from a kernel that knows them. Params are Router's; other sizes in them are E_CONFIG.
template <TakesFixedSizes Router, class Sizes>
class Fixed : public RowRouter<detail::FixedSizesConfig<typename Router::Config, Sizes>> {
 public:
  static constexpr char const* kName = Router::kName;
  static constexpr bool kWeightOnInput = Router::kWeightOnInput;
  using Params = typename Router::Params;
  /// Throws E_CONFIG.
  explicit Fixed(Params const& p)
      : RowRouter<detail::FixedSizesConfig<typename Router::Config, Sizes>>(
            detail::fixed_sizes<typename Router::Config, Sizes>(Router(p).config())) {}
};

namespace detail {
template <class Router, class Sizes>
struct FixedWherePossible {
  using type = Router;
};
template <TakesFixedSizes Router, class Sizes>
  requires(Sizes::num_experts > 0 && Sizes::topk > 0)
struct FixedWherePossible<Router, Sizes> {
  using type = Fixed<Router, Sizes>;
};
}  // namespace detail

/// Fixed<Router, Sizes> where Router takes fixed sizes and Sizes states them, else Router.
template <class Router, class Sizes>
using FixedWherePossible = typename detail::FixedWherePossible<Router, Sizes>::type;

}  // namespace moe::routing
