// SPDX-License-Identifier: Apache-2.0
// examples/moe/whole_number.hpp: the check of an option whose range ends at the limit of an integer type.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <limits>
#include <string>
#include <system_error>

#include "moe/core/error.hpp"

namespace moe_tool {

/// For CLI::Option::check: refuses what is not a decimal number of [least, the largest T]; CLI11 itself reads "" as 0 and clamps values
/// that overflow.
template <class T>
auto whole_number(T least) {
  return [least](std::string const& words) -> std::string {
    T value{};
    auto const [end, error] = std::from_chars(words.data(), words.data() + words.size(), value);
    bool const ok = error == std::errc{} && end == words.data() + words.size() && value >= least;
    bool const octal = words.size() > 1 && words[words[0] == '-' ? 1 : 0] == '0';  // CLI11 would read 010 as 8
    return ok && !octal ? std::string{}
                        : moe::text('"', words, "\" is not a whole number from ", least, " to ", std::numeric_limits<T>::max());
  };
}

}  // namespace moe_tool
