// SPDX-License-Identifier: Apache-2.0
// tests/routing_tables.hpp: the cases of docs/semantics/routing.md §16 that need one row only: scores, order, ties, groups, bias, NaN and
// infinity. The tests are the same for the host's function and the device's kernel: the file that includes this one defines route_one().
#pragma once

#include "routing_rows.hpp"
#include "routing_variants.hpp"

namespace {

template <class L>
void table_of_section_4(double tolerance) {
  expect_row(route<RouterConfig, L>(plain(4, 2), kTable), {0, 1}, {0.643914, 0.236883}, tolerance);
  expect_row(route<RouterConfig, L>(plain(4, 2, Scoring::softmax, Renorm::sum), kTable), {0, 1}, {0.731059, 0.268941}, tolerance);
  RouterConfig c = plain(4, 2);
  c.order = Order::topk_then_score;
  expect_row(route<RouterConfig, L>(c, kTable), {0, 1}, {0.731059, 0.268941}, tolerance);
  c.renorm = Renorm::sum;  // accepted; has no effect for softmax
  expect_row(route<RouterConfig, L>(c, kTable), {0, 1}, {0.731059, 0.268941}, tolerance);
  expect_row(route<RouterConfig, L>(plain(4, 2, Scoring::sigmoid), kTable), {0, 1}, {0.880797, 0.731059}, tolerance);
  expect_row(route<RouterConfig, L>(plain(4, 2, Scoring::sigmoid, Renorm::sum), kTable), {0, 1}, {0.546449, 0.453551}, tolerance);
  expect_row(route<RouterConfig, L>(plain(4, 2, Scoring::sqrtsoftplus, Renorm::sum), kTable), {0, 1}, {0.559980, 0.440020}, tolerance);
  expect_row(route<RouterConfig, L>(plain(4, 2, Scoring::identity), kTable), {0, 1}, {2.0, 1.0}, tolerance);
  Llama4 const llama(Llama4::Params{.num_experts = 4});
  expect_row(route<Llama4::Config, L>(llama.config(), kTable), {0}, {0.880797}, tolerance);
  std::vector<float> const bias{0.0F, 0.0F, 0.5F, 0.0F};
  c = plain(4, 2, Scoring::sigmoid, Renorm::sum);
  c.correction_bias = bias.data();
  c.routed_scaling_factor = 2.5F;
  expect_row(route<RouterConfig, L>(c, kTable), {2, 0}, {0.905274, 1.594726}, tolerance);
}
TEST(Routing, R1_TableF32) { table_of_section_4<float>(1e-6); }
TEST(Routing, R1_TableBf16) { table_of_section_4<bf16>(1e-6); }  // the logits of the table are exact in bf16 and f16
TEST(Routing, R1_TableF16) { table_of_section_4<f16>(1e-6); }

std::vector<float> const kGrouped{0.2F, 1.4F, -0.5F, 0.9F, 1.1F, 1.0F, -2.0F, 2.0F};

TEST(Routing, R2_ExampleA_SoftmaxGroups) {
  RouterConfig c = plain(8, 3);
  expect_row(route(c, kGrouped), {7, 1, 4}, {.342251, .187831, .139149});
  c.num_expert_group = 4;
  c.topk_group = 2;
  expect_row(route(c, kGrouped), {7, 1, 0}, {.342251, .187831, .056574});
  c.renorm = Renorm::sum;
  expect_row(route(c, kGrouped), {7, 1, 0}, {.583393, .320173, .096434});
  c.renorm = Renorm::none;
  c.routed_scaling_factor = 16.0F;
  expect_row(route(c, kGrouped), {7, 1, 0}, {5.476018, 3.005302, .905180});
}

TEST(Routing, R2_ExampleB_SigmoidBiasGroups) {
  std::vector<float> const bias{0.0F, -.3F, .1F, 0.0F, .05F, 0.0F, .2F, -.1F};
  RouterConfig c = plain(8, 3, Scoring::sigmoid, Renorm::sum);
  c.correction_bias = bias.data();
  c.routed_scaling_factor = 2.5F;
  EXPECT_EQ(route(c, kGrouped).ids, (std::vector<std::int32_t>{4, 7, 5}));
  c.num_expert_group = 4;
  c.topk_group = 2;
  c.group_score = GroupScore::top2_sum;
  expect_row(route(c, kGrouped), {4, 5, 3}, {.855575, .833678, .810746});
  using Policy = GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>;
  Policy const policy(Policy::Params{
      .num_experts = 8, .topk = 3, .num_expert_group = 4, .topk_group = 2, .correction_bias = bias.data(), .routed_scaling_factor = 2.5F});
  EXPECT_EQ(route(policy.config(), kGrouped).weights, route(c, kGrouped).weights);
}

TEST(Routing, R3_EqualLogits) {
  for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus}) {
    RouterConfig c = plain(16, 4, s, Renorm::sum);
    expect_row(route(c, std::vector<float>(16, 0.7F)), {0, 1, 2, 3}, {.25, .25, .25, .25});
    c.num_expert_group = 4;
    c.topk_group = 2;
    c.topk = 6;
    for (GroupScore g : {GroupScore::max, GroupScore::top2_sum}) {
      c.group_score = g;
      EXPECT_EQ(route(c, std::vector<float>(16, 0.7F)).ids, (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5}));
    }
  }
  std::vector<float> const zeros{-0.0F, 0.0F, -0.0F, 0.0F};  // one value
  EXPECT_EQ(route(plain(4, 4, Scoring::identity), zeros).ids, (std::vector<std::int32_t>{0, 1, 2, 3}));
}

