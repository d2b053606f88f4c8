// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/printable_error.hpp: what every fuzz target asks of an error.
#pragma once

#include <algorithm>
#include <string>

#include "moe/core/error.hpp"

namespace moe_test {

/// Every error is one printable line, for any input.
inline void check_printable(moe::Error const& error) {
  std::string const& message = error.message();
  if (message.empty() || message.size() > 4096) __builtin_trap();
  if (std::any_of(message.begin(), message.end(), [](unsigned char c) { return c < 0x20; })) __builtin_trap();
}

}  // namespace moe_test
