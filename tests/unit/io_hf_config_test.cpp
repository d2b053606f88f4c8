// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_hf_config_test.cpp: config.json to layer description: released configurations, and every error in one.
#include "moe/io/layer_from_config.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "expect_error.hpp"
#include "moe/io/block_metadata.hpp"

namespace {

using moe::ErrorCode;
using moe_test::expect_error;
using namespace moe::io;
using nlohmann::json;

json qwen3() {
  return {{"model_type", "qwen3_moe"},    {"hidden_size", 2048},
          {"moe_intermediate_size", 768}, {"num_experts", 128},
          {"num_experts_per_tok", 8},     {"norm_topk_prob", true},
          {"num_hidden_layers", 48},      {"hidden_act", "silu"},
          {"decoder_sparse_step", 1},     {"mlp_only_layers", json::array()}};
}
json deepseek_v3() {
  return {{"model_type", "deepseek_v3"},
          {"hidden_size", 7168},
          {"moe_intermediate_size", 2048},
          {"n_routed_experts", 256},
          {"n_shared_experts", 1},
          {"num_experts_per_tok", 8},
          {"norm_topk_prob", true},
          {"num_hidden_layers", 61},
          {"hidden_act", "silu"},
          {"n_group", 8},
          {"topk_group", 4},
          {"routed_scaling_factor", 2.5},
          {"scoring_func", "sigmoid"},
          {"topk_method", "noaux_tc"},
          {"first_k_dense_replace", 3},
          {"moe_layer_freq", 1}};
}
HfConfig config(json const& j) { return HfConfig::from_text(j.dump(), "config.json"); }
LayerDescription describe(json const& j, std::int64_t layer = 0) { return from_config(config(j), layer); }
json with(json j, char const* field, json value) {
  j[field] = std::move(value);
  return j;
}
json without(json j, char const* field) {
  j.erase(field);
  return j;
}

std::string refusal(ErrorCode code, json const& j, std::int64_t layer = 0) {
  return expect_error(code, [&] { (void)describe(j, layer); });
}

TEST(HfConfig, Qwen3) {
  LayerDescription const d = describe(qwen3(), 47);
  EXPECT_EQ(d.hidden, 2048);
  EXPECT_EQ(d.intermediate, 768);
  EXPECT_EQ(d.router.num_experts, 128);
  EXPECT_EQ(d.router.topk, 8);
  EXPECT_EQ(d.router.renorm, moe::routing::Renorm::sum);
  EXPECT_EQ(d.router.scoring, moe::routing::Scoring::softmax);
  EXPECT_EQ(d.shared.count, 0);
  EXPECT_EQ(describe(with(qwen3(), "norm_topk_prob", false)).router.renorm, moe::routing::Renorm::none);
}

TEST(HfConfig, DeepSeekV3) {
  LayerDescription const d = describe(deepseek_v3(), 3);
  EXPECT_EQ(d.router.scoring, moe::routing::Scoring::sigmoid);
  EXPECT_EQ(d.router.num_expert_group, 8);
  EXPECT_EQ(d.router.topk_group, 4);
  EXPECT_EQ(d.router.group_score, moe::routing::GroupScore::top2_sum);
  EXPECT_TRUE(d.correction_bias);
  EXPECT_FLOAT_EQ(d.router.routed_scaling_factor, 2.5F);
  EXPECT_EQ(d.shared.count, 1);
  EXPECT_EQ(d.shared.intermediate, 2048);
  EXPECT_EQ(d.shared.gate, SharedGate::none);
  json kimi = deepseek_v3();
  kimi["model_type"] = "kimi_k2";
  kimi["n_group"] = kimi["topk_group"] = 1;
  kimi["n_routed_experts"] = 384;
  EXPECT_EQ(describe(kimi, 3).router.num_expert_group, 0) << "one group is none";
}

json with_quantization(json quantization) { return with(qwen3(), "quantization_config", std::move(quantization)); }
CheckpointQuantization quantization(json const& q) { return describe(with_quantization(q)).quantization; }
json groups(json weights) {
  return {{"quant_method", "compressed-tensors"}, {"config_groups", {{"group_0", {{"weights", std::move(weights)}}}}}};
}

TEST(HfConfig, QuantizationConfigsOfReleases) {
  EXPECT_EQ(describe(qwen3()).quantization.method, QuantMethod::none);
  // DeepSeek-V3.2, MiniMax-M2: blocks of fp8
  auto q = quantization({{"activation_scheme", "dynamic"},
                         {"fmt", "float8_e4m3fn"},
                         {"quant_method", "fp8"},
                         {"scale_fmt", "ue8m0"},
                         {"weight_block_size", {64, 256}}});
  EXPECT_EQ(q.method, QuantMethod::fp8);
  EXPECT_EQ(q.block[0], 64);
  EXPECT_EQ(q.block[1], 256);
  EXPECT_EQ(q.weights, (std::vector<StoredWeights>{{false, 8, 0}}));
  EXPECT_EQ(quantization({{"quant_method", "mxfp4"}}).weights, (std::vector<StoredWeights>{{false, 4, 32}}));
  q = quantization({{"quant_method", "gptq"}, {"bits", 8}, {"group_size", -1}, {"desc_act", true}, {"checkpoint_format", "gptq_v2"}});
  EXPECT_EQ(q.weights, (std::vector<StoredWeights>{{true, 8, -1}}));
  EXPECT_FALSE(q.zeros_minus_one);
  EXPECT_TRUE(quantization({{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}}).zeros_minus_one);
  EXPECT_EQ(quantization({{"quant_method", "awq"}, {"w_bit", 4}, {"q_group_size", 128}, {"version", "gemm"}}).method, QuantMethod::awq);
  // Kimi-K2-Thinking: int4 in groups of 32; Kimi-K3: mxfp4
  q = quantization(
      groups({{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 32}, {"symmetric", true}, {"actorder", nullptr}}));
  EXPECT_EQ(q.method, QuantMethod::compressed_tensors);
  EXPECT_EQ(q.weights, (std::vector<StoredWeights>{{true, 4, 32}}));
  q = quantization(groups({{"num_bits", 4}, {"type", "float"}, {"strategy", "group"}, {"group_size", 32}, {"scale_dtype", "torch.uint8"}}));
  EXPECT_EQ(q.weights, (std::vector<StoredWeights>{{false, 4, 32}}));
  // GLM-4.5-FP8, Llama-4-Maverick-FP8: a scale per output channel
  EXPECT_EQ(quantization(groups({{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}})).weights,
            (std::vector<StoredWeights>{{false, 8, -1}}));
  q = quantization(groups({{"num_bits", 8}, {"type", "float"}, {"strategy", "block"}, {"block_structure", {32, 64}}}));
  EXPECT_EQ(q.block[1], 64);
  // ModelOpt's two spellings, and its groups inside an fp8 configuration (DeepSeek-V4-NVFP4)
  EXPECT_EQ(quantization({{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"group_size", 16}}).weights,
            (std::vector<StoredWeights>{{false, 4, 16}}));
  EXPECT_EQ(quantization({{"quant_method", "modelopt"}, {"quantization", {{"quant_algo", "fp8"}}}}).weights,
            (std::vector<StoredWeights>{{false, 8, 0}}));
  q = quantization(
      {{"quant_method", "fp8"},
       {"fmt", "e4m3"},
       {"config_groups", {{"group_0", {{"weights", {{"dynamic", false}, {"group_size", 16}, {"num_bits", 4}, {"type", "float"}}}}}}}});
  EXPECT_EQ(q.weights, (std::vector<StoredWeights>{{false, 8, 0}, {false, 4, 16}}));
}

TEST(HfConfig, QuantizationConfigsThatAreRefused) {
  auto const refused = [](ErrorCode code, json q) { return refusal(code, with_quantization(std::move(q))); };
  EXPECT_HAS(refused(ErrorCode::unsupported, {{"quant_method", "bitsandbytes"}}),
             "'quant_method' is \"bitsandbytes\", known: fp8, mxfp4, gptq, awq, compressed-tensors, modelopt");
  EXPECT_HAS(refused(ErrorCode::config, json::object()), "'quant_method' is missing");
  EXPECT_HAS(refused(ErrorCode::unsupported, {{"quant_method", "fp8"}, {"fmt", "e4m3fnuz"}}), "'fmt' is \"e4m3fnuz\", known: e4m3");
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "fp8"}, {"weight_block_size", {0, 128}}}), "'weight_block_size'[0] is 0");
  // docs/semantics/quantization.md §5: bits and group sizes
  for (int bits : {2, 3, 5, 6}) {
    EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "gptq"}, {"bits", bits}, {"group_size", 128}}),
               "only 4 and 8 bit weights, got " + std::to_string(bits) + " bits");
    EXPECT_HAS(refused(ErrorCode::config, groups({{"num_bits", bits}, {"type", "int"}, {"strategy", "group"}, {"group_size", 128}})),
               "only 4 and 8 bit weights, got " + std::to_string(bits) + " bits");
  }
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 100}}),
             "group size 100 is not one of -1, 16, 32, 64, 128, 256");
  EXPECT_HAS(refused(ErrorCode::config, groups({{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 48}})),
             "group size 48 is not one of -1, 16, 32, 64, 128, 256");
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "gptq"}, {"group_size", 128}}), "'bits' is missing");
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "gptq"}, {"bits", 4}}), "'group_size' is missing");
  EXPECT_HAS(refused(ErrorCode::unsupported, {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}, {"checkpoint_format", "marlin"}}),
             "'checkpoint_format' is \"marlin\", known: gptq, gptq_v2");
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "awq"}, {"bits", 8}, {"group_size", 128}}), "AWQ weights are 4 bit, got 8 bits");
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "awq"}, {"bits", 4}, {"w_bit", 8}, {"group_size", 128}}),
             "'bits' is 4 and 'w_bit' is 8, but they mean the same");
  EXPECT_HAS(refused(ErrorCode::unsupported, {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 128}, {"version", "gemv"}}),
             "'version' is \"gemv\", known: gemm");
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "compressed-tensors"}}), "'config_groups' is missing");
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "compressed-tensors"}, {"config_groups", json::object()}}),
             "'config_groups' has no group with 'weights'");
  json sparse = groups({{"num_bits", 4}});
  sparse["format"] = "marlin-24";
  EXPECT_HAS(refused(ErrorCode::unsupported, sparse), "'format' is \"marlin-24\", known: pack-quantized");
  EXPECT_HAS(refused(ErrorCode::unsupported, {{"quant_method", "modelopt"}, {"quant_algo", "INT4_AWQ"}}),
             "'quant_algo' is \"INT4_AWQ\", known: FP8");
  EXPECT_HAS(refused(ErrorCode::config, {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"group_size", 32}}),
             "'group_size' is 32, nvfp4 has 16");
}

