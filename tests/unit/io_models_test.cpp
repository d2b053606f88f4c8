// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_models_test.cpp: the models' constants, field by field, against the fields of their released config.json.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <string>
#include <string_view>

#include "moe/io/layer_from_config.hpp"
#include "moe/models/catalog.hpp"

namespace {

using namespace moe::io;
using moe::routing::Order;
using moe::routing::Renorm;
using moe::routing::RouterConfig;
using moe::routing::Selection;

/// The fields of each release's config.json that concern its MoE layers.
std::map<std::string_view, char const*> const kReleased{
    {"Mixtral-8x7B", R"({"model_type": "mixtral", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
      "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_local_experts": 8})"},
    {"Mixtral-8x22B", R"({"model_type": "mixtral", "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 16384,
      "num_experts_per_tok": 2, "num_hidden_layers": 56, "num_local_experts": 8})"},
    {"Qwen1.5-MoE-A2.7B", R"({"model_type": "qwen2_moe", "hidden_act": "silu", "hidden_size": 2048, "moe_intermediate_size": 1408,
      "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
      "norm_topk_prob": false, "decoder_sparse_step": 1})"},
    {"Qwen2-57B-A14B", R"({"model_type": "qwen2_moe", "hidden_act": "silu", "hidden_size": 3584, "moe_intermediate_size": 2560,
      "shared_expert_intermediate_size": 20480, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 28,
      "norm_topk_prob": false, "decoder_sparse_step": 1})"},
    {"Qwen3-30B-A3B", R"({"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 2048, "moe_intermediate_size": 768,
      "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48, "norm_topk_prob": true, "decoder_sparse_step": 1,
      "mlp_only_layers": []})"},
    {"Qwen3-235B-A22B", R"({"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 4096, "moe_intermediate_size": 1536,
      "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94, "norm_topk_prob": true, "decoder_sparse_step": 1,
      "mlp_only_layers": []})"},
    {"Qwen3-Coder-480B-A35B", R"({"model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 6144, "moe_intermediate_size": 2560,
      "num_experts": 160, "num_experts_per_tok": 8, "num_hidden_layers": 62, "norm_topk_prob": true, "decoder_sparse_step": 1,
      "mlp_only_layers": []})"},
    {"Qwen3-Next-80B-A3B", R"({"model_type": "qwen3_next", "hidden_act": "silu", "hidden_size": 2048, "moe_intermediate_size": 512,
      "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
      "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": []})"},
    {"DeepSeek-V2-Lite", R"({"model_type": "deepseek_v2", "hidden_act": "silu", "hidden_size": 2048, "moe_intermediate_size": 1408,
      "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "num_hidden_layers": 27, "first_k_dense_replace": 1,
      "moe_layer_freq": 1, "norm_topk_prob": false, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy",
      "n_group": 1, "topk_group": 1})"},
    {"DeepSeek-V2", R"({"model_type": "deepseek_v2", "hidden_act": "silu", "hidden_size": 5120, "moe_intermediate_size": 1536,
      "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "num_hidden_layers": 60, "first_k_dense_replace": 1,
      "moe_layer_freq": 1, "norm_topk_prob": false, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
      "topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3})"},
    {"DeepSeek-V3", R"({"model_type": "deepseek_v3", "hidden_act": "silu", "hidden_size": 7168, "moe_intermediate_size": 2048,
      "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 3,
      "moe_layer_freq": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
      "n_group": 8, "topk_group": 4, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}})"},
    {"Kimi-K2", R"({"model_type": "kimi_k2", "hidden_act": "silu", "hidden_size": 7168, "moe_intermediate_size": 2048,
      "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 1,
      "moe_layer_freq": 1, "norm_topk_prob": true, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
      "n_group": 1, "topk_group": 1})"},
    {"GLM-4.5", R"({"model_type": "glm4_moe", "hidden_act": "silu", "hidden_size": 5120, "moe_intermediate_size": 1536,
      "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hidden_layers": 92, "first_k_dense_replace": 3,
      "norm_topk_prob": true, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1})"},
    {"GLM-4.5-Air", R"({"model_type": "glm4_moe", "hidden_act": "silu", "hidden_size": 4096, "moe_intermediate_size": 1408,
      "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hidden_layers": 46, "first_k_dense_replace": 1,
      "norm_topk_prob": true, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1})"},
    {"gpt-oss-20b", R"({"model_type": "gpt_oss", "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
      "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "num_hidden_layers": 24, "swiglu_limit": 7.0,
      "quantization_config": {"quant_method": "mxfp4"}})"},
    {"gpt-oss-120b", R"({"model_type": "gpt_oss", "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
      "num_local_experts": 128, "num_experts_per_tok": 4, "experts_per_token": 4, "num_hidden_layers": 36, "swiglu_limit": 7.0,
      "quantization_config": {"quant_method": "mxfp4"}})"},
    {"Llama-4-Scout", R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_act": "silu", "hidden_size": 5120,
      "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
      "num_hidden_layers": 48, "interleave_moe_layer_step": 1}})"},
    {"Llama-4-Maverick", R"({"model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_act": "silu", "hidden_size": 5120,
      "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 128, "num_experts_per_tok": 1,
      "num_hidden_layers": 48, "interleave_moe_layer_step": 2}})"},
    {"OLMoE-1B-7B", R"({"model_type": "olmoe", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
      "num_experts_per_tok": 8, "num_hidden_layers": 16, "norm_topk_prob": false})"},
    {"MiniMax-M2", R"({"model_type": "minimax", "architectures": ["MiniMaxM2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3072,
      "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 62,
      "scoring_func": "sigmoid", "use_routing_bias": true})"},
    {"Phi-3.5-MoE", R"({"model_type": "phimoe", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 6400,
      "num_local_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "router_jitter_noise": 0.01})"},
    {"Granite-3.0-1b-a400m", R"({"model_type": "granitemoe", "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 512,
      "num_local_experts": 32, "num_experts_per_tok": 8, "num_hidden_layers": 24})"},
    {"Granite-3.0-3b-a800m", R"({"model_type": "granitemoe", "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512,
      "num_local_experts": 40, "num_experts_per_tok": 8, "num_hidden_layers": 32})"},
    {"ERNIE-4.5-21B-A3B", R"({"model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 2560, "moe_intermediate_size": 1536,
      "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "num_hidden_layers": 28, "moe_layer_start_index": 1,
      "moe_layer_end_index": 27, "moe_layer_interval": 1})"},
    {"ERNIE-4.5-300B-A47B", R"({"model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 8192, "moe_intermediate_size": 3584,
      "moe_num_experts": 64, "moe_num_shared_experts": 0, "moe_k": 8, "num_hidden_layers": 54, "moe_layer_start_index": 3,
      "moe_layer_end_index": 53, "moe_layer_interval": 1})"},
    {"LongCat-Flash", R"({"model_type": "longcat_flash", "hidden_size": 6144, "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288,
      "n_routed_experts": 512, "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12, "num_layers": 28,
      "routed_scaling_factor": 6.0})"},
    {"Grok-1", R"({"model_type": "grok-1", "hidden_size": 6144, "intermediate_size": 32768, "num_experts": 8, "num_experts_per_tok": 2,
      "num_hidden_layers": 64})"},
    {"DBRX", R"({"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "ffn_config": {"ffn_hidden_size": 10752, "moe_num_experts": 16,
      "moe_top_k": 4, "moe_jitter_eps": 0.01, "moe_loss_weight": 0.05}})"},
    {"Jamba-1.5-Mini", R"({"model_type": "jamba", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
      "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "expert_layer_offset": 1, "expert_layer_period": 2})"},
    {"Jamba-1.5-Large", R"({"model_type": "jamba", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 24576,
      "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 72, "expert_layer_offset": 1, "expert_layer_period": 2})"},
};
/// Hunyuan states several values once a layer.
std::string hunyuan() {
  nlohmann::json j{{"model_type", "hunyuan_v1_moe"}, {"hidden_act", "silu"}, {"hidden_size", 4096},
                   {"intermediate_size", 3072},      {"num_experts", 64},    {"num_hidden_layers", 32}};
  j["moe_topk"] = std::vector<int>(32, 8);
  j["moe_intermediate_size"] = std::vector<int>(32, 3072);
  j["num_shared_expert"] = std::vector<int>(32, 1);
  return j.dump();
}

