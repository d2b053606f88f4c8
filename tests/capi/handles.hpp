// SPDX-License-Identifier: Apache-2.0
// tests/capi/handles.hpp: the C handles of one test of moe.h, and the check of a call's status.
#pragma once

#include <gtest/gtest.h>
#include <moe/moe.h>

#define EXPECT_OK(call) EXPECT_EQ(call, MOE_OK) << moe_last_error()
#define ASSERT_OK(call) ASSERT_EQ(call, MOE_OK) << moe_last_error()

namespace moe_test {

/// A group of one rank, and a runner that the test creates. Both are destroyed at the end. On a GPU, work must have finished before.
struct Handles {
  Handles() { EXPECT_OK(moe_group_create_self(&group)); }
  ~Handles() {
    EXPECT_OK(moe_runner_destroy(runner));
    EXPECT_OK(moe_group_destroy(group));
  }
  Handles(Handles const&) = delete;
  Handles& operator=(Handles const&) = delete;
  moe_group_t group = nullptr;
  moe_runner_t runner = nullptr;
};

}  // namespace moe_test