TEST(HfConfig, ALanguageModelInsideAMultimodalOne) {
  json const outer{{"model_type", "some_vlm"}, {"text_config", qwen3()}, {"vision_config", {{"hidden_size", 3}}}};
  EXPECT_EQ(describe(outer).hidden, 2048);
}

TEST(HfConfig, BareInfinityIsAccepted) {
  std::string text = qwen3().dump();
  text.insert(1, R"("time_step_limit": [0.0, Infinity], "other": [NaN, -Infinity], "string": "NaN \" Infinity", )");
  EXPECT_EQ(from_config(HfConfig::from_text(text, "c"), 0).hidden, 2048);
}

TEST(HfConfig, M8_UnknownArchitectureIsNamedWithTheKnownOnes) {
  std::string const message = refusal(ErrorCode::unsupported, with(qwen3(), "model_type", "gpt2"));
  EXPECT_HAS(message, "model_type 'gpt2' is not known, known: afmoe, ");
  EXPECT_HAS(message, "qwen3_moe");
  EXPECT_HAS(message, "deepseek_v3");
}

TEST(HfConfig, M9_NormTopkProbHasNoSilentDefault) {
  for (json const& j : {qwen3(), deepseek_v3()}) {
    EXPECT_HAS(refusal(ErrorCode::config, without(j, "norm_topk_prob"), 5), "'norm_topk_prob' is missing");
    EXPECT_HAS(refusal(ErrorCode::config, with(j, "norm_topk_prob", nullptr), 5), "'norm_topk_prob' is missing");
    EXPECT_HAS(refusal(ErrorCode::config, with(j, "norm_topk_prob", "yes"), 5), "'norm_topk_prob' is \"yes\", expected true or false");
  }
}

