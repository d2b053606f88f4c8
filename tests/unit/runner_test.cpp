// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_test.cpp: each part of a runner around one layer, against the definition and against the layer alone; what cannot go
// together. Blocks of all families run through runners in the tests of mpi.
#include "moe/runner/runner.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <vector>

#include "../expect_error.hpp"
#include "../numbers.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/external.hpp"
#include "moe/runner/host/primitives.hpp"

namespace {

using namespace moe;
using moe_test::expect_error;
using moe_test::numbers;

constexpr int kRows = 7, kHidden = 48, kLatent = 24, kIntermediate = 16, kExperts = 6, kTopK = 2, kShared = 2, kSharedWidth = 12;
constexpr float kSize = 0.3F;  // of weights and of most inputs

template <class ActT>
struct Config : LayerDefaults {
  using Act = ActT;
  using Activation = activation::Any;
};
template <class Act = float>
using LayerOf = ModularKernel<Config<Act>, routing::AnyRouter, quantization::None, backends::NoExpertParallel<>, experts::Reference<float>>;
using Layer = LayerOf<>;

Rows<float const> rows(std::vector<float> const& v, std::int64_t width) {
  return make_rows(v.data(), static_cast<std::int64_t>(v.size()) / width, width);
}
Rows<float> rows(std::vector<float>& v, std::int64_t width) {
  return make_rows(v.data(), static_cast<std::int64_t>(v.size()) / width, width);
}

/// Experts of a width, with zeros behind the first `used` columns of the hidden state. size: a factor of their outputs.
template <class Act = float>
experts::WeightStore<Config<Act>, quantization::None> store(int width, int used, int seed = 1, float size = 1.0F) {
  experts::WeightStore<Config<Act>, quantization::None> out(kExperts, width, kIntermediate, true);
  for (int e = 0; e < kExperts; ++e) {
    std::vector<float> const narrow13 = numbers(seed + 2 * e, 2 * kIntermediate * used, kSize);
    std::vector<float> const narrow2 = numbers(seed + 2 * e + 1, used * kIntermediate, kSize);
    std::vector<float> w13(static_cast<std::size_t>(2 * kIntermediate * width)), w2(static_cast<std::size_t>(width * kIntermediate));
    for (int i = 0; i < 2 * kIntermediate; ++i) std::copy_n(narrow13.data() + i * used, used, w13.data() + i * width);
    std::transform(narrow2.begin(), narrow2.end(), w2.begin(), [&](float v) { return size * v; });
    out.set_expert(e, w13.data(), w2.data());
  }
  return out;
}
template <class L = Layer>
typename L::Params layer_params(int width, routing::RouterConfig router = {.num_experts = kExperts, .topk = kTopK}) {
  return {.shape = {width, kIntermediate, kExperts, kTopK, false},
          .max_tokens_per_rank = kRows,
          .placement = ExpertPlacement(kExperts, 1),
          .router = router};
}

std::vector<float> product(std::vector<float> const& w, std::vector<float> const& x, std::int64_t k) {
  std::int64_t const n = static_cast<std::int64_t>(w.size()) / k, m = static_cast<std::int64_t>(x.size()) / k;
  std::vector<float> y(static_cast<std::size_t>(m * n));
  for (std::int64_t t = 0; t < m; ++t) {
    for (std::int64_t i = 0; i < n; ++i) {
      double sum = 0;
      for (std::int64_t j = 0; j < k; ++j) sum += static_cast<double>(rows(w, k)(i, j)) * rows(x, k)(t, j);
      rows(y, n)(t, i) = static_cast<float>(sum);
    }
  }
  return y;
}
void expect_near(std::vector<float> const& got, std::vector<float> const& want, float bound = 2e-6F) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], bound) << "value " << i;
}

/// The layer alone.
std::vector<float> routed(std::vector<float> const& x, std::vector<float> const& logits, int width,
                          routing::RouterConfig router = {.num_experts = kExperts, .topk = kTopK}) {
  auto const weights = store(width, width);
  comm::Self<> self;
  Layer layer(self, weights.view(), layer_params(width, router));
  std::vector<float> out(x.size());
  layer.forward(rows(x, width), rows(logits, router.num_logits()), rows(out, width));
  return out;
}

