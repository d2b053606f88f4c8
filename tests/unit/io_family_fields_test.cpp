// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_family_fields_test.cpp: no field of a config.json that decides what a block computes is ignored, in any family.
//
// tests/data/family_fields.json holds each family's configuration as transformers 5.23.0 writes it, and the values of its fields that
// changed the output of that family's block there (same weights, same input).
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "expect_error.hpp"
#include "moe/io/layer_description_json.hpp"
#include "moe/io/layer_from_config.hpp"

namespace {

using moe::ErrorCode;
using namespace moe::io;
using nlohmann::json;

json families() {
  std::ifstream in(std::filesystem::path(MOE_TEST_DATA) / "family_fields.json");
  return json::parse(in);
}
/// Description of the first MoE layer; nullopt if the configuration is refused.
std::optional<nlohmann::ordered_json> described(json const& config) {
  try {
    HfConfig const c = HfConfig::from_text(config.dump(), "config.json");
    return to_json(from_config(c, 0));
  } catch (moe::Error const& error) {
    EXPECT_TRUE(error.code() == ErrorCode::config || error.code() == ErrorCode::unsupported) << error.what();
    return std::nullopt;
  }
}

TEST(FamilyFields, EveryFamilyIsThereAndIsDescribed) {
  json const all = families();
  std::set<std::string> with_data;
  for (auto const& [family, entry] : all.items()) {
    with_data.insert(family);
    EXPECT_TRUE(described(entry["config"])) << family;
    EXPECT_FALSE(entry["changes"].empty()) << family;
  }
  for (std::string_view type : known_model_types()) {
    // Other libraries' families, which transformers has no code for.
    if (type == "grok-1" || type == "kimi_k2") continue;
    EXPECT_TRUE(with_data.contains(std::string(type))) << type;
  }
}

TEST(FamilyFields, AValueThatChangesTheOutputChangesTheDescriptionOrIsRefused) {
  int changed = 0, refused = 0;
  json const all = families();
  for (auto const& [family, entry] : all.items()) {
    auto const base = described(entry["config"]);
    ASSERT_TRUE(base) << family;
    for (json const& change : entry["changes"]) {
      json config = entry["config"];
      config[change[0].get<std::string>()] = change[1];
      auto const now = described(config);
      EXPECT_NE(base, now) << family << " ignores " << change.dump();
      ++(now ? changed : refused);
    }
  }
  EXPECT_GT(changed, 200);
  EXPECT_GT(refused, 40);
}

/// A field whose default in the family's code is not what its absence would mean here must be stated.
TEST(FamilyFields, AnAbsentFieldIsRefusedOrMeansTheDefaultOfTheFamily) {
  // What transformers 5.23.0 takes where these are absent, which is what the description then has.
  json const defaults{{"axk2", {{"n_group", nullptr}}},
                      {"cohere2_moe", {{"num_shared_experts", 0}}},
                      {"dots1", {{"n_shared_experts", nullptr}}},
                      {"dots3_note_vision_encoder", {{"per_layer_config", nullptr}}},
                      {"granitemoe_swa", {{"shared_intermediate_size", 0}}},
                      {"granitemoeshared", {{"shared_intermediate_size", 0}}},
                      {"kimi_linear", {{"num_expert_group", 1}}},
                      {"step3p5", {{"swiglu_limits", nullptr}, {"swiglu_limits_shared", nullptr}}}};
  json const all = families();
  for (auto const& [family, entry] : all.items()) {
    json const& base = entry["config"];
    for (auto const& [field, value] : base.items()) {
      if (field == "mlp_layer_types") continue;  // which layers have a block
      json config = base;
      config.erase(field);
      auto const now = described(config);
      if (!now || now == described(base)) continue;
      ASSERT_TRUE(defaults.contains(family) && defaults[family].contains(field)) << family << ": the absence of " << field << " is ignored";
      config[field] = defaults[family][field];
      EXPECT_EQ(now, described(config)) << family << ' ' << field;
    }
  }
}

/// Two contradictory values of a field. A family reads the field, or refuses the value that its blocks do not implement.
TEST(FamilyFields, AFieldOfAnotherFamilyIsNotIgnored) {
  std::map<std::string, std::vector<json>> const contradictory{
      {"hidden_act", {"silu", "relu6"}},
      {"hidden_activation", {"silu", "relu6"}},
      {"activation_function", {"silu", "relu6"}},
      {"mlp_hidden_act", {"silu", "relu6"}},
      {"dense_act_fn", {"silu", "relu6"}},
      {"is_gated_act", {true, false}},
      {"swiglu_alpha", {1.25, 2.5}},
      {"swiglu_beta", {1.25, 2.5}},
      {"swiglu_limit", {3.5, 12.0}},
      {"swiglu_limits", {{3.5, 3.5}, {12.0, 12.0}}},
      {"swiglu_limits_shared", {{3.5, 3.5}, {12.0, 12.0}}},
      {"mlp_gate_softcap", {3.5, 12.0}},
      {"mlp_up_softcap", {3.5, 12.0}},
      {"norm_topk_prob", {true, false}},
      {"moe_renormalize", {true, false}},
      {"norm_expert_weight", {true, false}},
      {"route_norm", {true, false}},
      {"routed_scaling_factor", {1.0, 3.75}},
      {"route_scale", {1.0, 3.75}},
      {"router_scaling_factor", {1.0, 3.75}},
      {"moe_routed_scaling_factor", {1.0, 3.75}},
      {"moe_router_scaling_factor", {1.0, 3.75}},
      {"n_group", {1, 2}},
      {"num_expert_group", {1, 2}},
      {"scoring_func", {"softmax", "sigmoid", "sqrtsoftplus"}},
      {"score_func", {"softmax", "sigmoid", "sqrtsoftplus"}},
      {"moe_router_activation", {"softmax", "sigmoid", "sqrtsoftplus"}},
      {"moe_router_activation_func", {"softmax", "sigmoid", "sqrtsoftplus"}},
      {"expert_selection_fn", {"softmax", "sigmoid"}},
      {"topk_method", {"greedy", "group_limited_greedy", "noaux_tc"}},
      {"use_expert_bias", {true, false}},
      {"use_routing_bias", {true, false}},
      {"use_moe_router_bias", {true, false}},
      {"moe_router_enable_expert_bias", {true, false}},
      {"router_bias", {true, false}},
      {"router_dtype", {"float32", "bfloat16"}},
      {"moe_router_dtype", {"float32", "bfloat16"}},
      {"moe_apply_router_weight_on_input", {true, false}},
      {"router_logit_softcapping", {5.0, 30.0}},
      {"moe_router_logit_softcapping", {5.0, 30.0}},
      {"n_shared_experts", {0, 1, 2}},
      {"num_shared_experts", {0, 1, 2}},
      {"num_shared_expert", {0, 1, 2}},
      {"moe_num_shared_experts", {0, 1, 2}},
      {"shared_expert_intermediate_size", {0, 8, 56}},
      {"shared_intermediate_size", {0, 8, 56}},
      {"moe_shared_expert_intermediate_size", {0, 8, 56}},
      {"share_expert_dim", {8, 56}},
      {"shared_expert_combination_strategy", {"sum", "average"}},
      {"shared_expert_sink", {true, false}},
      {"zero_expert_num", {0, 2, 4}},
      {"zero_expert_type", {"identity", "copy"}},
      {"moe_latent_size", {16, 24}},
      {"routed_expert_hidden_size", {16, 24}},
      {"latent_moe_use_norm", {true, false}},
      {"moe_hidden_size", {16, 24}},
      {"output_multiplier", {0.5, 2.5}},
      {"shared_experts_intermediate_size", {7, 11}},
  };
  // Fields that a family's own code ignores, as its block files and transformers 5.23.0 show.
  std::set<std::pair<std::string, std::string>> const of_no_account{
      {"deepseek_v2", "norm_topk_prob"},  // never renormalised
      {"deepseek_v2", "n_group"},         // with topk_method greedy
      {"deepseek_v2", "topk_method"},     // with one group
      {"kimi_linear", "latent_moe_use_norm"},
  };
  json const all = families();
  for (detail::SemanticField const& field : detail::kSemanticFields) {
    std::string const name(field.name);
    ASSERT_TRUE(contradictory.contains(name)) << name << " needs values here";
    for (auto const& [family, entry] : all.items()) {
      if (of_no_account.contains({family, name})) continue;
      // Without shared experts their combination has no effect; without zero experts their type has none.
      json const& base = entry["config"];
      auto const plain = described(base);
      if (name == "shared_expert_combination_strategy" && !plain->contains("shared")) continue;
      if (name == "zero_expert_type" && (*plain)["num_zero_experts"] == 0) continue;
      std::set<std::string> accepted;
      std::size_t same = 0;
      for (json const& value : contradictory.at(name)) {
        json config = base;
        config[name] = value;
        auto const now = described(config);
        if (!now) continue;
        if (!accepted.insert(now->dump()).second) ++same;
      }
      EXPECT_EQ(same, 0U) << family << ": values of " << name << " that contradict each other give one description";
    }
  }
}

TEST(FamilyFields, TheRefusalNamesFieldAndFamily) {
  json config = families()["qwen3_moe"]["config"];
  config["swiglu_limit"] = 7.0;
  try {
    (void)from_config(HfConfig::from_text(config.dump(), "config.json"), 0);
    FAIL() << "no error";
  } catch (moe::Error const& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_NE(error.message().find("'swiglu_limit' is 7.0, which the blocks of qwen3_moe do not have"), std::string::npos) << error.what();
  }
}

TEST(FamilyFields, ConstantsOfTheGateAreRead) {
  json const all = families();
  for (char const* family : {"gpt_oss", "openai_privacy_filter", "minimax_m3_vl_text"}) {
    json config = all[family]["config"];
    config["swiglu_alpha"] = 1.25;
    config["swiglu_limit"] = 2.5;
    LayerDescription const d = from_config(HfConfig::from_text(config.dump(), "c"), 0);
    EXPECT_EQ(d.activation.constants.alpha, 1.25F) << family;
    EXPECT_EQ(d.activation.constants.limit, 2.5F) << family;
  }
  // The first releases of gpt-oss state the limit only.
  json config = all["gpt_oss"]["config"];
  config.erase("swiglu_alpha");
  EXPECT_EQ(from_config(HfConfig::from_text(config.dump(), "c"), 0).activation.constants.alpha, 1.702F);
  // Aria's routed experts are always silu-gated; its shared experts follow hidden_act.
  json aria = all["aria_text"]["config"];
  aria["hidden_act"] = "gelu";
  LayerDescription const d = from_config(HfConfig::from_text(aria.dump(), "c"), 0);
  EXPECT_EQ(d.activation.kind, moe::activation::Kind::silu);
  EXPECT_EQ(d.shared.activation.kind, moe::activation::Kind::gelu);
}

TEST(FamilyFields, FieldsOfReleasesBeforeTransformers) {
  json const all = families();
  // Inkling: dense_intermediate_size beside intermediate_size, the width of an expert; dense_mlp_idx instead of a list; no model type
  // inside.
  json inkling = all["inkling_text"]["config"];
  std::int64_t const width = inkling["moe_intermediate_size"];
  for (char const* field : {"moe_intermediate_size", "mlp_layer_types", "model_type"}) inkling.erase(field);
  inkling["intermediate_size"] = width;
  inkling["dense_intermediate_size"] = 4 * width;
  inkling["dense_mlp_idx"] = 1;
  inkling["num_hidden_layers"] = 3;
  HfConfig const whole = HfConfig::from_text(json{{"model_type", "inkling_mm_model"}, {"text_config", inkling}}.dump(), "c");
  EXPECT_EQ(moe_layers(whole), (std::vector<std::int64_t>{1, 2}));
  EXPECT_EQ(from_config(whole, 1).intermediate, width);
  // Step-3.7: moe_layers_enum, in a string or a list
  json step = all["step3p5"]["config"];
  for (char const* field : {"mlp_layer_types", "swiglu_limits", "swiglu_limits_shared", "model_type"}) step.erase(field);
  step["num_hidden_layers"] = 13;
  for (json const& layers : {json("2,12"), json("2, 12"), json::array({2, 12})}) {
    step["moe_layers_enum"] = layers;
    HfConfig const c = HfConfig::from_text(json{{"model_type", "step3p7"}, {"text_config", step}}.dump(), "c");
    EXPECT_EQ(moe_layers(c), (std::vector<std::int64_t>{2, 12}));
    EXPECT_EQ(from_config(c, 12).activation.kind, moe::activation::Kind::silu);
  }
}

/// What a whole model's configuration says of its language model, as transformers and as the hub have it.
TEST(FamilyFields, TheLanguageModelOfAWholeModel) {
  json const all = families();
  auto const expect_same = [&](json const& whole, char const* family) {
    HfConfig const c = HfConfig::from_text(whole.dump(), "c"), own = HfConfig::from_text(all[family]["config"].dump(), "own");
    ASSERT_EQ(moe_layers(c), moe_layers(own)) << family;
    auto description = to_json(from_config(c, 0));
    EXPECT_EQ(description, to_json(from_config(own, 0))) << family;
  };
  std::map<std::string, char const*> const parts{{"deepseek_ocr2", "deepseek_ocr2_text"}, {"diffusion_gemma", "diffusion_gemma_text"},
                                                 {"dots3_note", "dots3_note_text"},       {"glm5_next", "glm5_next_text"},
                                                 {"inkling2", "inkling2_text"},           {"mistral_large4", "mistral_large4_text"},
                                                 {"muse_spark", "muse_spark_text"},       {"qwen4_exp", "qwen4_exp_text"},
                                                 {"unlimited_ocr", "unlimited_ocr_text"}};
  for (auto const& [whole, family] : parts) {
    json const text = all[family]["config"];
    expect_same({{"model_type", whole}, {"text_config", text}}, family);
    expect_same({{"model_type", whole}, {"language_config", text}}, family);
    json unnamed = text;
    unnamed.erase("model_type");
    expect_same({{"model_type", whole}, {"text_config", unnamed}}, family);
    json flat = text;
    flat["model_type"] = whole;
    expect_same(flat, family);
  }
  json const thinker{{"model_type", "qwen3_omni_moe_thinker"}, {"text_config", all["qwen3_omni_moe_text"]["config"]}};
  expect_same({{"model_type", "qwen3_omni_moe"}, {"thinker_config", thinker}, {"talker_config", json::object()}}, "qwen3_omni_moe_text");
}

TEST(FamilyFields, ABlockThatIsNotComputedIsRefusedWithTheReason) {
  HfConfig const c = HfConfig::from_text(json{{"model_type", "doge"}, {"num_hidden_layers", 1}}.dump(), "c");
  for (auto const& call : {std::function<void()>([&] { (void)from_config(c, 0); }), std::function<void()>([&] { (void)moe_layers(c); })}) {
    moe_test::expect_error(ErrorCode::unsupported,
                           "model_type 'doge' cannot be computed: its experts are single vectors, chosen by pairs of keys from the logits "
                           "of two different tokens",
                           call);
  }
}

TEST(FamilyFields, MuseSparkNormalisesWhatGoesIntoItsExpertsAndWhatComesOut) {
  json config = families()["muse_spark_text"]["config"];
  LayerDescription const d = from_config(HfConfig::from_text(config.dump(), "c"), 0);
  EXPECT_TRUE(d.expert_norm && d.latent_in_norm);
  EXPECT_EQ(d.latent, config["moe_hidden_size"].get<int>());
  EXPECT_FLOAT_EQ(d.expert_norm_eps, config["post_norm_eps"].get<float>());
  EXPECT_FLOAT_EQ(d.rms_norm_eps, config["rms_norm_eps"].get<float>());
  for (json const& wrong : {json(0.0), json(-1e-8), json("small")}) {
    config["post_norm_eps"] = wrong;
    moe_test::expect_error(ErrorCode::config, "post_norm_eps", [&] { (void)from_config(HfConfig::from_text(config.dump(), "c"), 0); });
  }
  config.erase("post_norm_eps");
  moe_test::expect_error(ErrorCode::config, "post_norm_eps", [&] { (void)from_config(HfConfig::from_text(config.dump(), "c"), 0); });
}

TEST(FamilyFields, ThePageListsEveryModelType) {
  std::ifstream in(std::filesystem::path(MOE_TEST_DATA) / ".." / ".." / "docs" / "models.md");
  std::string const page{std::istreambuf_iterator<char>(in), {}};
  for (std::string_view type : known_model_types()) EXPECT_NE(page.find("`" + std::string(type) + "`"), std::string::npos) << type;
  for (detail::RefusedFamily const& refused : detail::kRefused) {
    EXPECT_NE(page.find("`" + std::string(refused.model_type) + "`"), std::string::npos) << refused.model_type;
  }
}

/// Names that the configuration class of transformers 5.23.0 maps to a field (attribute_map): either name, and no contradiction.
TEST(FamilyFields, NamesThatTransformersMapsToAField) {
  json const all = families();
  std::map<std::string, char const*> const topk{{"ernie4_5_moe", "moe_k"}, {"longcat_flash", "moe_topk"}, {"hunyuan_v1_moe", "moe_topk"}};
  for (auto const& [family, field] : topk) {
    json config = all[family]["config"];
    json const value = config[field].is_array() ? config[field][0] : config[field];
    auto const plain = described(config);
    config["num_experts_per_tok"] = value.get<int>() + 1;
    EXPECT_EQ(described(config), std::nullopt) << family << ": two values of the same field";
    config["num_experts_per_tok"] = value;
    EXPECT_EQ(described(config), plain) << family;
    config.erase(field);
    EXPECT_EQ(described(config), plain) << family;
  }
}

TEST(FamilyFields, ValuesThatTransformersTakesInAnotherWay) {
  json const all = families();
  json longcat = all["longcat_flash"]["config"];
  auto const plain = described(longcat);
  longcat["norm_topk_prob"] = false;
  EXPECT_EQ(described(longcat), plain);
  longcat["norm_topk_prob"] = true;  // never normalised there
  EXPECT_EQ(described(longcat), std::nullopt);
  json axk2 = all["axk2"]["config"];
  axk2["n_group"] = axk2["topk_group"] = nullptr;
  ASSERT_TRUE(described(axk2));
  EXPECT_EQ(from_config(HfConfig::from_text(axk2.dump(), "c"), 0).router.num_expert_group, 0);
  for (auto const& [family, field] :
       std::map<std::string, char const*>{{"nemotron_h", "n_shared_experts"}, {"hy_v3", "num_shared_experts"}}) {
    json config = all[family]["config"];
    config[field] = 0;  // one shared expert there, in hy_v3 as wide as a dense layer
    EXPECT_EQ(described(config), std::nullopt) << family;
  }
}

TEST(FamilyFields, LayersThatTheConfigurationCountsInItsOwnWay) {
  json const all = families();
  json gemma = all["gemma4_text"]["config"];
  gemma.erase("enable_moe_block");  // false there
  moe_test::expect_error(ErrorCode::config, "'enable_moe_block' is missing",
                         [&] { (void)moe_layers(HfConfig::from_text(gemma.dump(), "c")); });
  // One number for all layers, as DeepSeek's configurations have it.
  json ocr = all["unlimited_ocr_text"]["config"];
  ocr.erase("mlp_layer_types");
  ocr["num_hidden_layers"] = 4;
  ocr["first_k_dense_replace"] = 1;
  ocr["moe_layer_freq"] = 1;
  EXPECT_EQ(moe_layers(HfConfig::from_text(ocr.dump(), "c")), (std::vector<std::int64_t>{1, 2, 3}));
  ocr["moe_layer_freq"] = 2;
  EXPECT_EQ(moe_layers(HfConfig::from_text(ocr.dump(), "c")), (std::vector<std::int64_t>{2}));
  json flint = all["flint"]["config"];
  flint.erase("mlp_only_layers");  // the model's code takes [0, 1] then
  moe_test::expect_error(ErrorCode::config, "'mlp_only_layers' is missing",
                         [&] { (void)moe_layers(HfConfig::from_text(flint.dump(), "c")); });
  json dots = all["dots3_note_text"]["config"];
  dots.erase("mlp_layer_types");
  dots["num_hidden_layers"] = 5;
  dots["first_k_dense_replace"] = 2;
  dots["moe_layer_freq"] = {1, 1, 1, 0, 1};
  EXPECT_EQ(moe_layers(HfConfig::from_text(dots.dump(), "c")), (std::vector<std::int64_t>{2, 4}));
  dots["moe_layer_freq"] = 2;
  EXPECT_EQ(moe_layers(HfConfig::from_text(dots.dump(), "c")), (std::vector<std::int64_t>{2, 4}));
  // The released names of dots3-note's shared experts and of Bailing's fields.
  dots["moe_shared_expert_intermediate_size"] = dots["shared_experts_intermediate_size"];
  dots.erase("shared_experts_intermediate_size");
  EXPECT_EQ(from_config(HfConfig::from_text(dots.dump(), "c"), 2).shared.intermediate, 24);
  json bailing = all["bailing_hybrid"]["config"];
  auto const described_as_before = [&](char const* name, char const* other) {
    json renamed = bailing;
    renamed[other] = renamed[name];
    renamed.erase(name);
    EXPECT_EQ(described(renamed), described(bailing)) << other;
    renamed[name] = renamed[other] == true ? json(false) : json(renamed[other].get<int>() + 1);
    EXPECT_EQ(described(renamed), std::nullopt) << name << " and " << other << " contradict each other";
  };
  described_as_before("num_expert_group", "n_group");
  described_as_before("moe_renormalize", "norm_topk_prob");
  described_as_before("num_shared_experts", "n_shared_experts");
  described_as_before("num_experts_per_token", "num_experts_per_tok");
  // Single layers of dots3-note's image encoder have their own numbers of experts.
  json vision = all["dots3_note_vision_encoder"]["config"];
  vision["per_layer_config"] = {{"0", {{"num_local_experts", 12}, {"num_experts_per_tok", 1}}}};
  LayerDescription const d = from_config(HfConfig::from_text(vision.dump(), "c"), 0);
  EXPECT_EQ(d.router.num_experts, 12);
  EXPECT_EQ(d.router.topk, 1);
  vision["per_layer_config"]["0"]["hidden_size"] = 16;
  moe_test::expect_error(ErrorCode::unsupported, "'hidden_size' is not known for a single layer",
                         [&] { (void)from_config(HfConfig::from_text(vision.dump(), "c"), 0); });
}

/// per_layer_config as transformers 5.23.0 writes it: the keys of a model with ten layers or more begin with zeros.
TEST(FamilyFields, ValuesOfASingleLayer) {
  json const all = families();
  auto const config = [](json const& c) { return HfConfig::from_text(c.dump(), "c"); };
  json vision = all["dots3_note_vision_encoder"]["config"];
  int const experts = vision["num_local_experts"];
  vision["num_hidden_layers"] = 12;
  vision["mlp_layer_types"] = std::vector<std::string>(12, "sparse");
  vision["per_layer_config"] = {{"03", {{"num_local_experts", 12}}}, {"11", {{"num_local_experts", 16}}}};
  EXPECT_EQ(from_config(config(vision), 2).router.num_experts, experts);
  EXPECT_EQ(from_config(config(vision), 3).router.num_experts, 12);
  EXPECT_EQ(from_config(config(vision), 11).router.num_experts, 16);
  vision["per_layer_config"]["3"] = {{"num_local_experts", 4}};
  moe_test::expect_error(ErrorCode::config, "'per_layer_config' names layer 3 twice", [&] { (void)from_config(config(vision), 3); });
  vision["per_layer_config"] = {{"first", {{"num_local_experts", 12}}}};
  moe_test::expect_error(ErrorCode::config, "'per_layer_config' has the key 'first', expected the index of a layer",
                         [&] { (void)from_config(config(vision), 3); });

  // Blocks that are alike in all layers: attention may differ, the block may not.
  for (auto const& [family, entry] : all.items()) {
    if (family == "dots3_note_vision_encoder") continue;
    json const& base = entry["config"];
    json c = base;
    c["per_layer_config"] = {{"0", {{"num_attention_heads", 3}, {"sliding_window", nullptr}, {"skip", json::array()}}}};
    EXPECT_EQ(described(c), described(base)) << family;
    for (json const& change : entry["changes"]) {
      std::string const field = change[0];
      c["per_layer_config"] = {{"00", {{field, base[field]}}}, {"01", {{field, change[1]}}}};
      EXPECT_EQ(described(c), described(base)) << family << ' ' << field;
      c["per_layer_config"] = {{"00", {{field, change[1]}}}};
      EXPECT_EQ(described(c), std::nullopt) << family << " ignores another " << field << " of layer 0";
    }
    c["per_layer_config"] = {{"0", {{"skip", {"mlp"}}}}};
    EXPECT_EQ(described(c), std::nullopt) << family;
  }
  json mixtral = all["mixtral"]["config"];
  mixtral["per_layer_config"] = {{"0", {{"num_experts_per_tok", 1}}}};
  moe_test::expect_error(ErrorCode::unsupported,
                         "'c:per_layer_config:0': 'num_experts_per_tok' is 1 for this layer alone, which the blocks of mixtral do not have",
                         [&] { (void)from_config(config(mixtral), 0); });
}

TEST(FamilyFields, ExpertDtypeInsideOrBesideTheQuantization) {
  json v4 = families()["deepseek_v4"]["config"];
  json const fp8{{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {128, 128}}};
  auto const weights = [&](json const& inside, json const& beside) {
    json c = v4;
    c["quantization_config"] = fp8;
    if (!inside.is_null()) c["quantization_config"]["expert_dtype"] = inside;
    if (!beside.is_null()) c["expert_dtype"] = beside;
    return from_config(HfConfig::from_text(c.dump(), "c"), 0).quantization.weights;
  };
  std::vector<StoredWeights> const plain{{false, 8, 0}}, mixed{{false, 8, 0}, {false, 4, 32}};
  EXPECT_EQ(weights(nullptr, nullptr), plain);
  EXPECT_EQ(weights("fp8", nullptr), plain);
  EXPECT_EQ(weights("fp4", nullptr), mixed);
  EXPECT_EQ(weights(nullptr, "fp4"), mixed);
  EXPECT_EQ(weights("fp4", "fp4"), mixed);
  EXPECT_THROW((void)weights("int4", nullptr), moe::Error);
}

}  // namespace
