// SPDX-License-Identifier: Apache-2.0
// tests/gpu/routing_policy_test.cu: the kernels of router policies, whose choices are compiled in, against the host.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "moe/routing/grouped_topk.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "tests/gpu/routing_case.cuh"

namespace {

using namespace moe;
using namespace moe::routing;
using namespace moe_test;

using DeepSeek = GroupedTopK<Scoring::sigmoid, GroupScore::top2_sum, Renormalize::yes>;
DeepSeek::Params deepseek() {
  return {.num_experts = 256, .topk = 8, .num_expert_group = 8, .topk_group = 4, .routed_scaling_factor = 2.5F};
}

TEST(RoutingPolicy, PolicyAgreesWithTheHost) {
  DeepSeek const router(deepseek());
  for (std::int64_t rows : {1, 100, 128, 500, 1000, 4096, 10000}) {
    expect_same<float>(router, router, {.config = router.resolved(), .rows = rows});
    expect_same<float>(router, router, {.config = router.resolved(), .rows = rows, .edge_rows = true});
  }
}

TEST(RoutingPolicy, R8_BiasOfTheSigmoidGroups) {
  std::mt19937 gen(3);
  std::normal_distribution<float> normal(0.0F, 0.5F);
  for (float disabled : {0.0F, 0.3F, 0.97F, 1.0F}) {
    std::vector<float> bias(256);
    std::uniform_real_distribution<float> uniform(0.0F, 1.0F);
    for (float& b : bias) b = uniform(gen) < disabled ? -std::numeric_limits<float>::infinity() : normal(gen);
    OnDevice<float> d_bias(bias);
    for (DegeneratePolicy policy : {DegeneratePolicy::uniform_first_k, DegeneratePolicy::drop}) {
      DeepSeek::Params p = deepseek();
      p.degenerate = policy;
      p.correction_bias = bias.data();
      DeepSeek const host(p);
      p.correction_bias = d_bias.data();
      expect_same<float>(host, DeepSeek(p), {.config = host.resolved(), .rows = 333, .edge_rows = true});
    }
  }
}

TEST(RoutingPolicy, EveryLaunchShape) {
  DeepSeek const router(deepseek());
  int const sms = device_facts().num_sms;
  using enum GridBarrier;
  for (RoutingTuning const& t :
       {RoutingTuning{1, 1, 1, none}, RoutingTuning{1, 32, 1, none}, RoutingTuning{2, 4, 2, cluster}, RoutingTuning{8, 16, 8, cluster},
        RoutingTuning{16, 8, 16, cluster}, RoutingTuning{16, 32, 16, cluster}, RoutingTuning{sms, 32, 1, cooperative},
        RoutingTuning{sms / 4 * 2, 16, 2, cooperative}, RoutingTuning{64, 32, 4, cooperative}, RoutingTuning{24, 8, 8, cooperative},
        RoutingTuning{8, 1, 8, cooperative}}) {
    SCOPED_TRACE(testing::PrintToString(t));
    for (std::int64_t rows : {1, 200, 3000}) {
      expect_same<float>(router, router, {.config = router.resolved(), .rows = rows, .map = true, .alignment = 8, .tuning = &t});
    }
  }
}

__global__ void compare_sigmoids(unsigned long long* wrong) {
  std::int64_t const step = std::int64_t{gridDim.x} * blockDim.x;
  for (std::int64_t bits = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; bits < std::int64_t{1} << 32; bits += step) {
    float const z = __uint_as_float(static_cast<unsigned>(bits));
    if (!(fabsf(z) < routing::detail::kUsualLogit)) continue;
    if (__float_as_uint(routing::detail::usual_sigmoid(z)) != __float_as_uint(routing::detail::sigmoid_rn(z))) atomicAdd(wrong, 1ULL);
  }
}
TEST(RoutingPolicy, TheShortSigmoidHasTheBitsOfTheLongOne) {
  OnDevice<unsigned long long> wrong({0ULL});
  compare_sigmoids<<<1024, 256>>>(wrong.data());
  check_cuda(cudaDeviceSynchronize(), "compare_sigmoids");
  EXPECT_EQ(wrong.get()[0], 0U);
}

TEST(RoutingPolicy, LogitTypes) {
  for (int e : {8, 64, 256, 260, 512}) {
    SoftmaxTopK<Renormalize::yes> const router({.num_experts = e, .topk = 4});
    expect_same<bf16>(router, router, {.config = router.resolved(), .rows = 90, .edge_rows = true});
    expect_same<f16>(router, router, {.config = router.resolved(), .rows = 90, .edge_rows = true});
  }
}

TEST(RoutingPolicy, R22_ManyRowsOfManyExperts) {
  SoftmaxTopK<Renormalize::yes> const router({.num_experts = 512, .topk = 10});
  expect_same<bf16>(router, router, {.config = router.resolved(), .rows = 65536, .seed = 5});
}

}  // namespace
