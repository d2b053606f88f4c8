// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_models_test.cpp: the models' constants, field by field, against the fields of their released config.json, or of a public
// copy where noted; each with the public source where its values were read.
#include "moe/models/catalog.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>

#include "expect_error.hpp"
#include "moe/core/config_defaults.hpp"
#include "moe/io/layer_from_config.hpp"

namespace {

using namespace moe::io;
using moe::routing::Order;
using moe::routing::Renorm;
using moe::routing::RouterConfig;
using moe::routing::Selection;

/// The fields of a release's config.json that concern its MoE layers.
struct Released {
  std::string_view model;
  char const* source;  ///< the public repository, path and form in which the values were read
  char const* json;
};
// Copies of whole config.json files as they were released: <organisation>--<model>_config.json.
#define MOE_AIC(file) "ai-dynamo/aiconfigurator aic-core/src/aiconfigurator_core/model_configs/" file
// The class whose default values are those of the release that it names.
#define MOE_DEFAULTS(model) "huggingface/transformers src/transformers/models/" model "/configuration_" model ".py (defaults)"
#define MOE_BRIDGE(path) "NVIDIA-NeMo/Megatron-Bridge tests/unit_tests/models/" path
#define MOE_GENZ "abhibambhaniya/GenZ-LLM-Analyzer GenZ/Models/Model_sets/misc.py, after the released config.json"

constexpr Released kReleased[] = {
    {"Mixtral-8x7B", MOE_AIC("mistralai--Mixtral-8x7B-v0.1_config.json"),
     R"({"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
      "model_type": "mixtral", "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_local_experts": 8})"},
    {"Mixtral-8x22B", MOE_AIC("mistralai--Mixtral-8x22B-v0.1_config.json"),
     R"({"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 6144, "intermediate_size": 16384,
      "model_type": "mixtral", "num_experts_per_tok": 2, "num_hidden_layers": 56, "num_local_experts": 8})"},
    {"Qwen1.5-MoE-A2.7B", MOE_DEFAULTS("qwen2_moe"),
     R"({"model_type": "qwen2_moe", "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408,
      "shared_expert_intermediate_size": 5632, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
      "norm_topk_prob": false, "decoder_sparse_step": 1})"},
    {"Qwen2-57B-A14B", "NVIDIA/TensorRT-LLM tests/unittest/_torch/modeling/test_modeling_qwen_moe.py (QWEN2_57B_A14B_CONFIG)",
     R"({"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 3584,
      "intermediate_size": 18944, "model_type": "qwen2_moe", "moe_intermediate_size": 2560, "norm_topk_prob": false, "num_experts": 64,
      "num_experts_per_tok": 8, "num_hidden_layers": 28, "shared_expert_intermediate_size": 20480})"},
    {"Qwen3-30B-A3B", MOE_AIC("Qwen--Qwen3-30B-A3B_config.json"),
     R"({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
      "intermediate_size": 6144, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
      "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48})"},
    {"Qwen3-235B-A22B", MOE_AIC("Qwen--Qwen3-235B-A22B_config.json"),
     R"({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 4096,
      "intermediate_size": 12288, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 1536, "norm_topk_prob": true,
      "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 94})"},
    {"Qwen3-Coder-480B-A35B", MOE_AIC("Qwen--Qwen3-Coder-480B-A35B-Instruct_config.json"),
     R"({"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 6144,
      "intermediate_size": 8192, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 2560, "norm_topk_prob": true,
      "num_experts": 160, "num_experts_per_tok": 8, "num_hidden_layers": 62, "shared_expert_intermediate_size": 0})"},
    {"Qwen3-Next-80B-A3B", "ai-dynamo/aiconfigurator src/aiconfigurator/model_configs/Qwen--Qwen3-Next-80B-A3B-Thinking_config.json",
     R"({"architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
      "intermediate_size": 5120, "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": true,
      "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "shared_expert_intermediate_size": 512})"},
    {"DeepSeek-V2-Lite", "inference-sim/inference-sim model_configs/deepseek-v2-lite/config.json",
     R"({"architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048,
      "intermediate_size": 10944, "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
      "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": false, "num_experts_per_tok": 6, "num_hidden_layers": 27,
      "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1, "topk_method": "greedy"})"},
    {"DeepSeek-V2", "scaleapi/llm-engine model-engine/tests/unit/domain/test_llm_use_cases.py (DeepSeek-Coder-V2, the same network)",
     R"({"first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12288, "model_type": "deepseek_v2",
      "moe_intermediate_size": 1536, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2,
      "norm_topk_prob": false, "num_experts_per_tok": 6, "num_hidden_layers": 60, "routed_scaling_factor": 16.0,
      "scoring_func": "softmax", "topk_group": 3, "topk_method": "group_limited_greedy"})"},
    {"DeepSeek-V3", MOE_AIC("deepseek-ai--DeepSeek-V3_config.json"),
     R"({"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
      "intermediate_size": 18432, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
      "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8, "num_hidden_layers": 61,
      "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
      "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc"})"},
    {"DeepSeek-V3", MOE_AIC("deepseek-ai--DeepSeek-R1_config.json"),
     R"({"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
      "intermediate_size": 18432, "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
      "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8, "num_hidden_layers": 61,
      "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
      "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc"})"},
    {"DeepSeek-V4-Flash", MOE_AIC("deepseek-ai--DeepSeek-V4-Flash_config.json"),
     R"({"architectures": ["DeepseekV4ForCausalLM"], "expert_dtype": "fp4", "hidden_act": "silu", "hidden_size": 4096,
      "model_type": "deepseek_v4", "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": true,
      "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_hash_layers": 3, "quantization_config": {"activation_scheme": "dynamic",
      "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, "routed_scaling_factor": 1.5,
      "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "topk_method": "noaux_tc"})"},
    {"DeepSeek-V4-Pro", MOE_AIC("deepseek-ai--DeepSeek-V4-Pro_config.json"),
     R"({"architectures": ["DeepseekV4ForCausalLM"], "expert_dtype": "fp4", "hidden_act": "silu", "hidden_size": 7168,
      "model_type": "deepseek_v4", "moe_intermediate_size": 3072, "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": true,
      "num_experts_per_tok": 6, "num_hidden_layers": 61, "num_hash_layers": 3, "quantization_config": {"activation_scheme": "dynamic",
      "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}, "routed_scaling_factor": 2.5,
      "scoring_func": "sqrtsoftplus", "swiglu_limit": 10.0, "topk_method": "noaux_tc"})"},
    {"Kimi-K2", MOE_AIC("moonshotai--Kimi-K2-Instruct_config.json"),
     R"({"architectures": ["DeepseekV3ForCausalLM"], "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 7168,
      "intermediate_size": 18432, "model_type": "kimi_k2", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1,
      "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": true, "num_experts_per_tok": 8, "num_hidden_layers": 61,
      "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
      "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc"})"},
    {"Kimi-K3", MOE_AIC("moonshotai--Kimi-K3_config.json"),
     R"({"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "text_config": {"activation_situ_beta": 4.0,
      "activation_situ_linear_beta": 25.0, "architectures": ["KimiLinearForCausalLM"], "first_k_dense_replace": 1, "hidden_act": "situ",
      "hidden_size": 7168, "intermediate_size": 33792, "latent_moe_use_norm": true, "model_type": "kimi_linear",
      "moe_intermediate_size": 3072, "moe_layer_freq": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
      "num_expert_group": 1, "num_experts": 896, "num_experts_per_token": 16, "num_hidden_layers": 93, "num_shared_experts": 2,
      "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "config_groups": {"group_0": {
      "format": "mxfp4-pack-quantized", "input_activations": null, "targets": ["Linear"], "weights": {"group_size": 32, "num_bits": 4,
      "scale_dtype": "torch.uint8", "strategy": "group", "symmetric": true, "type": "float"}}}}, "rms_norm_eps": 1e-05,
      "routed_expert_hidden_size": 3584, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "noaux_tc",
      "use_grouped_topk": true}})"},
    {"GLM-4.5", MOE_BRIDGE("glm/test_glm45_bridge.py") " (355B), norm_topk_prob and groups from " MOE_DEFAULTS("glm4_moe"),
     R"({"model_type": "glm4_moe", "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536,
      "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hidden_layers": 92, "first_k_dense_replace": 3,
      "norm_topk_prob": true, "routed_scaling_factor": 2.5, "n_group": 1, "topk_group": 1})"},
    {"GLM-4.5-Air", "vllm-project/vime scripts/models/glm4.5-106B-A12B.sh (its flags; no scaling factor is 1)",
     R"({"model_type": "glm4_moe", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
      "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "num_hidden_layers": 46, "first_k_dense_replace": 1,
      "norm_topk_prob": true, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1})"},
    {"gpt-oss-20b", MOE_AIC("openai--gpt-oss-20b_config.json"),
     R"({"architectures": ["GptOssForCausalLM"], "experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880,
      "intermediate_size": 2880, "model_type": "gpt_oss", "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_local_experts": 32,
      "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
      "lm_head"], "quant_method": "mxfp4"}, "swiglu_limit": 7.0})"},
    {"gpt-oss-120b", MOE_AIC("openai--gpt-oss-120b_config.json"),
     R"({"architectures": ["GptOssForCausalLM"], "experts_per_token": 4, "hidden_act": "silu", "hidden_size": 2880,
      "intermediate_size": 2880, "model_type": "gpt_oss", "num_experts_per_tok": 4, "num_hidden_layers": 36, "num_local_experts": 128,
      "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
      "lm_head"], "quant_method": "mxfp4"}, "swiglu_limit": 7.0})"},
    {"Llama-4-Scout", MOE_AIC("meta-llama--Llama-4-Scout-17B-16E-Instruct_config.json"),
     R"({"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": {"hidden_act": "silu",
      "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
      "model_type": "llama4_text", "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_local_experts": 16}})"},
    {"Llama-4-Maverick", MOE_AIC("meta-llama--Llama-4-Maverick-17B-128E-Instruct_config.json"),
     R"({"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "text_config": {"hidden_act": "silu",
      "hidden_size": 5120, "interleave_moe_layer_step": 2, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
      "model_type": "llama4_text", "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_local_experts": 128}})"},
    {"OLMoE-1B-7B", MOE_BRIDGE("olmoe/test_olmoe_bridge.py") ", norm_topk_prob from " MOE_DEFAULTS("olmoe"),
     R"({"architectures": ["OlmoeForCausalLM"], "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 1024,
      "model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "norm_topk_prob": false})"},
    {"MiniMax-M2", MOE_AIC("MiniMaxAI--MiniMax-M2.5_config.json") " (the same network)",
     R"({"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "num_hidden_layers": 62, "hidden_size": 3072,
      "intermediate_size": 1536, "num_experts_per_tok": 8, "num_local_experts": 256, "hidden_act": "silu", "use_routing_bias": true,
      "shared_intermediate_size": 0, "scoring_func": "sigmoid", "quantization_config": {"quant_method": "fp8", "fmt": "float8_e4m3fn",
      "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["gate", "e_score_correction_bias",
      "lm_head"]}})"},
    {"MiniMax-M2", "the values above, under the model type of the first release",
     R"({"model_type": "minimax", "architectures": ["MiniMaxM2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3072,
      "intermediate_size": 1536, "num_local_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 62,
      "scoring_func": "sigmoid", "use_routing_bias": true})"},
    {"Phi-3.5-MoE", MOE_DEFAULTS("phimoe"),
     R"({"model_type": "phimoe", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 6400, "num_local_experts": 16,
      "num_experts_per_tok": 2, "num_hidden_layers": 32, "router_jitter_noise": 0.01})"},
    // Of the two Granite models no copy of the released file was found: these are values that tests of other projects quote from it.
    {"Granite-3.0-1b-a400m",
     "valid_granite_config in tests/test_config.py of mini_llm (a small inference program; granite-3.1, the same network)",
     R"({"model_type": "granitemoe", "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 512,
      "num_local_experts": 32, "num_experts_per_tok": 8, "num_hidden_layers": 24})"},
    {"Granite-3.0-3b-a800m", "ibm-granite/granite-3.1-3b-a800m-instruct config.json (the same network), as other projects' tests quote it",
     R"({"model_type": "granitemoe", "hidden_act": "silu", "hidden_size": 1536, "intermediate_size": 512,
      "num_local_experts": 40, "num_experts_per_tok": 8, "num_hidden_layers": 32})"},
    {"ERNIE-4.5-21B-A3B", MOE_DEFAULTS("ernie4_5_moe"),
     R"({"model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 12288, "moe_intermediate_size": 1536,
      "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "num_hidden_layers": 28, "moe_layer_start_index": 1,
      "moe_layer_end_index": -1, "moe_layer_interval": 1, "moe_norm_min": 1e-12})"},
    // 54 layers: num_hidden_layers 56 less remove_tail_layer 2
    {"ERNIE-4.5-300B-A47B", "PaddlePaddle/ERNIE examples/pre-training/model_configs/ERNIE-4p5-300B-A47B/model_config.json",
     R"({"model_type": "ernie4_5_moe", "hidden_act": "silu", "hidden_size": 8192, "moe_intermediate_size": 3584,
      "moe_num_experts": 64, "moe_num_shared_experts": 0, "moe_k": 8, "num_hidden_layers": 54, "moe_layer_start_index": 3,
      "moe_layer_end_index": 53, "moe_layer_interval": 1})"},
    // the lists of the release have one entry per layer; hunyuan() writes them out
    {"Hunyuan-A13B", "Tencent-Hunyuan/Hunyuan-A13B models/config.json",
     R"({"architectures": ["HunYuanMoEV1ForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 3072,
      "model_type": "hunyuan", "norm_topk_prob": true, "num_experts": 64, "num_hidden_layers": 32, "routed_scaling_factor": 1.0,
      "topk_group": null, "use_mixed_mlp_moe": true, "moe_intermediate_size": "3072 for each", "moe_topk": "8 for each",
      "num_shared_expert": "1 for each"})"},
    {"LongCat-Flash", MOE_DEFAULTS("longcat_flash"),
     R"({"model_type": "longcat_flash", "hidden_act": "silu", "hidden_size": 6144, "expert_ffn_hidden_size": 2048,
      "ffn_hidden_size": 12288, "n_routed_experts": 512, "zero_expert_num": 256, "zero_expert_type": "identity", "moe_topk": 12,
      "num_hidden_layers": 56, "num_layers": 28, "routed_scaling_factor": 6.0})"},
    // emb_size 48 · 128, widening_factor 8: ffn_size() = 8 · 6144 · 2 / 3
    {"Grok-1", "xai-org/grok-1 run.py and model.py, which were released instead of a config.json",
     R"({"model_type": "grok-1", "hidden_size": 6144, "intermediate_size": 32768, "num_experts": 8, "num_experts_per_tok": 2,
      "num_hidden_layers": 64})"},
    {"DBRX", "lablup/mlxcel src/models/dbrx_tests.rs (dbrx-instruct)",
     R"({"model_type": "dbrx", "d_model": 6144, "n_layers": 40, "ffn_config": {"ffn_act_fn": {"name": "silu"}, "ffn_hidden_size": 10752,
      "moe_num_experts": 16, "moe_top_k": 4, "moe_jitter_eps": 0, "moe_loss_weight": 0.05, "moe_normalize_expert_weights": 1,
      "uniform_expert_assignment": false}})"},
    {"Jamba-1.5-Mini", MOE_GENZ,
     R"({"model_type": "jamba", "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
      "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "expert_layer_offset": 1, "expert_layer_period": 2})"},
    {"Jamba-1.5-Large", MOE_GENZ,
     R"({"model_type": "jamba", "hidden_act": "silu", "hidden_size": 8192, "intermediate_size": 24576,
      "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 72, "expert_layer_offset": 1, "expert_layer_period": 2})"},
};
/// Hunyuan states several values once per layer.
std::string hunyuan(char const* json) {
  nlohmann::json j = nlohmann::json::parse(json);
  j["moe_topk"] = std::vector<int>(32, 8);
  j["moe_intermediate_size"] = std::vector<int>(32, 3072);
  j["num_shared_expert"] = std::vector<int>(32, 1);
  return j.dump();
}

