// SPDX-License-Identifier: Apache-2.0
// tests/capi/bad_input_test.cpp: each wrong argument of moe.h is one status and one text with what is wrong, its value and what was
// expected.
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "tests/capi/arguments.hpp"

namespace {

using namespace moe_test;

constexpr std::int64_t kHuge = (std::int64_t{1} << 40) + 1;

/// A table of ids of [4, cols], rows `stride` apart.
void hash_table(Arguments& x, std::int64_t cols, std::int64_t stride) {
  DLTensor& t = x.spare.tensor();
  t.dtype = {kDLInt, 64, 1};
  t.ndim = 2;
  t.shape[0] = 4;
  t.shape[1] = cols;
  x.strides[0] = stride;
  x.strides[1] = 1;
  t.strides = x.strides;
  x.router.selection = "hash_table";
  x.router.hash_table = &t;
}

TEST(BadInput, Create) {
  float const kNan = std::numeric_limits<float>::quiet_NaN();
  run(
      {
          {"config size", [](Arguments& x) { x.config.struct_size = 8; }, MOE_E_ARG, {"config", "struct_size is 8"}},
          {"zeroed config", [](Arguments& x) { x.config = {}; }, MOE_E_ARG, {"config", "struct_size is 0"}},
          {"weights size", [](Arguments& x) { x.weights.struct_size += 8; }, MOE_E_ARG, {"weights", "struct_size"}},
          {"router size", [](Arguments& x) { x.router.struct_size = 1; }, MOE_E_ARG, {"router", "struct_size is 1"}},
          {"hidden 0", [](Arguments& x) { x.config.hidden = 0; }, MOE_E_CONFIG, {"hidden", "0"}},
          {"hidden huge", [](Arguments& x) { x.config.hidden = std::int64_t{1} << 62; }, MOE_E_CONFIG, {"hidden", "4611686018427387904"}},
          {"intermediate", [](Arguments& x) { x.config.intermediate = -4; }, MOE_E_CONFIG, {"intermediate", "-4"}},
          {"experts", [](Arguments& x) { x.config.num_experts = -1; }, MOE_E_CONFIG, {"num_experts", "-1"}},
          {"topk 0", [](Arguments& x) { x.config.topk = x.router.topk = 0; }, MOE_E_CONFIG, {"E_CONFIG: topk: 0 is out of range [1, 8]"}},
          {"topk", [](Arguments& x) { x.config.topk = x.router.topk = 9; }, MOE_E_CONFIG, {"E_CONFIG: topk: 9 is out of range [1, 8]"}},
          {"topk of two", [](Arguments& x) { x.router.topk = 3; }, MOE_E_CONFIG, {"router.topk", "3", "2"}},
          {"tokens", [](Arguments& x) { x.config.max_tokens_per_rank = 0; }, MOE_E_CONFIG, {"max_tokens_per_rank", "0"}},
          {"many tokens",
           [](Arguments& x) { x.config.max_tokens_per_rank = std::int64_t{1} << 50; },
           MOE_E_CAPACITY,
           {"max_tokens_per_rank"}},
          {"threads", [](Arguments& x) { x.config.num_threads = -1; }, MOE_E_CONFIG, {"num_threads", "-1"}},
          {"many threads",
           [](Arguments& x) { x.config.num_threads = 1 << 30; },
           MOE_E_CONFIG,
           {"num_threads: 1073741824 is out of range [0, 4096]"}},
          {"gate and up in turn",
           [](Arguments& x) { x.config.activation = "swigluoai"; },
           MOE_E_CONFIG,
           {"activation: swigluoai", "alternate", "gate rows first", "swigluoai_halves", "activation_limit 7"}},
          {"activation", [](Arguments& x) { x.config.activation = "swish"; }, MOE_E_CONFIG, {"activation", "swish", "silu"}},
          {"situ gate", [](Arguments& x) { x.config.activation_situ_gate = 0; }, MOE_E_CONFIG, {"activation_situ_gate", "0"}},
          {"situ up", [=](Arguments& x) { x.config.activation_situ_up = kNan; }, MOE_E_CONFIG, {"activation_situ_up", "nan"}},
          {"limit",
           [=](Arguments& x) { x.config.activation_limit = kNan; },
           MOE_E_CONFIG,
           {"activation_limit: nan is out of range [0, infinity]"}},
          {"alpha",
           [=](Arguments& x) { x.config.activation_alpha = kNan; },
           MOE_E_CONFIG,
           {"activation_alpha: nan is not a finite number"}},
          {"beta", [=](Arguments& x) { x.config.activation_beta = kNan; }, MOE_E_CONFIG, {"activation_beta: nan is not a finite number"}},
          {"a value with a name of the specification",
           [](Arguments& x) { x.config.activation = "top_k"; },
           MOE_E_CONFIG,
           {"activation: unknown name \"top_k\"; known: silu"}},
          {"step", [](Arguments& x) { x.config.activation = "swiglu_step"; }, MOE_E_CONFIG, {"swiglu_step", "limit"}},
          {"ungated", [](Arguments& x) { x.config.activation = "relu2_no_mul"; }, MOE_E_ARG, {"w13", "[8, 256, 64]", "[8, 128, 64]"}},
          {"dtype", [](Arguments& x) { x.config.dtype = "float64"; }, MOE_E_CONFIG, {"dtype", "float64", "bfloat16"}},
          {"other dtype", [](Arguments& x) { x.config.dtype = "float16"; }, MOE_E_ARG, {"w13", "float32", "float16"}},
          {"quantization", [](Arguments& x) { x.config.quantization = "int3"; }, MOE_E_CONFIG, {"quantization", "int3", "fp8_block128"}},
          {"backend",
           [](Arguments& x) { x.config.backend = "carrier_pigeon"; },
           MOE_E_CONFIG,
           {"backend", "carrier_pigeon", "no_expert_parallel"}},
          {"experts name",
           [](Arguments& x) { x.config.experts = "hopper_masked"; },
           MOE_E_CONFIG,
           {"experts", "hopper_masked", "cpu", "onednn"}},
      },
      [](Arguments& x) { return x.create(); });
  Arguments x;
  expect_refused(moe_runner_create(nullptr, &x.weights, x.group, &x.runner), MOE_E_ARG, {"config", "NULL"});
  expect_refused(moe_runner_create(&x.config, nullptr, x.group, &x.runner), MOE_E_ARG, {"weights", "NULL"});
  expect_refused(moe_runner_create(&x.config, &x.weights, x.group, nullptr), MOE_E_ARG, {"runner", "NULL"});
}

TEST(BadInput, CreateRouter) {
  float const kNan = std::numeric_limits<float>::quiet_NaN();
  run(
      {
          {"scoring",
           [](Arguments& x) { x.router.scoring = "argmax"; },
           MOE_E_CONFIG,
           {"router.scoring: unknown name \"argmax\"", "sigmoid"}},
          {"renorm", [](Arguments& x) { x.router.renorm = "max"; }, MOE_E_CONFIG, {"router.renorm", "max", "p_norm"}},
          {"order",
           [](Arguments& x) { x.router.order = "topk"; },
           MOE_E_CONFIG,
           {"router.order: unknown name \"topk\"; known: score_then_topk, topk_then_score"}},
          {"selection",
           [](Arguments& x) { x.router.selection = "best"; },
           MOE_E_CONFIG,
           {"router.selection: unknown name \"best\"; known: topk, hash_table, sparsemixer"}},
          {"group score",
           [](Arguments& x) { x.router.group_score = "top3_sum"; },
           MOE_E_CONFIG,
           {"router.group_score: unknown name \"top3_sum\"; known: max, top2_sum"}},
          {"zero expert",
           [](Arguments& x) { x.router.zero_expert = "zeros"; },
           MOE_E_CONFIG,
           {"router.zero_expert: unknown name \"zeros\"; known: identity, none"}},
          {"degenerate",
           [](Arguments& x) { x.router.degenerate = ""; },
           MOE_E_CONFIG,
           {"router.degenerate: unknown name \"\"; known: uniform_first_k, drop"}},
          {"sparsemixer nan",
           [=](Arguments& x) {
             x.router.selection = "sparsemixer";
             x.router.sparsemixer_eps = kNan;
           },
           MOE_E_CONFIG,
           {"router.sparsemixer_eps: nan is out of range [0, infinity)"}},
          {"sparsemixer",
           [](Arguments& x) {
             x.router.selection = "sparsemixer";
             x.router.sparsemixer_eps = -0.5F;
           },
           MOE_E_CONFIG,
           {"router.sparsemixer_eps: -0.5"}},
          {"per_expert_scale",
           [](Arguments& x) { x.router.per_expert_scale = &x.a.logits; },
           MOE_E_ARG,
           {"router.per_expert_scale: shape is [16, 8], expected 1 dimension"}},
          {"per_expert_scale of fewer",
           [](Arguments& x) {
             x.spare.tensor().ndim = 1;
             x.spare.tensor().shape[0] = 7;
             x.router.per_expert_scale = &x.spare;
           },
           MOE_E_ARG,
           {"router.per_expert_scale: shape is [7], expected [8]"}},
          {"per_expert_scale in bfloat16",
           [](Arguments& x) {
             x.spare.tensor().ndim = 1;
             x.spare.tensor().dtype = {kDLBfloat, 16, 1};
             x.router.per_expert_scale = &x.spare;
           },
           MOE_E_ARG,
           {"router.per_expert_scale: dtype is bfloat16, expected float32"}},
          {"hash_table columns", [](Arguments& x) { hash_table(x, 3, 3); }, MOE_E_ARG, {"router.hash_table: rows of 3, 3 apart", ", 2]"}},
          {"hash_table rows",
           [](Arguments& x) { hash_table(x, 2, 4); },
           MOE_E_ARG,
           {"router.hash_table: rows of 2, 4 apart", "contiguous"}},
          {"hash_table dtype",
           [](Arguments& x) {
             hash_table(x, 2, 2);
             x.spare.tensor().dtype.bits = 32;
           },
           MOE_E_ARG,
           {"router.hash_table: dtype is int32, expected int64"}},
          {"hash_table of no rows",
           [](Arguments& x) {
             hash_table(x, 2, 2);
             x.spare.tensor().shape[0] = 0;
           },
           MOE_E_ARG,
           {"router.hash_table: shape is [0, 2], expected [vocabulary, 2], at least one row"}},
          {"sparsemixer normalised",
           [](Arguments& x) {
             x.router.selection = "sparsemixer";
             x.router.renorm = "sum";
           },
           MOE_E_ARG,
           {"router.renorm: \"sum\" with selection sparsemixer, which needs \"none\""}},
          {"groups of few experts",
           [](Arguments& x) {
             x.router.num_expert_group = 8;
             x.router.topk_group = 1;
           },
           MOE_E_CONFIG,
           {"topk_group: 1 groups of 1 experts hold less than topk 2"}},
          {"no hash_table", [](Arguments& x) { x.router.selection = "hash_table"; }, MOE_E_ARG, {"hash_table"}},
          {"groups", [](Arguments& x) { x.router.num_expert_group = 3; }, MOE_E_CONFIG, {"topk_group"}},
          {"bias", [](Arguments& x) { x.router.correction_bias = &x.a.logits; }, MOE_E_ARG, {"router.correction_bias", "[16, 8]"}},
      },
      [](Arguments& x) { return x.create(); });
}

TEST(BadInput, CreateWeights) {
  run(
      {
          {"no w13", [](Arguments& x) { x.weights.w13 = nullptr; }, MOE_E_ARG, {"w13", "NULL"}},
          {"no w2", [](Arguments& x) { x.weights.w2 = nullptr; }, MOE_E_ARG, {"w2", "NULL"}},
          {"w13 data", [](Arguments& x) { x.w13.data = nullptr; }, MOE_E_ARG, {"w13", "data is NULL"}},
          {"w13 shape", [](Arguments& x) { x.w13.shape = nullptr; }, MOE_E_ARG, {"w13", "shape is NULL"}},
          {"w13 dimensions", [](Arguments& x) { x.w13.ndim = 2; }, MOE_E_ARG, {"w13", "[8, 256]", "3 dimensions"}},
          {"w13 ndim", [](Arguments& x) { x.w13.ndim = 1 << 30; }, MOE_E_ARG, {"w13", "ndim is 1073741824"}},
          {"w13 negative ndim", [](Arguments& x) { x.w13.ndim = -1; }, MOE_E_ARG, {"w13", "ndim is -1"}},
          {"w13 dtype", [](Arguments& x) { x.w13.dtype = {kDLInt, 32, 1}; }, MOE_E_ARG, {"w13", "int32", "float32"}},
          {"w13 lanes", [](Arguments& x) { x.w13.dtype.lanes = 2; }, MOE_E_ARG, {"w13", "float32x2"}},
          {"w2 dtype", [](Arguments& x) { x.w2.dtype = {kDLBfloat, 16, 1}; }, MOE_E_ARG, {"w2", "bfloat16", "float32"}},
          {"w13 device",
           // NOLINTNEXTLINE(clang-analyzer-optin.core.EnumCastOutOfRange): DLPack has more devices than this enum.
           [](Arguments& x) { x.w13.device = {static_cast<DLDeviceType>(10), 3}; },
           MOE_E_UNSUPPORTED,
           {"w13", "10:3", "cpu and cuda"}},
          {"w2 device", [](Arguments& x) { x.w2.device = {kDLCUDA, 1}; }, MOE_E_ARG, {"w2", "cuda:1", "cpu"}},
          {"w13 extents", [](Arguments& x) { x.w13.shape[0] = 7; }, MOE_E_ARG, {"w13", "[7, 256, 64]", "[8, 256, 64]"}},
          {"w13 negative", [](Arguments& x) { x.w13.shape[2] = -64; }, MOE_E_ARG, {"w13", "-64"}},
          {"w13 strides",
           [](Arguments& x) {
             x.strides[0] = 256 * 64;
             x.strides[1] = 1;
             x.strides[2] = 256;
             x.w13.strides = x.strides;
           },
           MOE_E_ARG,
           {"w13", "strides are [16384, 1, 256]", "contiguous"}},
          {"w2 offset", [](Arguments& x) { x.w2.byte_offset = 2; }, MOE_E_ARG, {"w2", "address", "4 bytes"}},
          {"scales", [](Arguments& x) { x.weights.w13_scale = &x.a.logits; }, MOE_E_ARG, {"w13_scale", "none has no scales"}},
          {"one bias", [](Arguments& x) { x.weights.w13_bias = &x.a.logits; }, MOE_E_ARG, {"w2_bias", "NULL"}},
          {"bias shape",
           [](Arguments& x) { x.weights.w13_bias = x.weights.w2_bias = &x.a.logits; },
           MOE_E_ARG,
           {"w13_bias", "[16, 8]", "[8, 256]"}},
          {"w13 extent",
           [](Arguments& x) { x.w13.shape[0] = kHuge; },
           MOE_E_ARG,
           {"w13: shape is [1099511627777, 256, 64], expected", "2^40"}},
          {"w13 elements",
           [](Arguments& x) { x.w13.shape[0] = x.w13.shape[1] = kHuge - 1; },
           MOE_E_ARG,
           {"w13: shape is [1099511627776, 1099511627776, 64], expected fewer than 2^46 elements"}},
          {"workspace of another device",
           [](Arguments& x) {
             x.config.workspace_of = x.another();
             x.w13.device = {kDLCUDA, 1};
           },
           MOE_E_ARG,
           {"workspace_of: is a runner on cpu, expected one on cuda:1"}},
      },
      [](Arguments& x) { return x.create(); });
}

TEST(BadInput, CreateQuantizedWeights) {
  run(
      {
          {"missing scales",
           [](Arguments& x) {
             x.config.quantization = "fp8_per_token";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
           },
           MOE_E_ARG,
           {"w13_scale", "NULL"}},
          {"shape of scales",
           [](Arguments& x) {
             x.config.quantization = "fp8_per_token";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
             x.weights.w13_scale = x.weights.w2_scale = &x.a.logits;
           },
           MOE_E_ARG,
           {"w13_scale: shape is [16, 8], expected [8, ...] with 256 scales of an expert"}},
          {"dimensions of scales",
           [](Arguments& x) {
             x.config.quantization = "fp8_per_token";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
             x.spare.tensor().ndim = 1;
             x.weights.w13_scale = x.weights.w2_scale = &x.spare;
           },
           MOE_E_ARG,
           {"w13_scale: shape is [8], expected [8, ...]"}},
          {"dtype of scales",
           [](Arguments& x) {
             x.config.quantization = "fp8_per_token";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
             x.spare.tensor().ndim = 2;
             x.spare.tensor().dtype = {kDLFloat, 16, 1};
             x.weights.w13_scale = x.weights.w2_scale = &x.spare;
           },
           MOE_E_ARG,
           {"w13_scale: dtype is float16, expected float32"}},
          {"dtype of powers of two",
           [](Arguments& x) {
             x.config.quantization = "mxfp4_w4a16";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
             x.w13.shape[2] /= 2;
             x.w2.shape[2] /= 2;
             x.spare.tensor().shape[2] = 2;
             x.weights.w13_scale = x.weights.w2_scale = &x.spare;
           },
           MOE_E_ARG,
           {"w13_scale: dtype is float32, expected uint8 or float8_e8m0fnu"}},
          {"float codes", [](Arguments& x) { x.config.quantization = "fp8_per_token"; }, MOE_E_ARG, {"w13", "float32", "uint8"}},
          {"unsigned codes of int8",
           [](Arguments& x) {
             x.config.quantization = "int8_per_channel";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
           },
           MOE_E_ARG,
           {"w13: dtype is uint8, expected int8"}},
          {"scales of nvfp4 without the global one",
           [](Arguments& x) {
             x.config.quantization = "nvfp4_w4a16";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
             x.w13.shape[2] /= 2;
             x.w2.shape[2] /= 2;
             x.spare.tensor().dtype = {MOE_DL_FLOAT8_E4M3FN, 8, 1};
             x.weights.w13_scale = x.weights.w2_scale = &x.spare;
           },
           MOE_E_ARG,
           {"w13_scale: dtype is float8_e4m3fn, expected uint8"}},
          {"scales of nvfp4 in another shape",
           [](Arguments& x) {
             x.config.quantization = "nvfp4_w4a16";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
             x.w13.shape[2] /= 2;
             x.w2.shape[2] /= 2;
             x.spare.tensor().dtype = {kDLUInt, 8, 1};
             x.weights.w13_scale = x.weights.w2_scale = &x.spare;
           },
           MOE_E_ARG,
           {"w13_scale: shape is", "[8, ...] with 1028 bytes of scales of an expert"}},
          {"scales without zero points",
           [](Arguments& x) {
             x.config.quantization = "int4_group128_zero";
             x.w13.dtype = x.w2.dtype = {kDLUInt, 8, 1};
             x.w13.shape[2] /= 2;
             x.w2.shape[2] /= 2;
             x.weights.w13_scale = x.weights.w2_scale = &x.a.logits;
           },
           MOE_E_ARG,
           {"w13_scale: shape is [16, 8], expected [8, ...] with 512 scales and zero points of an expert"}},
          {"sizes of blocks",
           [](Arguments& x) {
             x.config.quantization = "mxfp4_w4a16";
             x.config.intermediate = 100;
           },
           MOE_E_CONFIG,
           {"mxfp4_w4a16", "32", "100"}},
      },
      [](Arguments& x) { return x.create(); });
}

std::vector<Case> cases_of_rows() {
  return {
      {"hidden dtype", [](Arguments& x) { x.hidden.dtype = {kDLBfloat, 16, 1}; }, MOE_E_ARG, {"hidden", "bfloat16", "float32"}},
      {"hidden device", [](Arguments& x) { x.hidden.device = {kDLCUDA, 0}; }, MOE_E_ARG, {"hidden", "cuda:0", "cpu"}},
      {"hidden width", [](Arguments& x) { x.hidden.shape = x.logits.shape; }, MOE_E_ARG, {"E_ARG: hidden: width: 8, expected 64"}},
      {"hidden dimensions", [](Arguments& x) { x.hidden.ndim = 1; }, MOE_E_ARG, {"hidden", "[16]", "2 dimensions"}},
      {"hidden data", [](Arguments& x) { x.hidden.data = nullptr; }, MOE_E_ARG, {"hidden", "data is NULL"}},
      {"hidden stride",
       [](Arguments& x) {
         x.strides[0] = 1;
         x.strides[1] = 16;
         x.hidden.strides = x.strides;
       },
       MOE_E_ARG,
       {"hidden", "[1, 16]", "stride 1"}},
      {"hidden overlaps",
       [](Arguments& x) {
         x.strides[0] = 32;
         x.strides[1] = 1;
         x.hidden.strides = x.strides;
       },
       MOE_E_ARG,
       {"hidden", "[32, 1]", "at least 64"}},
      {"hidden offset", [](Arguments& x) { x.hidden.byte_offset = 1; }, MOE_E_ARG, {"hidden", "4 bytes"}},
      {"hidden rows",
       [](Arguments& x) {
         x.shape[0] = 17;
         x.shape[1] = 64;
         x.hidden.shape = x.output.shape = x.shape;
         x.hidden.data = x.output.data = x.spare.values().data();
         x.output.byte_offset = 17 * 64 * sizeof(float);
       },
       MOE_E_CAPACITY,
       {"17", "max_tokens_per_rank", "16"}},
      {"hidden extent",
       [](Arguments& x) {
         x.shape[0] = kHuge;
         x.shape[1] = 64;
         x.hidden.shape = x.shape;
       },
       MOE_E_ARG,
       {"hidden: shape is [1099511627777, 64], expected extents of [0, 2^40]"}},
      {"hidden elements",
       [](Arguments& x) {
         x.shape[0] = x.shape[1] = kHuge - 1;
         x.hidden.shape = x.shape;
       },
       MOE_E_ARG,
       {"hidden: shape is [1099511627776, 1099511627776], expected fewer than 2^46 elements"}},
      {"hidden far apart",
       [](Arguments& x) {
         x.strides[0] = std::numeric_limits<std::int64_t>::max();
         x.strides[1] = 1;
         x.hidden.strides = x.strides;
       },
       MOE_E_ARG,
       {"hidden: strides are [9223372036854775807, 1], expected fewer than 2^46 elements"}},
      {"output extent",
       [](Arguments& x) {
         x.shape[0] = 16;
         x.shape[1] = kHuge;
         x.output.shape = x.shape;
       },
       MOE_E_ARG,
       {"output: shape is [16, 1099511627777]", "2^40"}},
      {"output rows",
       [](Arguments& x) {
         x.shape[0] = 15;
         x.shape[1] = 64;
         x.output.shape = x.shape;
       },
       MOE_E_ARG,
       {"output", "15", "16"}},
      {"output dtype", [](Arguments& x) { x.output.dtype.code = kDLInt; }, MOE_E_ARG, {"output", "int32", "float32"}},
      {"options size", [](Arguments& x) { x.options.struct_size = 3; }, MOE_E_ARG, {"options", "struct_size is 3"}},
      {"valid rows", [](Arguments& x) { x.options.num_valid_rows = 17; }, MOE_E_ARG, {"num_valid_rows", "17", "16"}},
      {"num_rows", [](Arguments& x) { x.options.num_rows = &x.ids; }, MOE_E_ARG, {"num_rows", "[16, 2]"}},
  };
}

TEST(BadInput, Forward) {
  std::vector<Case> cases = cases_of_rows();
  std::vector<Case> const more = {
      {"logits width", [](Arguments& x) { x.logits.shape = x.ids.shape; }, MOE_E_ARG, {"router_logits", "2", "8"}},
      {"logits dtype", [](Arguments& x) { x.logits.dtype = {kDLFloat, 64, 1}; }, MOE_E_ARG, {"router_logits", "float64"}},
      {"token_ids", [](Arguments& x) { x.options.token_ids = &x.ids; }, MOE_E_ARG, {"token_ids"}},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  run(cases, [](Arguments& x) {
    EXPECT_EQ(x.create(), MOE_OK) << moe_last_error();
    return moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, &x.options, nullptr);
  });
  Arguments x;
  ASSERT_EQ(x.create(), MOE_OK);
  expect_refused(moe_runner_forward(x.runner, nullptr, &x.logits, &x.output, nullptr, nullptr), MOE_E_ARG, {"hidden", "NULL"});
  expect_refused(moe_runner_forward(x.runner, &x.hidden, nullptr, &x.output, nullptr, nullptr), MOE_E_ARG, {"router_logits", "NULL"});
  expect_refused(moe_runner_forward(x.runner, &x.hidden, &x.logits, nullptr, nullptr, nullptr), MOE_E_ARG, {"output", "NULL"});
  expect_refused(moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, nullptr, &x), MOE_E_ARG, {"stream", "NULL"});
  expect_refused(moe_runner_get_info(x.runner, nullptr), MOE_E_ARG, {"info", "NULL"});
  moe_runner_info info{};
  expect_refused(moe_runner_get_info(x.runner, &info), MOE_E_ARG, {"info", "struct_size is 0"});
  EXPECT_EQ(moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, nullptr, nullptr), MOE_OK) << "the runner goes on after errors";
}