/// The choices that a router type fixes, over those that a configuration leaves open.
template <class Router>
void expect_router(RouterConfig const& r, bool biased) {
  if (std::is_same_v<Router, moe::routing::AnyRouter>) return;
  using C = typename Router::Config;
  EXPECT_EQ(C{}.scoring, r.scoring);
  EXPECT_EQ(C{}.order, r.order);
  EXPECT_EQ(C{}.selection, r.selection);
  EXPECT_EQ(std::string_view(Router::kName).ends_with("renormalize"), r.renorm != Renorm::none);
  // A router that takes no bias cannot serve a model that has one.
  constexpr bool kTakesBias = requires(typename Router::Params p) { p.correction_bias; };
  EXPECT_TRUE(kTakesBias || !biased);
}

template <class M>
void check() {
  SCOPED_TRACE(M::kName);
  std::string_view const name = M::kName;
  auto const found = kReleased.find(name);
  if (found == kReleased.end() && name != "Hunyuan-A13B") {
    // Their configurations decide; only what all releases share is a constant.
    EXPECT_TRUE(name == "DeepSeek-V4" || name == "Kimi-K3") << "no released configuration to compare with";
    return;
  }
  HfConfig const config = HfConfig::from_text(found == kReleased.end() ? hunyuan() : found->second, M::kName);
  auto const layers = moe_layers(config);
  ASSERT_FALSE(layers.empty());
  EXPECT_EQ(num_layers(config), M::num_layers);
  EXPECT_EQ(layers.front(), M::first_moe_layer);
  EXPECT_EQ(layers.back(), M::num_layers - 1);
  EXPECT_EQ(static_cast<std::int64_t>(layers.size()), (M::num_layers - M::first_moe_layer + M::moe_layer_step - 1) / M::moe_layer_step);
  LayerDescription const d = from_config(config, layers.front());
  EXPECT_EQ(d.hidden, M::hidden);
  EXPECT_EQ(d.intermediate, M::intermediate);
  EXPECT_EQ(d.router.num_experts, M::num_experts);
  EXPECT_EQ(d.router.topk, M::topk);
  EXPECT_EQ(d.router.num_expert_group, M::num_expert_group);
  EXPECT_EQ(d.router.topk_group, M::topk_group);
  EXPECT_EQ(d.router.num_zero_experts, M::num_zero_experts);
  EXPECT_EQ(d.router.routed_scaling_factor, M::routed_scaling_factor);
  EXPECT_EQ(d.shared.count, M::num_shared_experts);
  EXPECT_EQ(d.shared.intermediate, M::shared_intermediate);
  EXPECT_EQ(d.shared.gate == SharedGate::sigmoid, M::shared_sigmoid_gate);
  EXPECT_EQ(d.weight_on == WeightOn::expert_input, M::weight_on_input);
  EXPECT_EQ(d.weight_on == WeightOn::expert_input, M::Router::kWeightOnInput);
  EXPECT_EQ(d.router_bias, M::router_bias);
  EXPECT_EQ(d.expert_bias, M::expert_bias);
  EXPECT_EQ(d.latent, M::latent);
  EXPECT_EQ(d.activation.kind, M::Activation::kKind);
  float const limit = d.activation.constants.limit;
  EXPECT_EQ(limit < std::numeric_limits<float>::infinity() ? limit : 0.0F, M::activation_limit);
  expect_router<typename M::Router>(d.router, d.correction_bias);
}

