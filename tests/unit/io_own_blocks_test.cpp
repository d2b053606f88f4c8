// SPDX-License-Identifier: Apache-2.0
// tests/unit/io_own_blocks_test.cpp: the model types of transformers 5.23 whose blocks are like no other's: two blocks a layer for text and
// image tokens (ERNIE-4.5-VL), an encoder's two experts a token (NLLB-MoE), an expert that the caller names (ViTPose).
//
// Each checkpoint is written here under the names that save_pretrained() gives its tensors. What the library's block computes from it is
// compared with the model's formula in float64, over the tensors as they were written.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "at.hpp"
#include "expect_error.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/io/layer_description_json.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/models/load_runner_host.hpp"
#include "moe/quantization/none.hpp"
#include "numbers.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace moe::io;
using moe::ErrorCode;
using moe_test::at;
using moe_test::expect_error;
using moe_test::TemporaryDirectory;
using nlohmann::json;
using Row = std::vector<double>;
using Block = moe::models::AnyBlock<moe::quantization::None, moe::backends::NoExpertParallel<>>;

constexpr std::int64_t kH = 12, kE = 5, kTokens = 9;
/// The tensors of a checkpoint as they are written.
class Tensors {
 public:
  void add(std::string const& name, std::vector<std::int64_t> shape, float size = 0.5F) {
    std::int64_t const n = std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
    all_[name] = {std::move(shape), moe_test::numbers(seed_++, n, size)};
  }
  void linear(std::string const& base, std::int64_t n, std::int64_t k) {
    add(base + ".weight", {n, k});
    add(base + ".bias", {n});
  }
  std::vector<float> const& operator[](std::string const& name) const { return all_.at(name).second; }
  void rename(std::string const& from, std::string const& to) { all_[to] = all_.extract(from).mapped(); }
  void set(std::string const& name, std::vector<std::int64_t> shape, std::vector<float> data) {
    all_[name] = {std::move(shape), std::move(data)};
  }
  void erase(std::string const& name) { all_.erase(name); }

  void write(std::filesystem::path const& directory, json const& config) const {
    std::ofstream(directory / "config.json") << config.dump();
    SafetensorsWriter writer;
    for (auto const& [name, tensor] : all_) writer.add<float>(name, tensor.first, tensor.second);
    writer.write(directory / "model.safetensors");
  }

 private:
  std::map<std::string, std::pair<std::vector<std::int64_t>, std::vector<float>>> all_;
  int seed_ = 1;
};

