// SPDX-License-Identifier: Apache-2.0
// tests/unit/core_forward_routed_test.cpp: routing that the caller did, on one rank: the same bits as forward(), padding, mapping and load,
// zero experts, a layer without a router, and each invalid slot by its sentence.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "../expect_error.hpp"
#include "moe/activation/activation.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/external.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "moe/routing/zero_expert.hpp"

namespace {

using namespace moe;
using moe_test::expect_error;

struct Config : LayerDefaults {
  using Activation = activation::Silu;
};
constexpr int kHidden = 16;
constexpr int kIntermediate = 8;
constexpr int kExperts = 5;
constexpr int kTopK = 3;
constexpr std::int64_t kRows = 4;

std::vector<float> values(std::size_t n, int seed) {
  std::vector<float> v(n);
  for (std::size_t i = 0; i < n; ++i) v[i] = static_cast<float>((i * 37 + static_cast<std::size_t>(seed) * 11) % 29) / 14.0F - 1.0F;
  return v;
}
/// `num_local` experts; expert e holds the weights of logical[e], or of e.
struct Store : experts::WeightStore<Config, quantization::None> {
  explicit Store(std::vector<std::int32_t> const& logical = {0, 1, 2, 3, 4})
      : WeightStore(static_cast<std::int64_t>(logical.size()), kHidden, kIntermediate, true) {
    for (std::size_t e = 0; e < logical.size(); ++e) {
      set_expert(static_cast<std::int64_t>(e), values(2 * kIntermediate * kHidden, logical[e]).data(),
                 values(kHidden * kIntermediate, logical[e] + 50).data());
    }
  }
};
template <class Router>
using LayerOf = ModularKernel<Config, Router, quantization::None, backends::NoExpertParallel<>, experts::Reference<>>;
using Routed = LayerOf<routing::External>;
using Softmax = LayerOf<routing::SoftmaxTopK<routing::Renormalize::yes>>;

template <class Layer>
typename Layer::Params params(ExpertPlacement const& placement = {kExperts, 1}) {
  return {.shape = {kHidden, kIntermediate, kExperts, kTopK},
          .max_tokens_per_rank = kRows,
          .placement = placement,
          .router = {.num_experts = kExperts, .topk = kTopK}};
}
struct Batch {
  std::vector<float> hidden = values(kRows * kHidden, 3);
  std::vector<std::int32_t> ids = {0, 1, 2, 4, 3, -1, -1, -1, -1, 2, 0, 4};
  std::vector<float> weights = {0.5F, 0.25F, 0.25F, 0.75F, 0.25F, 0.0F, 0.0F, 0.0F, 0.0F, 1.0F, 2.0F, -3.0F};
};
template <class Layer>
std::vector<float> forward_routed(Layer& layer, Batch const& in, ForwardOptions const& options = {}) {
  std::vector<float> out(kRows * kHidden, -1.0F);
  layer.forward_routed(make_rows(in.hidden.data(), kRows, kHidden), make_rows(in.ids.data(), kRows, kTopK),
                       make_rows(in.weights.data(), kRows, kTopK), make_rows(out.data(), kRows, kHidden), options);
  return out;
}

TEST(ForwardRouted, EqualsForward) {
  Store const store;
  comm::Self<> self;
  Softmax layer(self, store.view(), params<Softmax>());
  Routed routed(self, store.view(), params<Routed>());
  Batch in;
  std::vector<float> logits = values(kRows * kExperts, 9);
  std::fill_n(logits.begin(), kExperts - 1, -std::numeric_limits<float>::infinity());  // row 0: one expert, two slots of -1
  std::vector<float> expected(kRows * kHidden);
  layer.forward(make_rows(in.hidden.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts),
                make_rows(expected.data(), kRows, kHidden));
  in.ids.assign(layer.topk_ids().data_handle(), layer.topk_ids().data_handle() + kRows * kTopK);
  in.weights.assign(layer.topk_weights().data_handle(), layer.topk_weights().data_handle() + kRows * kTopK);
  EXPECT_EQ(in.ids[1], -1);
  EXPECT_EQ(forward_routed(layer, in), expected) << "a layer with a router takes the caller's routing, too";
  EXPECT_EQ(forward_routed(routed, in), expected);
  for (std::int64_t i = 0; i < kRows * kTopK; ++i) EXPECT_EQ(routed.topk_ids().data_handle()[i], in.ids[static_cast<std::size_t>(i)]);
}

TEST(ForwardRouted, WideRowsAndSlotsWithoutAnExpert) {
  Store const store;
  comm::Self<> self;
  Routed layer(self, store.view(), params<Routed>());
  Batch in;
  std::vector<float> const expected = forward_routed(layer, in);
  EXPECT_TRUE(std::all_of(expected.begin() + 2 * kHidden, expected.begin() + 3 * kHidden, [](float v) { return v == 0.0F; }));
  std::vector<std::int32_t> ids(kRows * 8, 99);  // rows further apart than they are wide
  std::vector<float> weights(kRows * 8, std::nanf(""));
  for (std::size_t t = 0; t < kRows; ++t) {
    for (std::size_t j = 0; j < kTopK; ++j) {
      ids[t * 8 + j] = in.ids[t * kTopK + j];
      weights[t * 8 + j] = in.ids[t * kTopK + j] == -1 ? std::nanf("") : in.weights[t * kTopK + j];  // not read where there is no expert
    }
  }
  std::vector<float> out(kRows * kHidden, -1.0F);
  layer.forward_routed(make_rows(in.hidden.data(), kRows, kHidden), make_strided_rows(ids.data(), kRows, kTopK, 8),
                       make_strided_rows(weights.data(), kRows, kTopK, 8), make_rows(out.data(), kRows, kHidden));
  EXPECT_EQ(out, expected);
  EXPECT_EQ(layer.topk_weights()(2, 0), 0.0F);
}

// int64 ids give the same bits; an id whose low half is an expert is refused.
TEST(ForwardRouted, IdsOfInt64) {
  Store const store;
  comm::Self<> self;
  Routed layer(self, store.view(), params<Routed>());
  Batch const in;
  std::vector<std::int64_t> ids(kRows * 5, 99);
  for (std::size_t t = 0; t < kRows; ++t) std::copy_n(in.ids.begin() + static_cast<std::ptrdiff_t>(t * kTopK), kTopK, &ids[t * 5]);
  std::vector<float> out(kRows * kHidden, -1.0F);
  auto call = [&] {
    layer.forward_routed(make_rows(in.hidden.data(), kRows, kHidden), make_strided_rows(ids.data(), kRows, kTopK, 5),
                         make_rows(in.weights.data(), kRows, kTopK), make_rows(out.data(), kRows, kHidden));
  };
  call();
  EXPECT_EQ(out, forward_routed(layer, in));
  ids[1] = (std::int64_t{1} << 32) + 1;
  expect_error(ErrorCode::argument, "topk_ids[0, 1]: 4294967297 is out of range [-1, 5)", call);
  ids[1] = -(std::int64_t{1} << 32);
  expect_error(ErrorCode::argument, "topk_ids[0, 1]: -4294967296 is out of range [-1, 5)", call);
}

TEST(ForwardRouted, PaddingIsNotChecked) {
  Store const store;
  comm::Self<> self;
  Routed layer(self, store.view(), params<Routed>());
  Batch in;
  std::vector<float> expected = forward_routed(layer, in);
  std::fill(expected.begin() + 2 * kHidden, expected.end(), 0.0F);
  for (std::size_t i = 2 * kTopK; i < in.ids.size(); ++i) in.ids[i] = -77;
  EXPECT_EQ(forward_routed(layer, in, {.num_valid_rows = 2}), expected);
  EXPECT_EQ(layer.topk_ids()(3, 0), -1);
  expect_error(ErrorCode::argument, "topk_ids[2, 0]: -77 is out of range [-1, 5)",
               [&] { forward_routed(layer, in, {.num_valid_rows = 3}); });
  for (std::int64_t const wrong : {std::int64_t{5}, std::int64_t{-2}, std::numeric_limits<std::int64_t>::min()}) {
    expect_error(ErrorCode::argument, moe::text("num_valid_rows: ", wrong, " is out of range [0, 4], or -1 for all rows"),
                 [&] { forward_routed(layer, in, {.num_valid_rows = wrong}); });
  }
}

TEST(ForwardRouted, ForwardRefusesTheSameNumbersOfValidRows) {
  Store const store;
  comm::Self<> self;
  Softmax layer(self, store.view(), params<Softmax>());
  Batch const in;
  std::vector<float> const logits = values(kRows * kExperts, 9);
  std::vector<float> out(kRows * kHidden);
  for (std::int64_t const wrong : {5, -2}) {
    expect_error(ErrorCode::argument, moe::text("num_valid_rows: ", wrong, " is out of range [0, 4], or -1 for all rows"), [&] {
      layer.forward(make_rows(in.hidden.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts),
                    make_rows(out.data(), kRows, kHidden), {.num_valid_rows = wrong});
    });
  }
}

TEST(ForwardRouted, ALayerRefusesConstantsThatAreNotNumbers) {
  Store const store;
  comm::Self<> self;
  auto wrong = params<Routed>();
  wrong.activation.constants.alpha = std::nanf("");
  expect_error(ErrorCode::config, "activation: alpha nan is not a finite number", [&] { Routed(self, store.view(), wrong); });
}

// The caller's ids are logical: replicas are chosen, and the load of physical experts counted, as in forward().
TEST(ForwardRouted, MappingReplicasAndLoad) {
  std::vector<std::int32_t> const physical_to_logical = {3, 1, 0, 0, 4, 2, 2};
  std::vector<std::int32_t> const tables = {2, 3, 1, 0, 5, 6, 0, 0, 4, 0};
  std::vector<std::int32_t> const counts = {2, 1, 2, 1, 1};
  Store const plain_store, store(physical_to_logical);
  comm::Self<> self;
  Routed plain(self, plain_store.view(), params<Routed>());
  auto with_map = [&]<class Layer>(std::vector<std::int32_t>& load) {
    auto p = params<Layer>(ExpertPlacement::from_physical_to_logical(physical_to_logical, kExperts, 1));
    p.mapping = {.num_experts = kExperts,
                 .num_physical = 7,
                 .max_replicas = 2,
                 .logical_to_physical = tables.data(),
                 .replica_count = counts.data()};
    p.load = {.load_counter = load.data()};
    return p;
  };
  std::vector<std::int32_t> load(7), expected_load(7);
  Routed mapped(self, store.view(), with_map.operator()<Routed>(load));
  Batch in;
  EXPECT_EQ(forward_routed(mapped, in), forward_routed(plain, in));
  EXPECT_EQ(load, (std::vector<std::int32_t>{1, 1, 1, 1, 2, 1, 1})) << "replicas by token: rows 0 and 3 of expert 0 go to 2 and 3";

  Softmax softmax(self, store.view(), with_map.operator()<Softmax>(expected_load));
  std::vector<float> const logits = values(kRows * kExperts, 9);
  std::vector<float> expected(kRows * kHidden);
  softmax.forward(make_rows(in.hidden.data(), kRows, kHidden), make_rows(logits.data(), kRows, kExperts),
                  make_rows(expected.data(), kRows, kHidden));
  in.ids.assign(softmax.topk_ids().data_handle(), softmax.topk_ids().data_handle() + kRows * kTopK);
  in.weights.assign(softmax.topk_weights().data_handle(), softmax.topk_weights().data_handle() + kRows * kTopK);
  std::fill(load.begin(), load.end(), 0);
  EXPECT_EQ(forward_routed(mapped, in), expected);
  EXPECT_EQ(load, expected_load);
}

// Ids of zero experts are E and above; they are not dispatched, and ids past them are refused.
TEST(ForwardRouted, ZeroExperts) {
  using Router = routing::ZeroExpert<routing::Scoring::softmax, routing::Renormalize::no>;
  Store const store;
  comm::Self<> self;
  auto p = params<Routed>();
  p.router.num_zero_experts = 2;
  Routed layer(self, store.view(), p);
  auto z = params<LayerOf<Router>>();
  z.router.num_zero_experts = 2;
  LayerOf<Router> router_layer(self, store.view(), z);
  Batch in;
  std::vector<float> const expected = forward_routed(layer, in);
  in.ids[5] = 6;
  in.weights[5] = 0.5F;
  EXPECT_EQ(forward_routed(layer, in), expected);
  EXPECT_EQ(forward_routed(router_layer, in), expected);
  EXPECT_EQ(layer.topk_ids()(1, 2), 6);
  EXPECT_EQ(layer.topk_weights()(1, 2), 0.5F);
  in.ids[5] = 7;
  expect_error(ErrorCode::argument, "topk_ids[1, 2]: 7 is out of range [-1, 7)", [&] { forward_routed(layer, in); });
  expect_error(ErrorCode::argument, "topk_ids[1, 2]: 7 is out of range [-1, 7)", [&] { forward_routed(router_layer, in); });
}

TEST(ForwardRouted, InvalidSlotsAndArraysAreNamed) {
  Store const store;
  comm::Self<> self;
  Routed layer(self, store.view(), params<Routed>());
  Batch const good;
  std::vector<float> const expected = forward_routed(layer, good);
  auto refuses = [&](char const* sentence, auto&& spoil) {
    Batch in;
    spoil(in);
    expect_error(ErrorCode::argument, sentence, [&] { forward_routed(layer, in); });
    EXPECT_EQ(forward_routed(layer, good), expected) << "the next call works";
  };
  refuses("topk_ids[3, 1]: 5 is out of range [-1, 5)", [](Batch& b) { b.ids[10] = kExperts; });
  refuses("topk_ids[0, 2]: -2 is out of range [-1, 5)", [](Batch& b) { b.ids[2] = -2; });
  refuses("topk_ids[1, 1]: 4 occurs twice in its row", [](Batch& b) { b.ids[4] = 4; });
  refuses("topk_weights[3, 2]: inf is not finite", [](Batch& b) { b.weights[11] = std::numeric_limits<float>::infinity(); });
  refuses("topk_weights[0, 0]: nan is not finite", [](Batch& b) { b.weights[0] = std::nanf(""); });

  auto call = [&](Rows<std::int32_t const> ids, Rows<float const> weights, ForwardOptions const& options = {}) {
    std::vector<float> out(kRows * kHidden);
    layer.forward_routed(make_rows(good.hidden.data(), kRows, kHidden), ids, weights, make_rows(out.data(), kRows, kHidden), options);
  };
  auto const ids = make_rows(good.ids.data(), kRows, kTopK);
  auto const weights = make_rows(good.weights.data(), kRows, kTopK);
  std::int64_t const token = 0;
  float shared = 0.0F;
  auto arg = [&](char const* sentence, auto&& f) { expect_error(ErrorCode::argument, sentence, f); };
  arg("topk_ids: width: 2, expected 3", [&] { call(make_rows(good.ids.data(), kRows, 2), weights); });
  arg("topk_ids: rows: 3, expected 4", [&] { call(make_rows(good.ids.data(), 3, kTopK), weights); });
  arg("topk_weights: rows: 3, expected 4", [&] { call(ids, make_rows(good.weights.data(), 3, kTopK)); });
  arg("topk_weights: width: 1, expected 3", [&] { call(ids, make_rows(good.weights.data(), kRows, 1)); });
  arg("topk_ids: null pointer for 4 rows", [&] { call(make_rows(static_cast<std::int32_t const*>(nullptr), kRows, kTopK), weights); });
  arg("topk_weights: row stride 1 is less than the width 3", [&] { call(ids, make_strided_rows(good.weights.data(), kRows, kTopK, 1)); });
  arg("token_ids: given to forward_routed()", [&] { call(ids, weights, {.token_ids = &token}); });
  arg("shared_weights: given to forward_routed()", [&] { call(ids, weights, {.shared_weights = make_rows(&shared, 1, 1)}); });
  expect_error(ErrorCode::unsupported, "num_rows: no_expert_parallel takes its row count from the host", [&] {
    std::int32_t const rows = 1;
    call(ids, weights, {.num_rows = &rows});
  });
}

TEST(ForwardRouted, NoRows) {
  Store const store;
  comm::Self<> self;
  Routed layer(self, store.view(), params<Routed>());
  layer.forward_routed(make_rows(static_cast<float const*>(nullptr), 0, kHidden),
                       make_rows(static_cast<std::int32_t const*>(nullptr), 0, kTopK),
                       make_rows(static_cast<float const*>(nullptr), 0, kTopK), make_rows(static_cast<float*>(nullptr), 0, kHidden));
  EXPECT_EQ(layer.topk_ids().extent(0), 0);
}

TEST(ForwardRouted, ExternalRouterIsValidated) {
  expect_error(ErrorCode::config, "top_k: 6 is out of range [1, 5]", [] { routing::External({.num_experts = 5, .topk = 6}); });
  expect_error(ErrorCode::config, "num_experts: 0 is below 1", [] { routing::External({.topk = 1}); });
}

}  // namespace