struct Weights {
  std::vector<float> hidden = numbers(100, kRows* kHidden, 1.0F);
  std::vector<float> gate = numbers(101, kExperts* kHidden, kSize), gate_bias = numbers(102, kExperts, kSize);
  std::vector<float> in = numbers(103, kLatent* kHidden, kSize), out = numbers(104, kHidden* kLatent, kSize);
  std::vector<float> shared13 = numbers(105, kShared * 2 * kSharedWidth * kHidden, kSize),
                     shared2 = numbers(106, kShared * kHidden * kSharedWidth, kSize);
  std::vector<float> shared_gate = numbers(107, kHidden, kSize), norm = numbers(108, kHidden, 1.0F), bias = numbers(109, kHidden, kSize);
  std::vector<float> logits() const {
    std::vector<float> v = product(gate, hidden, kHidden);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] += gate_bias[i % kExperts];
    return v;
  }
  /// Σ_s gate · FFN_s(x) by the definition.
  std::vector<float> shared(bool gated) const {
    std::vector<float> y(hidden.size());
    for (int s = 0; s < kShared; ++s) {
      auto part = [&](std::vector<float> const& w) {
        auto const n = static_cast<std::ptrdiff_t>(w.size()) / kShared;
        return std::vector<float>(w.begin() + s * n, w.begin() + (s + 1) * n);
      };
      std::vector<float> const both = product(part(shared13), hidden, kHidden);
      std::vector<float> h;
      for (int t = 0; t < kRows; ++t) {
        for (int i = 0; i < kSharedWidth; ++i) {
          float const g = rows(both, 2 * kSharedWidth)(t, i);
          h.push_back(g / (1.0F + std::exp(-g)) * rows(both, 2 * kSharedWidth)(t, kSharedWidth + i));
        }
      }
      std::vector<float> const z = product(part(shared2), h, kSharedWidth);
      for (std::size_t i = 0; i < y.size(); ++i) {
        float const v = product(shared_gate, hidden, kHidden)[i / kHidden];
        y[i] += gated ? z[i] / (1.0F + std::exp(-v)) : z[i];
      }
    }
    return y;
  }
  template <class Params>
  Params shared_params() const {
    Params p{.count = kShared, .intermediate = kSharedWidth};
    p.weights.w13 = {make_blocks(shared13.data(), kShared, 2 * kSharedWidth, kHidden),
                     make_rows(p.weights.w13.scales.data_handle(), kShared, 0),
                     {},
                     2 * kSharedWidth,
                     kHidden};
    p.weights.w2 = {make_blocks(shared2.data(), kShared, kHidden, kSharedWidth),
                    make_rows(p.weights.w2.scales.data_handle(), kShared, 0),
                    {},
                    kHidden,
                    kSharedWidth};
    return p;
  }
};

TEST(Runner, AloneItIsItsLayer) {
  Weights const w;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  Runner<Layer> runner(self, experts.view(), {.layer = layer_params(kHidden)});
  std::vector<float> const logits = w.logits();
  std::vector<float> out(w.hidden.size());
  runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden));
  EXPECT_EQ(out, routed(w.hidden, logits, kHidden));
  EXPECT_EQ(runner.bytes(), runner.layer().bytes()) << "absent parts take no memory";
  struct Stages : NoProbe {
    std::vector<Phase> begun;
    void begin(Phase phase) { begun.push_back(phase); }
  } stages;
  runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden), {}, {}, stages);
  EXPECT_EQ(stages.begun, (std::vector{Phase::route, Phase::route, Phase::dispatch, Phase::experts, Phase::combine}))
      << "absent parts have no stage but for what comes before the router";
}

struct GateParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};
// An absent part has no object: an empty type stands for it, in one byte.
template <class Policy>
constexpr bool kNoObject = std::is_empty_v<typename runner::detail::PartOf<Policy, space::host, float>::type>;
static_assert(kNoObject<runner::gate::Outside> && kNoObject<runner::transform::None> && kNoObject<runner::shared::None>);
static_assert(!kNoObject<runner::gate::Linear<float>> && !kNoObject<runner::transform::Projection<float>>);
static_assert(std::is_empty_v<runner::detail::GroupOf<runner::parallel::None>::type>);
static_assert(std::is_empty_v<runner::detail::ChunksOf<runner::chunking::None, comm::Self<>>::type>);
static_assert(std::is_empty_v<runner::detail::HalvedOf<runner::dual_batch::None, Layer>::type>);
static_assert(sizeof(Runner<Layer>) - sizeof(Layer) <= 640, "a runner without parts: sizes, pointers and its arena");
static_assert(sizeof(Runner<Layer, GateParts>) > sizeof(Runner<Layer>));
TEST(Runner, GateInside) {  // N17
  Weights const w;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  Runner<Layer, GateParts> runner(self, experts.view(),
                                  {.layer = layer_params(kHidden), .gate = {rows(w.gate, kHidden), w.gate_bias.data()}});
  std::vector<float> out(w.hidden.size());
  runner.forward(rows(w.hidden, kHidden), rows(out, kHidden));
  expect_near(out, routed(w.hidden, w.logits(), kHidden));
}