/// Compares the options that a router type fixes with those of a configuration.
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
void check(Released const& release) {
  SCOPED_TRACE(M::kName);
  SCOPED_TRACE(release.source);
  bool const lists = std::string_view(M::kName) == "Hunyuan-A13B";
  HfConfig const config = HfConfig::from_text(lists ? hunyuan(release.json) : release.json, M::kName);
  auto const layers = moe_layers(config);
  ASSERT_FALSE(layers.empty());
  EXPECT_EQ(num_layers(config), M::num_layers);
  EXPECT_EQ(layers.front(), M::first_moe_layer);
  EXPECT_EQ(layers.back(), M::num_layers - 1);
  EXPECT_EQ(static_cast<std::int64_t>(layers.size()), (M::num_layers - M::first_moe_layer + M::moe_layer_step - 1) / M::moe_layer_step);
  for (std::int64_t layer : layers) {
    bool const hash = layer < M::num_hash_layers;
    LayerDescription const d = from_config(config, layer);
    EXPECT_EQ(d.router.selection == Selection::hash_table, hash) << "layer " << layer;
    EXPECT_EQ(d.expert_hidden(), M::hidden);
    EXPECT_EQ(d.latent > 0 ? d.hidden : 0, M::block_hidden);
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
    EXPECT_EQ(d.activation.kind, M::Activation::kKind);
    auto const constants = moe::default_activation<M>().constants;
    EXPECT_EQ(constants.limit, d.activation.constants.limit);
    EXPECT_EQ(constants.alpha, d.activation.constants.alpha);
    EXPECT_EQ(constants.situ_gate, d.activation.constants.situ_gate);
    EXPECT_EQ(constants.situ_up, d.activation.constants.situ_up);
    auto const params = moe::default_router_params<M, typename M::Router::Params>();
    if constexpr (requires { params.routed_scaling_factor; }) {
      EXPECT_EQ(params.routed_scaling_factor, d.router.routed_scaling_factor);
    }
    if constexpr (requires { params.logit_softcap; }) {
      EXPECT_EQ(params.logit_softcap, d.router.logit_softcap);
    }
    if constexpr (requires { params.router_jitter_noise; }) {
      EXPECT_EQ(params.router_jitter_noise, d.router.sparsemixer_eps);
    }
    if constexpr (requires { params.renorm; }) {
      EXPECT_EQ(params.renorm, d.router.renorm);
    }
    if (!hash) expect_router<typename M::Router>(d.router, d.correction_bias);
  }
}