TEST(Models, EveryModelIsWhatWasReleased) {
  std::set<std::string_view> names;
  boost::hana::for_each(moe::models::catalog, [&](auto type) {
    using M = typename decltype(type)::type;
    static_assert(moe::LayerConfig<M>);
    EXPECT_TRUE(names.insert(M::kName).second) << M::kName << " twice";
    check<M>();
  });
  for (auto const& [name, json] : kReleased) EXPECT_TRUE(names.contains(name)) << name << " has no constants";
  EXPECT_EQ(names.size(), 33U);
}

TEST(Models, KimiK3SharesAModelTypeButNotItsExperts) {
  nlohmann::json k3{{"model_type", "kimi_linear"},
                    {"hidden_act", "silu"},
                    {"hidden_size", 7168},
                    {"moe_intermediate_size", 3072},
                    {"num_experts", 896},
                    {"num_experts_per_token", 16},
                    {"num_shared_experts", 2},
                    {"first_k_dense_replace", 1},
                    {"num_hidden_layers", 4},
                    {"moe_renormalize", true},
                    {"moe_router_activation_func", "sigmoid"},
                    {"routed_scaling_factor", 2.0},
                    {"routed_expert_hidden_size", 3584}};
  try {
    (void)from_config(HfConfig::from_text(k3.dump(), "c"), 1);
    ADD_FAILURE() << "no error";
  } catch (moe::Error const& error) {
    EXPECT_EQ(error.code(), moe::ErrorCode::unsupported);
    EXPECT_NE(error.message().find("'routed_expert_hidden_size' 3584 differs from hidden_size 7168"), std::string::npos) << error.what();
  }
  k3.erase("routed_expert_hidden_size");
  EXPECT_EQ(from_config(HfConfig::from_text(k3.dump(), "c"), 1).router.topk, 16);
}

}  // namespace
