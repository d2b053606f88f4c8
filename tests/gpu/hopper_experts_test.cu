// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_experts_test.cu: a composition with the Hopper experts equals the same composition with the device oracle.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/backends/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_contiguous.cuh"
#include "moe/experts/hopper_experts.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/route.cuh"
#include "moe/routing/softmax_topk.hpp"

namespace {

using namespace moe;
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;

template <class T>
struct Config : LayerDefaults {
  using Act = T;
  using Weight = T;
  using Activation = activation::Silu;
};

constexpr int kHidden = 256;
constexpr int kIntermediate = 192;
constexpr int kExperts = 16;
constexpr int kTopK = 4;
constexpr std::int64_t kMaxTokens = 300;

template <class T, class Experts>
std::vector<float> forward(std::int64_t rows, unsigned seed) {
  using Layer = ModularKernel<Config<T>, Router, quantization::None, backends::NoExpertParallel<space::cuda>, Experts>;
  std::mt19937 gen(seed);
  std::normal_distribution<float> normal;
  experts::WeightStore<Config<T>, quantization::None, space::cuda> store(kExperts, kHidden, kIntermediate, true);
  std::vector<float> w13(2 * kIntermediate * kHidden);
  std::vector<float> w2(kHidden * kIntermediate);
  for (int e = 0; e < kExperts; ++e) {
    for (float& v : w13) v = normal(gen) / std::sqrt(static_cast<float>(kHidden));
    for (float& v : w2) v = normal(gen) / std::sqrt(static_cast<float>(kIntermediate));
    store.set_expert(e, w13.data(), w2.data());
  }
  comm::Self<space::cuda> comm;
  Layer layer(comm, store.view(),
              typename Layer::Params{.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
                                     .max_tokens_per_rank = kMaxTokens,
                                     .placement = ExpertPlacement(kExperts, 1),
                                     .router = typename Router::Params{kExperts, kTopK}});
  std::vector<T> x(static_cast<std::size_t>(kMaxTokens * kHidden));
  std::vector<float> z(static_cast<std::size_t>(kMaxTokens * kExperts));
  for (T& v : x) v = from_float<T>(normal(gen));
  for (float& v : z) v = gen() % 8 == 0 ? -std::numeric_limits<float>::infinity() : normal(gen);
  Buffer<T, space::cuda> hidden(kMaxTokens * kHidden);
  Buffer<float, space::cuda> logits(kMaxTokens * kExperts);
  Buffer<T, space::cuda> output(kMaxTokens * kHidden);
  std::vector<T> y(x.size(), from_float<T>(std::numeric_limits<float>::quiet_NaN()));
  hidden.copy_from_host(x.data());
  logits.copy_from_host(z.data());
  output.copy_from_host(y.data());
  layer.forward(make_rows(static_cast<T const*>(hidden.data()), rows, kHidden),
                make_rows(static_cast<float const*>(logits.data()), rows, kExperts), make_rows(output.data(), rows, kHidden), {},
                Stream<space::cuda>{});
  output.copy_to_host(y.data());
  std::vector<float> out;
  for (std::int64_t i = 0; i < rows * kHidden; ++i) out.push_back(to_float(y[static_cast<std::size_t>(i)]));
  return out;
}

template <class T>
void equals_oracle() {
  int major = 0;
  ASSERT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  if (major != 9) GTEST_SKIP() << "needs compute capability 9.0";
  for (std::int64_t rows : {1, 7, 64, 300}) {
    auto const want = forward<T, experts::CudaReference>(rows, 10 + static_cast<unsigned>(rows));
    auto const got = forward<T, experts::HopperContiguous>(rows, 10 + static_cast<unsigned>(rows));
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      error += std::pow(static_cast<double>(got[i]) - static_cast<double>(want[i]), 2);
      norm += std::pow(static_cast<double>(want[i]), 2);
    }
    EXPECT_LT(std::sqrt(error / norm), 5e-3) << rows << " rows";
  }
}

TEST(HopperExperts, Bf16EqualsOracle) { equals_oracle<bf16>(); }
TEST(HopperExperts, Fp16EqualsOracle) { equals_oracle<f16>(); }

}  // namespace
