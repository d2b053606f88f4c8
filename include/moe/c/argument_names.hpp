// SPDX-License-Identifier: Apache-2.0
// c/argument_names.hpp: the names of arguments in an error's text as the called interface has them. Needs no other header of the library,
// so that interfaces over moe.h can use it.
#pragma once

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

namespace moe::c {

/// What an argument is called behind an interface, and what its caller calls it.
struct ArgumentName {
  std::string_view behind;
  std::string_view caller;
};

/// The layers behind moe.h use the names of the specification (docs/semantics).
inline constexpr std::array<ArgumentName, 4> kNamesOfMoeH{
    {{"hidden_states", "hidden"}, {"top_k", "topk"}, {"renormalisation", "renorm"}, {"zero_expert_kind", "zero_expert"}}};

/// append(piece) for each piece of the text in its order, every name that stands behind the interface replaced by the caller's. Whole words
/// only, and none in quotes, which are around values; an apostrophe in a word is no quote. Allocates no memory.
template <class Append>
constexpr void with_names_of_caller(std::string_view text, std::span<ArgumentName const> names, Append const& append) {
  auto const in_word = [](char c) { return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); };
  char quote = '\0';  // the one that is open
  bool after_word = false;
  while (!text.empty()) {
    std::size_t count = 0;
    while (count < text.size() && in_word(text[count])) ++count;
    std::string_view piece = text.substr(0, count > 0 ? count : 1);
    text.remove_prefix(piece.size());
    if (char const c = piece.front(); quote != '\0') {
      if (c == quote) quote = '\0';
    } else if (c == '"' || (c == '\'' && !after_word)) {
      quote = c;
    }
    after_word = count > 0;
    for (ArgumentName const& name : names) {
      if (quote == '\0' && piece == name.behind) {
        piece = name.caller;
        break;
      }
    }
    append(piece);
  }
}

}  // namespace moe::c
