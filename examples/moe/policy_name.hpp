// SPDX-License-Identifier: Apache-2.0
// examples/moe/policy_name.hpp: a check of CLI11 for the names of policies.
#pragma once

#include <string>

#include "moe/models/registry.hpp"

namespace moe_tool {

/// Refuses, as bad usage, a name that no policy of the list has; the message lists those that exist.
template <class List>
auto policy_name(List list, char const* what) {
  return [list, what](std::string const& wanted) -> std::string {
    try {
      moe::registry::with_policy(list, what, wanted, [](auto) {});
      return {};
    } catch (moe::Error const& e) {
      return e.what();
    }
  };
}

}  // namespace moe_tool
