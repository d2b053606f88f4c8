// SPDX-License-Identifier: Apache-2.0
// tests/numbers.hpp: random values of a test, the same in every run and on every rank.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "moe/core/types.hpp"

namespace moe_test {

/// Uniform in [-size, size).
inline std::vector<float> numbers(std::int64_t seed, std::int64_t count, float size = 0.5F) {
  std::mt19937 gen(static_cast<unsigned>(seed));
  std::uniform_real_distribution<float> value(-size, size);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = value(gen);
  return out;
}
/// Normally distributed around 0.
inline std::vector<float> normal(std::int64_t seed, std::int64_t count, float sigma = 1.0F) {
  std::mt19937 gen(static_cast<unsigned>(seed));
  std::normal_distribution<float> value(0.0F, sigma);
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = value(gen);
  return out;
}
/// numbers() rounded to values that bf16 holds exactly.
inline std::vector<float> bf16_numbers(std::int64_t seed, std::int64_t count) {
  std::vector<float> out = numbers(seed, count);
  for (float& v : out) v = moe::to_float(moe::from_float<moe::bf16>(v));
  return out;
}
/// A rank's rows [n, hidden] of bf16_numbers(), n from 0 to `most`: other rows and another n on each rank and in each round.
inline std::vector<float> uneven_rows(std::int64_t hidden, int rank, int round, std::int64_t most) {
  std::int64_t const counts[] = {5, 0, 3, most};
  return bf16_numbers(1000 + 10 * round + rank, counts[(rank + round) % 4] * hidden);
}

}  // namespace moe_test
