// SPDX-License-Identifier: Apache-2.0
// examples/moe/refusal.hpp: the form in which every option refuses a value: --option: "value", expected …
#pragma once

#include <string>
#include <string_view>

#include "moe/core/error.hpp"

namespace moe_tool {

/// The words after the option's name.
template <class... Words>
std::string refusal(std::string_view value, Words const&... expected) {
  return moe::text('"', value, "\", expected ", expected...);
}

/// "a, b, c"
template <class Names>
std::string joined(Names const& names) {
  std::string out;
  for (auto const& name : names) {
    out += out.empty() ? "" : ", ";
    out += name;
  }
  return out;
}

}  // namespace moe_tool