TEST(BadInput, ForwardRouted) {
  std::vector<Case> cases = cases_of_rows();
  std::vector<Case> const more = {
      {"id", [](Arguments& x) { x.a.ids[5] = 8; }, MOE_E_ARG, {"topk_ids[2, 1]", "8", "[-1, 8)"}},
      {"twice", [](Arguments& x) { x.a.ids[4] = x.a.ids[5]; }, MOE_E_ARG, {"topk_ids[2, 1]", "twice"}},
      {"weight", [](Arguments& x) { x.a.weights[2] = std::numeric_limits<float>::infinity(); }, MOE_E_ARG, {"topk_weights[1, 0]", "inf"}},
      {"ids extent",
       [](Arguments& x) {
         x.shape[0] = kHuge;
         x.shape[1] = 2;
         x.ids.shape = x.shape;
       },
       MOE_E_ARG,
       {"topk_ids: shape is [1099511627777, 2]", "2^40"}},
      {"ids dtype", [](Arguments& x) { x.ids.dtype.bits = 16; }, MOE_E_ARG, {"topk_ids", "int16", "int32 or int64"}},
      {"ids of floats", [](Arguments& x) { x.ids.dtype.code = kDLFloat; }, MOE_E_ARG, {"topk_ids", "float32", "int32 or int64"}},
      {"ids width",
       [](Arguments& x) {
         x.ids.shape = x.logits.shape;
         x.ids.data = x.spare.values().data();
       },
       MOE_E_ARG,
       {"topk_ids", "8", "2"}},
      {"weights dtype",
       [](Arguments& x) { x.topk_weights.dtype = {kDLBfloat, 16, 1}; },
       MOE_E_ARG,
       {"topk_weights", "bfloat16", "float32"}},
  };
  cases.insert(cases.end(), more.begin(), more.end());
  run(cases, [](Arguments& x) {
    x.config.router = nullptr;
    EXPECT_EQ(x.create(), MOE_OK) << moe_last_error();
    return moe_runner_forward_routed(x.runner, &x.hidden, &x.ids, &x.topk_weights, &x.output, &x.options, nullptr);
  });
  Arguments x;
  x.config.router = nullptr;
  ASSERT_EQ(x.create(), MOE_OK);
  expect_refused(moe_runner_forward(x.runner, &x.hidden, &x.logits, &x.output, nullptr, nullptr), MOE_E_STATE,
                 {"no router", "forward_routed"});
  expect_refused(moe_runner_forward_routed(x.runner, &x.hidden, nullptr, &x.topk_weights, &x.output, nullptr, nullptr), MOE_E_ARG,
                 {"topk_ids", "NULL"});
  expect_refused(moe_runner_forward_routed(x.runner, &x.hidden, &x.ids, nullptr, &x.output, nullptr, nullptr), MOE_E_ARG,
                 {"topk_weights", "NULL"});
}