template <runner::gate::Precision P>
struct Bf16Parts : RunnerDefaults {
  using Gate = runner::gate::Linear<float, P>;
};
template <runner::gate::Precision P>
std::vector<float> bf16_weights(Weights const& w) {
  auto const experts = store<bf16>(kHidden, kHidden);
  comm::Self<> self;
  Runner<LayerOf<bf16>, Bf16Parts<P>> runner(self, experts.view(),
                                             {.layer = layer_params<LayerOf<bf16>>(kHidden), .gate = {rows(w.gate, kHidden)}});
  std::vector<bf16> x, out(w.hidden.size());
  for (float v : w.hidden) x.push_back(from_float<bf16>(v));
  runner.forward(make_rows(static_cast<bf16 const*>(x.data()), kRows, kHidden), make_rows(out.data(), kRows, kHidden));
  auto const weights = runner.topk_weights();
  return {weights.data_handle(), weights.data_handle() + weights.size()};
}
// The logits are float32, or the model's type: then they, and the weights, have its precision.
TEST(Runner, GateInTheModelsType) {
  Weights w;
  for (float& v : w.hidden) v = to_float(from_float<bf16>(v));
  std::vector<float> logits = product(w.gate, w.hidden, kHidden);
  auto weights_of = [&] {
    auto const experts = store(kHidden, kHidden);
    comm::Self<> self;
    Layer layer(self, experts.view(), layer_params(kHidden));
    std::vector<float> out(w.hidden.size());
    layer.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden));
    return std::vector<float>(layer.topk_weights().data_handle(), layer.topk_weights().data_handle() + kRows * kTopK);
  };
  expect_near(bf16_weights<runner::gate::Precision::float32>(w), weights_of(), 1e-6F);
  std::vector<float> const exact = weights_of();
  for (float& v : logits) v = to_float(from_float<bf16>(v));
  expect_near(bf16_weights<runner::gate::Precision::model>(w), weights_of(), 1e-6F);
  EXPECT_NE(weights_of(), exact);
}

struct LatentParts : RunnerDefaults {
  using Input = runner::transform::Projection<float>;
  using Output = runner::transform::Projection<float>;
};
// N8 on one rank: widths 48 → 24 → padded to 40 → 24 → 48.
TEST(Runner, LatentWithPadding) {
  constexpr int kPadded = 40;
  Weights const w;
  std::vector<float> const logits = w.logits();
  std::vector<float> const x = product(w.in, w.hidden, kHidden);
  std::vector<float> const want = product(w.out, routed(x, logits, kLatent), kLatent);
  for (int width : {kLatent, kPadded}) {
    auto const experts = store(width, kLatent);
    comm::Self<> self;
    Runner<Layer, LatentParts> runner(self, experts.view(),
                                      {.layer = layer_params(width),
                                       .hidden = kHidden,
                                       .expert_hidden = kLatent,
                                       .input = {rows(w.in, kHidden)},
                                       .output = {rows(w.out, kLatent)}});
    std::vector<float> out(w.hidden.size());
    runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden));
    expect_near(out, want, 1e-5F);
  }
}
// RMSNorm before and after a projection.
TEST(Runner, NormsOfProjections) {
  Weights const w;
  auto normed = [&](std::vector<float> x) {
    for (std::size_t t = 0; t < x.size() / kLatent; ++t) {
      double squares = 0;
      for (std::size_t i = 0; i < kLatent; ++i) squares += std::pow(x[t * kLatent + i], 2);
      for (std::size_t i = 0; i < kLatent; ++i) x[t * kLatent + i] *= w.norm[i] / static_cast<float>(std::sqrt(squares / kLatent + 1e-3));
    }
    return x;
  };
  std::vector<float> const logits = w.logits();
  std::vector<float> const want = product(w.out, normed(routed(normed(product(w.in, w.hidden, kHidden)), logits, kLatent)), kLatent);
  auto const experts = store(kLatent, kLatent);
  comm::Self<> self;
  Runner<Layer, LatentParts>::Params p{.layer = layer_params(kLatent), .hidden = kHidden};
  p.input = {.weight = rows(w.in, kHidden), .normalise_result = true, .result_norm = w.norm.data(), .eps = 1e-3F};
  p.output = {.weight = rows(w.out, kLatent), .normalise = true, .norm = w.norm.data(), .eps = 1e-3F};
  Runner<Layer, LatentParts> runner(self, experts.view(), p);
  std::vector<float> out(want.size());
  runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden));
  expect_near(out, want, 1e-5F);
}
// Padding alone: the layer is wider than the block.
TEST(Runner, PaddingAndTruncation) {
  Weights const w;
  std::vector<float> const logits = w.logits();
  auto const experts = store(kHidden + 8, kHidden);
  comm::Self<> self;
  Runner<Layer> runner(self, experts.view(), {.layer = layer_params(kHidden + 8), .hidden = kHidden, .expert_hidden = kHidden});
  std::vector<float> out(w.hidden.size());
  runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden));
  expect_near(out, routed(w.hidden, logits, kHidden));
}

