// SPDX-License-Identifier: Apache-2.0
// tests/unit/experts_norm_test.cpp: a norm of each expert's output before the weighted sum (Muse-Spark): the host experts against the
// definition, and what a layer, a runner and a store refuse.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "expect_close.hpp"
#include "expect_error.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/monolithic.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/reference.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"
#include "numbers.hpp"
#include "output_norm.hpp"

namespace {

using namespace moe;
namespace norm = moe_test::output_norm;
using moe_test::expect_close;
using moe_test::expect_error;
using moe_test::normal;
using norm::batched;
using norm::kEps;
using norm::Routing;
using norm::Sizes;
using norm::standard;
using norm::store;
using quantization::None;
using Plain = norm::Plain<float>;
using Normed = norm::Normed<float>;
using IfGiven = norm::IfGiven<float>;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

/// s·y / sqrt(mean((s·y)²) + eps) of each row.
std::vector<float> normalised(std::vector<float> y, std::int64_t hidden) {
  std::vector<float> const scale = norm::scale_of(hidden);
  auto const h = static_cast<std::size_t>(hidden);
  for (std::size_t first = 0; first < y.size(); first += h) {
    long double squares = 0;
    for (std::size_t i = 0; i < h; ++i) squares += std::pow(static_cast<long double>(y[first + i]) * scale[i], 2);
    long double const root = std::sqrt(squares / static_cast<long double>(h) + kEps);
    for (std::size_t i = 0; i < h; ++i) y[first + i] = static_cast<float>(y[first + i] * scale[i] / root);
  }
  return y;
}
/// The weighted sum of normalised outputs, which are computed without a norm: a row for each slot goes through every expert.
std::vector<float> definition(Sizes const& s, std::vector<float> const& x) {
  Routing const routing = norm::routing_of(s);
  auto const h = static_cast<std::size_t>(s.hidden), slots = routing.ids.size(), topk = static_cast<std::size_t>(s.topk);
  Sizes all = s;
  all.rows = static_cast<std::int64_t>(slots) + s.experts;  // batched() leaves the last rows of an expert out
  std::vector<float> in(static_cast<std::size_t>(all.rows) * h);
  for (std::size_t i = 0; i < slots * h; ++i) {
    in[i] = x[i / h / topk * h + i % h] * (s.on_input ? routing.weights[i / h] : 1.0F);
  }
  std::vector<float> const out = normalised(batched<experts::Reference<double>, Plain>(all, in, false), s.hidden);
  std::vector<float> y(x.size());
  for (std::size_t slot = 0; slot < slots; ++slot) {
    if (routing.ids[slot] < 0) continue;
    float const w = s.on_input ? 1.0F : routing.weights[slot];
    std::size_t const from = static_cast<std::size_t>(routing.ids[slot]) * in.size() + slot * h;
    for (std::size_t i = 0; i < h; ++i) y[slot / topk * h + i] += w * out[from + i];
  }
  return y;
}

template <class Policy>
class NormOn : public testing::Test {};
using HostExperts = testing::Types<experts::Reference<>, experts::Reference<double>, experts::OneDnn>;
TYPED_TEST_SUITE(NormOn, HostExperts);

TYPED_TEST(NormOn, X25_EachOutputIsNormalisedBeforeItIsWeighted) {
  for (Sizes const& s : norm::kStandard) {
    SCOPED_TRACE(testing::Message() << s.rows << " rows of " << s.hidden);
    std::vector<float> const x = normal(7, s.rows * s.hidden), want = definition(s, x);
    expect_close(standard<TypeParam, Normed>(s, x, true), want, 4e-6F);
    expect_close(standard<TypeParam, IfGiven>(s, x, true), want, 4e-6F);
  }
}
TYPED_TEST(NormOn, X25_BatchesAreNormalisedRowByRow) {
  for (Sizes const& s : norm::kBatched) {
    std::vector<float> const x = normal(7, s.rows * s.hidden);
    expect_close(batched<TypeParam, Normed>(s, x, true), normalised(batched<experts::Reference<double>, Plain>(s, x, false), s.hidden),
                 4e-6F);
  }
}
TYPED_TEST(NormOn, X25_WithoutOneTheBitsAreThoseOfALayerThatHasNone) {
  Sizes const s{33, 72, 40};
  std::vector<float> const x = normal(7, s.rows * s.hidden);
  EXPECT_EQ((standard<TypeParam, IfGiven>(s, x, false)), (standard<TypeParam, Plain>(s, x, false)));
  EXPECT_EQ((batched<TypeParam, IfGiven>(s, x, false)), (batched<TypeParam, Plain>(s, x, false)));
}
TYPED_TEST(NormOn, X25_NoRowsLargeSmallAndZeroOutputs) {
  EXPECT_TRUE((standard<TypeParam, Normed>({0, 24, 16}, {}, true)).empty());
  Sizes const s{.rows = 4, .hidden = 24, .intermediate = 16, .biases = false};
  for (float size : {1e15F, 1e-10F, 0.0F}) {  // outputs of about 1e30 and 1e-20, whose squares leave float32, and zeros
    SCOPED_TRACE(testing::Message() << "rows of " << size);
    std::vector<float> x = normal(7, s.rows * s.hidden);
    for (float& v : x) v *= size;
    std::vector<float> const y = standard<TypeParam, Normed>(s, x, true);
    expect_close(y, definition(s, x), 4e-6F);
    EXPECT_EQ(std::count(y.begin(), y.end(), 0.0F) == static_cast<std::ptrdiff_t>(y.size()), size == 0.0F);
  }
}
TEST(Norm, ARowOfTheReferenceDoesNotDependOnTheOthers) {
  Sizes const s{33, 72, 40};
  std::vector<float> const x = normal(7, s.rows * s.hidden);
  auto const first = [](std::vector<float> const& v) { return std::vector<float>(v.begin(), v.begin() + 72); };
  auto const alone = batched<experts::Reference<>, Normed>({1, 72, 40}, first(x), true);
  EXPECT_EQ(first(alone), first(batched<experts::Reference<>, Normed>(s, x, true)));
}

// ---- what a layer refuses

constexpr Sizes kLayer{8, 24, 16, 4, 2};

template <class Config, class Experts = experts::Reference<>>
using LayerOf = ModularKernel<Config, routing::AnyRouter, None, backends::NoExpertParallel<>, Experts>;
template <class Layer>
typename Layer::Params params() {
  return {.shape = {kLayer.hidden, kLayer.intermediate, kLayer.experts, kLayer.topk, false},
          .max_tokens_per_rank = kLayer.rows,
          .placement = ExpertPlacement(kLayer.experts, 1),
          .router = {.num_experts = kLayer.experts, .topk = kLayer.topk}};
}
template <class Config, class Experts = experts::Reference<>, class Change>
void construct(bool normed, Change&& change) {
  using Layer = LayerOf<Config, Experts>;
  comm::Self<> self;
  auto const weights = store<Config>(kLayer, normed);
  auto view = weights.view();
  change(view.norm);
  Layer layer(self, view, params<Layer>());
}
constexpr auto kAsItIs = [](ExpertNormWeights&) {};

/// Experts that do not declare kNormalisesOutput.
struct Silent : experts::Reference<> {
  static constexpr char const* kName = "silent";
  static constexpr bool kNormalisesOutput = false;
};

TEST(Norm, ALayerTakesTheWeightsThatItsConfigurationStates) {
  construct<Normed>(true, kAsItIs);
  construct<Normed, experts::OneDnn>(true, kAsItIs);
  construct<Normed, experts::Monolithic<experts::Reference<>>>(true, kAsItIs);
  construct<IfGiven>(true, kAsItIs);
  construct<IfGiven>(false, kAsItIs);
  construct<IfGiven, Silent>(false, kAsItIs);
  expect_error(ErrorCode::argument, "expert weights: norm is missing, and the layer's configuration has expert_norm",
               [] { construct<Normed>(false, kAsItIs); });
  expect_error(ErrorCode::config, "expert weights: norm is given, and the layer's configuration has no expert_norm",
               [] { construct<Plain>(true, kAsItIs); });
  expect_error(ErrorCode::unsupported,
               "silent cannot normalise an expert's output before the weighted sum. Fix: choose experts that declare",
               [] { construct<IfGiven, Silent>(true, kAsItIs); });
}
TEST(Norm, ALayerRefusesANormOfAnotherShape) {
  expect_error(ErrorCode::argument, "expert weights: norm has 23 elements, expected 24",
               [] { construct<Normed>(true, [](ExpertNormWeights& n) { n.scale = make_vector(n.scale.data_handle(), 23); }); });
  expect_error(ErrorCode::argument, "expert weights: norm is a null pointer for 24 elements",
               [] { construct<Normed>(true, [](ExpertNormWeights& n) { n.scale = make_vector<float const>(nullptr, 24); }); });
  for (float eps : {0.0F, -1.0F, kNan, HUGE_VALF}) {
    expect_error(ErrorCode::config, "expert weights: norm: eps",
                 [&] { construct<Normed>(true, [&](ExpertNormWeights& n) { n.eps = eps; }); });
  }
  auto weights = store<Normed>(kLayer, false);
  expect_error(ErrorCode::argument, "norm is a null pointer", [&] { weights.set_norm(nullptr, kEps); });
}
TEST(Norm, TheRuleAsksTheExperts) {
  using rules::ExpertsNormaliseOutput;
  using Local = backends::NoExpertParallel<>;
  EXPECT_STREQ((Composition<Normed, routing::AnyRouter, None, Local, Silent>::reason()), ExpertsNormaliseOutput::kSentence);
  EXPECT_EQ((Composition<Normed, routing::AnyRouter, None, Local, experts::OneDnn>::reason()), nullptr);
  EXPECT_EQ((Composition<IfGiven, routing::AnyRouter, None, Local, Silent>::reason()), nullptr) << "the weights decide";
  EXPECT_EQ((Composition<Plain, routing::AnyRouter, None, Local, Silent>::reason()), nullptr);
}

// ---- what a runner refuses

struct Grid : RunnerDefaults {
  using Parallel = runner::parallel::Groups<comm::Self<>>;
};
template <class Parts>
void build(std::int64_t expert_hidden, int moe_tp_size) {
  using Layer = LayerOf<Normed>;
  using Block = Runner<Layer, Parts>;
  comm::Self<> self;
  auto const weights = store<Normed>(kLayer, true);
  typename Block::Params p{.layer = params<Layer>()};
  p.expert_hidden = p.hidden = expert_hidden;
  if constexpr (requires { p.parallel.moe; }) p.parallel.moe.moe_tp_size = moe_tp_size;
  Block block(self, weights.view(), p);
}
TEST(Norm, ARunnerNeedsWholeOutputs) {
  build<RunnerDefaults>(kLayer.hidden, 1);
  build<Grid>(kLayer.hidden, 1);
  expect_error(ErrorCode::unsupported, "an output is normalised as a whole, and expert_hidden 20 is padded to 24 columns",
               [] { build<RunnerDefaults>(20, 1); });
  expect_error(ErrorCode::unsupported, "an output is normalised as a whole, and 2 tensor-parallel ranks hold a part of each expert",
               [] { build<Grid>(kLayer.hidden, 2); });
}

}  // namespace