// What an int32 would make of such an id is an expert: it must be refused, not narrowed.
TEST(BadInput, IdsThatNoInt32Holds) {
  Arguments x;
  x.config.router = nullptr;
  ASSERT_EQ(x.create(), MOE_OK);
  moe_test::Array<std::int64_t> ids({x.a.sizes.tokens, x.a.sizes.topk});
  for (std::int64_t i = 0; i < ids.size(); ++i) ids[i] = x.a.ids[i];
  auto forward = [&] { return moe_runner_forward_routed(x.runner, &x.hidden, &ids, &x.topk_weights, &x.output, nullptr, nullptr); };
  EXPECT_EQ(forward(), MOE_OK) << moe_last_error();
  for (std::int64_t const bad :
       {std::int64_t{8}, std::int64_t{1} << 32, (std::int64_t{1} << 32) + 3, -(std::int64_t{1} << 32), INT64_MIN}) {
    ids[5] = bad;
    std::string const sentence = moe::text(": ", bad, " is out of range [-1, 8)");
    expect_refused(forward(), MOE_E_ARG, {"topk_ids[2, 1]", sentence});
  }
}

TEST(BadInput, WorkspaceOf) {
  Arguments x;
  ASSERT_EQ(x.create(), MOE_OK);
  Arguments y;
  y.config.workspace_of = x.runner;  // host: nothing is shared
  ASSERT_EQ(y.create(), MOE_OK) << moe_last_error();
  EXPECT_EQ(moe_runner_forward(y.runner, &y.hidden, &y.logits, &y.output, nullptr, nullptr), MOE_OK) << moe_last_error();
  Arguments z;
  z.config.workspace_of = reinterpret_cast<moe_runner_t>(std::uintptr_t{77});
  expect_refused(z.create(), MOE_E_ARG, {"77", "not a handle of a runner"});
  z.config.workspace_of = x.runner;
  ASSERT_EQ(moe_runner_destroy(std::exchange(x.runner, nullptr)), MOE_OK);
  expect_refused(z.create(), MOE_E_STATE, {std::to_string(reinterpret_cast<std::uintptr_t>(z.config.workspace_of)), "was destroyed"});
  EXPECT_EQ(z.runner, nullptr);
}

