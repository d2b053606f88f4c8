// SPDX-License-Identifier: Apache-2.0
// tests/exchange_batch.hpp: the tokens of every rank, and experts whose result is known: expert p multiplies a row by factor(p). Values are
// small multiples of powers of two, so that all sums are exact in float32. For exchanges in either space.
#pragma once

#include <random>
#include <vector>

#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "tests/expect_error.hpp"
#include "tests/expert_factor.hpp"

namespace moe_test {

struct AnyActivation {};
template <class T, int Hidden = moe::dynamic>
struct Config : moe::LayerDefaults {
  static constexpr int hidden = Hidden;
  using Act = T;
  using Activation = AnyActivation;
};

/// The tokens of one rank.
template <class Act>
struct Batch {
  std::int64_t rows = 0, hidden = 0, k = 0;
  std::vector<Act> x;             // [rows, hidden]
  std::vector<std::int32_t> ids;  // [rows, k]
  std::vector<float> weights;     // [rows, k]

  Batch(std::int64_t rows_, std::int64_t hidden_, std::int64_t k_) : rows(rows_), hidden(hidden_), k(k_) {
    x.resize(static_cast<std::size_t>(rows * hidden));
    ids.resize(static_cast<std::size_t>(rows * k));
    weights.resize(static_cast<std::size_t>(rows * k));
  }
  moe::RoutedTokens<Act> tokens() const {
    return {moe::make_rows(x.data(), rows, hidden), moe::make_rows(ids.data(), rows, k), moe::make_rows(weights.data(), rows, k)};
  }
  /// Σ_j w_j factor(id_j) x, rounded once.
  float expected(std::int64_t t, std::int64_t h, int num_experts) const {
    float sum = 0;
    for (std::int64_t j = 0; j < k; ++j) {
      int const id = ids[static_cast<std::size_t>(t * k + j)];
      sum += id >= 0 && id < num_experts ? weights[static_cast<std::size_t>(t * k + j)] * factor(id) : 0.0F;
    }
    return moe::to_float(moe::from_float<Act>(sum * moe::to_float(x[static_cast<std::size_t>(t * hidden + h)])));
  }
};

/// A batch that every rank can generate for any rank. `exact`: sums of its values have no rounding. Ids are in [-1, num_experts).
template <class Act>
Batch<Act> random_batch(int rank, int round, std::int64_t rows, std::int64_t hidden, std::int64_t k, int num_experts, bool exact = true) {
  std::mt19937 gen(static_cast<unsigned>(rank * 7919 + round * 104729 + 1));
  Batch<Act> b(rows, hidden, k);
  auto real = [&] { return static_cast<float>(gen()) / 2147483648.0F - 1.0F; };
  auto integer = [&](unsigned n) { return static_cast<float>(gen() % n); };
  for (auto& v : b.x) v = moe::from_float<Act>(exact ? integer(17) - 8.0F : real());
  for (auto& v : b.weights) v = exact ? integer(17) / 16.0F : real();
  for (auto& v : b.ids) v = static_cast<std::int32_t>(gen() % static_cast<unsigned>(num_experts + 1)) - 1;
  return b;
}

/// The number of rows of `rank` in `round`: from 0 to max_tokens, often one of these bounds.
inline std::int64_t random_rows(int rank, int round, std::int64_t max_tokens) {
  std::mt19937 gen(static_cast<unsigned>(rank * 31 + round * 1009 + 17));
  unsigned const kind = gen() % 6;
  return kind == 0 ? 0 : kind == 1 ? max_tokens : static_cast<std::int64_t>(gen() % static_cast<unsigned>(max_tokens + 1));
}

}  // namespace moe_test
