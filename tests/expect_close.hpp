// SPDX-License-Identifier: Apache-2.0
// tests/expect_close.hpp: outputs that may differ by rounding.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

namespace moe_test {

/// As many values as wanted, each within `tolerance` of the largest wanted one.
inline void expect_close(std::vector<float> const& got, std::vector<float> const& want, float tolerance) {
  ASSERT_EQ(got.size(), want.size());
  float largest = 0;
  for (float v : want) largest = std::max(largest, std::abs(v));
  ASSERT_TRUE(std::isfinite(largest));
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], tolerance * largest) << "value " << i;
}

}  // namespace moe_test
