// SPDX-License-Identifier: Apache-2.0
// tests/capi/export_cuda.cpp: moe.h over a model library in the CUDA space: export_cuda.c has the bits of the C++ layer, and any other
// layer is refused, which needs no GPU.
#include "tests/capi/export_cuda.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <load_deepseek.hpp>
#include <memory>
#include <string>
#include <vector>

#include "moe/c/layer_runner.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/experts/weights.hpp"
#include "moe/models/gpt_oss.hpp"
#include "tests/capi/handles.hpp"
#include "tests/capi/on_gpu.hpp"
#include "tests/capi/tensors.hpp"
#include "tests/expect_error.hpp"
#include "tests/gpu/on_hopper.hpp"

namespace {

using namespace moe_test;
using moe::bf16;
using Cuda = moe::space::cuda;
/// moe_test::TinyDeepSeek.
constexpr Sizes kSizes{.hidden = 64, .intermediate = 32, .experts = 16, .topk = 4, .tokens = 16};

// ---- on a GPU

class ExportOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "presets in the CUDA space need a GPU of compute capability 9.0";
    fill(bias, 5, 0.3F);
    bias_on_gpu = std::make_unique<OnGpu>(bias);
    hidden = std::make_unique<OnGpu>(a.hidden);
    logits = std::make_unique<OnGpu>(a.logits);
    ids = std::make_unique<OnGpu>(a.ids);
    given = std::make_unique<OnGpu>(a.weights);
  }
  /// The outputs of both forward functions, by the layer itself.
  template <class Layer>
  void run_layer(typename Layer::Comm& comm) {
    moe::experts::WeightStore<typename Layer::Config, moe::quantization::None, Cuda> store(kSizes.experts, kSizes.hidden,
                                                                                           kSizes.intermediate, true);
    std::vector<float> const w13 = widened(a.w13.values());
    std::vector<float> const w2 = widened(a.w2.values());
    std::int64_t const down = kSizes.hidden * kSizes.intermediate;
    for (std::int64_t e = 0; e < kSizes.experts; ++e) store.set_expert(e, w13.data() + e * 2 * down, w2.data() + e * down);
    typename Layer::Params params{.max_tokens_per_rank = kSizes.tokens, .placement = moe::ExpertPlacement(16, 1)};
    params.router.correction_bias = static_cast<float const*>(bias_on_gpu->tensor().data);
    Layer layer(comm, store.view(), params);
    OnGpu output(a.output);
    auto const rows = [&]<class T>(OnGpu& array, T, std::int64_t cols) {
      return moe::make_rows(static_cast<T const*>(array.tensor().data), kSizes.tokens, cols);
    };
    auto const in = moe::make_rows<64, bf16 const>(static_cast<bf16 const*>(hidden->tensor().data), kSizes.tokens, 64);
    auto const out = moe::make_rows<64>(static_cast<bf16*>(output.tensor().data), kSizes.tokens, 64);
    output.spoil();
    layer.forward(in, rows(*logits, 0.0F, kSizes.experts), out);
    layer.wait();
    output.read(a.output);
    expected = widened(a.output.values());
    output.spoil();
    layer.forward_routed(in, rows(*ids, 0, kSizes.topk), rows(*given, 0.0F, kSizes.topk), out);
    layer.wait();
    output.read(a.output);
    expected_routed = widened(a.output.values());
    EXPECT_LT(relative_error(a.output.values(), reference(a)), 8e-3);
    EXPECT_NE(expected, expected_routed);
  }
  /// The same outputs from C.
  void run_c(std::uint8_t const* id, char const* backend) {
    OnGpu w13(a.w13), w2(a.w2), output(a.output), routed(a.output);
    output.spoil();
    routed.spoil();
    moe::CudaStream const stream;
    export_cuda_call call{.device = output.tensor().device.device_id,
                          .stream = static_cast<cudaStream_t>(stream),
                          .hidden_size = kSizes.hidden,
                          .intermediate_size = kSizes.intermediate,
                          .tokens = kSizes.tokens,
                          .num_experts = static_cast<std::int32_t>(kSizes.experts),
                          .topk = static_cast<std::int32_t>(kSizes.topk),
                          .w13 = w13.tensor().data,
                          .w2 = w2.tensor().data,
                          .bias = bias_on_gpu->tensor().data,
                          .hidden = hidden->tensor().data,
                          .logits = logits->tensor().data,
                          .ids = ids->tensor().data,
                          .weights = given->tensor().data,
                          .output = output.tensor().data,
                          .routed = routed.tensor().data,
                          .id = id,
                          .info = MOE_RUNNER_INFO_INIT};
    moe::check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    ASSERT_OK(export_cuda_run(&call));
    EXPECT_EQ(call.info.device.device_type, kDLCUDA);
    EXPECT_STREQ(call.info.backend, backend);
    EXPECT_STREQ(call.info.experts, "hopper_contiguous");
    output.read(a.output);
    EXPECT_EQ(widened(a.output.values()), expected);
    routed.read(a.output);
    EXPECT_EQ(widened(a.output.values()), expected_routed);
  }

  LayerArrays<bf16> a{kSizes};
  Array<float> bias{{kSizes.experts}};
  std::unique_ptr<OnGpu> bias_on_gpu, hidden, logits, ids, given;
  std::vector<float> expected, expected_routed;
};

