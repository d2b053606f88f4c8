// SPDX-License-Identifier: Apache-2.0
// tests/capi/export_absent.cpp: a library behind moe.h on a machine without oneDNN: it is loaded, and a runner of oneDNN's experts is
// refused.
#include <gtest/gtest.h>

#include <string>

#include "tests/capi/small_layer.hpp"

namespace {

TEST(Export, WithoutOneDnn) {
  moe_test::Small s;
  EXPECT_EQ(s.create(), MOE_E_UNSUPPORTED);
  EXPECT_EQ(std::string(moe_last_error()).find("E_UNSUPPORTED: experts: onednn needs oneDNN: libdnnl_absent.so: "), 0U) << moe_last_error();
  EXPECT_EQ(s.runner, nullptr);
}

}  // namespace