TEST(Models, EveryModelIsWhatWasReleased) {
  std::set<std::string_view> names;
  boost::hana::for_each(moe::models::catalog, [&](auto type) {
    using M = typename decltype(type)::type;
    static_assert(moe::LayerConfig<M>);
    EXPECT_TRUE(names.insert(M::kName).second) << M::kName << " twice";
    bool found = false;
    for (Released const& release : kReleased) {
      if (release.model != M::kName) continue;
      check<M>(release);
      found = true;
    }
    EXPECT_TRUE(found) << M::kName << " has no released configuration to compare with";
  });
  for (Released const& release : kReleased) EXPECT_TRUE(names.contains(release.model)) << release.model << " has no constants";
  EXPECT_EQ(names.size(), 34U);
}

TEST(Models, KimiK3WorksOnAProjectionOfTheToken) {
  auto const release = std::ranges::find_if(kReleased, [](Released const& r) { return r.model == "Kimi-K3"; });
  nlohmann::json k3 = nlohmann::json::parse(release->json)["text_config"];
  auto const describe = [&] { return from_config(HfConfig::from_text(k3.dump(), "c"), 1); };
  EXPECT_EQ(describe().latent, 3584);
  EXPECT_TRUE(describe().latent_norm);
  EXPECT_FLOAT_EQ(describe().rms_norm_eps, 1e-5F);
  EXPECT_EQ(describe().activation.constants.situ_gate, 4.0F);
  EXPECT_EQ(describe().activation.constants.situ_up, 25.0F);
  EXPECT_EQ(describe().shared.activation.kind, moe::activation::Kind::situ);
  EXPECT_EQ(describe().quantization.weights.at(0), (StoredWeights{false, 4, 32}));
  for (char const* field : {"latent_moe_use_norm", "rms_norm_eps", "activation_situ_beta", "activation_situ_linear_beta", "hidden_act"}) {
    auto const whole = k3;
    k3.erase(field);
    moe_test::expect_error(moe::ErrorCode::config, moe::text("'", field, "' is missing"), describe);
    k3 = whole;
  }
  // Kimi-Linear, of the same model type
  k3.erase("routed_expert_hidden_size");
  k3["hidden_act"] = "silu";
  EXPECT_EQ(describe().latent, 0);
  EXPECT_EQ(describe().activation.kind, moe::activation::Kind::silu);
}

}  // namespace