struct SumParts : RunnerDefaults {
  using Shared = runner::shared::Separate<experts::Reference<float>>;
  using Scaling = runner::scaling::Factor;
  using End = runner::end::BiasNorm;
};
// y = norm?(f (c routed + shared) + bias), in place too.
TEST(Runner, SharedExpertsScalingAndNorm) {
  Weights const w;
  std::vector<float> const logits = w.logits();
  std::vector<float> const alone = routed(w.hidden, logits, kHidden);
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  for (bool gated : {false, true}) {
    for (bool average : {false, true}) {
      for (bool normalise : {false, true}) {
        Runner<Layer, SumParts>::Params p{.layer = layer_params(kHidden)};
        p.shared = w.shared_params<decltype(p.shared)>();
        if (gated) p.shared.gate = runner::shared::Gate::sigmoid;
        p.shared.gate_vector = w.shared_gate.data();
        p.shared.average = average;
        p.scaling.routed = 2.5F;
        p.end = {w.bias.data(), normalise, w.norm.data(), 1e-5F};
        Runner<Layer, SumParts> runner(self, experts.view(), p);
        std::vector<float> want = w.shared(gated);
        for (std::size_t i = 0; i < want.size(); ++i) want[i] = (average ? 0.5F : 1.0F) * (2.5F * alone[i] + want[i]) + w.bias[i % kHidden];
        for (int t = 0; t < kRows && normalise; ++t) {
          double squares = 0;
          for (int i = 0; i < kHidden; ++i) squares += std::pow(rows(want, kHidden)(t, i), 2);
          auto const r = static_cast<float>(1.0 / std::sqrt(squares / kHidden + 1e-5));
          for (int i = 0; i < kHidden; ++i) rows(want, kHidden)(t, i) *= r * w.norm[static_cast<std::size_t>(i)];
        }
        std::vector<float> out(want.size());
        runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden));
        expect_near(out, want, 1e-5F);
        std::vector<float> in_place = w.hidden;
        runner.forward(rows(in_place, kHidden), rows(logits, kExperts), rows(in_place, kHidden));
        EXPECT_EQ(in_place, out);
        std::vector<float> longer = w.hidden;
        longer.resize(longer.size() + kHidden);
        expect_error(ErrorCode::argument, text("output: it begins ", 4 * kHidden, " bytes from hidden_states"), [&] {
          runner.forward(make_rows(static_cast<float const*>(longer.data()), kRows, kHidden), rows(logits, kExperts),
                         make_rows(longer.data() + kHidden, kRows, kHidden));
        });
      }
    }
  }
}

struct InverseParts : RunnerDefaults {
  using Shared = runner::shared::Separate<experts::Reference<float>>;
  using Scaling = runner::scaling::SharedInverse;
};
TEST(Runner, SharedScaledInsteadOfRouted) {  // N19's arithmetic
  Weights const w;
  std::vector<float> const logits = w.logits();
  std::vector<float> want = w.shared(false);
  std::vector<float> const alone = routed(w.hidden, logits, kHidden);
  for (std::size_t i = 0; i < want.size(); ++i) want[i] = alone[i] + want[i] / 2.5F;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  Runner<Layer, InverseParts>::Params p{.layer = layer_params(kHidden)};
  p.shared = w.shared_params<decltype(p.shared)>();
  p.scaling.shared = 1 / 2.5F;
  Runner<Layer, InverseParts> runner(self, experts.view(), p);
  std::vector<float> out(want.size());
  runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden));
  expect_near(out, want, 1e-5F);
}

/// The block's output with factor 2.5 in rows of `Act`: of outputs `size` times as large.
template <class Act, class Parts>
std::vector<float> scaled_block(Weights const& w, std::vector<float> const& logits, float size) {
  using R = Runner<LayerOf<Act>, Parts>;
  auto const experts = store<Act>(kHidden, kHidden, 1, size);
  Weights large = w;
  for (float& v : large.shared2) v *= size;
  comm::Self<> self;
  typename R::Params p{.layer = layer_params<LayerOf<Act>>(kHidden)};
  p.shared = large.template shared_params<decltype(p.shared)>();
  if constexpr (std::is_same_v<typename Parts::Scaling, runner::scaling::Factor>) {
    p.scaling.routed = 2.5F;
  } else {
    p.scaling.shared = 1 / 2.5F;
  }
  R runner(self, experts.view(), p);
  std::vector<Act> x, out(w.hidden.size());
  for (float v : w.hidden) x.push_back(from_float<Act>(v));
  runner.forward(make_rows(static_cast<Act const*>(x.data()), kRows, kHidden), rows(logits, kExperts),
                 make_rows(out.data(), kRows, kHidden));
  std::vector<float> wide;
  for (Act v : out) wide.push_back(to_float(v));
  return wide;
}
float largest(std::vector<float> const& values) {
  float out = 0;
  for (float v : values) out = std::max(out, std::abs(v));
  return out;
}
struct FactorParts : InverseParts {
  using Scaling = runner::scaling::Factor;
};
// Routed values that f16 holds and 2.5 times them does not: with the factor on the shared output instead nothing overflows, and what the
// model multiplies by 2.5 is what bf16 gives.
TEST(Runner, N19_ScalingInF16OfLargeValues) {
  Weights w;
  for (float& v : w.hidden) v = to_float(from_float<bf16>(v));
  std::vector<float> const logits = w.logits();
  float const size = 40'000.0F / largest(scaled_block<float, InverseParts>(w, logits, 1.0F));
  std::vector<float> const want = scaled_block<bf16, FactorParts>(w, logits, size);
  ASSERT_GT(largest(want), 65'504.0F);
  EXPECT_TRUE(std::isinf(largest(scaled_block<f16, FactorParts>(w, logits, size)))) << "the factor on the routed output overflows";
  std::vector<float> got = scaled_block<f16, InverseParts>(w, logits, size);
  for (float& v : got) v *= 2.5F;
  ASSERT_TRUE(std::isfinite(largest(got)));
  expect_near(got, want, 2.0F / 256 * largest(want));
}

struct ZeroParts : RunnerDefaults {
  using ZeroExperts = runner::zero_experts::Identity;
  using Scaling = runner::scaling::Factor;
};
routing::RouterConfig zero_router() { return {.num_experts = kExperts, .topk = kTopK, .num_zero_experts = 3}; }
TEST(Runner, ZeroExperts) {
  Weights const w;
  std::vector<float> const logits = numbers(110, kRows * (kExperts + 3), 2.0F);
  std::vector<float> want = routed(w.hidden, logits, kHidden, zero_router());
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  Runner<Layer, ZeroParts>::Params p{.layer = layer_params(kHidden, zero_router())};
  p.scaling.routed = 2.0F;
  Runner<Layer, ZeroParts> runner(self, experts.view(), p);
  std::vector<float> out(want.size());
  runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts + 3), rows(out, kHidden));
  int found = 0;
  for (int t = 0; t < kRows; ++t) {
    float z = 0;
    for (int j = 0; j < kTopK; ++j) {
      if (runner.topk_ids()(t, j) >= kExperts) z += runner.topk_weights()(t, j), ++found;
    }
    for (int i = 0; i < kHidden; ++i) rows(want, kHidden)(t, i) = 2.0F * (rows(want, kHidden)(t, i) + z * rows(w.hidden, kHidden)(t, i));
  }
  EXPECT_GT(found, 0);
  expect_near(out, want, 1e-5F);
}