TEST(Routing, R4_NegativeBiasedScoresWinOverMaskedGroups) {
  std::vector<float> const minus_two(16, -2.0F);
  std::vector<float> const zero(16, 0.0F);
  for (unsigned seed = 0; seed < 50; ++seed) {
    auto const z = random_logits(16, seed);
    RouterConfig c = plain(16, 4, Scoring::sigmoid, Renorm::sum);
    c.num_expert_group = 4;
    c.topk_group = 2;
    c.group_score = GroupScore::top2_sum;
    c.correction_bias = zero.data();
    Row const with_zero = route(c, z);
    c.correction_bias = minus_two.data();
    Row const with_minus = route(c, z);
    EXPECT_EQ(with_minus.ids, with_zero.ids);
    EXPECT_EQ(with_minus.weights, with_zero.weights);
    std::set<int> groups;
    for (std::int32_t id : with_minus.ids) groups.insert(id / 4);
    EXPECT_LE(groups.size(), 2U);
  }
}

TEST(Routing, R4_ADisabledExpertBesideAnInfiniteBiasLosesItsGroup) {
  float const inf = std::numeric_limits<float>::infinity();
  std::vector<float> const bias{inf, -inf, 0.0F, 0.0F};  // the sum of group 0's two best is NaN
  RouterConfig c = plain(4, 2, Scoring::sigmoid, Renorm::sum);
  c.num_expert_group = 2;
  c.topk_group = 1;
  c.group_score = GroupScore::top2_sum;
  c.correction_bias = bias.data();
  EXPECT_EQ(route(c, {1.0F, 1.0F, -1.0F, -2.0F}).ids, (std::vector<std::int32_t>{2, 3}));
}

TEST(Routing, R5_NaNLogitCountsAsAbsent) {
  for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus}) {
    Row const with = route(plain(5, 3, s), {2.0F, kNaN, 1.0F, 0.0F, -1.0F});
    Row const without = route(plain(4, 3, s), kTable);
    EXPECT_EQ(with.ids, (std::vector<std::int32_t>{0, 2, 3}));
    for (std::size_t j = 0; j < 3; ++j) EXPECT_NEAR(with.weights[j], without.weights[j], 1e-6);
    Row const all_but_one = route(plain(3, 2, s), {kNaN, 1.0F, -kInf});
    EXPECT_EQ(all_but_one.ids, (std::vector<std::int32_t>{1, -1}));
    EXPECT_EQ(all_but_one.weights[1], 0.0F);
    EXPECT_FALSE(all_but_one.degenerate);
  }
}

