// SPDX-License-Identifier: Apache-2.0
// io/layer_from_config.hpp: which layers of a checkpoint are MoE layers, and the description of one of them.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/families.hpp"
#include "moe/io/hf_config.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/unread_fields.hpp"

namespace moe::io {

namespace detail {

/// Where a family's configuration says which layers are MoE layers.
enum class MoeLayers : std::uint8_t {
  all,
  sparse_step,    ///< decoder_sparse_step, mlp_only_layers
  first_k_dense,  ///< first_k_dense_replace, moe_layer_freq
  num_dense,      ///< num_dense_layers
  ernie,          ///< moe_layer_start_index, _end_index, _interval
  llama4,         ///< moe_layers or interleave_moe_layer_step
  jamba,          ///< expert_layer_period, expert_layer_offset
  blocks,         ///< layers_block_type or hybrid_override_pattern
  encoder_step,   ///< encoder_sparse_step
  encoder_last,   ///< the last of every encoder_sparse_step layers
  experts,        ///< all of them, with num_experts above 1
  listed,         ///< mlp_layer_types, or the field of earlier releases
};

struct Family {
  std::string_view model_type;
  MoeLayers layers;
  void (*describe)(HfConfig const&, LayerDescription&, std::int64_t layer);
};

template <void (*F)(HfConfig const&, LayerDescription&)>
void any_layer(HfConfig const& c, LayerDescription& d, std::int64_t) {
  F(c, d);
}

namespace f = families;
inline constexpr std::array kFamilies{
    Family{"afmoe", MoeLayers::num_dense, any_layer<f::afmoe>},
    Family{"aria_text", MoeLayers::all, any_layer<f::aria>},
    Family{"axk1", MoeLayers::first_k_dense, any_layer<f::axk1>},
    Family{"axk2", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"bailing_hybrid", MoeLayers::listed, any_layer<f::bailing_hybrid>},
    Family{"beam", MoeLayers::listed, any_layer<f::beam>},
    Family{"cohere2_moe", MoeLayers::listed, any_layer<f::cohere2>},
    Family{"dbrx", MoeLayers::all, any_layer<f::dbrx>},
    Family{"deepseek_ocr2_text", MoeLayers::listed, any_layer<f::deepseek_ocr>},
    Family{"deepseek_v2", MoeLayers::first_k_dense, any_layer<f::deepseek_v2>},
    Family{"deepseek_v3", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"deepseek_v32", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"deepseek_v4", MoeLayers::all, f::deepseek_v4},
    Family{"diffusion_gemma_text", MoeLayers::all, any_layer<f::gemma4>},
    Family{"dots1", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"dots3_note_text", MoeLayers::first_k_dense, any_layer<f::dots3_note>},
    Family{"dots3_note_vision_encoder", MoeLayers::listed, f::dots3_note_vision},
    Family{"ernie4_5_moe", MoeLayers::ernie, any_layer<f::ernie>},
    Family{"ernie4_5_vl_moe_text", MoeLayers::listed, any_layer<f::ernie_vl>},
    Family{"exaone_moe", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"flex_olmo", MoeLayers::all, any_layer<f::olmoe>},
    Family{"flint", MoeLayers::sparse_step, any_layer<f::flint>},
    Family{"gemma4_text", MoeLayers::all, any_layer<f::gemma4>},
    Family{"glm4_moe", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"glm4_moe_lite", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"glm4v_moe_text", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"glm5_next_text", MoeLayers::listed, any_layer<f::glm5_next>},
    Family{"glm_moe_dsa", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"gpt_oss", MoeLayers::all, any_layer<f::gpt_oss>},
    Family{"granitemoe", MoeLayers::all, any_layer<f::granite>},
    Family{"granitemoe_swa", MoeLayers::all, any_layer<f::granite>},
    Family{"granitemoehybrid", MoeLayers::all, any_layer<f::granite>},
    Family{"granitemoeshared", MoeLayers::all, any_layer<f::granite>},
    Family{"grok-1", MoeLayers::all, any_layer<f::grok1>},
    Family{"hunyuan_v1_moe", MoeLayers::all, f::hunyuan_v1},
    Family{"hy_v3", MoeLayers::listed, any_layer<f::hy_v3>},
    Family{"hy_v4", MoeLayers::listed, any_layer<f::hy_v4>},
    Family{"inkling2_text", MoeLayers::all, any_layer<f::inkling2>},
    Family{"inkling_text", MoeLayers::listed, any_layer<f::inkling>},
    Family{"jamba", MoeLayers::jamba, any_layer<f::jamba>},
    Family{"jetmoe", MoeLayers::all, any_layer<f::jetmoe>},
    Family{"kimi_k2", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"kimi_linear", MoeLayers::first_k_dense, any_layer<f::kimi_linear>},
    Family{"kolibri1", MoeLayers::all, any_layer<f::kolibri1>},
    Family{"laguna", MoeLayers::listed, any_layer<f::laguna>},
    Family{"lfm2_moe", MoeLayers::num_dense, any_layer<f::lfm2>},
    Family{"llama4_text", MoeLayers::llama4, any_layer<f::llama4>},
    Family{"longcat_flash", MoeLayers::all, any_layer<f::longcat_flash>},
    Family{"mellum", MoeLayers::sparse_step, any_layer<f::qwen_moe>},
    Family{"mimo_v2_flash", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"minimax", MoeLayers::all, any_layer<f::mixtral>},
    Family{"minimax_m2", MoeLayers::all, any_layer<f::minimax_m2>},
    Family{"minimax_m3_vl_text", MoeLayers::listed, any_layer<f::minimax_m3>},
    Family{"mistral4", MoeLayers::first_k_dense, any_layer<f::mistral4>},
    Family{"mistral_large4_text", MoeLayers::listed, any_layer<f::mistral_large4>},
    Family{"mixtral", MoeLayers::all, any_layer<f::mixtral>},
    Family{"muse_spark_text", MoeLayers::listed, any_layer<f::muse_spark>},
    Family{"nemotron_h", MoeLayers::blocks, any_layer<f::nemotron_h>},
    Family{"nllb-moe", MoeLayers::encoder_last, any_layer<f::nllb>},
    Family{"olmoe", MoeLayers::all, any_layer<f::olmoe>},
    Family{"openai_privacy_filter", MoeLayers::all, any_layer<f::openai_privacy_filter>},
    Family{"phimoe", MoeLayers::all, any_layer<f::phimoe>},
    Family{"qwen2_moe", MoeLayers::sparse_step, any_layer<f::qwen_shared>},
    Family{"qwen3_5_moe_text", MoeLayers::sparse_step, any_layer<f::qwen_shared_always>},
    Family{"qwen3_moe", MoeLayers::sparse_step, any_layer<f::qwen_moe>},
    Family{"qwen3_next", MoeLayers::sparse_step, any_layer<f::qwen_shared>},
    Family{"qwen3_omni_moe_talker_text", MoeLayers::sparse_step, any_layer<f::qwen_shared>},
    Family{"qwen3_omni_moe_text", MoeLayers::sparse_step, any_layer<f::qwen_moe>},
    Family{"qwen3_vl_moe_text", MoeLayers::sparse_step, any_layer<f::qwen_moe_always>},
    Family{"qwen4_exp_text", MoeLayers::all, any_layer<f::qwen_shared>},
    Family{"solar_open", MoeLayers::first_k_dense, any_layer<f::deepseek_v3>},
    Family{"step3p5", MoeLayers::listed, f::step3},
    Family{"switch_transformers", MoeLayers::encoder_step, any_layer<f::switch_transformers>},
    Family{"unlimited_ocr_text", MoeLayers::listed, any_layer<f::deepseek_ocr>},
    Family{"vitpose_backbone", MoeLayers::experts, any_layer<f::vitpose>},
    Family{"zaya", MoeLayers::all, any_layer<f::zaya>},
};

/// Model types with an MoE block that this library does not compute, and why.
struct RefusedFamily {
  std::string_view model_type, why;
};
inline constexpr RefusedFamily kRefused[] = {
    {"doge", "its experts are single vectors, chosen by pairs of keys from the logits of two different tokens"},
};

/// The family of a configuration. E_UNSUPPORTED naming the model type and the known ones.
inline Family const& family_of(HfConfig const& c) {
  std::string known;
  std::string_view wanted = c.model_type();
  if (c.has("architectures")) {
    nlohmann::json const& architecture = c.at("architectures", 0);
    // MiniMax-M2 was released under the model type of its predecessor, which routes differently.
    if (wanted == "minimax" && architecture == "MiniMaxM2ForCausalLM") wanted = "minimax_m2";
    if (wanted == "hunyuan" && architecture == "HunYuanMoEV1ForCausalLM") wanted = "hunyuan_v1_moe";
  }
  // Text models released under the name of the whole model.
  if (wanted == "minimax_m3") wanted = "minimax_m3_vl_text";
  if (std::string_view const part = HfConfig::text_part_of(wanted); !part.empty()) wanted = part;
  for (Family const& family : kFamilies) {
    if (family.model_type == wanted) return family;
    known += (known.empty() ? "" : ", ") + std::string(family.model_type);
  }
  for (RefusedFamily const& refused : kRefused) {
    if (refused.model_type != wanted) continue;
    throw Error(ErrorCode::unsupported, one_line("'", c.label(), "': model_type '", wanted, "' cannot be computed: ", refused.why));
  }
  throw Error(ErrorCode::unsupported, one_line("'", c.label(), "': model_type '", c.model_type(), "' is not known, known: ", known));
}

/// The first layers are dense, of the others every moe_layer_freq-th has a block. `field` says how many are dense; absent: none.
inline std::optional<std::string> why_dense_by_count(HfConfig const& c, std::string_view field, std::int64_t layer) {
  std::int64_t const first = c.has(field) ? c.integer(field, 0) : 0;
  if (layer < first) return text(field, " = ", first);
  std::int64_t const step = c.has("moe_layer_freq") ? c.integer("moe_layer_freq") : 1;
  return layer % step == 0 ? std::nullopt : std::optional(text("moe_layer_freq = ", step));
}

/// why_dense() for families that list their layers in mlp_layer_types, by the fields of their earlier releases.
inline std::optional<std::string> why_dense_in_a_list(HfConfig const& c, std::int64_t layer) {
  if (c.has("moe_layers_enum")) {  // Step-3.7: "3,4,5" or [3, 4, 5]
    nlohmann::json const& layers = c.json()["moe_layers_enum"];
    std::string words = layers.is_string() ? layers.get<std::string>() : std::string{};
    std::erase(words, ' ');
    bool const listed = layers.is_string() ? text(',', words, ',').find(text(',', layer, ',')) != std::string::npos
                                           : c.list_contains("moe_layers_enum", layer);
    return listed ? std::nullopt : std::optional(text("moe_layers_enum does not contain ", layer));
  }
  bool const has_step = c.has("moe_layer_freq");
  if (has_step && c.json()["moe_layer_freq"].is_array()) {
    if (c.integer_at("moe_layer_freq", layer, 0, 1) == 0) return text("moe_layer_freq[", layer, "] = 0");
    return std::nullopt;
  }
  std::string_view const field = families::first_stated(c, {"dense_mlp_idx", "first_k_dense_replace"});
  if (!has_step && !c.has(field)) c.fail("'mlp_layer_types' is missing");
  return why_dense_by_count(c, field, layer);
}

/// The reason why a layer has no MoE block; nullopt if it has one.
inline std::optional<std::string> why_dense(HfConfig const& c, MoeLayers rule, std::int64_t layer) {
  auto const dense_if = [](bool dense, auto const&... why) { return dense ? std::optional(text(why...)) : std::nullopt; };
  if (c.has("mlp_layer_types")) {  // newer releases list the layers; the list takes precedence
    nlohmann::json const& type = c.at("mlp_layer_types", layer);
    if (!type.is_string()) c.fail(one_line("'mlp_layer_types'[", layer, "] is not a string"));
    auto const& name_ = type.get_ref<std::string const&>();
    if (name_ == "dense") return text("mlp_layer_types[", layer, "] = dense");
    if (name_ != "sparse" && name_ != "moe" && name_ != "hash_moe") {
      throw Error(ErrorCode::unsupported, one_line("'", c.label(), "': mlp_layer_types[", layer, "] = '", name_.substr(0, 60),
                                                   "', known: dense, sparse, moe, hash_moe"));
    }
    return std::nullopt;
  }
  switch (rule) {
    case MoeLayers::all:
      if (c.model_type() == "gemma4_text" && !c.has("enable_moe_block")) c.fail("'enable_moe_block' is missing");  // false where unstated
      return dense_if(c.has("enable_moe_block") && !c.flag("enable_moe_block"), "enable_moe_block = false");
    case MoeLayers::sparse_step: {
      if (c.model_type() == "flint" && !c.has("mlp_only_layers")) c.fail("'mlp_only_layers' is missing");  // not empty where unstated
      if (c.list_contains("mlp_only_layers", layer)) return text("mlp_only_layers contains ", layer);
      std::int64_t const step = c.has("decoder_sparse_step") ? c.integer("decoder_sparse_step") : 1;
      return dense_if((layer + 1) % step != 0, "decoder_sparse_step = ", step);
    }
    case MoeLayers::first_k_dense: {
      if (c.has("moe_layer_freq") && c.json()["moe_layer_freq"].is_array()) {
        if (c.model_type().starts_with("dots3_note") && layer < c.integer("first_k_dense_replace", 0)) {
          return text("first_k_dense_replace = ", c.integer("first_k_dense_replace", 0));
        }
        return dense_if(c.integer_at("moe_layer_freq", layer, 0, 1) == 0, "moe_layer_freq[", layer, "] = 0");
      }
      if (c.model_type() != "solar_open") (void)c.integer("first_k_dense_replace", 0);  // the others must state it
      return why_dense_by_count(c, "first_k_dense_replace", layer);
    }
    case MoeLayers::num_dense: {
      std::int64_t const first = c.integer("num_dense_layers", 0);
      return dense_if(layer < first, "num_dense_layers = ", first);
    }
    case MoeLayers::ernie: {
      std::int64_t const first = c.integer("moe_layer_start_index", 0);
      std::int64_t const last = c.has("moe_layer_end_index") ? c.integer("moe_layer_end_index", -1) : -1;
      std::int64_t const step = c.has("moe_layer_interval") ? c.integer("moe_layer_interval") : 1;
      if (layer < first) return text("moe_layer_start_index = ", first);
      if (last >= 0 && layer > last) return text("moe_layer_end_index = ", last);
      return dense_if((layer + 1) % step != 0, "moe_layer_interval = ", step);
    }
    case MoeLayers::llama4: {
      if (c.has("moe_layers")) return dense_if(!c.list_contains("moe_layers", layer), "moe_layers does not contain ", layer);
      std::int64_t const step = c.integer("interleave_moe_layer_step");
      return dense_if((layer + 1) % step != 0, "interleave_moe_layer_step = ", step);
    }
    case MoeLayers::jamba: {
      std::int64_t const period = c.integer("expert_layer_period"), offset = c.integer("expert_layer_offset", 0);
      return dense_if(layer % period != offset, "expert_layer_period = ", period, ", expert_layer_offset = ", offset);
    }
    case MoeLayers::blocks: {
      if (c.has("layers_block_type")) {
        nlohmann::json const& type = c.at("layers_block_type", layer);
        return dense_if(type != "moe", "layers_block_type[", layer, "] is not moe");
      }
      std::string const pattern = c.string("hybrid_override_pattern");
      if (layer >= static_cast<std::int64_t>(pattern.size())) c.fail(one_line("'hybrid_override_pattern' has no entry for layer ", layer));
      return dense_if(pattern[static_cast<std::size_t>(layer)] != 'E', "hybrid_override_pattern[", layer, "] is not E");
    }
    case MoeLayers::encoder_step: {
      std::int64_t const step = c.integer("encoder_sparse_step");
      return dense_if(step > 1 && layer % step != 1, "encoder_sparse_step = ", step);
    }
    case MoeLayers::encoder_last: {
      std::int64_t const step = c.integer("encoder_sparse_step", 0);
      return dense_if(step == 0 || (layer + 1) % step != 0, "encoder_sparse_step = ", step);
    }
    case MoeLayers::experts: return dense_if(c.integer("num_experts") == 1, "num_experts = 1");
    case MoeLayers::listed: return why_dense_in_a_list(c, layer);
  }
  return std::nullopt;
}

}  // namespace detail

/// The model types whose configurations are known, sorted.
inline std::vector<std::string_view> known_model_types() {
  std::vector<std::string_view> out;
  out.reserve(std::size(detail::kFamilies));
  for (detail::Family const& family : detail::kFamilies) out.push_back(family.model_type);
  return out;
}

/// Number of layers of the model, dense ones included.
inline std::int64_t num_layers(HfConfig const& c) {
  if (c.model_type() == "longcat_flash") return c.integer({"num_layers"}, 1, 100'000);  // its num_hidden_layers counts half layers
  if (c.model_type() == "nllb-moe") return c.integer({"encoder_layers", "num_hidden_layers"}, 1, 100'000);
  if (c.has("layers_block_type") && !c.has("num_hidden_layers") && c.json()["layers_block_type"].is_array()) {
    return static_cast<std::int64_t>(c.json()["layers_block_type"].size());
  }
  return c.integer({"num_hidden_layers", "n_layers", "num_layers"}, 1, 100'000);
}

/// The layers that have an MoE block. E_UNSUPPORTED if the model type is not known.
inline std::vector<std::int64_t> moe_layers(HfConfig const& c) {
  detail::Family const& family = detail::family_of(c);
  std::vector<std::int64_t> out;
  for (std::int64_t layer = 0, n = num_layers(c); layer < n; ++layer) {
    if (!detail::why_dense(c, family.layers, layer)) out.push_back(layer);
  }
  return out;
}

/// The description of layer `layer` of a checkpoint. E_UNSUPPORTED for an unknown model type or option, and for a field that affects the
/// block but that this family does not read; E_CONFIG for a missing or invalid field, E_ARG for a layer out of range or without an MoE
/// block. `tokens` chooses between the two blocks of a layer of ERNIE-4.5-VL (all: the text tokens' block, which the model runs on every
/// token of an input without images); E_ARG in other models.
inline LayerDescription from_config(HfConfig const& config, std::int64_t layer, Tokens tokens = Tokens::all) {
  std::set<std::string, std::less<>> read;
  HfConfig const c = config.noting(read);
  detail::Family const& family = detail::family_of(c);
  std::int64_t const n = num_layers(c);
  if (layer < 0 || layer >= n)
    throw Error(ErrorCode::argument, one_line("layer ", layer, " is out of range [0, ", n, ") of '", c.label(), "'"));
  if (auto const why = detail::why_dense(c, family.layers, layer)) {
    throw Error(ErrorCode::argument, one_line("layer ", layer, " of '", c.label(), "' is dense (", *why, "), it has no experts"));
  }
  LayerDescription d;
  d.model_type = c.model_type();
  d.tokens = tokens;
  family.describe(c, d, layer);
  if (tokens != Tokens::all && family.describe != detail::any_layer<detail::f::ernie_vl>) {
    throw Error(ErrorCode::argument,
                one_line("layer ", layer, " of '", c.label(), "' has one block for all tokens, none for ", name(tokens), " tokens alone"));
  }
  auto const refuse_biases = [&](char const* field) {
    if (!d.expert_bias && c.has(field) && c.flag(field)) {
      throw Error(ErrorCode::unsupported,
                  one_line("'", c.label(), "': ", field, " is true, and experts of ", d.model_type, " have no biases here"));
    }
  };
  refuse_biases("mlp_bias");
  if (d.model_type.starts_with("ernie")) refuse_biases("use_bias");
  detail::refuse_unread(config, read, d);
  detail::refuse_own_values(config, read, layer);
  if (c.has("quantization_config")) {
    HfConfig const q = c.section("quantization_config");
    d.quantization = checkpoint_quantization(q);
    // DeepSeek-V4: the routed experts are mxfp4, everything else is fp8. transformers writes the field into quantization_config.
    auto const fp4 = [](HfConfig const& at) { return at.has("expert_dtype") && at.string("expert_dtype", {"fp4", "fp8"}) == "fp4"; };
    if (fp4(q) || (!q.has("expert_dtype") && fp4(c))) d.quantization.weights.push_back({false, 4, 32});
  }
  validate(d, c.label());
  return d;
}

}  // namespace moe::io
