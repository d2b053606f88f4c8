// SPDX-License-Identifier: Apache-2.0
// tests/expect_close.hpp: outputs that may differ by rounding.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "moe/core/error.hpp"

namespace moe_test {

inline float largest(std::vector<float> const& values) {
  float out = 0;
  for (float v : values) out = std::max(out, std::abs(v));
  return out;
}
/// The first value that is further than `bound` from what one rank gives; "" if none is.
inline std::string differs_from_one_rank(std::vector<float> const& got, std::vector<float> const& want, float bound) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (!(std::abs(got[i] - want[i]) <= bound)) return moe::text("value ", i, " is ", got[i], ", one rank gives ", want[i]);
  }
  return "";
}
/// As many values as wanted, each within `tolerance` of the largest wanted one.
inline void expect_close(std::vector<float> const& got, std::vector<float> const& want, float tolerance) {
  ASSERT_EQ(got.size(), want.size());
  float const bound = tolerance * largest(want);
  ASSERT_TRUE(std::isfinite(bound));
  for (std::size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], bound) << "value " << i;
}

}  // namespace moe_test
