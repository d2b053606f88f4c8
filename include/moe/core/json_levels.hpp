// SPDX-License-Identifier: Apache-2.0
// core/json_levels.hpp: how deep JSON may nest. Deep values would overflow the stack when they are copied.
#pragma once

namespace moe::detail {

inline constexpr int kMostJsonLevels = 64;

/// A callback for nlohmann::json::parse(): calls fail(), which throws, if the text nests deeper.
template <class Fail>
auto bounded_levels(Fail fail) {
  return [fail](int depth, auto, auto const&) {
    if (depth > kMostJsonLevels) fail();
    return true;
  };
}

}  // namespace moe::detail