TEST(BadInput, StreamWait) {
  expect_refused(moe_stream_wait({kDLCPU, 0}, nullptr, 0), MOE_E_ARG, {"device", "cpu", "cuda"});
  expect_refused(moe_stream_wait({kDLCUDA, 0}, nullptr, -1), MOE_E_ARG, {"timeout_ms", "-1"});
  if (moe_has("cuda") == 0) expect_refused(moe_stream_wait({kDLCUDA, 0}, nullptr, 0), MOE_E_UNSUPPORTED, {"cuda:0", "without CUDA"});
}

TEST(BadInput, Experts) {
  run({{"hidden", [](Arguments& x) { x.hidden.ndim = 1; }, MOE_E_ARG, {"hidden", "[16]"}},
       {"config", [](Arguments& x) { x.config.struct_size = 0; }, MOE_E_ARG, {"config", "struct_size is 0"}},
       {"output", [](Arguments& x) { x.output.dtype.bits = 64; }, MOE_E_ARG, {"output", "float64"}},
       {"w13", [](Arguments& x) { x.weights.w13 = nullptr; }, MOE_E_ARG, {"w13", "NULL"}}},
      [](Arguments& x) { return moe_experts(&x.config, &x.weights, &x.hidden, &x.ids, &x.topk_weights, &x.output, nullptr); });
}