/// W x (+ b); W [n, x.size()].
Row times(std::vector<float> const& w, Row const& x, float const* bias = nullptr) {
  Row y(w.size() / x.size());
  for (std::size_t i = 0; i < y.size(); ++i) {
    y[i] = bias == nullptr ? 0.0 : bias[i];
    for (std::size_t j = 0; j < x.size(); ++j) y[i] += static_cast<double>(w[i * x.size() + j]) * x[j];
  }
  return y;
}
Row linear(Tensors const& t, std::string const& base, Row const& x) { return times(t[base + ".weight"], x, t[base + ".bias"].data()); }
Row softmax(Row z) {
  double const most = std::ranges::max(z);
  double sum = 0;
  for (double& v : z) sum += v = std::exp(v - most);
  for (double& v : z) v /= sum;
  return z;
}
/// The k best of `values`.
std::vector<std::size_t> best(Row const& values, std::size_t k) {
  std::vector<std::size_t> order(values.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::ranges::stable_sort(order, [&](std::size_t a, std::size_t b) { return values[a] > values[b]; });
  order.resize(k);
  return order;
}
/// down(silu(gate x) * up x) of the network `base`.
Row gated(Tensors const& t, std::string const& base, Row const& x) {
  Row g = times(t[base + "gate_proj.weight"], x);
  Row const u = times(t[base + "up_proj.weight"], x);
  for (std::size_t i = 0; i < g.size(); ++i) g[i] *= u[i] / (1.0 + std::exp(-g[i]));
  return times(t[base + "down_proj.weight"], g);
}
void add(Row& sum, double factor, Row const& y) {
  for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += factor * y[i];
}

/// What the library's block of layer `layer` computes, against formula(token, its row).
template <class F>
void expect_block(std::filesystem::path const& directory, std::int64_t layer, Tokens tokens, std::vector<std::int64_t> const& ids,
                  F const& formula) {
  moe::comm::Self<> self;
  auto block = moe::load_runner<Block>(directory, layer, self, {.max_tokens_per_rank = kTokens, .tokens = tokens});
  auto const hidden = moe_test::numbers(77, kTokens * kH, 1.5F);
  std::vector<float> out(hidden.size());
  block.forward(moe::make_rows(hidden.data(), kTokens, kH), moe::make_rows(out.data(), kTokens, kH),
                {.token_ids = ids.empty() ? nullptr : ids.data()});
  for (std::int64_t t = 0; t < kTokens; ++t) {
    Row const x(hidden.begin() + t * kH, hidden.begin() + (t + 1) * kH), y = formula(t, x);
    for (std::int64_t h = 0; h < kH; ++h) EXPECT_NEAR(out[at(t * kH + h)], y[at(h)], 2e-5) << "token " << t << ", column " << h;
  }
}
/// The description of the first MoE layer; nothing if the configuration is refused.
std::optional<nlohmann::ordered_json> described(json const& config) {
  try {
    HfConfig const c = HfConfig::from_text(config.dump(), "c");
    auto const layers = moe_layers(c);
    if (layers.empty()) return std::nullopt;
    return to_json(from_config(c, layers[0]));
  } catch (moe::Error const& error) {
    EXPECT_TRUE(error.code() == ErrorCode::config || error.code() == ErrorCode::unsupported) << error.what();
    return std::nullopt;
  }
}
/// Every one of `changes` changes the description or is refused, and so does leaving out a field that has no default here.
void expect_read(json const& config, json const& changes) {
  auto const plain = described(config);
  ASSERT_TRUE(plain);
  for (auto const& [field, values] : changes.items()) {
    for (json const& value : values) {
      json changed = config;
      changed[field] = value;
      EXPECT_NE(described(changed), plain) << field << " = " << value;
    }
    json without = config;
    without.erase(field);
    EXPECT_EQ(described(without), std::nullopt) << "without " << field;
  }
}
void expect_same(json const& config, json const& other) { EXPECT_EQ(described(other), described(config)); }

// ERNIE-4.5-VL: Ernie4_5_VLMoeMoeBlock

json ernie() {
  return {{"model_type", "ernie4_5_vl_moe_text"},
          {"hidden_size", kH},
          {"intermediate_size", 40},
          {"num_hidden_layers", 3},
          {"hidden_act", "silu"},
          {"use_bias", false},
          {"moe_intermediate_size", {6, 4}},
          {"moe_k", 2},
          {"moe_num_experts", kE},
          {"moe_num_shared_experts", 2},
          {"moe_norm_min", 1e-12},
          {"mlp_layer_types", {"dense", "sparse", "sparse"}}};
}
std::string const kErnie = "model.layers.1.mlp.";

/// As Ernie4_5_VLMoeForConditionalGeneration saves it: the mapping "ernie4_5_vl_moe" of transformers/conversion_mapping.py, backwards.
Tensors ernie_tensors() {
  Tensors t;
  t.add(kErnie + "gate.weight", {kH, kE}, 1.0F);
  t.add(kErnie + "gate.weight_1", {kH, kE}, 1.0F);
  t.add(kErnie + "moe_statics.e_score_correction_bias", {2, kE}, 0.3F);
  for (std::int64_t e = 0; e < 2 * kE; ++e) {
    std::string const expert = kErnie + "experts." + std::to_string(e) + ".";
    std::int64_t const width = e < kE ? 6 : 4;
    t.add(expert + "gate_proj.weight", {width, kH});
    t.add(expert + "up_proj.weight", {width, kH});
    t.add(expert + "down_proj.weight", {kH, width});
  }
  t.add(kErnie + "shared_experts.gate_proj.weight", {12, kH});
  t.add(kErnie + "shared_experts.up_proj.weight", {12, kH});
  t.add(kErnie + "shared_experts.down_proj.weight", {kH, 12});
  return t;
}
/// softmax of the logits; the experts are the best of softmax + bias, their weights the softmax over max(sum of the chosen, moe_norm_min).
Row ernie_formula(Tensors const& t, bool image, Row const& x) {
  auto const& router = t[kErnie + (image ? "gate.weight_1" : "gate.weight")];
  auto const& bias = t[kErnie + "moe_statics.e_score_correction_bias"];
  Row z(kE);
  for (std::size_t e = 0; e < z.size(); ++e) {
    for (std::size_t h = 0; h < x.size(); ++h) z[e] += static_cast<double>(router[h * z.size() + e]) * x[h];
  }
  Row const p = softmax(z);
  Row biased = p;
  for (std::size_t e = 0; e < p.size(); ++e) biased[e] += bias[e + (image ? p.size() : 0)];
  auto const chosen = best(biased, 2);
  Row y = gated(t, kErnie + "shared_experts.", x);
  for (std::size_t const e : chosen) {
    add(y, p[e] / (p[chosen[0]] + p[chosen[1]]), gated(t, kErnie + "experts." + std::to_string(e + (image ? at(kE) : 0)) + ".", x));
  }
  return y;
}
void expect_ernie(Tensors const& saved, Tensors const& read) {
  TemporaryDirectory const directory;
  saved.write(directory.path(), ernie());
  for (Tokens const tokens : {Tokens::all, Tokens::text, Tokens::image}) {
    SCOPED_TRACE(name(tokens));
    expect_block(directory.path(), 1, tokens, {},
                 [&](std::int64_t, Row const& x) { return ernie_formula(read, tokens == Tokens::image, x); });
  }
}

TEST(ErnieVl, BothBlocksAsACheckpointHasThem) { expect_ernie(ernie_tensors(), ernie_tensors()); }

/// The modules' own names: stacked experts, a router [E, H] and a bias [1, E] per block.
TEST(ErnieVl, BothBlocksAsTheModulesAreNamed) {
  Tensors const t = ernie_tensors();
  Tensors own = t;
  std::int64_t first = 0;
  for (auto const& [set, router, width] : {std::tuple{"text_moe.", "gate.weight", std::int64_t{6}}, {"vision_moe.", "gate.weight_1", 4}}) {
    std::vector<float> gate, gate_up, down;
    for (std::int64_t e = 0; e < kE; ++e) {
      for (std::int64_t h = 0; h < kH; ++h) gate.push_back(t[kErnie + router][at(h * kE + e)]);
      std::string const expert = kErnie + "experts." + std::to_string(first + e) + ".";
      for (auto const& [part, to] : {std::pair{"gate_proj", &gate_up}, {"up_proj", &gate_up}, {"down_proj", &down}}) {
        std::ranges::copy(t[expert + part + ".weight"], std::back_inserter(*to));
        own.erase(expert + part + ".weight");
      }
    }
    auto const& bias = t[kErnie + "moe_statics.e_score_correction_bias"];
    own.set(kErnie + set + "gate.weight", {kE, kH}, gate);
    own.set(kErnie + set + "gate.moe_statics.e_score_correction_bias", {1, kE}, {bias.begin() + first, bias.begin() + first + kE});
    own.set(kErnie + set + "experts.gate_up_proj", {kE, 2 * width, kH}, gate_up);
    own.set(kErnie + set + "experts.down_proj", {kE, kH, width}, down);
    own.erase(kErnie + router);
    first += kE;
  }
  own.erase(kErnie + "moe_statics.e_score_correction_bias");
  expect_ernie(own, t);
}

TEST(ErnieVl, EveryFieldOfTheBlockIsRead) {
  expect_read(ernie(), {{"hidden_size", {24}},
                        {"hidden_act", {"gelu", "relu"}},
                        {"moe_intermediate_size", {{8, 4}, 6, {6}}},
                        {"moe_k", {3}},
                        {"moe_num_experts", {6}},
                        {"moe_num_shared_experts", {0, 1}},
                        {"moe_norm_min", {0.5}},
                        {"mlp_layer_types", {{"dense", "dense", "dense"}}}});
  json biased = ernie();
  biased["use_bias"] = true;
  EXPECT_EQ(described(biased), std::nullopt);
  expect_same(ernie(), {{"model_type", "ernie4_5_vl_moe"}, {"text_config", ernie()}});
  HfConfig const c = HfConfig::from_text(ernie().dump(), "c");
  EXPECT_EQ(moe_layers(c), (std::vector<std::int64_t>{1, 2}));
  LayerDescription const text = from_config(c, 1), image = from_config(c, 1, Tokens::image);
  EXPECT_EQ(text.tokens, Tokens::text);
  EXPECT_EQ(text.intermediate, 6);
  EXPECT_EQ(image.intermediate, 4);
  EXPECT_EQ(image.shared.intermediate, 12);  // the shared experts are the text experts' size for both
}

TEST(ErnieVl, OtherModelsHaveOneBlock) {
  HfConfig const c = HfConfig::from_text(
      R"({"model_type": "mixtral", "hidden_size": 8, "intermediate_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
          "hidden_act": "silu", "num_hidden_layers": 1})",
      "c");
  expect_error(ErrorCode::argument, "layer 0 of 'c' has one block for all tokens, none for image tokens alone",
               [&] { (void)from_config(c, 0, Tokens::image); });
}