TEST(Routing, R6_RowAllNaN) {
  std::vector<float> const z(8, kNaN);
  for (Order order : {Order::score_then_topk, Order::topk_then_score}) {
    RouterConfig c = plain(8, 4, Scoring::softmax, Renorm::sum);
    c.order = order;
    c.routed_scaling_factor = 2.5F;  // not applied to a degenerate row
    Row row = route(c, z);
    expect_row(row, {0, 1, 2, 3}, {.25, .25, .25, .25});
    EXPECT_TRUE(row.degenerate);
    c.degenerate = DegeneratePolicy::drop;
    row = route(c, z);
    expect_row(row, {-1, -1, -1, -1}, {0, 0, 0, 0});
    EXPECT_TRUE(row.degenerate);
  }
  std::vector<float> bias(8, 0.0F);
  bias[0] = bias[2] = -kInf;
  RouterConfig c = plain(8, 4);
  c.correction_bias = bias.data();
  EXPECT_EQ(route(c, z).ids, (std::vector<std::int32_t>{1, 3, 4, 5}));  // skips what the bias disables
}

TEST(Routing, R7_InfiniteLogitIsChosenFirst) {
  for (Renorm renorm : {Renorm::none, Renorm::sum}) {
    Row const row = route(plain(4, 3, Scoring::softmax, renorm), {0.0F, 1.0F, kInf, 2.0F});
    expect_row(row, {2, 0, 1}, {1, 0, 0});
  }
  RouterConfig c = plain(4, 3);
  c.order = Order::topk_then_score;
  expect_row(route(c, {0.0F, 1.0F, kInf, 2.0F}), {2, 3, 1}, {1, 0, 0});
  expect_row(route(plain(4, 2), {kInf, 1.0F, kInf, 2.0F}), {0, 2}, {.5, .5});
  expect_row(route(plain(2, 2, Scoring::sigmoid), {kInf, -1e30F}), {0, 1}, {1, 0});
  for (float w : route(plain(4, 4, Scoring::sqrtsoftplus, Renorm::sum), {kInf, -kInf, 3.0F, -3e38F}).weights) EXPECT_TRUE(std::isfinite(w));
}

TEST(Routing, R8_BiasDisablesExperts) {
  std::vector<float> const bias{-kInf, 0.0F, -kInf, 0.0F, -kInf};
  for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus}) {
    RouterConfig c = plain(5, 4, s, Renorm::sum);
    c.correction_bias = bias.data();
    Row const row = route(c, {9.0F, 1.0F, 8.0F, 2.0F, 7.0F});
    EXPECT_EQ(row.ids, (std::vector<std::int32_t>{3, 1, -1, -1}));
    EXPECT_EQ(row.weights[2], 0.0F);
    EXPECT_EQ(row.weights[3], 0.0F);
    EXPECT_NEAR(row.weights[0] + row.weights[1], 1.0, 2e-6);
    EXPECT_EQ(row.num_chosen, 2);
  }
}

