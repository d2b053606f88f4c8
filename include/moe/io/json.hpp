// SPDX-License-Identifier: Apache-2.0
// io/json.hpp: parses the JSON files of a checkpoint, which Python writes (bare NaN and Infinity included).
#pragma once

#include <cstddef>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/core/json_levels.hpp"
#include "moe/io/mapped_file.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

namespace detail {
/// Replaces the words NaN, Infinity and -Infinity, which Python's json writes but JSON does not allow, by null.
inline std::string without_python_numbers(std::string_view in) {
  std::string out;
  out.reserve(in.size());
  bool quoted = false;
  for (std::size_t i = 0; i < in.size();) {
    if (quoted && in[i] == '\\' && i + 1 < in.size()) {
      out.append(in.substr(i, 2));
      i += 2;
      continue;
    }
    if (in[i] == '"') quoted = !quoted;
    bool replaced = false;
    for (std::string_view word : {"-Infinity", "Infinity", "NaN"}) {
      if (!quoted && in.substr(i, word.size()) == word) {
        out += "null";
        i += word.size();
        replaced = true;
        break;
      }
    }
    if (!replaced) out += in[i++];
  }
  return out;
}
}  // namespace detail

/// Parses a JSON text; `label` names it in errors. Throws `code` with the offset of the first invalid byte, or if the nesting is too deep.
inline nlohmann::json parse_json(std::string_view text_, std::string_view label, ErrorCode code = ErrorCode::config) {
  auto const bounded = moe::detail::bounded_levels(
      [&] { throw Error(code, one_line("'", label, "' nests deeper than ", moe::detail::kMostJsonLevels, " levels")); });
  auto parsed = nlohmann::json::parse(text_, bounded, false);
  if (!parsed.is_discarded()) return parsed;
  try {
    return nlohmann::json::parse(detail::without_python_numbers(text_), bounded);
  } catch (nlohmann::json::parse_error const& error) {
    throw Error(code, one_line("'", label, "' is not valid JSON at byte ", error.byte));
  } catch (nlohmann::json::exception const& error) {
    throw Error(code, one_line("'", label, "' is not valid JSON: ", moe::detail::json_reason(error.what())));
  }
}

/// Parses a JSON file. Throws E_ARG if it cannot be opened, `code` if it is not JSON.
inline nlohmann::json read_json(std::filesystem::path const& path, ErrorCode code = ErrorCode::config) {
  MappedFile const file(path);
  return parse_json({reinterpret_cast<char const*>(file.bytes().data()), file.bytes().size()}, path.string(), code);
}

}  // namespace moe::io