TEST(ErnieVl, WhatIsMissingIsNamed) {
  for (std::string const missing : {"gate.weight_1", "moe_statics.e_score_correction_bias", "experts.7.up_proj.weight"}) {
    TemporaryDirectory const directory;
    Tensors t = ernie_tensors();
    t.erase(kErnie + missing);
    t.write(directory.path(), ernie());
    std::string const part = missing == "gate.weight_1" ? "no router weight under" : missing.substr(0, missing.find(".weight"));
    expect_error(ErrorCode::argument, part, [&] { (void)load_checkpoint_layer<float>(directory.path(), 1, {}, Tokens::image); });
  }
  TemporaryDirectory const directory;
  Tensors t = ernie_tensors();
  t.add(kErnie + "experts.10.up_proj.weight", {4, kH});
  t.write(directory.path(), ernie());
  expect_error(ErrorCode::argument, "is out of range [0, 10)", [&] { (void)load_checkpoint_layer<float>(directory.path(), 1); });
}

// NLLB-MoE: NllbMoeTop2Router, NllbMoeDenseActDense

json nllb() {
  return {{"model_type", "nllb-moe"},
          {"d_model", kH},
          {"encoder_layers", 4},
          {"decoder_layers", 6},
          {"encoder_ffn_dim", 7},
          {"decoder_ffn_dim", 9},
          {"encoder_sparse_step", 2},
          {"decoder_sparse_step", 2},
          {"num_experts", kE},
          {"activation_function", "relu"},
          {"router_bias", true},
          {"router_dtype", "float32"},
          {"router_ignore_padding_tokens", false},
          {"expert_capacity", 3},
          {"second_expert_policy", "all"},
          {"normalize_router_prob_before_dropping", false},
          {"batch_prioritized_routing", false},
          {"moe_eval_capacity_token_fraction", 1.0},
          {"moe_token_dropout", 0.2}};
}
std::string const kNllb = "model.encoder.layers.3.ffn.";

