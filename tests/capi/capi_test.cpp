// SPDX-License-Identifier: Apache-2.0
// tests/capi/capi_test.cpp: moe.h over libmoe in the host space: results beside the definition, C handles, threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "tests/capi/handles.hpp"
#include "tests/capi/tensors.hpp"

namespace {

using namespace moe_test;

template <class T>
class Dtypes : public testing::Test {};
using Elements = testing::Types<float, moe::bf16, moe::f16>;
TYPED_TEST_SUITE(Dtypes, Elements);

TYPED_TEST(Dtypes, RoutedByTheCaller) {
  LayerArrays<TypeParam> a;
  a.ids[3] = -1;
  Handles h;
  moe_runner_config const config = a.config();
  moe_weights const weights = a.view();
  ASSERT_OK(moe_runner_create(&config, &weights, h.group, &h.runner));
  for (int repeat = 0; repeat < 2; ++repeat) {
    ASSERT_OK(moe_runner_forward_routed(h.runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr));
    EXPECT_LT(relative_error(a.output.values(), reference(a)), sizeof(TypeParam) == 4 ? 1e-5 : 4e-3);
  }
  Array<std::int64_t> wide({a.sizes.tokens, a.sizes.topk});  // ids of int64
  for (std::int64_t i = 0; i < wide.size(); ++i) wide[i] = a.ids[i];
  std::vector<float> const first = widened(a.output.values());
  a.output.values().assign(a.output.values().size(), TypeParam{});
  ASSERT_OK(moe_runner_forward_routed(h.runner, &a.hidden, &wide, &a.weights, &a.output, nullptr, nullptr));
  EXPECT_EQ(widened(a.output.values()), first);
  LayerArrays<TypeParam> once;
  once.ids[3] = -1;
  moe_runner_config defaults = MOE_RUNNER_CONFIG_INIT;  // every size from the arrays
  ASSERT_OK(moe_experts(&defaults, &weights, &once.hidden, &once.ids, &once.weights, &once.output, nullptr));
  EXPECT_EQ(widened(once.output.values()), widened(a.output.values()));
}

TYPED_TEST(Dtypes, RoutedByTheRouter) {
  LayerArrays<TypeParam> a;
  Handles h;
  moe_runner_config config = a.config();
  moe_router_config router = MOE_ROUTER_CONFIG_INIT;
  router.renorm = "sum";
  config.router = &router;
  moe_weights const weights = a.view();
  ASSERT_OK(moe_runner_create(&config, &weights, h.group, &h.runner));
  ASSERT_OK(moe_runner_forward(h.runner, &a.hidden, &a.logits, &a.output, nullptr, nullptr));

  router.num_experts = config.num_experts;
  router.topk = config.topk;
  ASSERT_OK(moe_route(&router, &a.logits, nullptr, &a.ids, &a.weights, nullptr));
  EXPECT_NEAR(a.weights[0] + a.weights[1], 1.0, 1e-6);
  EXPECT_LT(relative_error(a.output.values(), reference(a)), sizeof(TypeParam) == 4 ? 1e-5 : 4e-3);

  Array<TypeParam> narrow({a.sizes.tokens, a.sizes.experts});  // logits in the runner's dtype
  for (std::int64_t i = 0; i < narrow.size(); ++i) narrow[i] = moe::from_float<TypeParam>(a.logits[i]);
  LayerArrays<TypeParam> b;
  ASSERT_OK(moe_runner_forward(h.runner, &b.hidden, &narrow, &b.output, nullptr, nullptr));
  ASSERT_OK(moe_route(&router, &narrow, nullptr, &b.ids, &b.weights, nullptr));
  EXPECT_LT(relative_error(b.output.values(), reference(b)), sizeof(TypeParam) == 4 ? 1e-5 : 4e-3);
}

TEST(Capi, RowsWithStridesAndPadding) {
  LayerArrays<float> a;
  Handles h;
  moe_runner_config const config = a.config();
  moe_weights const weights = a.view();
  ASSERT_OK(moe_runner_create(&config, &weights, h.group, &h.runner));
  std::vector<double> expected = reference(a);

  Array<float> wide({a.sizes.tokens, 100});
  for (std::int64_t i = 0; i < a.hidden.size(); ++i) wide[i / 64 * 100 + 7 + i % 64] = a.hidden[i];
  std::int64_t shape[] = {a.sizes.tokens, 64};
  std::int64_t strides[] = {100, 1};
  DLTensor rows = wide.tensor();
  rows.shape = shape;
  rows.strides = strides;
  rows.byte_offset = 7 * sizeof(float);
  moe_forward_options options = MOE_FORWARD_OPTIONS_INIT;
  options.num_valid_rows = 10;
  for (std::int64_t i = 10 * 64; i < a.hidden.size(); ++i) expected[static_cast<std::size_t>(i)] = 0.0;
  ASSERT_OK(moe_runner_forward_routed(h.runner, &rows, &a.ids, &a.weights, &a.output, &options, nullptr));
  EXPECT_LT(relative_error(a.output.values(), expected), 1e-5);

  shape[0] = 0;  // no rows, and no memory
  rows.data = nullptr;
  std::int64_t const none[] = {0, 2};
  DLTensor ids = a.ids.tensor();
  DLTensor given = a.weights.tensor();
  ids.shape = given.shape = const_cast<std::int64_t*>(none);
  EXPECT_OK(moe_runner_forward_routed(h.runner, &rows, &ids, &given, &rows, nullptr, nullptr));
}

TEST(Capi, Biases) {
  LayerArrays<float> a;
  Array<float> b13({a.sizes.experts, 2 * a.sizes.intermediate});
  Array<float> b2({a.sizes.experts, a.sizes.hidden});
  fill(b2, 9, 1.0F);
  fill(a.w13, 1, 0.0F);  // only the biases are left: silu(0) times 0, so the output is the sum of weight times b2
  moe_weights weights = a.view();
  weights.w13_bias = &b13;
  weights.w2_bias = &b2;
  Handles h;
  moe_runner_config const config = a.config();
  ASSERT_OK(moe_runner_create(&config, &weights, h.group, &h.runner));
  ASSERT_OK(moe_runner_forward_routed(h.runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr));
  for (std::int64_t i = 0; i < a.output.size(); ++i) {
    float sum = 0.0F;
    for (int j = 0; j < 2; ++j) sum += a.weights[i / 64 * 2 + j] * b2[a.ids[i / 64 * 2 + j] * 64 + i % 64];
    ASSERT_NEAR(a.output[i], sum, 1e-5) << i;
  }
}

/// A matrix of gate and up rows in turn, as gpt-oss has them, with the even rows first.
Array<float> sorted(Array<float>& in_turn) {
  Array<float> out = in_turn;
  std::int64_t const rows = in_turn.tensor().shape[1], cols = in_turn.tensor().ndim == 3 ? in_turn.tensor().shape[2] : 1;
  for (std::int64_t i = 0; i < in_turn.size(); ++i) {
    std::int64_t const e = i / cols / rows, row = i / cols % rows;
    out[(e * rows + row % 2 * (rows / 2) + row / 2) * cols + i % cols] = in_turn[i];
  }
  return out;
}

// By the formula that gpt-oss has for its own weights: g = x[0::2], u = x[1::2]; (clamp(u, 7) + 1) g' sigmoid(1.702 g'), g' = min(g, 7).
TEST(Capi, LayerOfGptOss) {
  LayerArrays<float> a;
  Array<float> bias13({8, 256}), bias2({8, 64});
  fill(bias13, 11, 2.0F);
  fill(bias2, 12, 1.0F);
  fill(a.hidden, 13, 8.0F);  // so that the limit is reached
  moe_weights weights = a.view();
  weights.w13_bias = &bias13;
  weights.w2_bias = &bias2;
  moe_runner_config config = a.config();
  config.activation = "swigluoai";
  EXPECT_EQ(moe_experts(&config, &weights, &a.hidden, &a.ids, &a.weights, &a.output, nullptr), MOE_E_CONFIG);
  EXPECT_NE(std::string(moe_last_error()).find("swigluoai_halves with activation_limit 7"), std::string::npos) << moe_last_error();

  Array<float> const w13 = sorted(a.w13), w13_bias = sorted(bias13);
  weights.w13 = &w13;
  weights.w13_bias = &w13_bias;
  config.activation = "swigluoai_halves";
  config.activation_limit = 7.0F;
  ASSERT_OK(moe_experts(&config, &weights, &a.hidden, &a.ids, &a.weights, &a.output, nullptr));
  std::vector<double> expected(static_cast<std::size_t>(a.hidden.size()), 0.0);
  std::int64_t limited = 0;
  for (std::int64_t slot = 0; slot < a.ids.size(); ++slot) {
    std::int64_t const e = a.ids[slot], t = slot / 2;
    std::vector<double> x(256), act(128);
    for (std::int64_t r = 0; r < 256; ++r) {
      double sum = bias13[e * 256 + r];
      for (std::int64_t h = 0; h < 64; ++h) sum += static_cast<double>(a.w13[(e * 256 + r) * 64 + h]) * a.hidden[t * 64 + h];
      x[static_cast<std::size_t>(r)] = sum;
    }
    for (std::size_t i = 0; i < 128; ++i) {
      double const g = std::min(x[2 * i], 7.0), u = std::clamp(x[2 * i + 1], -7.0, 7.0);
      limited += g != x[2 * i] || u != x[2 * i + 1] ? 1 : 0;
      act[i] = (u + 1.0) * g / (1.0 + std::exp(-1.702 * g));
    }
    for (std::int64_t h = 0; h < 64; ++h) {
      double sum = bias2[e * 64 + h];
      for (std::int64_t i = 0; i < 128; ++i) sum += a.w2[(e * 64 + h) * 128 + i] * act[static_cast<std::size_t>(i)];
      expected[static_cast<std::size_t>(t * 64 + h)] += a.weights[slot] * sum;
    }
  }
  EXPECT_GT(limited, 100);
  EXPECT_LT(relative_error(a.output.values(), expected), 1e-5);
}

TEST(Capi, ConstantsOfSitu) {
  LayerArrays<float> a;
  Array<float> b13({a.sizes.experts, 2 * a.sizes.intermediate});
  Array<float> b2({a.sizes.experts, a.sizes.hidden});
  float const gate = 1.5F;
  float const up = 7.0F;
  for (std::int64_t i = 0; i < b13.size(); ++i) b13[i] = i % (2 * a.sizes.intermediate) < a.sizes.intermediate ? gate : up;
  fill(a.w13, 1, 0.0F);  // only the biases are left
  for (float& w : a.w2.values()) w = 1.0F / static_cast<float>(a.sizes.intermediate);
  moe_weights weights = a.view();
  weights.w13_bias = &b13;
  weights.w2_bias = &b2;
  moe_runner_config config = a.config();
  config.activation = "situ";
  auto run = [&](float b, float l) {
    Handles h;
    ASSERT_OK(moe_runner_create(&config, &weights, h.group, &h.runner));
    ASSERT_OK(moe_runner_forward_routed(h.runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr));
    float const expected = b * std::tanh(gate / b) / (1.0F + std::exp(-gate)) * l * std::tanh(up / l) * (a.weights[0] + a.weights[1]);
    EXPECT_NEAR(a.output[0], expected, 1e-4F * expected);
  };
  run(4.0F, 25.0F);  // the initialiser's
  config.activation_situ_gate = 2.0F;
  config.activation_situ_up = 3.0F;
  run(2.0F, 3.0F);
}

struct Scheme {
  char const* name;
  double tolerance;  // of the dequantised weights' layer: of the activations' quantisation
};
class Schemes : public testing::TestWithParam<Scheme> {};

TEST_P(Schemes, QuantizedWeights) {
  auto const [scheme, tolerance] = GetParam();
  Sizes const s{.hidden = 128, .intermediate = 128, .experts = 4, .topk = 2, .tokens = 8};
  LayerArrays<moe::bf16> a(s);
  auto layout = [&](std::int64_t rows, std::int64_t cols) {
    moe_quantized_layout l = MOE_QUANTIZED_LAYOUT_INIT;
    EXPECT_OK(moe_get_quantized_layout(scheme, rows, cols, &l));
    return l;
  };
  moe_quantized_layout const l13 = layout(256, 128);
  moe_quantized_layout const l2 = layout(128, 128);
  Array<std::uint8_t> c13({4, 256, l13.code_cols});
  Array<std::uint8_t> c2({4, 128, l2.code_cols});
  Array<float> s13({4, l13.scale_rows, l13.scale_cols});
  Array<float> s2({4, l2.scale_rows, l2.scale_cols});
  Array<std::uint8_t> e13({4, l13.scale_rows, l13.scale_cols});
  Array<std::uint8_t> e2({4, l2.scale_rows, l2.scale_cols});
  c13.tensor().dtype = c2.tensor().dtype = l13.code_dtype;
  bool const bytes = l13.scale_dtype.code == kDLUInt;
  ASSERT_OK(moe_quantize(scheme, &a.w13, &c13, bytes ? &e13 : &s13));
  ASSERT_OK(moe_quantize(scheme, &a.w2, &c2, bytes ? &e2 : &s2));
  std::vector<float> w13 = dequantized(scheme, c13, s13, e13, 256, 128);
  std::vector<float> const w2 = dequantized(scheme, c2, s2, e2, 128, 128);
  std::vector<float> const source = widened(a.w13.values());
  EXPECT_LT(relative_error(w13, {source.begin(), source.end()}), 0.15);
  if (std::string(scheme).starts_with("int4_group128_zero")) {  // zero points other than the middle
    for (std::int64_t i = 1; i < s13.size(); i += 4) s13[i] = 7.0F;
    w13 = dequantized(scheme, c13, s13, e13, 256, 128);
  }

  moe_runner_config config = a.config();
  config.quantization = scheme;
  moe_weights weights = a.view();
  weights.w13 = &c13;
  weights.w2 = &c2;
  weights.w13_scale = bytes ? &e13 : &s13;
  weights.w2_scale = bytes ? &e2 : &s2;
  Handles h;
  ASSERT_OK(moe_runner_create(&config, &weights, h.group, &h.runner));
  ASSERT_OK(moe_runner_forward_routed(h.runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr));
  std::vector<double> const expected = reference(s, widened(a.hidden.values()), w13, w2, a.ids.values(), a.weights.values());
  EXPECT_LT(relative_error(a.output.values(), expected), tolerance);

  moe_runner_info info = MOE_RUNNER_INFO_INIT;
  ASSERT_OK(moe_runner_get_info(h.runner, &info));
  EXPECT_STREQ(info.quantization, scheme);
  EXPECT_STREQ(info.dtype, "bfloat16");
  EXPECT_STREQ(info.backend, "no_expert_parallel");
  EXPECT_STREQ(info.experts, "onednn");
  EXPECT_EQ(info.weights_packed, 0);
  EXPECT_EQ(info.num_local_experts, 4);
  EXPECT_GT(info.bytes, 0);

  s2[0] = std::numeric_limits<float>::quiet_NaN();
  e2[0] = 0xFF;  // no number in either kind of bytes
  moe_runner_t refused = nullptr;
  EXPECT_EQ(moe_runner_create(&config, &weights, h.group, &refused), MOE_E_ARG);
  std::string const message = moe_last_error();
  EXPECT_EQ(message.find(std::string("E_ARG: expert weights: w2 of expert 0 in ") + scheme + ": scale 0 is not finite or out of range: "),
            0)
      << message;
}
INSTANTIATE_TEST_SUITE_P(All, Schemes,
                         testing::Values(Scheme{"fp8_block128", 0.06}, Scheme{"fp8_per_token", 0.06}, Scheme{"int4_group32", 4e-3},
                                         Scheme{"int4_group64", 4e-3}, Scheme{"int4_group128", 4e-3}, Scheme{"mxfp4_w4a16", 4e-3},
                                         Scheme{"int4_group128_zero", 4e-3}, Scheme{"int8_per_channel", 4e-3},
                                         Scheme{"int8_per_token", 0.02}, Scheme{"mxfp8", 0.06}, Scheme{"mxfp4_fp8", 0.06},
                                         Scheme{"fp8_per_channel", 4e-3}, Scheme{"mxfp8_w8a16", 4e-3}, Scheme{"nvfp4_w4a16", 4e-3},
                                         Scheme{"int4_group32_fp8", 0.06}, Scheme{"int4_group64_fp8", 0.06},
                                         Scheme{"int4_group128_fp8", 0.06}, Scheme{"int4_group128_zero_fp8", 0.06}),
                         [](auto const& info) { return std::string(info.param.name); });

TEST(Capi, Plan) {
  Array<float> load({2, 4});
  load.values() = {90.0F, 5.0F, 3.0F, 2.0F, 1.0F, 1.0F, 1.0F, 97.0F};
  moe_plan_config config = MOE_PLAN_CONFIG_INIT;
  config.num_physical = 6;
  config.num_ranks = 2;
  Array<std::int32_t> physical({2, 6});
  Array<std::int32_t> logical({2, 4, 3});
  Array<std::int32_t> count({2, 4});
  ASSERT_OK(moe_plan(&config, &load, &physical, &logical, &count));
  EXPECT_EQ(count.values(), (std::vector<std::int32_t>{3, 1, 1, 1, 1, 1, 1, 3}));
  for (std::int64_t layer = 0; layer < 2; ++layer) {
    for (std::int64_t e = 0; e < 4; ++e) {
      for (std::int64_t x = 0; x < 3; ++x) {
        std::int32_t const slot = logical[(layer * 4 + e) * 3 + x];
        ASSERT_EQ(slot >= 0, x < count[layer * 4 + e]);
        if (slot >= 0) {
          EXPECT_EQ(physical[layer * 6 + slot], e);
        }
      }
    }
  }
  EXPECT_OK(moe_plan(&config, &load, &physical, nullptr, nullptr));
  config.num_physical = 5;
  EXPECT_EQ(moe_plan(&config, &load, &physical, nullptr, nullptr), MOE_E_ARG);
}

TEST(Capi, HandlesAfterTheirEnd) {
  LayerArrays<float> a;
  moe_group_t group = nullptr;
  moe_runner_t runner = nullptr;
  moe_runner_config const config = a.config();
  moe_weights const weights = a.view();
  ASSERT_OK(moe_group_create_self(&group));
  ASSERT_OK(moe_runner_create(&config, &weights, group, &runner));
  std::int32_t rank = -1;
  std::int32_t size = -1;
  ASSERT_OK(moe_group_get_rank(group, &rank, &size));
  EXPECT_EQ(rank, 0);
  EXPECT_EQ(size, 1);
  ASSERT_OK(moe_group_destroy(group));  // the runner keeps it
  ASSERT_OK(moe_runner_forward_routed(runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr));
  moe_runner_t other = nullptr;
  EXPECT_EQ(moe_runner_create(&config, &weights, group, &other), MOE_E_STATE);
  EXPECT_NE(std::string(moe_last_error()).find("group: "), std::string::npos);
  EXPECT_EQ(other, nullptr);
  EXPECT_EQ(moe_group_destroy(group), MOE_E_STATE);
  EXPECT_EQ(moe_group_get_rank(group, &rank, &size), MOE_E_STATE);

  ASSERT_OK(moe_runner_destroy(runner));
  moe_runner_info info = MOE_RUNNER_INFO_INIT;
  EXPECT_EQ(moe_runner_forward_routed(runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr), MOE_E_STATE);
  EXPECT_NE(std::string(moe_last_error()).find("was destroyed"), std::string::npos) << moe_last_error();
  EXPECT_EQ(moe_runner_forward(runner, &a.hidden, &a.logits, &a.output, nullptr, nullptr), MOE_E_STATE);
  EXPECT_EQ(moe_runner_check(runner), MOE_E_STATE);
  EXPECT_EQ(moe_runner_wait(runner, nullptr), MOE_E_STATE);
  EXPECT_EQ(moe_runner_weights_changed(runner, nullptr), MOE_E_STATE);
  EXPECT_EQ(moe_runner_get_info(runner, &info), MOE_E_STATE);
  EXPECT_EQ(moe_runner_destroy(runner), MOE_E_STATE);

  // A new runner in the same entry of the table has another C handle.
  ASSERT_OK(moe_group_create_self(&group));
  ASSERT_OK(moe_runner_create(&config, &weights, group, &other));
  EXPECT_NE(other, runner);
  EXPECT_EQ(moe_runner_check(runner), MOE_E_STATE);
  EXPECT_OK(moe_runner_check(other));
  // Not C handles: NULL, an address, a group.
  EXPECT_EQ(moe_runner_check(nullptr), MOE_E_ARG);
  EXPECT_EQ(moe_runner_check(reinterpret_cast<moe_runner_t>(&info)), MOE_E_ARG);
  EXPECT_EQ(moe_runner_check(reinterpret_cast<moe_runner_t>(group)), MOE_E_ARG);
  EXPECT_EQ(moe_runner_create(&config, &weights, nullptr, &runner), MOE_E_ARG);
  EXPECT_OK(moe_runner_destroy(nullptr));
  EXPECT_OK(moe_group_destroy(nullptr));
  EXPECT_OK(moe_runner_destroy(other));
  EXPECT_OK(moe_group_destroy(group));
}

TEST(Capi, TwoThreadsWithTwoRunners) {
  std::atomic<int> failed{0};
  auto const work = [&failed](int seed) {
    LayerArrays<moe::bf16> a;
    fill(a.hidden, seed, 1.0F);
    moe_group_t group = nullptr;
    moe_runner_t runner = nullptr;
    moe_runner_config config = a.config();
    config.num_threads = 2;
    moe_weights const weights = a.view();
    failed += moe_group_create_self(&group) != MOE_OK;
    failed += moe_runner_create(&config, &weights, group, &runner) != MOE_OK;
    std::vector<double> const expected = reference(a);
    for (int i = 0; i < 20; ++i) {
      failed += moe_runner_forward_routed(runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr) != MOE_OK;
      failed += relative_error(a.output.values(), expected) > 4e-3;
      a.ids[0] = 99;  // each thread has its own last error
      failed += moe_runner_forward_routed(runner, &a.hidden, &a.ids, &a.weights, &a.output, nullptr, nullptr) != MOE_E_ARG;
      failed += std::string(moe_last_error()).find("99") == std::string::npos;
      a.ids[0] = 0;
    }
    failed += moe_runner_destroy(runner) != MOE_OK;
    failed += moe_group_destroy(group) != MOE_OK;
  };
  std::thread first(work, 5);
  std::thread second(work, 6);
  first.join();
  second.join();
  EXPECT_EQ(failed, 0);
}

/// Calls on one runner from two threads while a third destroys it: each call runs alone or answers with a status.
TEST(Capi, OneRunnerInThreeThreads) {
  LayerArrays<float> a;
  Handles h;
  moe_runner_config const config = a.config();
  moe_weights const weights = a.view();
  moe_runner_t runner = nullptr;
  ASSERT_OK(moe_runner_create(&config, &weights, h.group, &runner));
  std::atomic<int> ran{0};
  std::atomic<int> wrong{0};
  auto const work = [&] {
    LayerArrays<float> own;
    for (bool alive = true; alive;) {
      moe_status const status = moe_runner_forward_routed(runner, &own.hidden, &own.ids, &own.weights, &own.output, nullptr, nullptr);
      ran += status == MOE_OK;
      wrong += status != MOE_OK && status != MOE_E_STATE;
      alive = status == MOE_OK || std::string(moe_last_error()).find("destroyed") == std::string::npos;
    }
  };
  std::thread first(work);
  std::thread second(work);
  while (ran < 10) std::this_thread::yield();
  EXPECT_OK(moe_runner_destroy(runner));
  first.join();
  second.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Capi, Versions) {
  EXPECT_EQ(moe_abi_version(), MOE_C_ABI_VERSION);
  EXPECT_STREQ(moe_version(), MOE_TEST_VERSION);
  EXPECT_STREQ(moe_status_name(MOE_OK), "MOE_OK");
  EXPECT_STREQ(moe_status_name(MOE_E_MEMORY), "MOE_E_MEMORY");
  // NOLINTBEGIN(clang-analyzer-optin.core.EnumCastOutOfRange): a caller of another version may have such a status.
  EXPECT_STREQ(moe_status_name(static_cast<moe_status>(12)), "?");
  EXPECT_STREQ(moe_status_name(static_cast<moe_status>(-1)), "?");
  // NOLINTEND(clang-analyzer-optin.core.EnumCastOutOfRange)
  EXPECT_EQ(moe_has("onednn"), 1);
  EXPECT_EQ(moe_has("telepathy"), 0);
  EXPECT_EQ(moe_has(nullptr), 0);
}

}  // namespace
