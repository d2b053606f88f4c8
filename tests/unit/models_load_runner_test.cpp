// SPDX-License-Identifier: Apache-2.0
// tests/unit/models_load_runner_test.cpp: a block of a checkpoint in one call: its output, what a preset refuses, and experts that are read
// as they are stored.
#include "moe/models/load_runner_host.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "golden_dir.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/models/model_defaults.hpp"
#include "moe/models/preset_host.hpp"
#include "moe/quantization/schemes.hpp"
#include "moe/routing/routers.hpp"
#include "temporary_directory.hpp"

namespace {

namespace fs = std::filesystem;
using namespace moe;
using io::FileDType;
using moe_test::expect_error;
using moe_test::TemporaryDirectory;
using nlohmann::json;
using Local = backends::NoExpertParallel<>;
using Any = models::AnyBlock<quantization::None, Local>;

std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }
fs::path tiny(char const* name) { return moe_test::golden_dir() / "checkpoints" / name; }

/// The largest error of a block's output, relative to the largest output.
template <class Block>
double error_of(Block& block, fs::path const& checkpoint, int layer) {
  io::SafetensorsFile const file(checkpoint / "moe_io.safetensors");
  auto const x = file.read<float>(text("layers.", layer, ".moe_in"));
  auto const wanted = file.read<float>(text("layers.", layer, ".moe_out_f32"));
  std::int64_t const h = block.runner().hidden(), rows = static_cast<std::int64_t>(x.size()) / h;
  std::vector<float> y(x.size());
  block.forward(make_rows(x.data(), rows, h), make_rows(y.data(), rows, h));
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < y.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(wanted[i])));
    worst = std::max(worst, std::abs(static_cast<double>(y[i]) - wanted[i]));
  }
  return worst / largest;
}

// ---- presets of the two bundled checkpoints

struct TinyQwen : models::ModelDefaults {
  static constexpr char const* kName = "TinyQwen";
  using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
  static constexpr int hidden = 64, intermediate = 32, num_experts = 8, topk = 2;
};
struct TinyDeepSeek : models::ModelDefaults {
  static constexpr char const* kName = "TinyDeepSeek";
  using Router = routing::GroupedTopK<routing::Scoring::sigmoid, routing::GroupScore::top2_sum, routing::Renormalize::yes>;
  static constexpr int hidden = 64, intermediate = 32, num_experts = 16, topk = 4;
  static constexpr int num_shared_experts = 1, shared_intermediate = 32, num_expert_group = 4, topk_group = 2;
  static constexpr float routed_scaling_factor = 2.5F;
};
template <class Model>
using Preset = models::PresetRunner<Model, quantization::None, Local>;

TEST(LoadRunner, AnyBlockEqualsTransformers) {
  comm::Self<> self;
  for (int layer : {0, 1}) {
    auto block = load_runner<Any>(tiny("qwen3_moe_tiny"), layer, self, {.max_tokens_per_rank = 364});
    EXPECT_TRUE(block.direct());
    EXPECT_LT(error_of(block, tiny("qwen3_moe_tiny"), layer), 1e-5) << layer;
  }
  for (int layer : {1, 2}) {
    auto block = load_runner<Any>(tiny("deepseek_v3_tiny"), layer, self, {.max_tokens_per_rank = 364});
    EXPECT_LT(error_of(block, tiny("deepseek_v3_tiny"), layer), 1e-5) << layer;
  }
}
TEST(LoadRunner, PresetEqualsTransformers) {
  comm::Self<> self;
  auto qwen = load_runner<Preset<TinyQwen>>(tiny("qwen3_moe_tiny"), 1, self, {.max_tokens_per_rank = 364});
  EXPECT_LT(error_of(qwen, tiny("qwen3_moe_tiny"), 1), 1e-5);
  auto deepseek = load_runner<Preset<TinyDeepSeek>>(tiny("deepseek_v3_tiny"), 2, self, {.max_tokens_per_rank = 364});
  EXPECT_LT(error_of(deepseek, tiny("deepseek_v3_tiny"), 2), 1e-5);
}

// ---- what a preset refuses

