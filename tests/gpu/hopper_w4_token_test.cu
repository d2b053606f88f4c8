// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_w4_token_test.cu: the kernel for one token of the layers that widen packed weights equals the device oracle on
// dequantised weights: every scheme, biases, clamped activations, sizes with an odd number of bricks and padding, slots without a local
// expert, no token, and layers behind each other in one stream. It runs alone, without the kernels that sort and sum.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "moe/core/cuda_space.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "on_hopper.hpp"
#include "packed_cases.cuh"

namespace {

using namespace moe;
using moe_test::kGptOss;
using moe_test::kSilu;
using moe_test::Load;
using moe_test::on_hopper;
using moe_test::PackedConfig;
using moe_test::RandomCall;
using moe_test::RandomWeights;
using moe_test::Sizes;

constexpr double kTolerance = 5e-3;

template <class Q>
using ExpertsOf = std::conditional_t<sizeof(typename Q::template WeightCode<bf16>) == 1 && Q::weight_code_cols(64) == 64,
                                     experts::HopperW8A16, experts::HopperW4A16>;

template <class Quant>
class HopperW4Token : public testing::Test {
 protected:
  static double error(Sizes const& s, std::uint64_t seed, Load load = Load::random, bool biases = false,
                      activation::Any const& act = kSilu) {
    return moe_test::standard_error<Quant, ExpertsOf<Quant>>(s, 1, load, seed, biases, act);
  }
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
};
using Schemes = testing::Types<quantization::Mxfp4W4A16<>, quantization::Nvfp4W4A16, quantization::Int4Group128, quantization::WNa16<4, 64>,
                               quantization::Int4Group128Zero, quantization::WNa16<4, 32>, quantization::WNa16<4, 32, true>,
                               quantization::Int8PerChannel, quantization::Fp8PerChannel<>, quantization::Mxfp8W8A16<>>;
TYPED_TEST_SUITE(HopperW4Token, Schemes);

/// The kernels of one call of one token, and the output of a replay.
template <class Quant>
struct Captured {
  using Kernel = moe_test::StandardKernel<Quant, ExpertsOf<Quant>>;
  CudaStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  std::size_t nodes = 0;

