// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_w8a16_test.cu: the layer with 8-bit weights alone equals the device oracle on dequantised weights: int8 with a scale per
// output channel, biases, every activation, both formats, widths that fill no brick, odd loads, graphs, weights replaced in place, and
// refused arguments.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "moe/backends/collective/no_expert_parallel.cuh"
#include "moe/core/check.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "on_hopper.hpp"
#include "w4_composition.cuh"
#include "widened_cases.cuh"

namespace {

using namespace moe;
using Cuda = space::cuda;
using Config = moe_test::WidenedConfig;
using moe_test::kGptOss;
using moe_test::kSilu;
using moe_test::Load;
using moe_test::make_ids;
using moe_test::on_hopper;
using moe_test::RandomWeights;
using moe_test::relative_error;
using moe_test::Sizes;
using moe_test::upload;
using Quant = quantization::Int8PerChannel;
using Kernel = experts::HopperW8A16::Kernel<Config, Quant, ActivationFormat::standard>;

constexpr double kTolerance = 5e-3;

class HopperW8A16 : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
};

double standard_error(Sizes const& s, int tokens, Load load, std::uint64_t seed, bool biases = false, activation::Any const& act = kSilu,
                      bool weight_on_input = false) {
  return moe_test::standard_error<Quant, experts::HopperW8A16>(s, tokens, load, seed, biases, act, 0, weight_on_input);
}

// Tiles of 16, of the middle kernel and of the largest, with every number of columns; K in parts and whole.
TEST_F(HopperW8A16, X3_Int8PerChannel) {
  Sizes const small{8, 256, 192, 2};
  std::uint64_t seed = 10;
  for (int tokens : {1, 2, 7, 33, 64, 129, 222, 300, 380, 1024, 4096}) {
    EXPECT_LT(standard_error(small, tokens, Load::random, ++seed), kTolerance) << tokens << " tokens";
  }
}

TEST_F(HopperW8A16, X5_SkewedLoads) {
  std::uint64_t seed = 100;
  for (Load load : {Load::one_expert, Load::some_missing, Load::all_missing, Load::few_experts}) {
    for (int tokens : {1, 40, 700}) {
      EXPECT_LT(standard_error({16, 320, 320, 4}, tokens, load, ++seed), kTolerance) << static_cast<int>(load) << ", " << tokens;
      EXPECT_LT(standard_error({4, 512, 128, 1}, tokens, load, ++seed), kTolerance) << static_cast<int>(load) << ", " << tokens;
    }
  }
  EXPECT_LT(standard_error({1, 128, 128, 1}, 300, Load::random, ++seed), kTolerance);
}

TEST_F(HopperW8A16, X9_GptOssSizesWithBiases) {
  for (int tokens : {1, 9, 150}) {
    EXPECT_LT(standard_error({4, 2880, 2880, 2}, tokens, Load::random, 200 + static_cast<std::uint64_t>(tokens), true, kGptOss), kTolerance)
        << tokens << " tokens";
  }
}

TEST_F(HopperW8A16, X2_X9_EveryActivationWithBiases) {
  for (int k = 0; k < activation::kKinds; ++k) {
    activation::Any act{static_cast<activation::Kind>(k)};
    act.constants.limit = 1.5F;  // limits some of the values
    auto const seed = static_cast<std::uint64_t>(1000 + 10 * k);
    for (int tokens : {1, 5, 70, 700}) {
      EXPECT_LT(standard_error({8, 256, 384, 2}, tokens, Load::random, seed, true, act), kTolerance)
          << activation::name(act.kind) << ", " << tokens << " tokens";
    }
    EXPECT_LT(standard_error({4, 128, 192, 1}, 60, Load::some_missing, seed, false, act), kTolerance)
        << activation::name(act.kind) << ", 64 of 256 features in the last tile";
    EXPECT_LT(standard_error({4, 128, 43, 2}, 60, Load::random, seed, true, act), kTolerance)
        << activation::name(act.kind) << ", features and K end inside a brick";
  }
}

TEST_F(HopperW8A16, X8_WeightOnTheInput) {
  for (activation::Kind kind : {activation::Kind::silu, activation::Kind::gelu, activation::Kind::relu2_no_mul}) {
    for (int k : {1, 2}) {
      for (int tokens : {1, 60, 400}) {
        EXPECT_LT(standard_error({8, 256, 128, k}, tokens, Load::random, 3000, true, activation::Any{kind}, true), kTolerance)
            << activation::name(kind) << ", top " << k << ", " << tokens << " tokens";
      }
    }
  }
}