template <class Model>
void expect_refused(char const* checkpoint, std::string const& words) {
  comm::Self<> self;
  expect_error(ErrorCode::config, words, [&] { load_runner<Preset<Model>>(tiny(checkpoint), 1, self, {.max_tokens_per_rank = 1}); });
}
struct Wider : TinyQwen {
  static constexpr int hidden = 128;
};
struct Narrower : TinyQwen {
  static constexpr int intermediate = 16;
};
struct MoreExperts : TinyQwen {
  static constexpr int num_experts = 16;
};
struct OneExpert : TinyQwen {
  static constexpr int topk = 1;
};
struct WithGelu : TinyQwen {
  using Activation = activation::Gelu;
};
struct NotNormalised : TinyQwen {
  using Router = routing::SoftmaxTopK<routing::Renormalize::no>;
};
struct WithSigmoid : TinyQwen {
  using Router = routing::SigmoidTopK<routing::Renormalize::yes>;
};
struct WithShared : TinyQwen {
  static constexpr int num_shared_experts = 1, shared_intermediate = 48;
};
struct OtherFactor : TinyDeepSeek {
  static constexpr float routed_scaling_factor = 1.0F;
};
struct OtherGroups : TinyDeepSeek {
  static constexpr int topk_group = 4;
};
struct NoShared : TinyDeepSeek {
  static constexpr int num_shared_experts = 0, shared_intermediate = 0;
};

TEST(LoadRunner, APresetRefusesAnotherModel) {
  expect_refused<Wider>("qwen3_moe_tiny", "hidden is 64, and TinyQwen fixes it to 128");
  expect_refused<Narrower>("qwen3_moe_tiny", "intermediate is 32, and TinyQwen fixes it to 16");
  expect_refused<MoreExperts>("qwen3_moe_tiny", "num_experts is 8, and TinyQwen fixes it to 16");
  expect_refused<OneExpert>("qwen3_moe_tiny", "topk is 2, and TinyQwen fixes it to 1");
  expect_refused<WithGelu>("qwen3_moe_tiny", "activation is silu, and TinyQwen fixes it to gelu");
  expect_refused<NotNormalised>("qwen3_moe_tiny", "renormalisation is 1, and softmax_topk fixes it to 0");
  expect_refused<WithSigmoid>("qwen3_moe_tiny", "scoring is softmax, and sigmoid_topk_renormalize fixes it to sigmoid");
  expect_refused<WithShared>("qwen3_moe_tiny", "num_shared_experts is 0, and TinyQwen fixes it to 1");
  expect_refused<OtherFactor>("deepseek_v3_tiny", "routed_scaling_factor is 2.5, and TinyDeepSeek fixes it to 1");
  expect_refused<OtherGroups>("deepseek_v3_tiny", "topk_group is 2, and TinyDeepSeek fixes it to 4");
  expect_refused<NoShared>("deepseek_v3_tiny", "num_shared_experts is 1, and TinyDeepSeek fixes it to 0");
}
TEST(LoadRunner, BadArguments) {
  comm::Self<> self;
  auto const load = [&](fs::path const& path, std::int64_t layer, LoadedRunner<Any>::Options const& o) {
    return [&self, path, layer, o] { load_runner<Any>(path, layer, self, o); };
  };
  fs::path const good = tiny("qwen3_moe_tiny");
  expect_error(ErrorCode::argument, "cannot open", load(good / "nowhere", 0, {.max_tokens_per_rank = 1}));
  expect_error(ErrorCode::argument, "layer 7 is out of range [0, 2)", load(good, 7, {.max_tokens_per_rank = 1}));
  expect_error(ErrorCode::argument, "max_tokens_per_rank: 0, at least 1", load(good, 0, {}));
  expect_error(ErrorCode::argument, "placement: of 8 experts on 2 ranks, the checkpoint has 8 and the group 1",
               load(good, 0, {.max_tokens_per_rank = 1, .placement = ExpertPlacement(8, 2)}));
  expect_error(ErrorCode::argument, "is dense", load(tiny("deepseek_v3_tiny"), 0, {.max_tokens_per_rank = 1}));

  TemporaryDirectory const copy;
  fs::copy(good, copy.path(), fs::copy_options::recursive);
  for (auto const& file : fs::directory_iterator(copy.path())) {
    if (file.path().filename().string().starts_with("model-0000")) fs::resize_file(file.path(), fs::file_size(file.path()) - 100);
  }
  expect_error(ErrorCode::argument, "model-0000", load(copy.path(), 0, {.max_tokens_per_rank = 1}));
}

// ---- experts as they are stored

constexpr std::int64_t kE = 3, kH = 128, kI = 128;

struct Writer {
  io::SafetensorsWriter file;
  std::mt19937 random{7};
  std::vector<std::vector<std::uint8_t>> kept;

  /// Random codes; those that are no numbers in e4m3 are left out.
  void codes(std::string const& name, FileDType type, std::vector<std::int64_t> const& shape) {
    std::int64_t n = io::bits(type) / 8;
    for (std::int64_t d : shape) n *= d;
    kept.emplace_back(at(n));
    for (std::uint8_t& v : kept.back()) {
      v = static_cast<std::uint8_t>(random());
      if (type == FileDType::f8_e4m3 && (v & 0x7F) == 0x7F) v = 0x7E;
    }
    file.add_bytes(name, type, shape, std::as_bytes(std::span(kept.back())));
  }
  void exponents(std::string const& name, std::vector<std::int64_t> const& shape) {
    std::int64_t n = 1;
    for (std::int64_t d : shape) n *= d;
    std::vector<std::uint8_t> v(at(n));
    for (std::uint8_t& x : v) x = static_cast<std::uint8_t>(120 + random() % 10);
    file.add(name, shape, v);
  }
  void scales(std::string const& name, std::vector<std::int64_t> const& shape) {
    std::int64_t n = 1;
    for (std::int64_t d : shape) n *= d;
    std::vector<float> v(at(n));
    for (float& x : v) x = static_cast<float>(1 + random() % 100) / 64;
    file.add(name, shape, v);
  }
};