TEST(BadInput, Route) {
  run({{"struct", [](Arguments& x) { x.router.struct_size = 0; }, MOE_E_ARG, {"router", "struct_size"}},
       {"experts", [](Arguments& x) { x.router.num_experts = 0; }, MOE_E_CONFIG, {"num_experts", "0"}},
       {"width", [](Arguments& x) { x.router.num_experts = 9; }, MOE_E_ARG, {"E_ARG: logits: shape is [16, 8], expected [16, 9]"}},
       {"dtype",
        [](Arguments& x) { x.logits.dtype = {kDLInt, 32, 1}; },
        MOE_E_ARG,
        {"logits: dtype is int32, expected float32, bfloat16 or float16"}},
       {"ids", [](Arguments& x) { x.ids.dtype.code = kDLFloat; }, MOE_E_ARG, {"topk_ids", "float32", "int32"}},
       {"hash", [](Arguments& x) { x.router.selection = "hash_table"; }, MOE_E_ARG, {"hash_table"}},
       {"extent",
        [](Arguments& x) {
          x.shape[0] = kHuge;
          x.shape[1] = 8;
          x.logits.shape = x.shape;
        },
        MOE_E_ARG,
        {"logits: shape is [1099511627777, 8]", "2^40"}},
       {"sparsemixer",
        [](Arguments& x) {
          x.router.selection = "sparsemixer";
          x.router.sparsemixer_eps = std::numeric_limits<float>::quiet_NaN();
        },
        MOE_E_CONFIG,
        {"router.sparsemixer_eps: nan"}}},
      [](Arguments& x) { return moe_route(&x.router, &x.logits, nullptr, &x.ids, &x.topk_weights, nullptr); });
  Arguments x;
  expect_refused(moe_route(nullptr, &x.logits, nullptr, &x.ids, &x.topk_weights, nullptr), MOE_E_ARG, {"router", "NULL"});
  expect_refused(moe_route(&x.router, nullptr, nullptr, &x.ids, &x.topk_weights, nullptr), MOE_E_ARG, {"logits", "NULL"});
  expect_refused(moe_route(&x.router, &x.logits, nullptr, nullptr, &x.topk_weights, nullptr), MOE_E_ARG, {"topk_ids", "NULL"});
}