Tensors nllb_tensors() {
  Tensors t;
  t.add(kNllb + "router.classifier.weight", {kE, kH}, 1.0F);
  t.add(kNllb + "router.classifier.bias", {kE});
  for (std::int64_t e = 0; e < kE; ++e) {
    t.linear(kNllb + "experts.expert_" + std::to_string(e) + ".fc1", 7, kH);
    t.linear(kNllb + "experts.expert_" + std::to_string(e) + ".fc2", kH, 7);
  }
  t.add("model.decoder.layers.3.ffn.router.classifier.weight", {kE, kH});  // the decoder's block of the same number
  return t;
}

/// The two best of the softmax over their sum; the experts' outputs times 1 - moe_token_dropout.
TEST(NllbMoe, TheEncodersBlock) {
  Tensors const t = nllb_tensors();
  TemporaryDirectory const directory;
  t.write(directory.path(), nllb());
  expect_block(directory.path(), 3, Tokens::all, {}, [&](std::int64_t, Row const& x) {
    Row const p = softmax(linear(t, kNllb + "router.classifier", x));
    auto const chosen = best(p, 2);
    Row y(at(kH));
    for (std::size_t const e : chosen) {
      std::string const expert = kNllb + "experts.expert_" + std::to_string(e) + ".";
      Row inner = linear(t, expert + "fc1", x);
      for (double& v : inner) v = std::max(v, 0.0);
      add(y, 0.8 * p[e] / (p[chosen[0]] + p[chosen[1]]), linear(t, expert + "fc2", inner));
    }
    return y;
  });
}

