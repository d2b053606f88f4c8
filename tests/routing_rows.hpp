// SPDX-License-Identifier: Apache-2.0
// tests/routing_rows.hpp: one row through a router, and what it must give: what routing_tables.hpp and routing_variants.hpp share. The file
// that includes one of them defines route_one().
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <random>
#include <set>
#include <vector>

#include "moe/routing/any_router.hpp"
#include "moe/routing/grouped_topk.hpp"
#include "moe/routing/llama4.hpp"

namespace moe_test {

struct RoutedRow {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
  std::vector<float> shared;  ///< weights of jointly normalised shared experts
  bool degenerate = false;
  int num_chosen = 0;
};
/// One row through the router under test. Config: RouterConfig or a policy's own.
template <class Config, class L>
RoutedRow route_one(Config const& cfg, std::vector<L> const& logits, std::int64_t token);

}  // namespace moe_test

namespace {

using namespace moe;
using namespace moe::routing;
using Row = moe_test::RoutedRow;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

template <class Config, class L = float>
Row route(Config const& cfg, std::vector<float> const& z, std::int64_t token = 0) {
  std::vector<L> logits;
  for (float v : z) logits.push_back(from_float<L>(v));
  validate(resolve(cfg));
  EXPECT_EQ(static_cast<int>(z.size()), cfg.num_logits());
  return moe_test::route_one<Config, L>(cfg, logits, token);
}

void expect_row(Row const& row, std::vector<std::int32_t> const& ids, std::vector<double> const& weights, double tolerance = 1e-6) {
  EXPECT_EQ(row.ids, ids);
  ASSERT_EQ(row.weights.size(), weights.size());
  for (std::size_t j = 0; j < weights.size(); ++j) EXPECT_NEAR(row.weights[j], weights[j], tolerance * std::max(1.0, weights[j]));
}

std::vector<float> random_logits(int n, unsigned seed, float sigma = 2.0F) {
  std::mt19937 gen(seed);
  std::normal_distribution<float> normal(0.0F, sigma);
  std::vector<float> z(static_cast<std::size_t>(n));
  for (float& v : z) v = normal(gen);
  return z;
}

/// Selection in double precision by a full sort: the independent reference for the choice, given scores that do not nearly tie.
std::vector<std::int32_t> sorted_choice(std::vector<double> const& sel, int k) {
  std::vector<std::int32_t> order(sel.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](std::int32_t a, std::int32_t b) { return sel[static_cast<std::size_t>(a)] > sel[static_cast<std::size_t>(b)]; });
  order.resize(static_cast<std::size_t>(k));
  return order;
}

RouterConfig plain(int e, int k, Scoring scoring = Scoring::softmax, Renorm renorm = Renorm::none) {
  RouterConfig c;
  c.num_experts = e;
  c.topk = k;
  c.scoring = scoring;
  c.renorm = renorm;
  return c;
}

std::vector<float> const kTable{2.0F, 1.0F, 0.0F, -1.0F};

}  // namespace
