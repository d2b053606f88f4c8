// SPDX-License-Identifier: Apache-2.0
// examples/moe/policy_lists.hpp: the registry's lists as packs of types. A table over several lists is then one constant; nested visits
// of the lists would be code for each product of their types, which took a minute to compile.
#pragma once

#include <algorithm>
#include <array>
#include <boost/hana/tuple.hpp>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "moe/models/registry.hpp"

namespace moe_tool {

template <class... Policies>
struct Pack {
  static constexpr std::size_t kSize = sizeof...(Policies);
  static constexpr std::array<std::string_view, kSize> kNames{Policies::kName...};
};
namespace detail {
template <class... Entries>
Pack<typename Entries::type...> pack_of(boost::hana::tuple<Entries...> const&);
}  // namespace detail

using Routers = decltype(detail::pack_of(moe::registry::routers));
using Quantizations = decltype(detail::pack_of(moe::registry::quantizations));
using Backends = decltype(detail::pack_of(moe::registry::all_backends));
using ExpertsKinds = decltype(detail::pack_of(moe::registry::all_experts));

/// The index of a name in a list's kNames; their number if it has no such name.
template <class List>
std::size_t place_of(std::string_view name) {
  return static_cast<std::size_t>(std::find(List::kNames.begin(), List::kNames.end(), name) - List::kNames.begin());
}

/// Each name of a list once: a backend of both spaces is in it twice.
template <class List>
std::vector<std::string> names_of() {
  std::vector<std::string> out;
  for (std::string_view const name : List::kNames) {
    if (std::find(out.begin(), out.end(), name) == out.end()) out.emplace_back(name);
  }
  return out;
}

}  // namespace moe_tool
