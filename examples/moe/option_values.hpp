// SPDX-License-Identifier: Apache-2.0
// examples/moe/option_values.hpp: checks of CLI11 for the values of options, which refuse all in one form (refusal.hpp).
#pragma once

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "examples/moe/refusal.hpp"

namespace moe_tool {

/// The option takes one of these words. Help shows those of `shown`; names of policies stand in the option's description.
inline CLI::Validator one_of(std::vector<std::string> known, bool shown = true) {
  std::string const help = shown ? "{" + joined(known) + "}" : "";
  return CLI::Validator(
      [known = std::move(known)](std::string const& word) {
        return std::find(known.begin(), known.end(), word) != known.end() ? std::string{} : refusal(word, "one of ", joined(known));
      },
      help);
}

/// The option takes any text but none: an empty one would count as the option's absence. `what` names it, as "a file".
inline CLI::Validator some_text(std::string const& what) {
  return CLI::Validator([what](std::string const& word) { return word.empty() ? refusal(word, what) : std::string{}; }, "");
}

/// The option takes a decimal number of [least, most]. CLI11 itself reads "" as 0, 010 as 8, and clamps values that overflow. `said`: the
/// least that a refusal names, where the command refuses lower ones itself, in its own words.
template <class T>
CLI::Validator whole_number(T least, T most = std::numeric_limits<T>::max(), std::optional<T> said = {}) {
  return CLI::Validator(
      [least, most, said](std::string const& word) {
        T value{};
        auto const [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
        bool const octal = word.size() > 1 && word[word[0] == '-' ? 1 : 0] == '0';
        bool const ok = error == std::errc{} && end == word.data() + word.size() && value >= least && value <= most && !octal;
        return ok ? std::string{} : refusal(word, "a whole number from ", said.value_or(least), " to ", most);
      },
      most < std::numeric_limits<T>::max() ? moe::text(least, " to ", most) : "");
}

}  // namespace moe_tool