/// A checkpoint of one Qwen3-like layer with what `write` adds for each matrix of each expert.
template <class Write>
void write_checkpoint(fs::path const& directory, json const& quantization, Write const& write) {
  json config{{"model_type", "qwen3_moe"},
              {"hidden_act", "silu"},
              {"hidden_size", kH},
              {"moe_intermediate_size", kI},
              {"num_experts", kE},
              {"num_experts_per_tok", 2},
              {"num_hidden_layers", 1},
              {"norm_topk_prob", true},
              {"mlp_only_layers", json::array()},
              {"decoder_sparse_step", 1},
              {"quantization_config", quantization}};
  std::ofstream(directory / "config.json") << config;
  Writer writer;
  std::string const root = "model.layers.0.mlp.";
  writer.file.add(root + "gate.weight", {kE, kH}, std::vector<float>(at(kE * kH), 0.5F));
  for (int e = 0; e < kE; ++e) {
    for (auto const& [name, n, k] : {std::tuple{"gate_proj", kI, kH}, {"up_proj", kI, kH}, {"down_proj", kH, kI}}) {
      write(writer, text(root, "experts.", e, '.', name), n, k);
    }
  }
  writer.file.write(directory / "model.safetensors");
}

/// Every expert as Quant stores it, decoded, is the expert that is read in float32.
template <class Quant>
void expect_same_values(fs::path const& directory, bool direct = true) {
  io::LayerDescription const d = io::from_config(io::HfConfig::from_file(directory), 0);
  io::TensorStore const store(directory);
  io::ExpertReader const reader = io::LayerLoader::from_checkpoint(store, d, 0).experts();
  Quant const quant{};
  io::ExpertLoader<Quant, float> const loader(store, d, reader, quant);
  EXPECT_EQ(loader.direct(), direct);
  using Loader = io::ExpertLoader<Quant, float>;
  std::vector<typename Loader::Packed::Code> c13(at(2 * kI * Quant::weight_code_cols(kH))), c2(at(kH * Quant::weight_code_cols(kI)));
  std::vector<typename Loader::Packed::Scale> s13(at(Quant::weight_scale_count(2 * kI, kH))), s2(at(Quant::weight_scale_count(kH, kI)));
  std::vector<float> w13(at(2 * kI * kH)), w2(at(kH * kI)), row(at(std::max(kH, kI)));
  for (int e = 0; e < kE; ++e) {
    loader.read(e, {c13.data(), c2.data(), s13.data(), s2.data()});
    reader.read(e, w13.data(), w2.data());
    auto const compare = [&](auto const& codes, auto const& scales, std::vector<float> const& w, std::int64_t n, std::int64_t k) {
      for (std::int64_t r = 0; r < n; ++r) {
        quant.template dequantize_weight_row<float>(codes.data(), scales.data(), n, k, r, row.data());
        for (std::int64_t c = 0; c < k; ++c) ASSERT_EQ(row[at(c)], w[at(r * k + c)]) << "expert " << e << ", " << r << ", " << c;
      }
    };
    compare(c13, s13, w13, 2 * kI, kH);
    compare(c2, s2, w2, kH, kI);
  }
}

