// SPDX-License-Identifier: Apache-2.0
// tests/unit/routing_row_test.cpp: the routing tables (tests/routing_tables.hpp) through the host's function of one row, and the scores
// that it is made of.
// moe-alone: its suites are in routing_tables.hpp, and it defines a function that is declared there.
#include "moe/routing/row/route_row.hpp"

#include "routing_tables.hpp"

namespace moe_test {

template <class Config, class L>
RoutedRow route_one(Config const& cfg, std::vector<L> const& logits, std::int64_t token) {
  auto const slots = static_cast<std::size_t>(cfg.num_slots());
  RoutedRow r{std::vector<std::int32_t>(slots, -7), std::vector<float>(slots, -7.0F),
              std::vector<float>(static_cast<std::size_t>(cfg.num_joint_shared), -7.0F)};
  auto const result = moe::routing::route_row(cfg, logits.data(), token, r.ids.data(), r.weights.data(), r.shared.data());
  r.degenerate = result.degenerate;
  r.num_chosen = result.num_chosen;
  return r;
}

}  // namespace moe_test

namespace {

TEST(Routing, ScoreFunctionsAgreeWithDoublePrecision) {
  double worst_exp = 0.0;
  double worst_soft = 0.0;
  double worst_tanh = 0.0;
  double worst_sigmoid = 0.0;
  for (int i = -870000; i <= 870000; ++i) {
    float const x = static_cast<float>(i) * 1e-4F;
    double const d = x;
    auto const rel = [](double got, double want) { return want == 0.0 ? std::abs(got) : std::abs(got - want) / std::abs(want); };
    worst_exp = std::max(worst_exp, rel(routing::detail::exp_rn(x), std::exp(d)));
    worst_sigmoid = std::max(worst_sigmoid, rel(routing::detail::sigmoid_rn(x), 1.0 / (1.0 + std::exp(-d))));
    worst_soft =
        std::max(worst_soft, rel(routing::detail::sqrtsoftplus_rn(x), std::sqrt(std::max(d, 0.0) + std::log1p(std::exp(-std::abs(d))))));
    worst_tanh = std::max(worst_tanh, rel(routing::detail::tanh_rn(x), std::tanh(d)));
  }
  EXPECT_LT(worst_exp, 1.5e-7);
  EXPECT_LT(worst_sigmoid, 2.5e-7);
  EXPECT_LT(worst_soft, 3e-7);
  EXPECT_LT(worst_tanh, 3e-7);
  EXPECT_EQ(routing::detail::exp_rn(0.0F), 1.0F);
  EXPECT_EQ(routing::detail::exp_rn(-kInf), 0.0F);
  EXPECT_EQ(routing::detail::exp_rn(kInf), kInf);
  EXPECT_EQ(routing::detail::exp_rn(-200.0F), 0.0F);
}

TEST(Routing, R17_PaddingRowsHaveNoSharedExperts) {
  RouterConfig c = plain(4, 2);
  c.num_fused_shared = 2;
  std::vector<std::int32_t> ids(4, 9);
  std::vector<float> weights(4, 9.0F);
  pad_row(c, ids.data(), weights.data());
  EXPECT_EQ(ids, (std::vector<std::int32_t>{-1, -1, -1, -1}));
  EXPECT_EQ(weights, (std::vector<float>{0, 0, 0, 0}));
}

}  // namespace