  explicit Captured(auto const& enqueue) {
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    enqueue(static_cast<cudaStream_t>(stream));
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  }
  ~Captured() {
    cudaGraphExecDestroy(exec);
    cudaGraphDestroy(graph);
  }
  void replay() {
    EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    stream.synchronize();
  }
};

// Sizes of Qwen3-30B-A3B; of bricks in an odd number, with padding of a whole row of them; with many slots.
TYPED_TEST(HopperW4Token, X3_EverySize) {
  EXPECT_LT((TestFixture::error({16, 2048, 768, 8}, 1)), kTolerance);
  EXPECT_LT((TestFixture::error({3, 1344, 640, 1}, 2)), kTolerance);
  EXPECT_LT((TestFixture::error({6, 1280, 768, 5}, 3)), kTolerance);
  EXPECT_LT((TestFixture::error({32, 1536, 640, 32}, 4)), kTolerance);
  EXPECT_LT((TestFixture::error({2, 7168, 2048, 2}, 5)), kTolerance);
  EXPECT_LT((TestFixture::error({4, 1152, 640, 1}, 6)), kTolerance) << "fewer units than multiprocessors";
}
TYPED_TEST(HopperW4Token, X9_GptOssSizesWithBiases) {
  if constexpr (!std::is_same_v<TypeParam, quantization::Int4Group128> && !std::is_same_v<TypeParam, quantization::Int4Group128Zero>) {
    EXPECT_LT((TestFixture::error({4, 2880, 2880, 4}, 10, Load::random, true, kGptOss)), kTolerance);
  }
  EXPECT_LT((TestFixture::error({4, 2048, 1024, 4}, 11, Load::random, true, kGptOss)), kTolerance);
}
TYPED_TEST(HopperW4Token, X5_SlotsWithoutAnExpert) {
  for (Load load : {Load::one_expert, Load::some_missing, Load::all_missing}) {
    for (std::uint64_t seed : {20, 21, 22}) {
      EXPECT_LT((TestFixture::error({16, 2048, 768, 8}, seed, load, true)), kTolerance) << static_cast<int>(load) << ", " << seed;
    }
  }
}
/// One kernel does the call; without a valid row it writes nothing; counters are as before after every call, whichever slots a token had.
TYPED_TEST(HopperW4Token, X19_OneKernelThatFollowsTheDevicesRowCount) {
  using Kernel = moe_test::StandardKernel<TypeParam, ExpertsOf<TypeParam>>;
  Sizes const s{16, 2048, 768, 8};
  std::mt19937_64 gen(30);
  RandomWeights<TypeParam> const weights(s, true, gen);
  Arena<space::cuda> arena;
  Kernel kernel(Shape<PackedConfig>(LayerShape{s.hidden, s.intermediate, s.experts, s.topk}), weights.view, 1, TypeParam{}, kSilu, {},
                arena);
  auto rows = moe_test::upload(std::vector<std::int32_t>{1});
  auto const count = static_cast<std::size_t>(s.hidden);
  Buffer<bf16, space::cuda> y(s.hidden);
  for (Load load : {Load::random, Load::some_missing, Load::random}) {
    RandomCall<TypeParam> call(s, 1, load, gen);
    call.batch.num_rows = rows.data();
    Captured<TypeParam> captured(
        [&](cudaStream_t stream) { kernel.apply(call.batch, make_rows(y.data(), 1, std::int64_t{s.hidden}), stream); });
    EXPECT_EQ(captured.nodes, 1U);
    std::vector<bf16> first(count), now(count);
    for (int repeat = 0; repeat < 20; ++repeat) {
      std::int32_t const valid = repeat % 4 == 3 ? 0 : 1;
      rows.copy_from_host(&valid);
      Memory<space::cuda>::fill(y.data(), 0xFF, y.bytes());
      captured.replay();
      y.copy_to_host(now.data());
      if (valid == 0) {
        EXPECT_TRUE(std::isnan(to_float(now[7]))) << "written without a row";
      } else if (repeat == 0) {
        first = now;
      } else {
        EXPECT_EQ(std::memcmp(first.data(), now.data(), count * sizeof(bf16)), 0) << "replay " << repeat;
      }
    }
  }
}
/// Layers behind each other in one stream, each of which may begin before the one before it has ended.
TEST(HopperW4TokenChain, LayersBehindEachOther) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  using Quant = quantization::Mxfp4W4A16<>;
  using Kernel = moe_test::StandardKernel<Quant, experts::HopperW4A16>;
  Sizes const s{16, 2048, 768, 8};
  std::mt19937_64 gen(40);
  RandomWeights<Quant> const weights(s, false, gen);
  RandomCall<Quant> call(s, 1, Load::random, gen);
  Arena<space::cuda> arena;
  Shape<PackedConfig> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  Kernel kernel(shape, weights.view, 1, Quant{}, kSilu, {}, arena);
  auto const run = [&](int layers, bool wait) {  // each layer reads what the one before it has written
    Buffer<bf16, space::cuda> y(std::int64_t{layers} * s.hidden);
    CudaStream stream;
    auto tokens = call.batch;
    for (int layer = 0; layer < layers; ++layer) {
      bf16* const to = y.data() + std::int64_t{layer} * s.hidden;
      kernel.apply(tokens, make_rows(to, 1, std::int64_t{s.hidden}), stream);
      // Each layer about squares the size of its rows, so every fourth one begins anew.
      tokens.rows = layer % 4 == 3 ? call.batch.rows : make_rows(static_cast<bf16 const*>(to), 1, std::int64_t{s.hidden});
      if (wait) stream.synchronize();
    }
    stream.synchronize();
    std::vector<bf16> out(static_cast<std::size_t>(layers * s.hidden));
    y.copy_to_host(out.data());
    return out;
  };
  auto const alone = run(40, true), chained = run(40, false);
  EXPECT_EQ(std::memcmp(alone.data(), chained.data(), alone.size() * sizeof(bf16)), 0);
  for (std::size_t layer = 0; layer < 40; ++layer) {
    auto const first = alone.begin() + static_cast<std::ptrdiff_t>(layer * static_cast<std::size_t>(s.hidden));
    EXPECT_TRUE(std::any_of(first, first + s.hidden, [](bf16 v) { return to_float(v) != 0.0F; })) << "layer " << layer;
  }
}

}  // namespace