TEST(HfConfig, EveryRequiredFieldIsMissedByName) {
  for (char const* field : {"hidden_size", "moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob", "hidden_act", "model_type"}) {
    EXPECT_HAS(refusal(ErrorCode::config, without(qwen3(), field)), "'" + std::string(field) + "' is missing");
  }
  EXPECT_HAS(refusal(ErrorCode::config, without(qwen3(), "num_hidden_layers")),
             "'num_hidden_layers' or 'n_layers' or 'num_layers' is missing");
  EXPECT_HAS(refusal(ErrorCode::config, without(qwen3(), "num_experts")), "'num_experts' or 'num_local_experts' or 'n_routed_experts'");
  for (char const* field : {"n_group", "topk_group", "routed_scaling_factor", "first_k_dense_replace"}) {
    EXPECT_HAS(refusal(ErrorCode::config, without(deepseek_v3(), field), 5), "'" + std::string(field) + "' is missing");
  }
}

TEST(HfConfig, AbsurdValuesAreNamedWithTheBound) {
  for (json const& value : {json(0), json(-1), json(10'000'001), json(std::numeric_limits<std::uint64_t>::max())}) {
    EXPECT_HAS(refusal(ErrorCode::config, with(qwen3(), "hidden_size", value)),
               "'hidden_size' is " + value.dump() + ", out of range [1, 10000000]");
  }
  for (json const& value : {json("2048"), json(20.5), json(true), json::array({1}), json::object()}) {
    EXPECT_HAS(refusal(ErrorCode::config, with(qwen3(), "hidden_size", value)), "expected an integer in [1, 10000000]");
  }
  EXPECT_HAS(refusal(ErrorCode::config, with(qwen3(), "num_experts_per_tok", 33)), "'num_experts_per_tok' is 33, out of range [1, 32]");
  EXPECT_HAS(refusal(ErrorCode::config, with(qwen3(), "num_experts", 4)), "top_k 8 exceeds num_experts 4");
  EXPECT_HAS(refusal(ErrorCode::config, with(qwen3(), "num_local_experts", 64)), "'num_experts' is 128 and 'num_local_experts' is 64");
  EXPECT_HAS(refusal(ErrorCode::config, with(deepseek_v3(), "routed_scaling_factor", -1), 5),
             "'routed_scaling_factor' is -1, out of range");
  EXPECT_HAS(refusal(ErrorCode::config, with(deepseek_v3(), "n_group", 7), 5), "num_experts 256 is not divisible by n_group 7");
  EXPECT_HAS(refusal(ErrorCode::config, with(deepseek_v3(), "topk_group", 9), 5), "topk_group 9 is out of range [1, 8]");
  EXPECT_HAS(refusal(ErrorCode::unsupported, with(deepseek_v3(), "scoring_func", "softmax"), 5),
             "'scoring_func' is \"softmax\", known: sigmoid");
  EXPECT_HAS(refusal(ErrorCode::unsupported, with(qwen3(), "hidden_act", "tanh")), "gated activation 'tanh' is unknown, known: silu");
}

