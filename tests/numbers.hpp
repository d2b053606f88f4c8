// SPDX-License-Identifier: Apache-2.0
// tests/numbers.hpp: random values of a test, the same in every run and on every rank.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

namespace moe_test {

/// Uniform in [-0.5, 0.5).
inline std::vector<float> numbers(int seed, std::int64_t count) {
  std::mt19937 gen(static_cast<unsigned>(seed));
  std::uniform_real_distribution<float> value(-0.5F, 0.5F);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = value(gen);
  return out;
}

}  // namespace moe_test