TEST_F(ExportOnGpu, HasTheBitsOfTheLayer) {
  moe::comm::Self<Cuda> self;
  run_layer<load_deepseek::no_expert_parallel::none::decode::Layer>(self);
  run_c(nullptr, "no_expert_parallel");
}
#ifdef MOE_C_HAS_NCCL
/// One rank over NCCL.
TEST_F(ExportOnGpu, HasTheBitsOfTheLayerOverNccl) {
  moe::comm::Nccl comm(0, 1, moe::comm::Nccl::unique_id(), {.timeout_ms = 20000});
  run_layer<load_deepseek::all_to_all_v::none::decode::Layer>(comm);
  std::uint8_t id[MOE_NCCL_ID_BYTES];
  ASSERT_OK(moe_nccl_get_id(id));
  run_c(id, "all_to_all_v");
}
#endif

// ---- without a GPU: arrays that say that they are on one, and are not read

struct Asked {
  Asked() {
    w13.tensor().device = w2.tensor().device = {kDLCUDA, 0};
    weights.w13 = &w13;
    weights.w2 = &w2;
    export_cuda_router(&router);
    config.hidden = kSizes.hidden;
    config.intermediate = kSizes.intermediate;
    config.num_experts = static_cast<std::int32_t>(kSizes.experts);
    config.topk = static_cast<std::int32_t>(kSizes.topk);
    config.max_tokens_per_rank = 1;
    config.router = &router;
  }
  Array<bf16> w13{{kSizes.experts, 2 * kSizes.intermediate, kSizes.hidden}}, w2{{kSizes.experts, kSizes.hidden, kSizes.intermediate}};
  moe_weights weights = MOE_WEIGHTS_INIT;
  moe_router_config router = MOE_ROUTER_CONFIG_INIT;
  moe_runner_config config = MOE_RUNNER_CONFIG_INIT;
};

TEST(ExportCuda, AnyOtherLayerIsRefused) {
  auto const refused = [](auto spoil, char const* part) {
    Asked asked;
    spoil(asked);
    Handles h;
    EXPECT_EQ(moe_runner_create(&asked.config, &asked.weights, h.group, &h.runner), MOE_E_CONFIG) << part;
    EXPECT_NE(std::string(moe_last_error()).find(part), std::string::npos) << moe_last_error();
  };
  char const* none = "is none of this library's layers: bfloat16, none, no_expert_parallel, hopper_contiguous on cuda";
  refused([](Asked& a) { a.config.activation = "gelu"; }, "activation: gelu was asked for, but the layer's type fixes it to silu");
  refused([](Asked& a) { a.router.renorm = "none"; }, "router.renorm");
  refused([](Asked& a) { a.router.scoring = "softmax"; }, "router.scoring");
  refused([](Asked& a) { a.config.topk = 2; }, "topk: 2, the router is compiled for 4");
  refused([none](Asked& a) { a.config.quantization = "fp8_block128"; }, none);
  refused([none](Asked& a) { a.config.experts = "cuda_reference"; }, none);
  refused([none](Asked& a) { a.w13.tensor().device = {kDLCPU, 0}; }, none);
}

/// The kernels of such a preset take every activation.
TEST(ExportCuda, APresetFixesItsActivation) {
  using Config = moe::models::PresetConfig<moe::models::GptOss_120B, Cuda>;
  EXPECT_NO_THROW(moe::c::check_same_activation<Config>(moe::activation::Kind::swigluoai_halves));
  expect_error(moe::ErrorCode::config, "activation: silu was asked for, but the layer's type fixes it to swigluoai_halves",
               [] { moe::c::check_same_activation<Config>(moe::activation::Kind::silu); });
}

TEST(ExportCuda, WhatTheLibraryIs) {
  EXPECT_STREQ(moe_version(), MOE_TEST_VERSION);
  EXPECT_EQ(moe_has("cuda"), 1);
  EXPECT_EQ(moe_has("nccl"), MOE_TEST_NCCL);
  Array<float> logits({1, 16}), weights({1, 4});
  Array<std::int32_t> ids({1, 4});
  logits.tensor().device = {kDLCUDA, 0};
  Asked asked;
  asked.router.num_experts = 16;
  asked.router.topk = 4;
  ids.tensor().device = weights.tensor().device = {kDLCUDA, 0};
  EXPECT_EQ(moe_route(&asked.router, &logits, nullptr, &ids, &weights, nullptr), MOE_E_UNSUPPORTED);
  EXPECT_STREQ(moe_last_error(), "E_UNSUPPORTED: logits: device is cuda:0, this library routes on cpu alone");
}

}  // namespace
