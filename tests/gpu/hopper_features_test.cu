// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_features_test.cu: features of the Hopper layer besides plain SwiGLU: every activation, biases, weights on the input,
// interleaved gate and up rows, ungated experts, scales per row and per tensor, sizes that do not fill a tile.
#include <gtest/gtest.h>

#include <cstring>

#include "hopper_reference.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "on_hopper.hpp"

namespace {

using namespace moe::hopper;
using namespace moe_test;
using moe::activation::Kind;

moe::activation::Constants constants_of(Kind kind) {
  bool const limited = kind == Kind::swigluoai || kind == Kind::swigluoai_halves || kind == Kind::silu_clamped || kind == Kind::swiglu_step;
  moe::activation::Constants c;
  if (limited) c.limit = 1.5F;  // limits some of the values
  return c;
}

LayerLauncher any_launcher(Scheme scheme) {
  switch (scheme) {
    case Scheme::bf16: return layer_launcher<Scheme::bf16, AnyActivation>();
    case Scheme::fp8_block: return layer_launcher<Scheme::fp8_block, AnyActivation>();
    case Scheme::int8_row: return layer_launcher<Scheme::int8_row, AnyActivation>();
    default: return layer_launcher<Scheme::fp8_row, AnyActivation>();
  }
}

class HopperFeatures : public testing::TestWithParam<Scheme> {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }

  static std::vector<char> run(Problem const& problem, ContiguousLayer const& layer, Tuning const* tuning = nullptr, int first = 0,
                               int count = -1) {
    int const tokens = count < 0 ? problem.tokens : count;
    LocalShape const& s = problem.shape;
    TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(tokens)));
    TypedMemory<char> const out(static_cast<std::size_t>(tokens) * s.hidden * 2);
    workspace.fill_bytes(0xFF);
    out.fill_bytes(0xFF);
    LayerCall call = problem.call(out.data());
    call.max_tokens = tokens;
    int const bytes = is_scaled(problem.scheme) && (is_row_scaled(problem.scheme) || call.x_scales != nullptr) ? 1 : 2;
    call.x = static_cast<char const*>(call.x) + static_cast<std::int64_t>(first) * s.hidden * bytes;
    if (call.x_scales != nullptr) {
      call.x_scales += static_cast<std::int64_t>(first) * (is_row_scaled(problem.scheme) ? 1 : (s.hidden + 127) / 128);
    }
    call.topk_ids += static_cast<std::int64_t>(first) * s.topk;
    call.topk_weights += static_cast<std::int64_t>(first) * s.topk;
    if (tuning != nullptr) {
      layer.forward(call, *tuning, workspace.data(), nullptr);
    } else {
      layer.forward(call, workspace.data(), nullptr);
    }
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    return out.download();
  }
  static double error(Problem const& problem, std::vector<char> const& out) {
    TypedMemory<char> const device(out.size());
    device.upload(out);
    return compare(problem, device.data(), 64).relative;
  }

  void check(LocalShape shape, int tokens, Features const& features, Pattern pattern = Pattern::random, char const* what = "") {
    Problem const problem(shape, GetParam(), tokens, pattern, seed_ += 13, features);
    ContiguousLayer const layer(shape, GetParam(), problem.layer_weights(), features.options, any_launcher(GetParam()));
    EXPECT_LT(error(problem, run(problem, layer)), tolerance(GetParam(), tokens))
        << what << " " << moe::activation::name(features.options.activation) << ", E " << shape.num_experts << " H " << shape.hidden
        << " I " << shape.intermediate << " k " << shape.topk << ", " << tokens << " tokens";
  }

  std::uint64_t seed_ = 5000;
};

TEST_P(HopperFeatures, X2_X23_EveryActivation) {
  for (int i = 0; i < moe::activation::kKinds; ++i) {
    Features f;
    f.options.activation = static_cast<Kind>(i);
    f.options.constants = constants_of(f.options.activation);
    f.bias = i % 2 == 0;
    for (int tokens : {3, 33, 300}) check({8, 256, 384, 2}, tokens, f);
  }
}