TEST_F(HopperW8A16, AnyIntermediateWidth) {
  for (int width : {1, 8, 33, 65, 100, 255, 1441}) {
    for (int tokens : {3, 60, 400}) {
      EXPECT_LT(standard_error({4, 128, width, 2}, tokens, Load::random, 350, true), kTolerance) << width << ", " << tokens << " tokens";
    }
  }
}

/// Rows and router weights of one call, on the device.
struct Call {
  Buffer<bf16, Cuda> x;
  Buffer<float, Cuda> w;
  Buffer<std::int32_t, Cuda> ids;
  StandardTokensOf<Config, Quant> batch{};

  Call(Sizes const& s, int tokens, std::mt19937_64& gen) {
    std::vector<bf16> rows(static_cast<std::size_t>(tokens) * s.hidden);
    std::normal_distribution<float> normal;
    for (bf16& v : rows) v = from_float<bf16>(normal(gen));
    x = upload(rows);
    w = upload(std::vector<float>(static_cast<std::size_t>(tokens) * s.topk, 0.5F));
    ids = upload(make_ids(s, tokens, Load::random, gen));
    batch.rows = make_rows(static_cast<bf16 const*>(x.data()), tokens, std::int64_t{s.hidden});
    batch.topk_ids = make_rows(static_cast<std::int32_t const*>(ids.data()), tokens, std::int64_t{s.topk});
    batch.topk_weights = make_rows(static_cast<float const*>(w.data()), tokens, std::int64_t{s.topk});
  }
};

