// SPDX-License-Identifier: Apache-2.0
// tests/numbers.hpp: random values of a test, the same in every run and on every rank.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "moe/core/types.hpp"

namespace moe_test {

/// Uniform in [-size, size).
inline std::vector<float> numbers(int seed, std::int64_t count, float size = 0.5F) {
  std::mt19937 gen(static_cast<unsigned>(seed));
  std::uniform_real_distribution<float> value(-size, size);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = value(gen);
  return out;
}
/// numbers() rounded to values that bf16 holds exactly.
inline std::vector<float> bf16_numbers(int seed, std::int64_t count) {
  std::vector<float> out = numbers(seed, count);
  for (float& v : out) v = moe::to_float(moe::from_float<moe::bf16>(v));
  return out;
}

}  // namespace moe_test