TEST(Runner, WhatCannotGoTogether) {
  Weights const w;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  {
    Runner<Layer, ZeroParts>::Params p{.layer = layer_params(kHidden)};
    p.layer.router.routed_scaling_factor = 2.5F;
    p.scaling.routed = 2.5F;
    expect_error(ErrorCode::config, "routed_scaling_factor: 2.5 in the routing weights and 2.5 on the output",
                 [&] { Runner<Layer, ZeroParts> runner(self, experts.view(), p); });
  }
  expect_error(ErrorCode::config, "zero experts: the router has 3",
               [&] { Runner<Layer> runner(self, experts.view(), {.layer = layer_params(kHidden, zero_router())}); });
  expect_error(ErrorCode::config, "gate: 5 logits, the router takes 6", [&] {
    Runner<Layer, GateParts> runner(self, experts.view(), {.layer = layer_params(kHidden), .gate = {make_rows(w.gate.data(), 5, kHidden)}});
  });
  expect_error(ErrorCode::argument, "gate: weight has 40 columns, expected hidden 48", [&] {
    Runner<Layer, GateParts> runner(self, experts.view(), {.layer = layer_params(kHidden), .gate = {make_rows(w.gate.data(), 6, 40)}});
  });
  expect_error(ErrorCode::config, "expert_hidden: 56 exceeds the layer's hidden 48",
               [&] { Runner<Layer> runner(self, experts.view(), {.layer = layer_params(kHidden), .hidden = 56, .expert_hidden = 56}); });
  expect_error(ErrorCode::config, "input projection: there is none, and the width changes from 56 to 48",
               [&] { Runner<Layer> runner(self, experts.view(), {.layer = layer_params(kHidden), .hidden = 56}); });
  expect_error(ErrorCode::argument, "output projection: weight is [48, 20], expected [48, 24]", [&] {
    auto const narrow = store(kLatent, kLatent);
    Runner<Layer, LatentParts> runner(self, narrow.view(),
                                      {.layer = layer_params(kLatent),
                                       .hidden = kHidden,
                                       .input = {rows(w.in, kHidden)},
                                       .output = {make_rows(w.out.data(), kHidden, 20)}});
  });
  {
    Runner<Layer, SumParts>::Params p{.layer = layer_params(kHidden)};
    p.shared = w.shared_params<decltype(p.shared)>();
    p.shared.gate = runner::shared::Gate::sigmoid;
    expect_error(ErrorCode::argument, "shared experts: the sigmoid gate has no vector",
                 [&] { Runner<Layer, SumParts> runner(self, experts.view(), p); });
    p.shared.gate = runner::shared::Gate::routing_weight;
    expect_error(ErrorCode::config, "shared experts: 2, and the router gives 0 weights for them",
                 [&] { Runner<Layer, SumParts> runner(self, experts.view(), p); });
  }
}

