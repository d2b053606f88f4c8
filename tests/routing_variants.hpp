// SPDX-License-Identifier: Apache-2.0
// tests/routing_variants.hpp: what families add to the plain rules, and the invariants of docs/semantics/routing.md §15 over random rows:
// part of routing_tables.hpp, which includes it.
#pragma once

#include "routing_rows.hpp"

namespace {

TEST(Routing, RenormalisationVariants) {
  RouterConfig c = plain(4, 2, Scoring::softmax, Renorm::floor);
  c.renorm_eps = 2.0F;  // larger than the sum: divides by it
  expect_row(route(c, kTable), {0, 1}, {0.643914 / 2, 0.236883 / 2});
  c.renorm = Renorm::p_norm;
  c.renorm_p = 2.0F;
  double const norm = std::sqrt(0.643914 * 0.643914 + 0.236883 * 0.236883);
  expect_row(route(c, kTable), {0, 1}, {0.643914 / norm, 0.236883 / norm});
  c.renorm_p = 3.0F;
  double const cube = std::cbrt(std::pow(0.643914, 3) + std::pow(0.236883, 3));
  expect_row(route(c, kTable), {0, 1}, {0.643914 / cube, 0.236883 / cube});
  c.renorm = Renorm::sum;
  c.renorm_eps = 0.0F;
  for (float w : route(c, {-1e30F, -kInf, -kInf, -kInf}).weights) EXPECT_TRUE(std::isfinite(w));
  RouterConfig s = plain(2, 2, Scoring::sigmoid, Renorm::sum);
  s.renorm_eps = 0.0F;
  for (float w : route(s, {-1e30F, -2e30F}).weights) EXPECT_EQ(w, 0.0F);  // 0 / 0 must not become a weight
}

TEST(Routing, SoftcapComesFirstAndKeepsDisabledExpertsDisabled) {
  RouterConfig c = plain(4, 3, Scoring::sigmoid);
  c.logit_softcap = 2.0F;
  Row const row = route(c, {5.0F, -kInf, 1.0F, kInf});
  EXPECT_EQ(row.ids, (std::vector<std::int32_t>{3, 0, 2}));
  auto const want = [](double z) { return 1.0 / (1.0 + std::exp(-2.0 * std::tanh(z / 2.0))); };
  EXPECT_NEAR(row.weights[1], want(5.0), 1e-6);
  EXPECT_NEAR(row.weights[2], want(1.0), 1e-6);
}

TEST(Routing, PerExpertScaleComesLast) {
  std::vector<float> const scale{2.0F, 3.0F, 5.0F, 7.0F};
  RouterConfig c = plain(4, 2, Scoring::softmax, Renorm::sum);
  c.per_expert_scale = scale.data();
  expect_row(route(c, kTable), {0, 1}, {2 * 0.731059, 3 * 0.268941}, 3e-6);
}

TEST(Routing, HashTableChoosesAndScoresAreWeights) {
  std::vector<std::int64_t> const table{3, 1, 0, 0, 2, 9};
  RouterConfig c = plain(4, 2, Scoring::sqrtsoftplus, Renorm::sum);
  c.selection = Selection::hash_table;
  c.hash_table = table.data();
  c.vocabulary = 3;
  Row const row = route(c, kTable, 0);
  EXPECT_EQ(row.ids, (std::vector<std::int32_t>{3, 1}));
  double const a = std::sqrt(std::log1p(std::exp(-1.0)));
  double const b = std::sqrt(std::log1p(std::exp(1.0)));
  EXPECT_NEAR(row.weights[0], a / (a + b), 1e-6);
  EXPECT_EQ(route(c, kTable, 1).ids, (std::vector<std::int32_t>{0, -1}));   // an id is used once
  EXPECT_EQ(route(c, kTable, 2).ids, (std::vector<std::int32_t>{2, -1}));   // 9 is no expert
  EXPECT_EQ(route(c, kTable, 3).ids, (std::vector<std::int32_t>{-1, -1}));  // outside the vocabulary
  EXPECT_EQ(route(c, kTable, -1).ids, (std::vector<std::int32_t>{-1, -1}));
  EXPECT_FALSE(route(c, kTable, 3).degenerate);
}

TEST(Routing, ZeroExpertsCompete) {
  RouterConfig c = plain(3, 2);
  c.num_zero_experts = 2;
  Row const row = route(c, {0.0F, 1.0F, 0.5F, 3.0F, -1.0F});
  EXPECT_EQ(row.ids, (std::vector<std::int32_t>{3, 1}));
  double const sum = 1.0 + std::exp(1.0) + std::exp(0.5) + std::exp(3.0) + std::exp(-1.0);
  EXPECT_NEAR(row.weights[0], std::exp(3.0) / sum, 1e-6);
}

TEST(Routing, JointSharedExpertsShareTheNormalisation) {
  RouterConfig c = plain(3, 2, Scoring::sigmoid, Renorm::sum);
  c.num_joint_shared = 2;
  c.routed_scaling_factor = 4.0F;
  std::vector<float> const z{0.0F, 1.0F, -1.0F, 2.0F, -0.5F};
  Row const row = route(c, z);
  auto const s = [](double v) { return 1.0 / (1.0 + std::exp(-v)); };
  double const sum = s(1.0) + s(0.0) + s(2.0) + s(-0.5);
  EXPECT_EQ(row.ids, (std::vector<std::int32_t>{1, 0}));
  EXPECT_NEAR(row.weights[0], 4.0 * s(1.0) / sum, 1e-5);
  EXPECT_NEAR(row.shared[0], 4.0 * s(2.0) / sum, 1e-5);
  EXPECT_NEAR(row.shared[1], 4.0 * s(-0.5) / sum, 1e-5);
}

// docs/semantics/routing.md §15.
TEST(RoutingInvariants, ConstantBiasChangesNothing) {
  std::vector<float> const half(32, 0.5F);
  std::vector<float> const zero(32, 0.0F);
  for (unsigned seed = 0; seed < 40; ++seed) {
    RouterConfig c = plain(32, 4, seed % 2 == 0 ? Scoring::sigmoid : Scoring::softmax, Renorm::sum);
    if (seed % 4 >= 2) {
      c.num_expert_group = 8;
      c.topk_group = 3;
      c.group_score = GroupScore::top2_sum;
    }
    auto const z = random_logits(32, seed);
    c.correction_bias = zero.data();
    Row const a = route(c, z);
    c.correction_bias = half.data();
    Row const b = route(c, z);
    EXPECT_EQ(a.ids, b.ids);
    EXPECT_EQ(a.weights, b.weights);
  }
}

TEST(RoutingInvariants, RenormalisedWeightsSumToTheFactorAndIdsAreUnique) {
  std::vector<float> const bias = random_logits(128, 77, 0.3F);
  for (unsigned seed = 0; seed < 60; ++seed) {
    for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus}) {
      RouterConfig c = plain(128, 8, s, Renorm::sum);
      c.routed_scaling_factor = 2.5F;
      if (seed % 2 == 1) c.correction_bias = bias.data();
      Row const row = route(c, random_logits(128, seed));
      EXPECT_NEAR(std::accumulate(row.weights.begin(), row.weights.end(), 0.0), 2.5, 2.5 * 8e-6);
      EXPECT_EQ(std::set<std::int32_t>(row.ids.begin(), row.ids.end()).size(), 8U);
    }
  }
}

}  // namespace