TEST_F(HopperW8A16, X19_GraphFollowsTheDevicesRowCount) {
  Sizes const s{8, 256, 192, 2};
  constexpr int kTokens = 64;
  std::mt19937_64 gen(500);
  RandomWeights<Quant> const weights(s, false, gen);
  Arena<Cuda> arena;
  Kernel kernel(Shape<Config>(LayerShape{s.hidden, s.intermediate, s.experts, s.topk}), weights.view, kTokens, Quant{}, kSilu, {}, arena);
  Call call(s, kTokens, gen);
  auto rows = upload(std::vector<std::int32_t>{kTokens});
  call.batch.num_rows = rows.data();
  auto const count = static_cast<std::size_t>(kTokens * s.hidden);
  Buffer<bf16, Cuda> y(static_cast<std::int64_t>(count));
  CudaStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  kernel.apply(call.batch, make_rows(y.data(), kTokens, std::int64_t{s.hidden}), stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  auto const replay = [&](std::int32_t valid) {
    rows.copy_from_host(&valid);
    Memory<Cuda>::fill(y.data(), 0xFF, y.bytes());
    EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    stream.synchronize();
    std::vector<bf16> got(count);
    y.copy_to_host(got.data());
    return got;
  };
  std::vector<bf16> const full = replay(kTokens);
  EXPECT_TRUE(std::any_of(full.begin(), full.end(), [](bf16 v) { return to_float(v) != 0.0F; }));
  for (std::int32_t valid : {1, 17, 0, kTokens}) {
    EXPECT_LT(relative_error(replay(valid), full, static_cast<std::size_t>(valid) * s.hidden), 1e-2) << valid << " rows";
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST_F(HopperW8A16, Batched) {
  Sizes const s{5, 256, 320, 1};
  constexpr int kCapacity = 70;
  std::mt19937_64 gen(600);
  RandomWeights<Quant> const weights(s, true, gen);
  Shape<Config> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  std::vector<std::int32_t> const counts{0, 1, kCapacity, 9, 33};
  std::vector<bf16> x(static_cast<std::size_t>(s.experts) * kCapacity * s.hidden);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < x.size(); ++i) {
    std::size_t const row = i / static_cast<std::size_t>(s.hidden);
    bool const valid = static_cast<int>(row % kCapacity) < counts[row / kCapacity];
    x[i] = from_float<bf16>(valid ? normal(gen) : std::numeric_limits<float>::quiet_NaN());
  }
  auto const device_x = upload(x);
  auto const device_counts = upload(counts);
  BatchedTokensOf<Config, Quant> batch{};
  batch.rows = make_blocks(device_x.data(), s.experts, kCapacity, std::int64_t{s.hidden});
  batch.expert_num_tokens = make_vector(device_counts.data(), s.experts);
  Arena<Cuda> arena;
  experts::CudaReference::Kernel<Config, Quant, ActivationFormat::batched> oracle(shape, weights.view, kCapacity, {}, kSilu, {}, arena);
  experts::HopperW8A16::Kernel<Config, Quant, ActivationFormat::batched> kernel(shape, weights.view, kCapacity, {}, kSilu, {}, arena);
  Buffer<float, Cuda> want(static_cast<std::int64_t>(x.size()));
  Buffer<bf16, Cuda> got(static_cast<std::int64_t>(x.size()));
  Memory<Cuda>::fill(want.data(), 0, want.bytes());
  Memory<Cuda>::fill(got.data(), 0, got.bytes());
  oracle.apply(batch, make_blocks(want.data(), s.experts, kCapacity, std::int64_t{s.hidden}), nullptr);
  kernel.apply(batch, make_blocks(got.data(), s.experts, kCapacity, std::int64_t{s.hidden}), nullptr);
  std::vector<float> a(x.size());
  std::vector<bf16> b(x.size());
  want.copy_to_host(a.data());
  got.copy_to_host(b.data());
  EXPECT_LT(relative_error(b, a, a.size()), kTolerance);
}

TEST_F(HopperW8A16, WeightsChangedInPlaceArePackedAnew) {
  Sizes const s{4, 128, 96, 2};
  std::mt19937_64 gen(650);
  RandomWeights<Quant> weights(s, false, gen);
  RandomWeights<Quant> const others(s, false, gen);
  Shape<Config> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  Arena<Cuda> arena;
  Kernel kernel(shape, weights.view, 8, Quant{}, kSilu, {}, arena);
  Kernel const fresh(shape, others.view, 8, Quant{}, kSilu, {}, arena);
  Call const call(s, 8, gen);
  Buffer<bf16, Cuda> y(8 * s.hidden);
  auto const run = [&](Kernel const& k) {
    std::vector<bf16> out(static_cast<std::size_t>(y.size()));
    k.apply(call.batch, make_rows(y.data(), 8, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(out.data());
    return out;
  };
  auto const want = run(fresh);
  EXPECT_GT(relative_error(run(kernel), want, want.size()), 0.1);
  Memory<Cuda>::copy_async(weights.c13.data(), others.c13.data(), weights.c13.bytes(), nullptr);
  Memory<Cuda>::copy_async(weights.c2.data(), others.c2.data(), weights.c2.bytes(), nullptr);
  Memory<Cuda>::copy_async(weights.s13.data(), others.s13.data(), weights.s13.bytes(), nullptr);
  Memory<Cuda>::copy_async(weights.s2.data(), others.s2.data(), weights.s2.bytes(), nullptr);
  kernel.weights_changed(nullptr);
  auto const got = run(kernel);
  EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(bf16)), 0);
}

TEST_F(HopperW8A16, Refusals) {
  std::mt19937_64 gen(700);
  auto const code_of = [&](RandomWeights<Quant> const& weights, LayerShape shape, activation::Any const& act) {
    try {
      Arena<Cuda> arena;
      Kernel kernel(Shape<Config>(shape), weights.view, 8, Quant{}, act, {}, arena);
    } catch (Error const& error) {
      return error.code();
    }
    return ErrorCode::internal;
  };
  Sizes const s{2, 128, 128, 1};
  LayerShape const shape{s.hidden, s.intermediate, s.experts, s.topk};
  RandomWeights<Quant> const weights(s, false, gen);
  EXPECT_EQ(code_of(weights, shape, kSilu), ErrorCode::internal) << "fits";
  EXPECT_EQ(code_of(weights, shape, activation::Any{activation::Kind::swiglu_step}), ErrorCode::config) << "without its limit";
  EXPECT_EQ(code_of(weights, shape, activation::Any{activation::Kind::relu2_no_mul}), ErrorCode::argument) << "I rows of w13";
  Sizes const narrow{2, 96, 128, 1};
  EXPECT_EQ(code_of(RandomWeights<Quant>(narrow, false, gen), LayerShape{96, 128, 2, 1}, kSilu), ErrorCode::config) << "hidden 96";
  float const infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(cudaMemcpy(const_cast<float*>(weights.s2.data()) + 5, &infinity, sizeof(float), cudaMemcpyHostToDevice), cudaSuccess);
  EXPECT_EQ(code_of(weights, shape, kSilu), ErrorCode::unsupported) << "a scale that is not finite";
}

using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
template <class Q, class Experts>
using Compose = Composition<Config, Router, Q, backends::NoExpertParallel<Cuda>, Experts>;
static_assert(Compose<Quant, experts::HopperW8A16>::kLegal);
static_assert(!Compose<quantization::None, experts::HopperW8A16>::kLegal &&
              !Compose<quantization::Int4Group128, experts::HopperW8A16>::kLegal);

TEST_F(HopperW8A16, CompositionEqualsOracle) {
  for (std::int64_t rows : {1, 50}) {
    auto const got = moe_test::composition_output<Config, Quant, experts::HopperW8A16>(rows);
    EXPECT_LT(relative_error(got, moe_test::composition_output<Config, Quant, experts::CudaReference>(rows), got.size()), kTolerance);
  }
}

}  // namespace