/// Routing of the last forward of a runner.
struct Routing {
  template <class R>
  explicit Routing(R& runner) {
    auto const chosen = runner.topk_ids();
    auto const chosen_weights = runner.topk_weights();
    for (std::int64_t t = 0; t < chosen.extent(0); ++t) {
      for (std::int64_t j = 0; j < chosen.extent(1); ++j) {
        ids.push_back(chosen(t, j));
        weights.push_back(chosen_weights(t, j));
      }
    }
  }
  template <class Id = std::int32_t, class R>
  std::vector<float> forward(R& runner, std::vector<float> const& x, ForwardOptions const& options = {}) const {
    std::vector<Id> const given(ids.begin(), ids.end());
    std::vector<float> out(x.size(), -1.0F);
    runner.forward_routed(rows(x, kHidden), make_rows(given.data(), static_cast<std::int64_t>(given.size()) / kTopK, kTopK),
                          rows(weights, kTopK), rows(out, kHidden), options);
    return out;
  }
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};
/// forward_routed() with the runner's own choice gives the bits of the forward before it.
template <class R>
Routing expect_same_bits(R& runner, std::vector<float> const& x, std::vector<float> const& want) {
  Routing const routing(runner);
  EXPECT_EQ(routing.forward(runner, x), want);
  EXPECT_EQ(routing.template forward<std::int64_t>(runner, x), want);
  EXPECT_EQ(Routing(runner).ids, routing.ids);
  return routing;
}

struct GatedSumParts : SumParts {
  using Gate = runner::gate::Linear<float>;
};
struct LatentZeroParts : LatentParts {
  using ZeroExperts = runner::zero_experts::Identity;
};
struct ChunkedParts : LatentZeroParts {
  using Chunking = runner::chunking::Lockstep;
};
TEST(Runner, RoutedByTheCallerWithSharedExperts) {
  Weights const w;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  Runner<Layer, GatedSumParts>::Params p{.layer = layer_params(kHidden), .gate = {rows(w.gate, kHidden), w.gate_bias.data()}};
  p.shared = w.shared_params<decltype(p.shared)>();
  p.shared.gate = runner::shared::Gate::sigmoid;
  p.shared.gate_vector = w.shared_gate.data();
  p.scaling.routed = 2.5F;
  p.end = {w.bias.data(), true, w.norm.data(), 1e-5F};
  Runner<Layer, GatedSumParts> runner(self, experts.view(), p);
  std::vector<float> out(w.hidden.size());
  runner.forward(rows(w.hidden, kHidden), rows(out, kHidden));
  Routing routing = expect_same_bits(runner, w.hidden, out);
  // Another choice is another output; padding is not checked.
  std::swap(routing.weights[0], routing.weights[1]);
  EXPECT_NE(routing.forward(runner, w.hidden), out);
  routing.ids.back() = kExperts;
  expect_error(ErrorCode::argument, text("topk_ids[", kRows - 1, ", 1]: 6 is out of range [-1, 6)"),
               [&] { routing.forward(runner, w.hidden); });
  routing.forward(runner, w.hidden, {.num_valid_rows = kRows - 1});
}

// Widths 48 → 24 → padded to 40 → 24 → 48, zero experts, and the same in chunks, with the last one partly filled.
TEST(Runner, RoutedByTheCallerInLatentBlocksAndChunks) {
  Weights const w;
  std::vector<float> const logits = numbers(110, kRows * (kExperts + 3), 2.0F);
  auto const experts = store(40, kLatent);
  comm::Self<> self;
  auto const with_parts = [&]<class R>(std::int64_t capacity) {
    typename R::Params p{.layer = layer_params(40, zero_router()), .hidden = kHidden, .expert_hidden = kLatent};
    p.input = {rows(w.in, kHidden)};
    p.output = {rows(w.out, kLatent)};
    p.layer.max_tokens_per_rank = capacity;
    return p;
  };
  using Whole = Runner<Layer, LatentZeroParts>;
  using Chunked = Runner<Layer, ChunkedParts>;
  Whole whole(self, experts.view(), with_parts.operator()<Whole>(kRows));
  std::vector<float> out(w.hidden.size());
  whole.forward(rows(w.hidden, kHidden), rows(logits, kExperts + 3), rows(out, kHidden));
  Routing routing = expect_same_bits(whole, w.hidden, out);
  EXPECT_GT(std::count_if(routing.ids.begin(), routing.ids.end(), [](std::int32_t id) { return id >= kExperts; }), 0);

  for (ChunkMode const mode : {ChunkMode::exact, ChunkMode::min_one}) {
    auto p = with_parts.operator()<Chunked>(3);
    p.chunking.mode = mode;
    Chunked chunked(self, experts.view(), p);
    EXPECT_EQ(routing.forward(chunked, w.hidden), out);
    EXPECT_EQ(routing.forward<std::int64_t>(chunked, w.hidden), out);
    chunked.forward_routed(make_rows(w.hidden.data(), 0, kHidden), make_rows(routing.ids.data(), 0, kTopK),
                           make_rows(routing.weights.data(), 0, kTopK), make_rows(out.data(), 0, kHidden));
    // Refused before the first chunk.
    Routing wrong = routing;
    wrong.ids.back() = kExperts + 3;
    std::vector<float> untouched(out.size(), -1.0F);
    expect_error(ErrorCode::argument, text("topk_ids[", kRows - 1, ", 1]: 9 is out of range [-1, 9)"), [&] {
      chunked.forward_routed(rows(w.hidden, kHidden), make_rows(wrong.ids.data(), kRows, kTopK), rows(wrong.weights, kTopK),
                             rows(untouched, kHidden));
    });
    // So is an output whose last row lies over the routing.
    std::vector<float> shared(out.size() + kRows * kTopK, -1.0F);
    std::copy(routing.weights.begin(), routing.weights.end(), shared.end() - kRows * kTopK);
    auto const forward = [&](std::int64_t at) {
      chunked.forward_routed(rows(w.hidden, kHidden), make_rows(routing.ids.data(), kRows, kTopK),
                             make_rows(static_cast<float const*>(shared.data() + out.size()), kRows, kTopK),
                             make_rows(shared.data() + at, kRows, kHidden));
    };
    expect_error(ErrorCode::argument, "output: its memory overlaps that of topk_weights", [&] { forward(1); });
    EXPECT_EQ(shared[1], -1.0F);
    forward(0);
    EXPECT_EQ(shared[1], out[1]);
    EXPECT_EQ(untouched, std::vector<float>(out.size(), -1.0F));
    EXPECT_EQ(routing.forward(chunked, w.hidden), out);
  }
}

