// SPDX-License-Identifier: Apache-2.0
// tests/gpu/routing_fixed_test.cu: kernels that are compiled for the sizes of a preset, against the host: ids, weights, mapping, load and
// permutation, bit for bit, as routing_test.cu and routing_policy_test.cu expect them of the kernels with run-time sizes.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "moe/core/config_defaults.hpp"
#include "moe/models/deepseek.hpp"
#include "moe/models/gpt_oss.hpp"
#include "moe/models/longcat.hpp"
#include "moe/models/qwen.hpp"
#include "moe/routing/fixed_sizes.hpp"
#include "tests/gpu/routing_case.cuh"

namespace {

using namespace moe;
using namespace moe::routing;
using namespace moe_test;

/// The model's router on the host, its sizes as values, beside the preset's on the device.
template <class Model, class L = float>
void expect_same_of(typename Model::Router::Params const& host, typename Model::Router::Params const& device) {
  using Router = typename Model::Router;
  Router const wanted(host);
  Fixed<Router, Model> const router(device);
  for (std::int64_t rows : {1, 16, 100, 129, 4096}) {
    expect_same<L>(wanted, router, {.config = wanted.resolved(), .rows = rows, .edge_rows = true});
    expect_same<L>(wanted, router, {.config = wanted.resolved(), .rows = rows, .permute = false});
  }
  expect_same<L>(wanted, router, {.config = wanted.resolved(), .rows = 300, .valid = 200, .map = true, .keep_every = 3, .alignment = 8});
  expect_same<L>(wanted, router, {.config = wanted.resolved(), .rows = 300, .valid = 77, .valid_on_device = true});
}
template <class Model, class L = float>
void expect_same_of() {
  auto const p = default_router_params<Model, typename Model::Router::Params>();
  expect_same_of<Model, L>(p, p);
}

TEST(RoutingFixed, Softmax) {
  expect_same_of<models::Qwen3_30B_A3B>();
  expect_same_of<models::Qwen3_30B_A3B, bf16>();
  expect_same_of<models::Qwen1_5_MoE_A2_7B>();  // 60 experts: a lane has two values, two lanes none
}
TEST(RoutingFixed, TopKBeforeSoftmax) { expect_same_of<models::GptOss_120B>(); }
TEST(RoutingFixed, Groups) { expect_same_of<models::DeepSeek_V2>(); }
TEST(RoutingFixed, SigmoidGroupsWithABias) {
  std::mt19937 gen(3);
  std::normal_distribution<float> normal(0.0F, 0.5F);
  std::vector<float> bias(257);
  for (float& b : bias) b = normal(gen);
  OnDevice<float> d_bias(bias);
  auto host = default_router_params<models::DeepSeek_V3, models::DeepSeek_V3::Router::Params>();
  for (int first : {0, 1}) {  // a bias that is not aligned takes the general kernel
    auto device = host;
    host.correction_bias = bias.data() + first;
    device.correction_bias = d_bias.data() + first;
    expect_same_of<models::DeepSeek_V3>(host, device);
  }
}
TEST(RoutingFixed, ZeroExperts) { expect_same_of<models::LongCat_Flash>(); }

}  // namespace