TEST(NllbMoe, EveryFieldOfTheBlockIsRead) {
  expect_read(nllb(), {{"d_model", {24}},
                       {"encoder_ffn_dim", {8}},
                       {"num_experts", {6, 1}},
                       {"activation_function", {"gelu", "tanh"}},
                       {"router_bias", {false}},
                       {"router_dtype", {"bfloat16"}},
                       {"second_expert_policy", {"sampling", "random"}},
                       {"moe_eval_capacity_token_fraction", {0.5, -1.0}},
                       {"moe_token_dropout", {0.0, 1.0}},
                       {"encoder_sparse_step", {0}}});
  // Of no effect as long as no expert can be full.
  for (char const* field : {"normalize_router_prob_before_dropping", "batch_prioritized_routing"}) {
    json changed = nllb();
    changed[field] = true;
    expect_same(nllb(), changed);
  }
  HfConfig const c = HfConfig::from_text(nllb().dump(), "c");
  EXPECT_EQ(num_layers(c), 4);
  EXPECT_EQ(moe_layers(c), (std::vector<std::int64_t>{1, 3}));
  json narrow = nllb();
  narrow["moe_eval_capacity_token_fraction"] = 0.5;
  expect_error(ErrorCode::unsupported, "experts drop tokens beyond a capacity that depends on the whole batch",
               [&] { (void)from_config(HfConfig::from_text(narrow.dump(), "c"), 1); });
}

// ViTPose: VitPoseBackboneMoeMLP

json vitpose() {
  return {{"model_type", "vitpose_backbone"},
          {"hidden_size", kH},
          {"mlp_ratio", 2},
          {"num_experts", kE},
          {"part_features", 5},
          {"hidden_act", "gelu"},
          {"num_hidden_layers", 2}};
}
Tensors vitpose_tensors(std::string const& root) {
  Tensors t;
  t.linear(root + "fc1", 2 * kH, kH);
  t.linear(root + "fc2", kH - 5, 2 * kH);
  for (std::int64_t e = 0; e < kE; ++e) t.linear(root + "experts." + std::to_string(e), 5, 2 * kH);
  return t;
}

/// fc2 of gelu(fc1 x), then the columns of the expert that the token's data set names.
TEST(VitPose, TheCallerNamesTheExpert) {
  for (std::string const prefix : {"encoder.layer.1.", "backbone.encoder.layer.1."}) {
    std::string const root = prefix + "mlp.";
    Tensors const t = vitpose_tensors(root);
    TemporaryDirectory const directory;
    t.write(directory.path(), prefix.starts_with("backbone") ? json{{"model_type", "vitpose"}, {"backbone_config", vitpose()}} : vitpose());
    std::vector<std::int64_t> const sets{0, 4, 2, 1, 3, 4, 0, 2, 2};
    expect_block(directory.path(), 1, Tokens::all, sets, [&](std::int64_t token, Row const& x) {
      Row inner = linear(t, root + "fc1", x);
      for (double& v : inner) v *= 0.5 * (1.0 + std::erf(v / std::sqrt(2.0)));
      Row y = linear(t, root + "fc2", inner);
      Row const own = linear(t, root + "experts." + std::to_string(sets[at(token)]), inner);
      y.insert(y.end(), own.begin(), own.end());
      return y;
    });
  }
}