// A runner whose layer has no router.
TEST(Runner, RoutedByTheCallerAlone) {
  Weights const w;
  std::vector<float> const logits = w.logits();
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  Runner<Layer> with_router(self, experts.view(), {.layer = layer_params(kHidden)});
  std::vector<float> out(w.hidden.size());
  with_router.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden));
  Routing const routing(with_router);
  using External =
      ModularKernel<Config<float>, routing::External, quantization::None, backends::NoExpertParallel<>, experts::Reference<float>>;
  Runner<External, SumParts>::Params p{.layer = {.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
                                                 .max_tokens_per_rank = kRows,
                                                 .placement = ExpertPlacement(kExperts, 1),
                                                 .router = {.num_experts = kExperts, .topk = kTopK}}};
  Runner<External, SumParts> runner(self, experts.view(), p);
  EXPECT_EQ(routing.forward(runner, w.hidden), out);
}

TEST(Runner, RoutingThatCannotBeGiven) {
  Weights const w;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  std::vector<std::int32_t> const ids(kRows * kTopK, -1);
  std::vector<float> const weights(ids.size());
  std::vector<float> out(w.hidden.size());
  auto const given = [&](auto& runner, std::int64_t id_rows, int k, ForwardOptions const& options = {}) {
    runner.forward_routed(rows(w.hidden, kHidden), make_rows(ids.data(), id_rows, k), make_rows(weights.data(), kRows, kTopK),
                          rows(out, kHidden), options);
  };
  Runner<Layer> plain(self, experts.view(), {.layer = layer_params(kHidden)});
  expect_error(ErrorCode::argument, "topk_ids: rows: 6, expected 7", [&] { given(plain, kRows - 1, kTopK); });
  expect_error(ErrorCode::argument, "topk_ids: width: 1, expected 2", [&] { given(plain, kRows, 1); });
  std::vector<std::int64_t> const tokens(kRows);
  expect_error(ErrorCode::argument, "token_ids: given to forward_routed(), which does not route",
               [&] { given(plain, kRows, kTopK, {.token_ids = tokens.data()}); });
  given(plain, kRows, kTopK);
  EXPECT_EQ(out, std::vector<float>(out.size()));

  // The router gives the shared experts their weights.
  Runner<Layer, SumParts>::Params p{
      .layer = layer_params(kHidden,
                            {.num_experts = kExperts, .topk = kTopK, .scoring = routing::Scoring::sigmoid, .num_joint_shared = kShared})};
  p.shared = w.shared_params<decltype(p.shared)>();
  p.shared.gate = runner::shared::Gate::routing_weight;
  Runner<Layer, SumParts> joint(self, experts.view(), p);
  expect_error(ErrorCode::unsupported, "shared experts: the router gives their weights", [&] { given(joint, kRows, kTopK); });
  std::vector<float> const logits = numbers(110, kRows * (kExperts + kShared), 2.0F);
  joint.forward(rows(w.hidden, kHidden), rows(logits, kExperts + kShared), rows(out, kHidden));
}

/// Shared experts of a caller that give one row too few.
struct ShortShared {
  static constexpr bool kAbsent = false;
  struct Params {
    static constexpr bool average = false;
    static constexpr int count = 1;
  };
  static runner::SharedOutput output_of(Params const&) { return runner::SharedOutput::complete; }
  template <class Space, class Act>
  class Part {
   public:
    using Output = float;
    Part(Params const&, runner::Sizes const& sizes, Arena<Space>&) : width_(sizes.hidden) {}
    static constexpr bool active() { return true; }
    static constexpr bool takes_routing_weights() { return false; }
    void run(Rows<Act const> hidden, Rows<float const>, Stream<Space>) { rows_ = hidden.extent(0) - 1; }
    std::int64_t rows() const { return rows_; }
    Rows<float> output() { return make_rows(static_cast<float*>(nullptr), rows_, width_); }

