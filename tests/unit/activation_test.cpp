// SPDX-License-Identifier: Apache-2.0
// tests/unit/activation_test.cpp: the worked values of docs/semantics/experts.md §9 (case X2) and the width and limit errors (X23, X24).

#include "moe/activation/activation.hpp"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "../expect_error.hpp"

using namespace moe;
using activation::Constants;
using activation::Kind;
using moe_test::expect_error;

namespace {

struct Case {
  Kind kind;
  Constants constants;
  float gate, up, expected;
};

constexpr float kInf = std::numeric_limits<float>::infinity();

TEST(Activation, X2_WorkedValues) {
  Constants const oai{1.702F, 1.0F, 7.0F, 4.0F, 25.0F};
  Constants const lim7{1.702F, 1.0F, 7.0F, 4.0F, 25.0F};
  std::vector<Case> const cases{
      {Kind::silu, {}, 1, 0.5F, 0.365529F},
      {Kind::gelu, {}, 1, 0.5F, 0.420672F},
      {Kind::gelu_tanh, {}, 1, 0.5F, 0.420596F},
      {Kind::swigluoai, oai, 1, 0.5F, 1.268694F},
      {Kind::silu_clamped, lim7, 1, 0.5F, 0.365529F},
      {Kind::swiglu_step, lim7, 1, 0.5F, 0.365529F},
      {Kind::situ, {}, 1, 0.5F, 0.358052F},
      {Kind::silu, {}, 8, -9, -71.975855F},
      {Kind::swigluoai, oai, 8, -9, -41.999719F},
      {Kind::silu_clamped, lim7, 8, -9, -48.955358F},
      {Kind::swiglu_step, lim7, 8, -9, -49.0F},
      {Kind::situ, {}, 8, -9, -33.268425F},
      {Kind::silu, {}, -3, 2, -0.284555F},
      {Kind::swigluoai, oai, -3, 2, -0.054214F},
  };
  for (Case const& c : cases) {
    float const got = activation::apply(c.kind, c.constants, c.gate, c.up);
    EXPECT_NEAR(got, c.expected, 1e-6F * std::max(1.0F, std::abs(c.expected)))
        << activation::name(c.kind) << '(' << c.gate << ", " << c.up << ')';
  }
}

TEST(Activation, X2_ZeroGateGivesZero) {
  Constants lim7;
  lim7.limit = 7.0F;
  for (int i = 0; i < activation::kKinds; ++i) {
    EXPECT_EQ(activation::apply(static_cast<Kind>(i), lim7, 0.0F, 5.0F), 0.0F) << i;
  }
}

TEST(Activation, Relu2IsTheSquare) {
  EXPECT_EQ(activation::apply(Kind::relu2_no_mul, {}, 3.0F, 99.0F), 9.0F);
  EXPECT_EQ(activation::apply(Kind::relu2_no_mul, {}, -3.0F, 99.0F), 0.0F);
  EXPECT_EQ(activation::apply(Kind::relu_no_mul, {}, 3.0F, 99.0F), 3.0F);
}

// swigluoai_halves with alpha 1, beta 0 and no limit is silu.
TEST(Activation, SwigluOaiReducesToSilu) {
  Constants const c{1.0F, 0.0F, kInf, 4.0F, 25.0F};
  for (float g : {-3.0F, 0.25F, 8.0F}) {
    EXPECT_FLOAT_EQ(activation::apply(Kind::swigluoai_halves, c, g, 1.5F), activation::apply(Kind::silu, {}, g, 1.5F));
  }
}

TEST(Activation, X10_InterleavedEqualsHalves) {
  activation::Any const act{Kind::swigluoai, {1.702F, 1.0F, 7.0F, 4.0F, 25.0F}};
  std::vector<float> const interleaved{1, 0.5F, 8, -9, -3, 2};
  std::vector<float> const halves{1, 8, -3, 0.5F, -9, 2};
  std::vector<float> a(3);
  std::vector<float> b(3);
  activation::apply_row(act, interleaved.data(), 6, a.data(), 3, true);
  activation::apply_row(act, halves.data(), 6, b.data(), 3, false);
  EXPECT_EQ(a, b);
}

TEST(Activation, X23_WidthsMustFit) {
  std::vector<float> in(7);
  std::vector<float> out(4);
  activation::Any const silu{Kind::silu, {}};
  activation::Any const relu2{Kind::relu2_no_mul, {}};
  EXPECT_THROW(activation::apply_row(silu, in.data(), 7, out.data(), 3), Error);
  EXPECT_THROW(activation::apply_row(relu2, in.data(), 6, out.data(), 3), Error);
  EXPECT_NO_THROW(activation::apply_row(relu2, in.data(), 4, out.data(), 4));
}

TEST(Activation, X24_StepNeedsALimit) {
  try {
    activation::validate(Kind::swiglu_step, {});
    FAIL() << "accepted swiglu_step without a limit";
  } catch (Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::config);
    EXPECT_NE(std::string(e.what()).find("limit"), std::string::npos);
  }
}

TEST(Activation, ConstantsAreFiniteNumbers) {
  float const nan = std::numeric_limits<float>::quiet_NaN();
  auto const refused = [](activation::Constants const& c, std::string const& message) {
    expect_error(ErrorCode::config, message, [&] { activation::validate(Kind::silu, c); });
  };
  refused({.alpha = nan}, "activation: alpha nan is not a finite number");
  refused({.beta = kInf}, "activation: beta inf is not a finite number");
  refused({.situ_gate = -kInf}, "activation: situ_gate -inf is not a finite number");
  refused({.situ_up = nan}, "activation: situ_up nan is not a finite number");
  refused({.limit = nan}, "activation: limit nan must be positive");
  activation::validate(Kind::silu, {.limit = kInf});
}

TEST(Activation, UnknownNameListsTheKnown) {
  try {
    activation::parse("swish");
    FAIL();
  } catch (Error const& e) {
    EXPECT_EQ(e.code(), ErrorCode::argument);
    EXPECT_NE(std::string(e.what()).find("relu2_no_mul"), std::string::npos);
  }
  EXPECT_EQ(activation::parse("situ"), Kind::situ);
}

}  // namespace