TEST(VitPose, PartsOfTwoRanksAddUp) {
  TemporaryDirectory const directory;
  vitpose_tensors("encoder.layer.0.mlp.").write(directory.path(), vitpose());
  auto const whole = load_checkpoint_layer<float>(directory.path(), 0);
  EXPECT_EQ(ExpertReader(TensorStore(directory.path()), whole.description, "encoder.layer.0.mlp.", 0).layout(), WeightLayout::common_rows);
  for (int rank : {0, 1}) {
    auto const part = load_checkpoint_layer<float>(directory.path(), 0, {.experts = std::vector<int>{3}, .tp_rank = rank, .tp_size = 2});
    for (std::int64_t i = 0; i < kH * kH; ++i) {
      std::int64_t const row = i / kH, column = i % kH;
      EXPECT_EQ(part.w13[at(i)], whole.w13[at(3 * 2 * kH * kH + (rank * kH + row) * kH + column)]);
      EXPECT_EQ(part.w2[at(i)], whole.w2[at(3 * 2 * kH * kH + row * 2 * kH + rank * kH + column)]);
    }
    for (std::int64_t i = 0; i < kH; ++i) EXPECT_EQ(part.w2_bias[at(i)], rank == 0 ? whole.w2_bias[at(3 * kH + i)] : 0.0F);
  }
}

TEST(VitPose, EveryFieldOfTheBlockIsRead) {
  expect_read(vitpose(), {{"hidden_size", {24}},
                          {"mlp_ratio", {4, 1.5}},
                          {"num_experts", {6, 1}},
                          {"part_features", {6, 0, 12}},
                          {"hidden_act", {"relu", "tanh"}}});
  expect_same(vitpose(), {{"model_type", "vitpose"}, {"backbone_config", vitpose()}});
  json dense = vitpose();
  dense["num_experts"] = 1;
  HfConfig const c = HfConfig::from_text(dense.dump(), "c");
  EXPECT_TRUE(moe_layers(c).empty());
  expect_error(ErrorCode::argument, "is dense (num_experts = 1)", [&] { (void)from_config(c, 0); });
}

TEST(VitPose, WhatIsMissingIsNamed) {
  for (std::string const missing : {"fc1.weight", "fc2.bias", "experts.2.weight", "experts.0.weight"}) {
    TemporaryDirectory const directory;
    Tensors t = vitpose_tensors("encoder.layer.0.mlp.");
    t.erase("encoder.layer.0.mlp." + missing);
    t.write(directory.path(), vitpose());
    expect_error(ErrorCode::argument, missing == "experts.0.weight" ? "no expert weight under 'model.layers.0.'" : "mlp." + missing,
                 [&] { (void)load_checkpoint_layer<float>(directory.path(), 0); });
  }
  {
    TemporaryDirectory const directory;
    Tensors t = vitpose_tensors("encoder.layer.0.mlp.");
    t.linear("encoder.layer.0.mlp.experts.5", 5, 2 * kH);
    t.write(directory.path(), vitpose());
    expect_error(ErrorCode::argument, "unexpected expert weights: expert 5",
                 [&] { (void)load_checkpoint_layer<float>(directory.path(), 0); });
  }
  TemporaryDirectory const directory;
  Tensors t = vitpose_tensors("encoder.layer.0.mlp.");
  t.linear("encoder.layer.0.mlp.fc2", kH - 4, 2 * kH);
  t.write(directory.path(), vitpose());
  expect_error(ErrorCode::argument, "[7, 24]", [&] { (void)load_checkpoint_layer<float>(directory.path(), 0); });
}

}  // namespace