TEST(BadInput, Quantize) {
  Arguments x;
  Array<std::uint8_t> codes({8, 256, 64});
  Array<float> scales({8, 256});
  EXPECT_EQ(moe_quantize("fp8_per_token", &x.w13, &codes, &scales), MOE_OK) << moe_last_error();
  expect_refused(moe_quantize("fp9", &x.w13, &codes, &scales), MOE_E_CONFIG, {"fp9", "mxfp4_w4a16"});
  expect_refused(moe_quantize(nullptr, &x.w13, &codes, &scales), MOE_E_ARG, {"quantization", "NULL"});
  expect_refused(moe_quantize("fp8_per_token", nullptr, &codes, &scales), MOE_E_ARG, {"matrix", "NULL"});
  expect_refused(moe_quantize("fp8_per_token", &x.w13, nullptr, &scales), MOE_E_ARG, {"codes", "NULL"});
  expect_refused(moe_quantize("fp8_per_token", &x.w13, &codes, nullptr), MOE_E_ARG, {"scales", "NULL"});
  expect_refused(moe_quantize("fp8_per_token", &x.w13, &scales, &scales), MOE_E_ARG, {"codes", "[8, 256]"});
  expect_refused(moe_quantize("int4_group32", &x.w13, &codes, &scales), MOE_E_ARG, {"codes", "[8, 256, 64]", "[8, 256, 32]"});
  expect_refused(moe_quantize("fp8_per_token", &x.w13, &codes, &x.logits), MOE_E_ARG, {"scales", "[16, 8]"});
  expect_refused(moe_quantize("fp8_per_token", &x.ids, &codes, &scales), MOE_E_ARG, {"matrix", "int32"});
  DLTensor narrow = scales.tensor();
  narrow.dtype = {kDLBfloat, 16, 1};
  expect_refused(moe_quantize("fp8_per_token", &x.w13, &codes, &narrow), MOE_E_ARG, {"scales: dtype is bfloat16, expected float32"});
  DLTensor flat = scales.tensor();
  flat.ndim = 1;
  expect_refused(moe_quantize("fp8_per_token", &x.w13, &codes, &flat), MOE_E_ARG, {"scales: shape is [8], expected [8, 256, 1]"});
  DLTensor large = x.w13;
  std::int64_t const extents[] = {2, kHuge, 64};
  large.shape = const_cast<std::int64_t*>(extents);
  expect_refused(moe_quantize("fp8_per_token", &large, &codes, &scales), MOE_E_ARG, {"matrix: shape is [2, 1099511627777, 64]", "2^40"});
  // No matrices: there is nothing to write, and the strides of an array without elements may be anything.
  std::int64_t no_matrices[] = {0, 256, 64}, no_scales[] = {0, 256}, strides[] = {0, 0, 0};
  DLTensor empty = x.w13, empty_codes = codes.tensor(), empty_scales = scales.tensor();
  empty.shape = empty_codes.shape = no_matrices;
  empty_scales.shape = no_scales;
  for (DLTensor* const t : {&empty, &empty_codes, &empty_scales}) t->strides = strides;
  EXPECT_EQ(moe_quantize("fp8_per_token", &empty, &empty_codes, &empty_scales), MOE_OK) << moe_last_error();
  moe_quantized_layout layout = MOE_QUANTIZED_LAYOUT_INIT;
  expect_refused(moe_get_quantized_layout("mxfp4_w4a16", 4, 48, &layout), MOE_E_CONFIG, {"mxfp4_w4a16", "32", "48"});
  expect_refused(moe_get_quantized_layout("none", 0, 48, &layout), MOE_E_CONFIG, {"0 x 48"});
  layout.struct_size = 1;
  expect_refused(moe_get_quantized_layout("none", 4, 48, &layout), MOE_E_ARG, {"layout", "struct_size is 1"});
}

