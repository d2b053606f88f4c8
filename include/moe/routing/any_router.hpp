// SPDX-License-Identifier: Apache-2.0
// routing/any_router.hpp: every choice of routing at run time: what the command-line tool uses for any checkpoint.
#pragma once

#include <string_view>

#include "moe/routing/row/row_router.hpp"

namespace moe::routing {

/// Which rule of docs/semantics/routing.md §1 executes a configuration; the first that applies, in this order.
enum class RouterKind : std::uint8_t { zero_expert, grouped, sparsemixer, hash, bias, plain };
constexpr RouterKind router_kind(RouterConfig const& c) {
  if (c.num_zero_experts > 0) return RouterKind::zero_expert;
  if (c.num_expert_group > 1) return RouterKind::grouped;
  if (c.selection == Selection::sparsemixer) return RouterKind::sparsemixer;
  if (c.selection == Selection::hash_table) return RouterKind::hash;
  return c.correction_bias != nullptr ? RouterKind::bias : RouterKind::plain;
}
constexpr std::string_view name(RouterKind kind) {
  switch (kind) {
    case RouterKind::zero_expert: return "zero-expert router";
    case RouterKind::grouped: return "grouped top-k";
    case RouterKind::sparsemixer: return "sparsemixer";
    case RouterKind::hash: return "hash router";
    case RouterKind::bias: return "bias router";
    case RouterKind::plain: return "plain top-k";
  }
  return "?";
}

/// The router of a RouterConfig. Results are those of the policy whose constants the configuration holds, bit for bit.
class AnyRouter : public RowRouter<RouterConfig> {
 public:
  static constexpr char const* kName = "any";
  using Params = RouterConfig;
  /// Throws E_CONFIG or E_ARG, see validate().
  explicit AnyRouter(Params const& p) : RowRouter(p) {}
};

}  // namespace moe::routing