TEST_P(HopperFeatures, X9_BiasesOfGptOss) {
  Features f;
  f.bias = true;
  f.options.activation = Kind::swigluoai_halves;
  f.options.constants = {1.702F, 1.0F, 7.0F, 4.0F, 25.0F};
  f.quantized_x = true;  // 320 is not whole groups of 128, which only quantised rows may have
  for (int tokens : {1, 8, 40, 500}) check({16, 320, 384, 4}, tokens, f);  // 1 token: K in parts, the bias once
  for (int tokens : {1, 200}) check({4, 512, 256, 1}, tokens, f, Pattern::some_missing);
}

TEST_P(HopperFeatures, X8_WeightOnTheInput) {
  Features f;
  f.options.weight_on_input = true;
  for (bool bias : {false, true}) {
    f.bias = bias;
    for (int k : {1, 2}) {
      for (int tokens : {1, 50, 400}) check({8, 256, 256, k}, tokens, f);
    }
  }
}

TEST_P(HopperFeatures, X10_InterleavedGateAndUpRows) {
  if (GetParam() == Scheme::fp8_block) GTEST_SKIP() << "interleaved rows share a scale block";
  Features f;
  f.interleaved = true;
  f.bias = true;
  f.options.activation = Kind::swigluoai;
  f.options.constants = {1.702F, 1.0F, 7.0F, 4.0F, 25.0F};
  for (int tokens : {1, 33, 300}) check({8, 256, 192, 2}, tokens, f);
  for (int tokens : {7, 100}) check({8, 80, 48, 3}, tokens, f);
}

TEST_P(HopperFeatures, SizesThatDoNotFillATile) {
  bool const block = GetParam() == Scheme::fp8_block;
  int const multiple = hidden_multiple(GetParam());
  Features f;
  f.quantized_x = true;
  for (Kind kind : {Kind::silu, Kind::relu2_no_mul}) {
    f.options.activation = kind;
    for (int hidden : {multiple, 64, 80, 144, 272}) {
      for (int inter : {multiple, 48, 128, 144, 400}) {
        if (block && inter % 128 != 0) continue;
        for (int tokens : {5, 70}) check({6, hidden, inter, 3}, tokens, f);
      }
    }
  }
}

TEST_P(HopperFeatures, QuantizedRowsAndTensorScales) {
  if (!is_scaled(GetParam())) GTEST_SKIP() << "schemes with scales only";
  Features f;
  f.quantized_x = true;
  for (int tokens : {1, 33, 300, 2000}) check({8, 512, 256, 2}, tokens, f, Pattern::random, "quantised rows");
  if (!is_row_scaled(GetParam())) return;
  f.tensor_scales = true;
  for (int tokens : {1, 33, 300}) check({8, 512, 256, 2}, tokens, f, Pattern::random, "tensor scales");
  f.options.static_scale = GetParam() == Scheme::int8_row ? 3.0F / 127.0F : 3.0F / 448.0F;
  for (int tokens : {1, 33, 300}) check({8, 512, 256, 2}, tokens, f, Pattern::random, "static scale");
  f = {};
  if (GetParam() == Scheme::fp8_row) {
    f.options.amax_bound = 0.5F;
    check({8, 512, 256, 2}, 100, f, Pattern::random, "bounded amax");
  }
  f = {};
  for (int inter : {2048, 2064, 4096}) check({4, 256, inter, 2}, 200, f, Pattern::random, "long rows");
  check({4, 7168, 512, 2}, 300, f, Pattern::random, "long K");
}

