// SPDX-License-Identifier: Apache-2.0
// core/json_levels.hpp: how deep JSON may nest (deep values would overflow the stack when they are copied), and why it was refused.
#pragma once

#include <cstddef>
#include <string_view>

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

/// The reason of an exception of nlohmann::json without the exception's name: "[json.exception.out_of_range.406] number overflow parsing
/// '1e400'" has it behind the bracket.
inline std::string_view json_reason(std::string_view what) {
  std::size_t const at = what.find("] ");
  return at == std::string_view::npos ? what : what.substr(at + 2);
}

}  // namespace moe::detail
