// SPDX-License-Identifier: Apache-2.0
// tests/exit_code.hpp: what a test program returns to ctest: 0 passed, 1 failed, 77 skipped.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>

namespace moe_test {

inline constexpr int kSkipped = 77;

/// Maps the result of RUN_ALL_TESTS(): if every case was skipped, the program is skipped; if no case ran (the filter matches nothing), it
/// fails.
inline int exit_code(int result) {
  auto const& all = *testing::UnitTest::GetInstance();
  if (result != 0 || GTEST_FLAG_GET(list_tests)) return result;
  if (all.test_to_run_count() == 0) {
    std::printf("failed: no case was run\n");
    return 1;
  }
  if (all.skipped_test_count() < all.test_to_run_count()) return 0;
  std::printf("skipped: all %d cases were skipped\n", all.test_to_run_count());
  return kSkipped;
}

}  // namespace moe_test
