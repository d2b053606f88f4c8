// SPDX-License-Identifier: Apache-2.0
// io/one_line.hpp: keeps error messages that quote a file on one printable line, for any file contents.
#pragma once

#include <string>

#include "moe/core/error.hpp"

namespace moe::io {

/// Joins its arguments into one string, as moe::text does, with control characters replaced by '?' and at most 2000 bytes long.
template <class... Parts>
std::string one_line(Parts const&... parts) {
  std::string out = text(parts...);
  if (out.size() > 2000) out.replace(1000, out.size() - 1900, " ... ");
  for (char& c : out) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return out;
}

}  // namespace moe::io