TEST(HfConfig, NotJson) {
  expect_error(ErrorCode::config, "'c.json' is not valid JSON at byte 7", [] { HfConfig::from_text("{\"a\": }", "c.json"); });
  expect_error(ErrorCode::config, "'c.json' is not valid JSON", [] { HfConfig::from_text("", "c.json"); });
  expect_error(ErrorCode::config, "'c.json' is not valid JSON: number overflow parsing '1e400'",
               [] { HfConfig::from_text("{\"a\": 1e400}", "c.json"); });
  expect_error(ErrorCode::config, "must be a JSON object", [] { HfConfig::from_text("[1]", "c.json"); });
  std::string const deep(200'000, '[');
  expect_error(ErrorCode::config, "nests deeper than 64 levels", [&] { HfConfig::from_text("{\"a\":" + deep, "c.json"); });
}

TEST(HfConfig, LayersOutOfRangeAndDenseLayers) {
  EXPECT_HAS(refusal(ErrorCode::argument, qwen3(), 99), "layer 99 is out of range [0, 48)");
  EXPECT_HAS(refusal(ErrorCode::argument, qwen3(), -1), "layer -1 is out of range [0, 48)");
  EXPECT_HAS(refusal(ErrorCode::argument, deepseek_v3(), 2), "layer 2 of 'config.json' is dense (first_k_dense_replace = 3)");
  EXPECT_HAS(refusal(ErrorCode::argument, with(qwen3(), "decoder_sparse_step", 2), 0), "is dense (decoder_sparse_step = 2)");
  EXPECT_NO_THROW((void)describe(with(qwen3(), "decoder_sparse_step", 2), 1));
  EXPECT_HAS(refusal(ErrorCode::argument, with(qwen3(), "mlp_only_layers", {7}), 7), "is dense (mlp_only_layers contains 7)");
  json listed = with(deepseek_v3(), "mlp_layer_types", json::array());
  for (int i = 0; i < 61; ++i) listed["mlp_layer_types"].push_back(i < 1 ? "dense" : "sparse");
  EXPECT_HAS(refusal(ErrorCode::argument, listed, 0), "mlp_layer_types[0] = dense");
  EXPECT_NO_THROW((void)describe(listed, 1));
  EXPECT_EQ(moe_layers(config(deepseek_v3())).size(), 58U);
  EXPECT_EQ(moe_layers(config(deepseek_v3())).front(), 3);
}

TEST(HfConfig, WhichLayersAreMoeInOtherFamilies) {
  json llama{{"model_type", "llama4_text"}, {"hidden_size", 5120},     {"intermediate_size", 8192}, {"num_local_experts", 128},
             {"num_experts_per_tok", 1},    {"num_hidden_layers", 48}, {"hidden_act", "silu"},      {"interleave_moe_layer_step", 2}};
  EXPECT_EQ(moe_layers(config(llama)).size(), 24U);
  EXPECT_EQ(moe_layers(config(llama)).front(), 1);
  LayerDescription const d = describe(llama, 1);
  EXPECT_EQ(d.weight_on, WeightOn::expert_input);
  EXPECT_EQ(d.shared.intermediate, 8192);
  json ernie{{"model_type", "ernie4_5_moe"},
             {"hidden_size", 2560},
             {"moe_intermediate_size", 1536},
             {"moe_num_experts", 64},
             {"moe_k", 6},
             {"moe_num_shared_experts", 2},
             {"num_hidden_layers", 28},
             {"hidden_act", "silu"},
             {"moe_layer_start_index", 1},
             {"moe_layer_end_index", 27},
             {"moe_layer_interval", 1}};
  EXPECT_EQ(moe_layers(config(ernie)).size(), 27U);
  EXPECT_EQ(describe(ernie, 1).shared.intermediate, 3072);
  EXPECT_EQ(describe(ernie, 1).router.renorm, moe::routing::Renorm::floor);
  json jamba{{"model_type", "jamba"}, {"hidden_size", 4096},      {"intermediate_size", 14336},
             {"num_experts", 16},     {"num_experts_per_tok", 2}, {"num_hidden_layers", 32},
             {"hidden_act", "silu"},  {"expert_layer_period", 2}, {"expert_layer_offset", 1}};
  EXPECT_EQ(moe_layers(config(jamba)).size(), 16U);
  EXPECT_EQ(moe_layers(config(jamba)).front(), 1);
  json solar = deepseek_v3();  // every layer is MoE, and newer files leave the field out
  solar["model_type"] = "solar_open";
  solar.erase("first_k_dense_replace");
  EXPECT_EQ(moe_layers(config(solar)).front(), 0);
}

TEST(HfConfig, KimiLinearAsTransformersWritesIt) {
  json kimi{{"model_type", "kimi_linear"},
            {"hidden_size", 2304},
            {"moe_intermediate_size", 1024},
            {"num_experts", 256},
            {"num_experts_per_token", 8},
            {"num_expert_group", 4},
            {"topk_group", 2},
            {"num_shared_experts", 1},
            {"moe_renormalize", true},
            {"routed_scaling_factor", 2.446},
            {"hidden_act", "silu"},
            {"num_hidden_layers", 2},
            {"mlp_layer_types", {"dense", "sparse"}}};
  EXPECT_EQ(moe_layers(config(kimi)), (std::vector<std::int64_t>{1}));
  EXPECT_EQ(describe(kimi, 1).router.num_expert_group, 4);
  EXPECT_EQ(describe(kimi, 1).router.scoring, moe::routing::Scoring::sigmoid);
  // transformers groups whatever use_grouped_topk says, the model's own code does not.
  EXPECT_HAS(refusal(ErrorCode::unsupported, with(kimi, "use_grouped_topk", false), 1),
             "use_grouped_topk is false and num_expert_group is 4");
  EXPECT_EQ(describe(with(with(kimi, "use_grouped_topk", false), "num_expert_group", 1), 1).router.num_expert_group, 0);
  EXPECT_HAS(refusal(ErrorCode::unsupported, with(kimi, "moe_router_activation_func", "softmax"), 1), "moe_router_activation_func");
}

// Block metadata

Metadata block() {
  return {{"model_type", "never_seen"},
          {"routing_family", "biased_sigmoid"},
          {"num_experts", "16"},
          {"num_zero_experts", "0"},
          {"top_k", "4"},
          {"hidden_size", "64"},
          {"intermediate_size", "32"},
          {"activation", "silu"},
          {"glu", "act(gate)*up"},
          {"scoring_func", "sigmoid"},
          {"selection", "topk_of_scores"},
          {"norm_topk_prob", "true"},
          {"renorm_eps", "1e-20"},
          {"n_group", "4"},
          {"topk_group", "2"},
          {"group_score", "top2_sum"},
          {"masked_group_fill", "-inf"},
          {"routed_scaling_factor", "2.5"},
          {"output_scaling_factor", "1.0"},
          {"weight_applied_on", "expert_output"},
          {"correction_bias", "selection_only"},
          {"shared_experts", "1"},
          {"shared_expert_intermediate_size", "32"},
          {"shared_expert_gate", "none"},
          {"expert_bias", "false"},
          {"router_bias", "false"},
          {"swiglu_alpha", "none"},
          {"swiglu_limit", "none"},
          {"layout", "per_expert"},
          {"tensor_prefix", "model.layers.0.mlp."}};
}
std::string block_refusal(ErrorCode code, char const* field, char const* value) {
  Metadata m = block();
  m[field] = value;
  return expect_error(code, [&] { (void)from_block_metadata(m, "b"); });
}

TEST(BlockMetadata, AnUnseenModelTypeRunsIfItsSemanticsAreKnown) {
  LayerDescription const d = from_block_metadata(block(), "b");
  EXPECT_EQ(d.model_type, "never_seen");
  EXPECT_EQ(d.router.num_expert_group, 4);
  EXPECT_FLOAT_EQ(d.router.renorm_eps, 1e-20F);
}

TEST(BlockMetadata, UnknownSemanticsAreNamed) {
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "routing_family", "voting"),
             "metadata field 'routing_family' = 'voting' is not known, known: 'softmax_topk'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "scoring_func", "tanh"), "'scoring_func' = 'tanh'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "selection", "random"), "'selection' = 'random'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "glu", "up"), "'glu' = 'up'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "activation", "mish"), "gated activation 'mish'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "layout", "scrambled"), "'layout' = 'scrambled'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "shared_expert_gate", "tanh"), "'shared_expert_gate' = 'tanh'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "weight_applied_on", "both"), "'weight_applied_on' = 'both'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "correction_bias", "everywhere"), "'correction_bias' = 'everywhere'");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "expert_rotation", "by 3"), "metadata field 'expert_rotation' = 'by 3' is not known");
  Metadata off = block();
  off["expert_rotation"] = "none";
  EXPECT_NO_THROW((void)from_block_metadata(off, "b"));
}

