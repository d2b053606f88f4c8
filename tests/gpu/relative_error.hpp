// SPDX-License-Identifier: Apache-2.0
// tests/gpu/relative_error.hpp: how far rows are from those that are expected.
#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include "moe/core/types.hpp"

namespace moe_test {

/// ‖got − want‖ / ‖want‖ of the first `count` elements, and ‖got‖ if want is zero; infinite if a value of got is not finite.
template <class T, class U>
double relative_error(std::vector<T> const& got, std::vector<U> const& want, std::size_t count) {
  double error = 0, norm = 0;
  for (std::size_t i = 0; i < count; ++i) {
    auto const g = static_cast<double>(moe::to_float(got[i])), w = static_cast<double>(moe::to_float(want[i]));
    if (!std::isfinite(g)) return INFINITY;
    error += (g - w) * (g - w);
    norm += w * w;
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}
/// The same of all elements; infinite if the sizes differ.
template <class T, class U>
double relative_error(std::vector<T> const& got, std::vector<U> const& want) {
  return got.size() == want.size() ? relative_error(got, want, got.size()) : INFINITY;
}

}  // namespace moe_test