json const kFp8{{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
void fp8_blocks(Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
  w.codes(base + ".weight", FileDType::f8_e4m3, {n, k});
  w.scales(base + ".weight_scale_inv", {n / 128, k / 128});
}

TEST(PackedExperts, Fp8Blocks) {
  TemporaryDirectory const directory;
  write_checkpoint(directory.path(), kFp8, fp8_blocks);
  expect_same_values<quantization::Fp8Block<>>(directory.path());
  expect_same_values<quantization::None>(directory.path(), false);  // widened
}
TEST(PackedExperts, Fp8PerChannel) {
  TemporaryDirectory const directory;
  json const config{{"quant_method", "compressed-tensors"},
                    {"format", "float-quantized"},
                    {"config_groups", {{"group_0", {{"weights", {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}}}}}}}};
  write_checkpoint(directory.path(), config, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
    w.codes(base + ".weight", FileDType::f8_e4m3, {n, k});
    w.scales(base + ".weight_scale", {n, 1});
  });
  expect_same_values<quantization::Fp8PerToken<>>(directory.path());
}
TEST(PackedExperts, Mxfp4OfSingleExperts) {
  TemporaryDirectory const directory;
  json const config{
      {"quant_method", "compressed-tensors"},
      {"format", "mxfp4-pack-quantized"},
      {"config_groups", {{"group_0", {{"weights", {{"num_bits", 4}, {"type", "float"}, {"strategy", "group"}, {"group_size", 32}}}}}}}};
  write_checkpoint(directory.path(), config, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
    w.codes(base + ".weight_packed", FileDType::u8, {n, k / 2});
    w.exponents(base + ".weight_scale", {n, k / 32});
  });
  expect_same_values<quantization::Mxfp4W4A16<>>(directory.path());
  expect_error(ErrorCode::config, "the checkpoint stores mxfp4, which does not become fp8_block128 without a second rounding",
               [&] { expect_same_values<quantization::Fp8Block<>>(directory.path()); });
}
TEST(PackedExperts, Mxfp4OfGptOss) {
  TemporaryDirectory const directory;
  json const config{{"model_type", "gpt_oss"}, {"hidden_act", "silu"},    {"hidden_size", kH},
                    {"intermediate_size", kI}, {"num_local_experts", kE}, {"num_experts_per_tok", 2},
                    {"num_hidden_layers", 1},  {"swiglu_limit", 7.0},     {"quantization_config", {{"quant_method", "mxfp4"}}}};
  std::ofstream(directory.path() / "config.json") << config;
  Writer w;
  std::string const root = "model.layers.0.mlp.";
  w.file.add(root + "router.weight", {kE, kH}, std::vector<float>(at(kE * kH)));
  w.codes(root + "experts.gate_up_proj_blocks", FileDType::u8, {kE, 2 * kI, kH / 32, 16});
  w.exponents(root + "experts.gate_up_proj_scales", {kE, 2 * kI, kH / 32});
  w.codes(root + "experts.down_proj_blocks", FileDType::u8, {kE, kH, kI / 32, 16});
  w.exponents(root + "experts.down_proj_scales", {kE, kH, kI / 32});
  w.file.write(directory.path() / "model.safetensors");
  expect_same_values<quantization::Mxfp4W4A16<>>(directory.path());
}
TEST(PackedExperts, IntegersOfCompressedTensors) {
  TemporaryDirectory const directory;
  json const config{
      {"quant_method", "compressed-tensors"},
      {"format", "pack-quantized"},
      {"config_groups", {{"group_0", {{"weights", {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 128}}}}}}}};
  write_checkpoint(directory.path(), config, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
    w.codes(base + ".weight_packed", FileDType::i32, {n, k / 8});
    w.scales(base + ".weight_scale", {n, k / 128});
  });
  expect_same_values<quantization::Int4Group128>(directory.path());
}
TEST(PackedExperts, IntegersOfGptq) {
  TemporaryDirectory const directory;
  json const config{{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}};
  write_checkpoint(directory.path(), config, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
    w.codes(base + ".qweight", FileDType::i32, {k / 8, n});
    w.scales(base + ".scales", {k / 128, n});
  });
  expect_same_values<quantization::Int4Group128>(directory.path());
}
TEST(PackedExperts, ACodeThatIsNoNumberIsRefused) {
  TemporaryDirectory const directory;
  write_checkpoint(directory.path(), kFp8, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
    fp8_blocks(w, base, n, k);
    if (base.ends_with("2.up_proj")) w.kept[w.kept.size() - 1][1000] = 0xFF;
  });
  comm::Self<> self;
  using Fp8 = models::AnyBlock<quantization::Fp8Block<>, Local>;
  expect_error(ErrorCode::argument, "experts.2.up_proj.weight",
               [&] { load_runner<Fp8>(directory.path(), 0, self, {.max_tokens_per_rank = 1}); });
}
TEST(PackedExperts, ProgressCountsTheBytes) {
  TemporaryDirectory const directory;
  write_checkpoint(directory.path(), kFp8, fp8_blocks);
  comm::Self<> self;
  std::vector<std::int64_t> done;
  std::int64_t total = 0;
  auto block = load_runner<models::AnyBlock<quantization::Fp8Block<>, Local>>(
      directory.path(), 0, self, {.max_tokens_per_rank = 1, .threads = 2, .progress = [&](std::int64_t d, std::int64_t t) {
                                    done.push_back(d);
                                    total = t;
                                  }});
  std::int64_t const expert = 3 * (kH * kI + 4);
  EXPECT_EQ(done, (std::vector<std::int64_t>{expert, 2 * expert, 3 * expert}));
  EXPECT_EQ(total, 3 * expert);
  EXPECT_TRUE(block.direct());
}

}  // namespace