TEST_P(HopperFeatures, X4_WeightsOfExpertsWithoutRowsAreNotRead) {
  LocalShape const shape{8, 256, 256, 2};
  Problem const problem(shape, GetParam(), 60, Pattern::random, 71);
  std::vector<std::int32_t> ids = make_ids(shape, 60, Pattern::random, 72);
  for (std::int32_t& id : ids) id = id < 4 ? id : -1;  // the upper half is on another rank
  problem.ids.upload(ids);
  std::size_t const half13 = problem.w13.size() / 2, half2 = problem.w2.size() / 2;
  ASSERT_EQ(cudaMemset(problem.w13.data() + half13, 0xFF, half13), cudaSuccess);  // NaN in every format
  ASSERT_EQ(cudaMemset(problem.w2.data() + half2, 0xFF, half2), cudaSuccess);
  for (auto* scales : {&problem.w13_scales, &problem.w2_scales}) {
    if (scales->size() == 0) continue;
    ASSERT_EQ(cudaMemset(scales->data() + scales->size() / 2, 0xFF, scales->size() / 2 * 4), cudaSuccess);
  }
  ContiguousLayer const layer(shape, GetParam(), problem.layer_weights(), {}, any_launcher(GetParam()));
  EXPECT_LT(error(problem, run(problem, layer)), tolerance(GetParam(), 60));
}

TEST_P(HopperFeatures, X7_X20_RowsAloneAndInChunksAreBitwiseEqualInBatchInvariantLayers) {
  LocalShape const shape{8, 384, 256, 2};
  for (bool quantized : {true, false}) {
    if (!quantized && GetParam() != Scheme::fp8_block) continue;  // rows are quantised by the kernels in fp8_block alone
    Features f;
    f.quantized_x = quantized;
    Problem const problem(shape, GetParam(), 1000, Pattern::random, 81, f);
    ContiguousLayer const layer(shape, GetParam(), problem.layer_weights(), {.batch_invariant = true}, any_launcher(GetParam()));
    std::vector<char> const whole = run(problem, layer);
    EXPECT_LT(error(problem, whole), tolerance(GetParam(), 1000));
    std::size_t const row = static_cast<std::size_t>(shape.hidden) * 2;
    for (int chunk : {1, 7, 40, 999}) {
      for (int first : {0, 1, 500}) {
        int const count = std::min(chunk, 1000 - first);
        std::vector<char> const part = run(problem, layer, nullptr, first, count);
        EXPECT_EQ(std::memcmp(part.data(), whole.data() + static_cast<std::size_t>(first) * row, part.size()), 0)
            << "chunk of " << chunk << " at " << first << (quantized ? "" : ", quantised by the kernels");
      }
    }
  }
}

TEST_P(HopperFeatures, X14_AlternatingLargeTermsAreSummedInFloat32) {
  LocalShape const shape{8, 256, 128, 8};
  Problem const problem(shape, GetParam(), 16, Pattern::random, 91);
  std::size_t const matrix13 = problem.w13.size() / 8, matrix2 = problem.w2.size() / 8;
  for (int e = 1; e < 8; ++e) {  // all experts equal
    ASSERT_EQ(cudaMemcpy(problem.w13.data() + e * matrix13, problem.w13.data(), matrix13, cudaMemcpyDeviceToDevice), cudaSuccess);
    ASSERT_EQ(cudaMemcpy(problem.w2.data() + e * matrix2, problem.w2.data(), matrix2, cudaMemcpyDeviceToDevice), cudaSuccess);
    for (auto* scales : {&problem.w13_scales, &problem.w2_scales}) {
      std::size_t const n = scales->size() / 8;
      if (n > 0) ASSERT_EQ(cudaMemcpy(scales->data() + e * n, scales->data(), n * 4, cudaMemcpyDeviceToDevice), cudaSuccess);
    }
  }
  std::vector<float> weights;
  for (int t = 0; t < 16; ++t) weights.insert(weights.end(), {64.0F, -64.0F, 512.0F, -512.0F, 4096.0F, -4096.0F, 1.0F, 0.5F});
  problem.weights.upload(weights);
  ContiguousLayer const layer(shape, GetParam(), problem.layer_weights(), {}, any_launcher(GetParam()));
  EXPECT_LT(error(problem, run(problem, layer)), tolerance(GetParam(), 16));  // one bf16 ulp of a large term would be 16
}

