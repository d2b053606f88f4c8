// SPDX-License-Identifier: Apache-2.0
// tests/expect_error.hpp: a call must throw moe::Error with this code and this text.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"

/// The message must have this part.
#define EXPECT_HAS(message, part)                                        \
  do {                                                                   \
    std::string const has_message = (message);                           \
    EXPECT_NE(has_message.find(part), std::string::npos) << has_message; \
  } while (false)

namespace moe_test {

/// call() must throw an error of this code, which is one line; its message, and "" without one.
template <class Call>
std::string expect_error(moe::ErrorCode code, Call&& call) {
  std::optional<moe::Error> const error = moe::error_of(call);
  if (!error) {
    ADD_FAILURE() << "no error, expected " << name(code);
    return {};
  }
  EXPECT_EQ(name(error->code()), name(code)) << error->what();
  EXPECT_EQ(error->message().find('\n'), std::string::npos) << "an error is one line: " << error->what();
  return error->message();
}

/// The message must have this part.
template <class Call>
void expect_error(moe::ErrorCode code, std::string_view part, Call&& call) {
  std::string const message = expect_error(code, call);
  EXPECT_NE(message.find(part), std::string::npos) << '"' << message << "\" has no \"" << part << '"';
}

/// Code and message of the error that call() throws, "E_ARG: ..."; "no error" if it throws none.
template <class Call>
std::string what_of(Call&& call) {
  std::optional<moe::Error> const error = moe::error_of(call);
  return error ? error->what() : "no error";
}

}  // namespace moe_test
