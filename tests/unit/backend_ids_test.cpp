// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_ids_test.cpp: expert ids out of range in a debug build, independent of this tree's build type.
#undef NDEBUG
#include <gtest/gtest.h>

#include "moe/backends/common/exchange_common.hpp"

namespace {

TEST(BackendIds, G3_OutOfRangeIsAnErrorThatNamesTheSlot) {
  std::int32_t ids[] = {0, -1, 7, 3, 8, 1};
  auto const view = moe::make_rows(static_cast<std::int32_t const*>(ids), 3, 2);
  try {
    moe::detail::check_ids(view, 8);
    FAIL() << "id 8 of 8 experts passed";
  } catch (moe::Error const& e) {
    EXPECT_EQ(e.code(), moe::ErrorCode::argument);
    EXPECT_EQ(e.message(), "topk_ids: 8 in slot (2, 0) is out of range [0, 8) and is not -1");
  }
  ids[4] = -2;
  EXPECT_THROW(moe::detail::check_ids(view, 8), moe::Error);
  ids[4] = -1;
  EXPECT_NO_THROW(moe::detail::check_ids(view, 8));
}

}  // namespace