   private:
    std::int64_t width_, rows_ = 0;
  };
};
struct ShortParts : RunnerDefaults {
  using Shared = ShortShared;
};
TEST(Runner, SharedOutputOfOtherRowsIsAnInternalError) {
  Weights const w;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  Runner<Layer, ShortParts> runner(self, experts.view(), {.layer = layer_params(kHidden)});
  std::vector<float> const logits = w.logits();
  std::vector<float> out(w.hidden.size());
  expect_error(ErrorCode::internal, "shared experts: 6 rows of output for 7 rows",
               [&] { runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden)); });
}

/// Shared experts that may run beside the routed ones, as on a device: the work that follows output() waits for them.
int outputs_taken = 0;
struct BesideShared : runner::shared::Separate<experts::Reference<float>> {
  template <class Space, class Act>
  class Part : public Separate::template Part<Space, Act> {
   public:
    using Base = typename Separate::template Part<Space, Act>;
    using Base::Base;
    auto output() {
      ++outputs_taken;
      return Base::output();
    }
  };
};
struct BesideParts : RunnerDefaults {
  using Shared = BesideShared;
};
TEST(Runner, TheLayerDoesNotWaitForSharedExperts) {
  Weights const w;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  typename Runner<Layer, BesideParts>::Params p{.layer = layer_params(kHidden)};
  p.shared = w.shared_params<decltype(p.shared)>();
  Runner<Layer, BesideParts> runner(self, experts.view(), p);
  std::vector<float> const logits = w.logits();
  std::vector<float> out(w.hidden.size());
  struct Outputs : NoProbe {
    int before_combine = -1, before_finish = -1;
    void begin(Phase phase) {
      if (phase == Phase::combine) before_combine = outputs_taken;
      if (phase == Phase::finish) before_finish = outputs_taken;
    }
  } seen;
  outputs_taken = 0;
  runner.forward(rows(w.hidden, kHidden), rows(logits, kExperts), rows(out, kHidden), {}, {}, seen);
  EXPECT_EQ(seen.before_combine, 0);
  EXPECT_EQ(seen.before_finish, 0);
  EXPECT_GT(outputs_taken, 0) << "the sum takes it";
}

TEST(Runner, WrongArguments) {
  Weights const w;
  auto const experts = store(kHidden, kHidden);
  comm::Self<> self;
  Runner<Layer> runner(self, experts.view(), {.layer = layer_params(kHidden)});
  std::vector<float> const logits = w.logits();
  std::vector<float> out(2 * w.hidden.size(), -1.0F);
  auto refuses = [&](ErrorCode code, std::string_view part, Rows<float const> x, Rows<float const> l, Rows<float> y) {
    expect_error(code, part, [&] { runner.forward(x, l, y); });
    EXPECT_EQ(out, std::vector<float>(out.size(), -1.0F)) << part;
  };
  auto const x = rows(w.hidden, kHidden);
  auto const l = rows(logits, kExperts);
  auto const y = make_rows(out.data(), kRows, kHidden);
  refuses(ErrorCode::argument, "hidden_states: width: 24, expected 48", make_rows(w.hidden.data(), kRows, 24), l, y);
  refuses(ErrorCode::argument, "output: width: 24, expected 48", x, l, make_rows(out.data(), kRows, 24));
  refuses(ErrorCode::argument, "output: rows: 6, expected 7", x, l, make_rows(out.data(), 6, kHidden));
  refuses(ErrorCode::argument, "router_logits: rows: 6, expected 7", x, make_rows(logits.data(), 6, kExperts), y);
  refuses(ErrorCode::argument, "router_logits: width: 5, expected 6", x, make_rows(logits.data(), kRows, 5), y);
  std::vector<float> const many(static_cast<std::size_t>((kRows + 1) * kHidden));
  refuses(ErrorCode::capacity, "hidden_states: 8 rows exceed max_tokens_per_rank 7", rows(many, kHidden), l,  // N21
          make_rows(out.data(), kRows + 1, kHidden));
  std::vector<float> neighbours((2 * kRows + 1) * kHidden);  // one row too many of each, and they overlap
  refuses(ErrorCode::capacity, "8 rows exceed max_tokens_per_rank 7",
          make_rows(static_cast<float const*>(neighbours.data()), kRows + 1, kHidden), l,
          make_rows(neighbours.data() + kRows * kHidden, kRows + 1, kHidden));
  refuses(ErrorCode::argument, "output: its memory overlaps that of router_logits, expected memory that the call does not read", x,
          make_rows(static_cast<float const*>(out.data()) + kRows * kHidden - 1, kRows, kExperts), y);
  runner.forward(x, l, y);
  EXPECT_NE(out[0], -1.0F);
  runner.forward(make_rows(w.hidden.data(), 0, kHidden), make_rows(logits.data(), 0, kExperts), make_rows(out.data(), 0, kHidden));
}

}  // namespace
