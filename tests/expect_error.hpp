// SPDX-License-Identifier: Apache-2.0
// tests/expect_error.hpp: a call must throw moe::Error with this code and this part of its text.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <string_view>

#include "moe/core/error.hpp"

namespace moe_test {

template <class Call>
void expect_error(moe::ErrorCode code, std::string_view part, Call&& call) {
  try {
    call();
    ADD_FAILURE() << "no error, expected " << name(code) << " with \"" << part << '"';
  } catch (moe::Error const& error) {
    EXPECT_EQ(name(error.code()), name(code)) << error.what();
    EXPECT_NE(error.message().find(part), std::string::npos) << error.what();
    EXPECT_EQ(error.message().find('\n'), std::string::npos) << "an error is one line: " << error.what();
  }
}

}  // namespace moe_test