TEST(BadInput, Plan) {
  moe_plan_config config = MOE_PLAN_CONFIG_INIT;
  config.num_physical = 8;
  Array<float> load({1, 8});
  Array<std::int32_t> out({1, 8});
  EXPECT_EQ(moe_plan(&config, &load, &out, nullptr, nullptr), MOE_OK) << moe_last_error();
  expect_refused(moe_plan(nullptr, &load, &out, nullptr, nullptr), MOE_E_ARG, {"config", "NULL"});
  expect_refused(moe_plan(&config, nullptr, &out, nullptr, nullptr), MOE_E_ARG, {"load", "NULL"});
  expect_refused(moe_plan(&config, &load, nullptr, nullptr, nullptr), MOE_E_ARG, {"physical_to_logical", "NULL"});
  expect_refused(moe_plan(&config, &load, &load, nullptr, nullptr), MOE_E_ARG, {"physical_to_logical", "float32", "int32"});
  expect_refused(moe_plan(&config, &load, &out, &out, nullptr), MOE_E_ARG, {"logical_to_physical", "[1, 8]", "3 dimensions"});
  Array<std::uint8_t> bytes({1, 8});
  expect_refused(moe_plan(&config, &bytes, &out, nullptr, nullptr), MOE_E_ARG,
                 {"load: dtype is uint8, expected float32, float64, int32 or int64"});
  Array<float> deep({1, 1, 8});
  expect_refused(moe_plan(&config, &deep, &out, nullptr, nullptr), MOE_E_ARG, {"load: shape is [1, 1, 8], expected 2 dimensions"});
  DLTensor large = load.tensor();
  std::int64_t const extents[] = {1, kHuge};
  large.shape = const_cast<std::int64_t*>(extents);
  expect_refused(moe_plan(&config, &large, &out, nullptr, nullptr), MOE_E_ARG, {"load: shape is [1, 1099511627777]", "2^40"});
  Array<std::int32_t> count({1, 7}), count_of_layers({8});
  expect_refused(moe_plan(&config, &load, &out, nullptr, &count), MOE_E_ARG, {"replica_count: shape is [1, 7], expected [1, 8]"});
  expect_refused(moe_plan(&config, &load, &out, nullptr, &count_of_layers), MOE_E_ARG, {"replica_count: shape is [8], expected 2 dim"});
  expect_refused(moe_plan(&config, &load, &out, nullptr, &load), MOE_E_ARG, {"replica_count: dtype is float32, expected int32"});
  load[3] = -1.0F;
  expect_refused(moe_plan(&config, &load, &out, nullptr, nullptr), MOE_E_ARG, {"expert 3", "-1"});
  load[3] = 0.0F;
  config.num_ranks = 3;
  expect_refused(moe_plan(&config, &load, &out, nullptr, nullptr), MOE_E_ARG, {"num_physical: 8 is not a multiple of num_ranks 3"});
  config.num_physical = 7;
  expect_refused(moe_plan(&config, &load, &out, nullptr, nullptr), MOE_E_ARG, {"physical_to_logical", "[1, 7]"});
}

