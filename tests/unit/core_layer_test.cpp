// SPDX-License-Identifier: Apache-2.0
// tests/unit/core_layer_test.cpp: layers of real policies on one rank: where the router weight goes, weights and placements that do not
// fit the layer, routing functions that throw.
#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

#include "../expect_error.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/reference.hpp"
#include "moe/modular_kernel.hpp"
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

// The caller's shape says nothing of weight_on_input: Llama-4's router does.
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

// Whatever a caller's function throws comes back as it is and leaves the layer as it was.
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