TEST(BlockMetadata, MissingAndAbsurdFieldsAreNamed) {
  for (auto const& [field, value] : block()) {
    if (field == "model_type" || field == "tensor_prefix" || field.starts_with("swiglu") || field == "renorm_eps") continue;
    Metadata m = block();
    m.erase(field);
    expect_error(ErrorCode::config, "metadata field '" + field + "' is missing", [&] { (void)from_block_metadata(m, "b"); });
  }
  EXPECT_HAS(block_refusal(ErrorCode::config, "hidden_size", "0"), "'hidden_size' is '0', expected an integer in [1, 10000000]");
  EXPECT_HAS(block_refusal(ErrorCode::config, "hidden_size", "64x"), "'hidden_size' is '64x'");
  EXPECT_HAS(block_refusal(ErrorCode::config, "routed_scaling_factor", "nan"), "'routed_scaling_factor' is 'nan'");
  EXPECT_HAS(block_refusal(ErrorCode::config, "top_k", "17"), "top_k 17 exceeds");
  EXPECT_HAS(block_refusal(ErrorCode::unsupported, "norm_topk_prob", "maybe"), "'norm_topk_prob' = 'maybe'");
}

TEST(BlockMetadata, StepClampsTheSharedExpertOnlyWithItsOwnLimit) {
  Metadata m = block();
  m["glu"] = "min(silu(gate),limit)*clamp(up,-limit,limit)";
  m["swiglu_limit"] = "0.5";
  LayerDescription d = from_block_metadata(m, "b");
  EXPECT_EQ(d.activation.kind, moe::activation::Kind::swiglu_step);
  EXPECT_EQ(d.shared.activation.kind, moe::activation::Kind::silu);
  m["shared_swiglu_limit"] = "1.5";
  d = from_block_metadata(m, "b");
  EXPECT_EQ(d.shared.activation.kind, moe::activation::Kind::swiglu_step);
  EXPECT_FLOAT_EQ(d.shared.activation.constants.limit, 1.5F);
  m["swiglu_limit"] = "none";
  EXPECT_EQ(from_block_metadata(m, "b").activation.kind, moe::activation::Kind::silu);
}

}  // namespace