TEST(BadInput, Groups) {
  expect_refused(moe_group_create_self(nullptr), MOE_E_ARG, {"group", "NULL"});
  moe_group_t group = nullptr;
  std::int32_t rank = 0;
  expect_refused(moe_group_get_rank(nullptr, &rank, &rank), MOE_E_ARG, {"group", "NULL"});
  ASSERT_EQ(moe_group_create_self(&group), MOE_OK);
  expect_refused(moe_group_get_rank(group, nullptr, &rank), MOE_E_ARG, {"rank", "NULL"});
  EXPECT_EQ(moe_group_destroy(group), MOE_OK);

  std::uint8_t id[MOE_NCCL_ID_BYTES] = {};
  expect_refused(moe_group_create_nccl(nullptr, 0, 1, 0, &group), MOE_E_ARG, {"id", "NULL"});
  expect_refused(moe_group_create_nccl(id, 2, 2, 0, &group), MOE_E_ARG, {"rank: 2", "size 2"});
  expect_refused(moe_group_create_nccl(id, 0, 0, 0, &group), MOE_E_ARG, {"size 0"});
  expect_refused(moe_group_create_nccl(id, 0, 1, -1, &group), MOE_E_ARG, {"timeout_ms", "-1"});
  if (moe_has("nccl") == 0) {
    expect_refused(moe_group_create_nccl(id, 0, 1, 0, &group), MOE_E_UNSUPPORTED, {"NCCL"});
    expect_refused(moe_nccl_get_id(id), MOE_E_UNSUPPORTED, {"NCCL"});
  }
  if (moe_has("mpi") == 0) {
    expect_refused(moe_group_create_mpi_world(0, &group), MOE_E_UNSUPPORTED, {"MPI"});
  } else {  // this program never starts MPI
    expect_refused(moe_group_create_mpi_world(0, &group), MOE_E_STATE, {"MPI_Init_thread"});
    expect_refused(moe_group_create_mpi(0, 0, &group), MOE_E_STATE, {"MPI_Init_thread"});
  }
  EXPECT_EQ(group, nullptr);

  if (moe_has("mpi") == 0) return;
  for (char const* backend : {"all_to_all_v", "low_latency", "high_throughput"}) {
    Arguments x;
    x.config.backend = backend;
    expect_refused(x.create(), MOE_E_CONFIG, {moe::text("backend: ", backend, " needs a group over mpi"), "this one is over self"});
  }
}

}  // namespace