TEST_P(HopperFeatures, X18_MoreThanTwoToThe31Elements) {
  if (GetParam() != Scheme::bf16) GTEST_SKIP() << "once is enough";
  check({8, 256, 16384, 8}, 16400, {});
}

TEST_P(HopperFeatures, RowsOfXMayBeApart) {
  LocalShape const shape{8, 256, 128, 2};
  Features f;
  f.quantized_x = true;
  Problem const problem(shape, GetParam(), 50, Pattern::random, 93, f);
  ContiguousLayer const layer(shape, GetParam(), problem.layer_weights(), {}, any_launcher(GetParam()));
  std::vector<char> const packed = run(problem, layer);
  int const bytes = element_bytes(GetParam());
  std::size_t const width = static_cast<std::size_t>(shape.hidden) * bytes;
  std::size_t const scale_cols = is_row_scaled(GetParam()) ? 1 : 2;
  TypedMemory<char> const apart(50 * (width + 64));
  TypedMemory<float> const scales(50 * (scale_cols + 3));
  apart.fill_bytes(0xFF);
  scales.fill_bytes(0xFF);
  ASSERT_EQ(cudaMemcpy2D(apart.data(), width + 64, problem.x.data(), width, width, 50, cudaMemcpyDeviceToDevice), cudaSuccess);
  if (is_scaled(GetParam())) {
    ASSERT_EQ(cudaMemcpy2D(scales.data(), (scale_cols + 3) * 4, problem.x_scales.data(), scale_cols * 4, scale_cols * 4, 50,
                           cudaMemcpyDeviceToDevice),
              cudaSuccess);
  }
  TypedMemory<char> const workspace(static_cast<std::size_t>(layer.workspace_bytes(50)));
  TypedMemory<char> const out(packed.size());
  LayerCall call = problem.call(out.data());
  call.x = apart.data();
  call.x_stride = static_cast<std::int64_t>((width + 64) / static_cast<std::size_t>(bytes));
  if (is_scaled(GetParam())) {
    call.x_scales = scales.data();
    call.x_scale_stride = static_cast<std::int64_t>(scale_cols + 3);
  }
  layer.forward(call, workspace.data(), nullptr);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  EXPECT_TRUE(out.download() == packed);
}

TEST_P(HopperFeatures, FewMultiprocessors) {
  Features f;
  f.options.workers = 7;
  for (int tokens : {1, 33, 300}) check({8, 256, 256, 2}, tokens, f);
}

TEST_P(HopperFeatures, X24_BadOptionsAreRefused) {
  LocalShape const shape{8, 256, 256, 2};
  Problem const problem(shape, GetParam(), 4, Pattern::random, 3);
  LayerOptions options;
  options.activation = Kind::swiglu_step;  // without a limit
  EXPECT_THROW(ContiguousLayer(shape, GetParam(), problem.layer_weights(), options, any_launcher(GetParam())), moe::Error);
  options = {};
  options.weight_on_input = true;
  EXPECT_THROW(ContiguousLayer(shape, GetParam(), problem.layer_weights(), options), moe::Error);  // plain kernels
  LayerWeights weights = problem.layer_weights();
  weights.w2 = nullptr;
  EXPECT_THROW(ContiguousLayer(shape, GetParam(), weights, {}, any_launcher(GetParam())), moe::Error);
  weights = problem.layer_weights();
  weights.w13 = static_cast<char const*>(weights.w13) + 8;
  EXPECT_THROW(ContiguousLayer(shape, GetParam(), weights, {}, any_launcher(GetParam())), moe::Error);
  if (is_scaled(GetParam())) {
    weights = problem.layer_weights();
    weights.w13_scales = nullptr;
    EXPECT_THROW(ContiguousLayer(shape, GetParam(), weights, {}, any_launcher(GetParam())), moe::Error);
  }
}

INSTANTIATE_TEST_SUITE_P(Schemes, HopperFeatures, testing::Values(Scheme::bf16, Scheme::fp8_block, Scheme::fp8_row, Scheme::int8_row),
                         [](auto const& info) { return std::string(name(info.param)); });

}  // namespace
