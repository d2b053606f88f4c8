// SPDX-License-Identifier: Apache-2.0
// examples/moe/router_name.cpp: which of the registry's routers a checkpoint's layer has.
#include "examples/moe/router_name.hpp"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <vector>

#include "examples/moe/policy_lists.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/models/preset_match.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/routing/row/router_config.hpp"

namespace moe_tool {
namespace {

using namespace moe;

template <class Router>
bool makes(routing::RouterConfig const& wanted) {
  if constexpr (!facts::selects<Router>() || std::is_same_v<typename Router::Params, routing::RouterConfig>) {
    return false;  // the caller's choice, and the router that can make any
  } else {
    try {
      models::matched_router<models::RuntimeLayer<float, float>, Router>(wanted, "");
      return true;
    } catch (Error const&) {
      return false;
    }
  }
}

template <class... RouterTypes>
std::string_view first_that_makes(routing::RouterConfig const& wanted, Pack<RouterTypes...>) {
  std::string_view found;
  ((found.empty() && makes<RouterTypes>(wanted) ? found = RouterTypes::kName : found), ...);
  return found.empty() ? "any" : found;
}

}  // namespace

std::string_view router_name(io::LayerDescription const& description) {
  // The arrays of a router are in its checkpoint. Whether it has them is a choice, what they hold is none.
  routing::RouterConfig wanted = description.router;
  std::vector<float> const bias(static_cast<std::size_t>(wanted.num_logits()), 0.0F);
  std::vector<float> const scale(static_cast<std::size_t>(wanted.num_experts), 1.0F);
  std::vector<std::int64_t> const table(static_cast<std::size_t>(wanted.topk), 0);
  if (description.correction_bias) wanted.correction_bias = bias.data();
  if (description.per_expert_scale) wanted.per_expert_scale = scale.data();
  if (wanted.selection == routing::Selection::hash_table) {
    wanted.hash_table = table.data();
    wanted.vocabulary = 1;
  }
  return first_that_makes(wanted, Routers());
}

}  // namespace moe_tool
