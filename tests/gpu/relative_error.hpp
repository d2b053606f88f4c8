// SPDX-License-Identifier: Apache-2.0
// tests/gpu/relative_error.hpp: how far rows are from those that are expected.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

namespace moe_test {

/// ‖got − want‖ / ‖want‖, and ‖got‖ if want is zero; infinite if a value of got is not finite or the sizes differ.
inline double relative_error(std::vector<float> const& got, std::vector<float> const& want) {
  if (got.size() != want.size()) return INFINITY;
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) return INFINITY;
    error += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

}  // namespace moe_test