TEST(Routing, R11_SizesMatchASortInDoublePrecision) {
  struct Shape {
    int e, k;
  };
  for (auto [e, k] : {Shape{1, 1}, Shape{8, 8}, Shape{896, 16}, Shape{512, 10}, Shape{1024, 32}, Shape{33, 5}, Shape{160, 6}}) {
    for (unsigned seed = 0; seed < 20; ++seed) {
      auto const z = random_logits(e, seed * 7919U + static_cast<unsigned>(e));
      double const max = *std::max_element(z.begin(), z.end());
      double sum = 0.0;
      for (float v : z) sum += std::exp(double{v} - max);
      std::vector<double> p(z.begin(), z.end());
      for (double& v : p) v = std::exp(v - max) / sum;
      std::vector<double> const sorted = [&] {
        auto s = p;
        std::sort(s.begin(), s.end());
        return s;
      }();
      bool close = false;  // float32 may miss a difference below its rounding
      for (std::size_t i = 1; i < sorted.size(); ++i) close = close || sorted[i] - sorted[i - 1] < 1e-6 * sorted[i];
      Row const row = route(plain(e, k), z);
      auto const want = sorted_choice(p, k);
      if (!close) {
        EXPECT_EQ(row.ids, want);
      }
      for (int j = 0; j < k; ++j) {
        auto const at = static_cast<std::size_t>(j);
        EXPECT_NEAR(row.weights[at], p[static_cast<std::size_t>(want[at])], 1e-6);
      }
    }
  }
}

TEST(Routing, R12_OneGroupIsUngrouped) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    auto const z = random_logits(24, seed);
    RouterConfig c = plain(24, 5, Scoring::sigmoid, Renorm::sum);
    Row const ungrouped = route(c, z);
    c.num_expert_group = c.topk_group = 1;
    c.group_score = GroupScore::top2_sum;
    EXPECT_EQ(route(c, z).ids, ungrouped.ids);
    EXPECT_EQ(route(c, z).weights, ungrouped.weights);
  }
}

TEST(Routing, R13_M11_Sparsemixer) {
  RouterConfig c = plain(4, 2);
  c.selection = Selection::sparsemixer;
  expect_row(route(c, {1.0F, 2.0F, 1.99F, -0.5F}), {1, 2}, {0.502500, 1.0});
  c.sparsemixer_eps = 0.0F;
  expect_row(route(c, {1.0F, 2.0F, 1.99F, -0.5F}), {1, 2}, {1.0, 1.0});
  expect_row(route(c, {kNaN, 2.0F, -kInf, kNaN}), {1, -1}, {1.0, 0.0});
  EXPECT_TRUE(route(c, {kNaN, kNaN, -kInf, kNaN}).degenerate);
  expect_row(route(c, {-1.0F, -2.0F, -3.0F, -4.0F}), {0, 1}, {1.0, 1.0});
}

TEST(Routing, R17_FusedSharedExperts) {
  RouterConfig c = plain(4, 2, Scoring::softmax, Renorm::sum);
  c.num_fused_shared = 2;
  c.fused_shared_weight = 0.4F;
  c.routed_scaling_factor = 2.5F;
  expect_row(route(c, kTable), {0, 1, 4, 5}, {2.5 * .731059, 2.5 * .268941, 0.4, 0.4}, 3e-6);
}

TEST(Routing, R21_FactorWithoutRenormalise) {
  for (Scoring s : {Scoring::softmax, Scoring::sigmoid, Scoring::sqrtsoftplus}) {
    Row const one = route(plain(4, 3, s), kTable);
    RouterConfig c = plain(4, 3, s);
    c.routed_scaling_factor = 2.5F;
    Row const scaled = route(c, kTable);
    for (std::size_t j = 0; j < 3; ++j) EXPECT_FLOAT_EQ(scaled.weights[j], 2.5F * one.weights[j]);
  }
}

TEST(Routing, R23_SoftmaxIgnoresAConstant) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    auto z = random_logits(64, seed);
    for (float& v : z) v = std::round(v * 64.0F) / 64.0F + static_cast<float>(seed % 3) * 0.001953125F;  // so that + 5 is exact
    Row const before = route(plain(64, 6), z);
    for (float& v : z) v += 5.0F;
    Row const after = route(plain(64, 6), z);
    EXPECT_EQ(after.ids, before.ids);
    for (std::size_t j = 0; j < 6; ++j) EXPECT_NEAR(after.weights[j], before.weights[j], 1e-6);
  }
}

}  // namespace
