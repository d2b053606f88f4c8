// SPDX-License-Identifier: Apache-2.0
// tests/unit/core_layer_test.cpp: layers of real policies on one rank: where the router weight goes, weights and placements that do not
// fit the layer, routing functions that throw.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../expect_error.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/reference.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/custom.hpp"
#include "moe/routing/llama4.hpp"

namespace {

using namespace moe;
using moe_test::expect_error;

struct Config : LayerDefaults {
  using Activation = activation::Silu;
};
using Rows1 = std::vector<float>;

constexpr int kHidden = 16;
constexpr int kIntermediate = 24;
constexpr int kExperts = 4;
constexpr std::int64_t kRows = 5;

Rows1 values(std::size_t n, int seed) {
  Rows1 v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = static_cast<float>((i * 37 + static_cast<std::size_t>(seed) * 11) % 29) / 14.0F - 1.0F;
  return v;
}
struct Store : experts::WeightStore<Config, quantization::None> {
  explicit Store(std::int64_t num_local) : WeightStore(num_local, kHidden, kIntermediate, true) {
    for (std::int64_t e = 0; e < num_local; ++e) {
      auto const seed = static_cast<int>(e);
      set_expert(e, values(2 * kIntermediate * kHidden, seed).data(), values(kHidden * kIntermediate, seed + 50).data());
    }
  }
};
template <class Router, class Experts>
using LayerOf = ModularKernel<Config, Router, quantization::None, backends::NoExpertParallel<>, Experts>;

template <class Layer>
typename Layer::Params params(typename Layer::RouterType::Params const& router) {
  return {.shape = {kHidden, kIntermediate, kExperts, 1},
          .max_tokens_per_rank = 8,
          .placement = ExpertPlacement(kExperts, 1),
          .router = router};
}
template <class Layer>
Rows1 forward(Layer& layer, Rows1 const& hidden, Rows1 const& logits) {
  Rows1 out(hidden.size(), -1.0F);
  layer.forward(make_rows(hidden.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts), make_rows(out.data(), kRows, kHidden));
  return out;
}

template <class Experts>
class LayerOn : public testing::Test {};
using AllExperts = testing::Types<experts::Reference<>, experts::OneDnn>;
TYPED_TEST_SUITE(LayerOn, AllExperts);

// weight_on_input comes from Llama-4's router; the caller's shape does not set it.
TYPED_TEST(LayerOn, Llama4PutsTheWeightOnTheInput) {
  Store const store(kExperts);
  comm::Self<> self;
  Rows1 const hidden = values(kRows * kHidden, 3);
  Rows1 const logits = values(kRows * kExperts, 9);
  LayerOf<routing::Llama4, TypeParam> layer(self, store.view(), params<LayerOf<routing::Llama4, TypeParam>>({.num_experts = kExperts}));
  EXPECT_TRUE(layer.shape().weight_on_input());
  Rows1 const out = forward(layer, hidden, logits);

  Rows1 weighted = hidden;
  for (std::int64_t t = 0; t < kRows; ++t) {
    for (int h = 0; h < kHidden; ++h) weighted[static_cast<std::size_t>(t * kHidden + h)] *= layer.topk_weights()(t, 0);
  }
  auto same_experts = [&](auto const&, int, bool, Rows<std::int32_t> ids, Rows<float> weights) {
    for (std::int64_t t = 0; t < kRows; ++t) {
      ids(t, 0) = layer.topk_ids()(t, 0);
      weights(t, 0) = 1.0F;
    }
  };
  using Plain = LayerOf<routing::CustomRouter<decltype(same_experts)>, TypeParam>;
  Plain plain(self, store.view(), params<Plain>({.num_experts = kExperts, .topk = 1, .function = same_experts}));
  EXPECT_FALSE(plain.shape().weight_on_input());
  Rows1 const expected = forward(plain, weighted, logits);
  for (std::size_t i = 0; i < out.size(); ++i) ASSERT_NEAR(out[i], expected[i], 1e-5) << i;
}

TYPED_TEST(LayerOn, WeightsAndPlacementMustCoverTheExperts) {
  using Layer = LayerOf<routing::Llama4, TypeParam>;
  comm::Self<> self;
  auto const good = params<Layer>({.num_experts = kExperts});
  Store const few(kExperts - 1);
  expect_error(ErrorCode::argument, "expert weights: 3 experts, the placement gives rank 0 4", [&] { Layer l(self, few.view(), good); });
  Store const more(kExperts + 1);
  Layer(self, more.view(), good);
  for (int physical : {2, 5}) {
    auto p = good;
    p.placement = ExpertPlacement(physical, 1);
    expect_error(ErrorCode::config, text("placement: ", physical, " physical experts, without a mapping expected num_experts 4"),
                 [&] { Layer l(self, more.view(), p); });
  }
}

TYPED_TEST(LayerOn, ExpertsThatWereNeverSetAreNamed) {
  using Layer = LayerOf<routing::Llama4, TypeParam>;
  comm::Self<> self;
  auto const p = params<Layer>({.num_experts = kExperts});
  experts::WeightStore<Config, quantization::None> store(kExperts, kHidden, kIntermediate, true);
  Rows1 const some = values(2 * kIntermediate * kHidden, 1);
  for (int const expert : {0, 3, 1}) store.set_expert(expert, some.data(), some.data());
  expect_error(ErrorCode::state, "expert weights: expert 2 of 4 was never set. Fix: set_expert() for each",
               [&] { Layer l(self, store.view(), p); });
  store.set_expert(2, some.data(), some.data());
  Layer(self, store.view(), p);
  experts::WeightStore<Config, quantization::None> moved(kExperts, kHidden, kIntermediate, true);
  moved.visit_tensors([](char const*, auto const&) {});  // as load balancing fills it
  Layer(self, moved.view(), p);
}

TYPED_TEST(LayerOn, MissingParametersAreNamed) {
  using Layer = LayerOf<routing::Llama4, TypeParam>;
  Store const store(kExperts);
  comm::Self<> self;
  ExpertPlacement const placement(kExperts, 1);
  LayerShape const shape{kHidden, kIntermediate, kExperts, 1};
  expect_error(ErrorCode::config, ".max_tokens_per_rank is missing in the layer's parameters, or below 0: -1",
               [&] { Layer l(self, store.view(), {.shape = shape, .placement = placement, .router = {.num_experts = kExperts}}); });
  expect_error(ErrorCode::config, ".router is missing in the layer's parameters, or leaves num_experts at 0: num_experts: 0 is below 1",
               [&] { Layer l(self, store.view(), {.shape = shape, .max_tokens_per_rank = 8, .placement = placement}); });
  expect_error(
      ErrorCode::config, ".shape is missing in the layer's parameters, and the configuration leaves dimensions dynamic: hidden: 0",
      [&] { Layer l(self, store.view(), {.max_tokens_per_rank = 8, .placement = placement, .router = {.num_experts = kExperts}}); });
  std::function<void(Rows<float const>, int, bool, Rows<std::int32_t>, Rows<float>)> const empty;
  using Custom = LayerOf<routing::CustomRouter<decltype(empty)>, TypeParam>;
  expect_error(ErrorCode::argument, "function: empty", [&] {
    Custom l(self, store.view(),
             {.shape = shape,
              .max_tokens_per_rank = 8,
              .placement = placement,
              .router = {.num_experts = kExperts, .topk = 1, .function = empty}});
  });
}

struct Fixed : Config {
  static constexpr int hidden = kHidden, intermediate = kIntermediate;
};
TEST(WeightStore, SizesOtherThanThoseOfTheType) {
  using Store = experts::WeightStore<Fixed, quantization::None>;
  Store(kExperts, kHidden, kIntermediate, true);
  expect_error(ErrorCode::config, "expert weights: hidden: 32 was given, but the layer's type fixes it to 16",
               [] { Store store(kExperts, 32, kIntermediate, true); });
  expect_error(ErrorCode::config, "expert weights: intermediate: 12 was given, but the layer's type fixes it to 24",
               [] { Store store(kExperts, kHidden, 12, true); });
}

// Sizes without a whole group are refused before anything is divided by it.
TEST(WeightStore, SizesThatTheQuantisationCannotTake) {
  expect_error(ErrorCode::config, text("int4_group128 needs the intermediate size per partition to be a multiple of 32, got 16"),
               [] { experts::WeightStore<Config, quantization::Int4Group128> store(1, 128, 16, true); });
}

TEST(WeightStore, NullSourcesAreNamed) {
  experts::WeightStore<Config, quantization::None> store(1, 4, 8, true);
  std::vector<float> const some(64, 1.0F);
  float const* const none = nullptr;
  expect_error(ErrorCode::argument, "expert weights: w13 is a null pointer for 64 elements",
               [&] { store.set_expert(0, none, some.data()); });
  expect_error(ErrorCode::argument, "expert weights: w2 is a null pointer for 32 elements",
               [&] { store.set_expert(0, some.data(), none); });
  expect_error(ErrorCode::argument, "expert weights: b2 is a null pointer for 4 elements", [&] { store.set_bias(0, some.data(), none); });
}

// A missing array is reported at construction, not in forward().
TYPED_TEST(LayerOn, MissingWeightArraysAreNamed) {
  using Quant = quantization::Fp8Block<>;
  using Layer = ModularKernel<Config, routing::Llama4, Quant, backends::NoExpertParallel<>, TypeParam>;
  experts::WeightStore<Config, Quant> store(kExperts, 128, 128, true);
  std::vector<float> const bias(256, 0.0F);
  for (int e = 0; e < kExperts; ++e) {
    store.set_expert(e, values(256 * 128, e).data(), values(128 * 128, e).data());
    store.set_bias(e, bias.data(), bias.data());
  }
  comm::Self<> self;
  typename Layer::Params p{.shape = {128, 128, kExperts, 1},
                           .max_tokens_per_rank = 8,
                           .placement = ExpertPlacement(kExperts, 1),
                           .router = {.num_experts = kExperts}};
  Layer(self, store.view(), p);
  auto refuses = [&](std::string const& sentence, auto&& spoil) {
    auto w = store.view();
    spoil(w);
    expect_error(ErrorCode::argument, "expert weights: " + sentence, [&] { Layer l(self, w, p); });
  };
  using Codes = decltype(store.view().w13.codes);
  using Scales = decltype(store.view().w13.scales);
  auto missing = [](auto& view) { view = std::remove_cvref_t<decltype(view)>(nullptr, view.mapping()); };
  refuses("w13 codes is a null pointer for 131072 elements", [&](auto& w) { missing(w.w13.codes); });
  refuses("w2 codes is a null pointer for 65536 elements", [&](auto& w) { missing(w.w2.codes); });
  refuses("w13 scales is a null pointer for 8 elements", [&](auto& w) { missing(w.w13.scales); });
  refuses("w2 scales is a null pointer for 4 elements", [&](auto& w) { missing(w.w2.scales); });
  refuses("w13 bias is a null pointer for 1024 elements", [&](auto& w) { missing(w.w13.bias); });
  refuses("w2 scales: experts is 0, expected 4", [&](auto& w) { w.w2.scales = Scales(); });
  refuses("w2 codes: rows is 0, expected 128", [&](auto& w) { w.w2.codes = Codes(); });
}

// A row of NaN logits goes to the first experts, by the router's rule, and is counted; a single NaN only excludes its expert.
TYPED_TEST(LayerOn, RowsWithoutAFiniteLogitAreCounted) {
  using Layer = LayerOf<routing::Llama4, TypeParam>;
  Store const store(kExperts);
  comm::Self<> self;
  Layer layer(self, store.view(), params<Layer>({.num_experts = kExperts}));
  Rows1 const hidden = values(kRows * kHidden, 3);
  Rows1 logits = values(kRows * kExperts, 9);
  forward(layer, hidden, logits);
  EXPECT_EQ(layer.counters().degenerate_rows, 0);
  float const nan = std::numeric_limits<float>::quiet_NaN();
  logits[0] = nan;                                                                                // row 0: one expert
  std::fill_n(logits.begin() + kExperts, kExperts, nan);                                          // row 1
  std::fill_n(logits.begin() + 3 * kExperts, kExperts, -std::numeric_limits<float>::infinity());  // row 3
  forward(layer, hidden, logits);
  EXPECT_EQ(layer.counters().degenerate_rows, 2);
  EXPECT_NE(layer.topk_ids()(0, 0), 0);
  EXPECT_EQ(layer.topk_ids()(1, 0), 0);
  forward(layer, hidden, logits);
  EXPECT_EQ(layer.counters().degenerate_rows, 4);
}

TYPED_TEST(LayerOn, ConstructionTellsWhatItTakesIfAsked) {
  using Layer = LayerOf<routing::Llama4, TypeParam>;
  Store const store(kExperts);
  comm::Self<> self;
  auto p = params<Layer>({.num_experts = kExperts});
  std::vector<std::string> lines;
  p.log = [&](std::string const& line) { lines.push_back(line); };
  Layer const layer(self, store.view(), p);
  EXPECT_GT(layer.memory().arena, 0U);
  EXPECT_EQ(layer.memory().window, 0U);
  EXPECT_EQ(layer.bytes(), layer.memory().arena);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0], text("moe: llama4, none, no_expert_parallel, ", TypeParam::kName, " on rank 0 of 1: ", layer.bytes(),
                           " bytes in the arena, 0 in the window"));
  p.log = std::function<void(std::string const&)>();  // nothing is called
  Layer const silent(self, store.view(), p);
  EXPECT_EQ(lines.size(), 1U);
}

// An exception of a caller's function is passed on unchanged and leaves the layer unchanged.
TYPED_TEST(LayerOn, RoutingThatThrows) {
  bool fail = true;
  auto route = [&fail](auto const&, int, bool, Rows<std::int32_t> ids, Rows<float> weights) {
    if (fail) throw std::runtime_error("no routing today");
    for (std::int64_t t = 0; t < kRows; ++t) {
      ids(t, 0) = static_cast<std::int32_t>(t % kExperts);
      weights(t, 0) = 1.0F;
    }
  };
  using Layer = LayerOf<routing::CustomRouter<decltype(route)>, TypeParam>;
  Store const store(kExperts);
  comm::Self<> self;
  Layer layer(self, store.view(), params<Layer>({.num_experts = kExperts, .topk = 1, .function = route}));
  Rows1 const hidden = values(kRows * kHidden, 3);
  EXPECT_THROW(forward(layer, hidden, values(kRows * kExperts, 9)), std::runtime_error);
  fail = false;
  EXPECT_NE(forward(layer, hidden, values(kRows * kExperts, 9))[0], -1.0F);
}

}  // namespace
