// SPDX-License-Identifier: Apache-2.0
// tests/unit/models_load_runner_test.cpp: a block of a checkpoint in one call: its output, what a preset refuses, and experts that are read
// as they are stored.
#include "moe/models/load_runner_host.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "at.hpp"
#include "expect_error.hpp"
#include "golden_dir.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/experts/reference.hpp"
#include "moe/io/progress_line.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/models/model_defaults.hpp"
#include "moe/models/preset_host.hpp"
#include "moe/quantization/schemes.hpp"
#include "moe/routing/routers.hpp"
#include "packed_checkpoint.hpp"
#include "packed_definition.hpp"
#include "temporary_directory.hpp"
#include "tests/gpu/relative_error.hpp"

namespace {

namespace fs = std::filesystem;
using namespace moe;
using io::FileDType;
using moe_test::add_nvfp4;
using moe_test::at;
using moe_test::expect_error;
using moe_test::golden_checkpoint;
using moe_test::packed_integers_config;
using moe_test::StoredZeros;
using moe_test::TemporaryDirectory;
using moe_test::Zeros;
using nlohmann::json;
using Local = backends::NoExpertParallel<>;
using Any = models::AnyBlock<quantization::None, Local>;

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
    auto block = load_runner<Any>(golden_checkpoint("qwen3_moe_tiny"), layer, self, {.max_tokens_per_rank = 364});
    EXPECT_TRUE(block.direct());
    EXPECT_LT(error_of(block, golden_checkpoint("qwen3_moe_tiny"), layer), 1e-5) << layer;
  }
  for (int layer : {1, 2}) {
    auto block = load_runner<Any>(golden_checkpoint("deepseek_v3_tiny"), layer, self, {.max_tokens_per_rank = 364});
    EXPECT_LT(error_of(block, golden_checkpoint("deepseek_v3_tiny"), layer), 1e-5) << layer;
  }
}
TEST(LoadRunner, RoutingOfTheCaller) {
  comm::Self<> self;
  auto block = load_runner<Any>(golden_checkpoint("qwen3_moe_tiny"), 0, self, {.max_tokens_per_rank = 8});
  std::int64_t const h = block.runner().hidden();
  int const k = block.description().router.topk;
  std::vector<float> x(static_cast<std::size_t>(8 * h));
  for (std::size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i));
  std::vector<float> want(x.size()), got(x.size(), -1.0F);
  block.forward(make_rows(x.data(), 8, h), make_rows(want.data(), 8, h));
  auto const copied = [&]<class T>(Rows<T> rows) { return std::vector<T>(rows.data_handle(), rows.data_handle() + 8 * k); };
  auto const ids = copied(block.runner().topk_ids());
  auto const weights = copied(block.runner().topk_weights());
  block.forward_routed(make_rows(x.data(), 8, h), make_rows(ids.data(), 8, k), make_rows(weights.data(), 8, k),
                       make_rows(got.data(), 8, h));
  EXPECT_EQ(got, want);
}
TEST(LoadRunner, PresetEqualsTransformers) {
  comm::Self<> self;
  auto qwen = load_runner<Preset<TinyQwen>>(golden_checkpoint("qwen3_moe_tiny"), 1, self, {.max_tokens_per_rank = 364});
  EXPECT_LT(error_of(qwen, golden_checkpoint("qwen3_moe_tiny"), 1), 1e-5);
  auto deepseek = load_runner<Preset<TinyDeepSeek>>(golden_checkpoint("deepseek_v3_tiny"), 2, self, {.max_tokens_per_rank = 364});
  EXPECT_LT(error_of(deepseek, golden_checkpoint("deepseek_v3_tiny"), 2), 1e-5);
}

// ---- what a preset refuses

template <class Model>
void expect_refused(char const* checkpoint, std::string const& words) {
  comm::Self<> self;
  expect_error(ErrorCode::config, words,
               [&] { load_runner<Preset<Model>>(golden_checkpoint(checkpoint), 1, self, {.max_tokens_per_rank = 1}); });
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
  fs::path const good = golden_checkpoint("qwen3_moe_tiny");
  expect_error(ErrorCode::argument, "cannot open", load(good / "nowhere", 0, {.max_tokens_per_rank = 1}));
  expect_error(ErrorCode::argument, "layer 7 is out of range [0, 2)", load(good, 7, {.max_tokens_per_rank = 1}));
  expect_error(ErrorCode::argument, "max_tokens_per_rank: 0, at least 1", load(good, 0, {}));
  expect_error(ErrorCode::argument, "placement: of 8 experts on 2 ranks, the checkpoint has 8 and the group 1",
               load(good, 0, {.max_tokens_per_rank = 1, .placement = ExpertPlacement(8, 2)}));
  expect_error(ErrorCode::argument, "is dense", load(golden_checkpoint("deepseek_v3_tiny"), 0, {.max_tokens_per_rank = 1}));

  TemporaryDirectory const copy;
  fs::copy(good, copy.path(), fs::copy_options::recursive);
  for (auto const& file : fs::directory_iterator(copy.path())) {
    if (file.path().filename().string().starts_with("model-0000")) fs::resize_file(file.path(), fs::file_size(file.path()) - 100);
  }
  expect_error(ErrorCode::argument, "model-0000", load(copy.path(), 0, {.max_tokens_per_rank = 1}));
}

// ---- experts as they are stored

constexpr std::int64_t kE = 3, kH = 128, kI = 128;
using Writer = moe_test::CheckpointWriter;

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
      if constexpr (requires { Quant::weight_scale_cols(k); }) {
        ASSERT_GT(Quant::weight_scale_cols(k), 0);
      }
      for (std::int64_t r = 0; r < n; ++r) {
        quant.template dequantize_weight_row<float>(codes.data(), scales.data(), n, k, r, row.data());
        for (std::int64_t c = 0; c < k; ++c) ASSERT_EQ(row[at(c)], w[at(r * k + c)]) << "expert " << e << ", " << r << ", " << c;
      }
    };
    compare(c13, s13, w13, 2 * kI, kH);
    compare(c2, s2, w2, kH, kI);
  }
}

json const kFp8 = moe_test::fp8_block_config();
constexpr auto fp8_blocks = moe_test::add_fp8_blocks;

json const kFp8Channels{{"quant_method", "compressed-tensors"},
                        {"format", "float-quantized"},
                        {"config_groups", {{"group_0", {{"weights", {{"num_bits", 8}, {"type", "float"}, {"strategy", "channel"}}}}}}}};

TEST(PackedExperts, Fp8Blocks) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), kFp8, fp8_blocks);
  expect_same_values<quantization::Fp8Block<>>(directory.path());
  expect_same_values<quantization::None>(directory.path(), false);  // widened
}
TEST(PackedExperts, Fp8PerChannel) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), kFp8Channels, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
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
  moe_test::write_checkpoint(directory.path(), config, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
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
json gptq_config(int bits, std::int64_t group, char const* format = nullptr) {
  json q{{"quant_method", "gptq"}, {"bits", bits}, {"group_size", group}};
  if (format != nullptr) q["checkpoint_format"] = format;
  return q;
}
json const kInt8 = moe_test::compressed_config("int-quantized", {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}});
void int8_rows(Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
  w.codes(base + ".weight", FileDType::i8, {n, k});
  w.scales(base + ".weight_scale", {n, 1});
}
/// weight_zero_point holds the zero points of eight rows in a word.
void int4_groups(Writer& w, std::string const& base, std::int64_t n, std::int64_t k, std::int64_t group, Zeros zeros) {
  auto const m = moe_test::random_integers(w, 4, n, k, group, zeros);
  moe_test::add_packed_integers(w, base, m);
  if (zeros == Zeros::symmetric) return;
  std::vector<std::uint32_t> words(at(n / 8 * (k / group)));
  for (std::int64_t r = 0; r < n; ++r) {
    for (std::int64_t g = 0; g < k / group; ++g) {
      words[at(r / 8 * (k / group) + g)] |= static_cast<std::uint32_t>(m.zeros[at(r * (k / group) + g)]) << (r % 8 * 4);
    }
  }
  w.file.add(base + ".weight_zero_point", {n / 8, k / group}, std::vector<std::int32_t>(words.begin(), words.end()));
}

TEST(PackedExperts, Nvfp4) {
  for (bool multiplies : {true, false}) {
    TemporaryDirectory const directory;
    moe_test::write_checkpoint(
        directory.path(), multiplies ? json{{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}} : moe_test::nvfp4_config(),
        [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
          multiplies ? add_nvfp4(w, base, n, k, ".weight", ".weight_scale_2", base.ends_with("down_proj") ? 0.01F : 0.3F)
                     : add_nvfp4(w, base, n, k);
        });
    expect_same_values<quantization::Nvfp4W4A16>(directory.path());
    expect_same_values<quantization::Nvfp4>(directory.path());
    expect_error(ErrorCode::config, "the checkpoint stores nvfp4, which does not become mxfp4 without a second rounding",
                 [&] { expect_same_values<quantization::Mxfp4<>>(directory.path()); });
  }
}
TEST(PackedExperts, Nvfp4WithTwoGlobalScalesInW13IsRefused) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), moe_test::nvfp4_config(),
                             [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
                               add_nvfp4(w, base, n, k, ".weight_packed", ".weight_global_scale", base.ends_with("1.up_proj") ? 32 : 64);
                             });
  expect_error(ErrorCode::config, "experts.1.up_proj.weight_global_scale",
               [&] { expect_same_values<quantization::Nvfp4W4A16>(directory.path()); });
}
TEST(PackedExperts, Int8WithAScaleForARow) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), kInt8, int8_rows);
  expect_same_values<quantization::Int8PerChannel>(directory.path());
  expect_same_values<quantization::Int8PerToken>(directory.path());
}
TEST(PackedExperts, Mxfp8) {
  TemporaryDirectory const directory;
  json const config =
      moe_test::compressed_config("mxfp8-quantized", {{"num_bits", 8}, {"type", "float"}, {"strategy", "group"}, {"group_size", 32}});
  moe_test::write_checkpoint(directory.path(), config, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
    w.codes(base + ".weight", FileDType::f8_e4m3, {n, k});
    w.exponents(base + ".weight_scale", {n, k / 32});
  });
  expect_same_values<quantization::Mxfp8<>>(directory.path());
  expect_same_values<quantization::Mxfp8W8A16<>>(directory.path());
}
TEST(PackedExperts, WeightsOfSchemesWithRowsOf8Bits) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(
      directory.path(), packed_integers_config(32),
      [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) { int4_groups(w, base, n, k, 32, Zeros::symmetric); });
  expect_same_values<quantization::WNa16<4, 32>>(directory.path());
  expect_same_values<quantization::W4A8<quantization::Fp8Codec<>, 32>>(directory.path());
  expect_same_values<quantization::Int4Fp8<32>>(directory.path());
  expect_error(ErrorCode::config, "gate_proj.weight_packed", [&] { expect_same_values<quantization::W4A8Fp8>(directory.path()); });
  expect_error(ErrorCode::config, "w4a8_fp8 cannot hold 4 bit weights in groups of 32",
               [&] { expect_same_values<quantization::W4A8Fp8>(directory.path()); });
}
TEST(PackedExperts, ZeroPointsOfCompressedTensors) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(
      directory.path(), packed_integers_config(64),
      [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) { int4_groups(w, base, n, k, 64, Zeros::random); });
  expect_same_values<quantization::WNa16<4, 64, true>>(directory.path());
  expect_same_values<quantization::WNa16<4, 32, true>>(directory.path());  // each scale twice
  expect_error(ErrorCode::config, "gate_proj.weight_zero_point", [&] { expect_same_values<quantization::WNa16<4, 64>>(directory.path()); });
}

/// A scale that is not a number, or under which the largest code is infinite, is refused with the name of its tensor and its position.
TEST(PackedExperts, AScaleThatCannotBePackedIsRefused) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(), kInf = std::numeric_limits<float>::infinity();
  auto const refused = [](json const& config, auto const& write, auto quant, std::string const& tensor, std::string const& words) {
    SCOPED_TRACE(text(decltype(quant)::kName, ", ", tensor, ", ", words));
    TemporaryDirectory const directory;
    moe_test::write_checkpoint(directory.path(), config, write);
    std::string const message = expect_error(ErrorCode::argument, [&] { expect_same_values<decltype(quant)>(directory.path()); });
    EXPECT_NE(message.find("experts.1.up_proj" + tensor + "' in "), std::string::npos) << message;
    EXPECT_NE(message.find("): " + words), std::string::npos) << message;
  };
  auto const is_bad = [](std::string const& base) { return base.ends_with("experts.1.up_proj"); };
  for (float bad : {kNan, kInf, 1e38F}) {
    refused(
        packed_integers_config(32),
        [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
          w.codes(base + ".weight_packed", FileDType::i32, {n, k / 8});
          std::vector<float> scales(at(n * k / 32), 0.5F);
          if (is_bad(base)) scales[7] = bad;
          w.file.add(base + ".weight_scale", {n, k / 32}, scales);
        },
        quantization::WNa16<4, 32>(), ".weight_scale", "scale 7 is");
    refused(
        kInt8,
        [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
          w.codes(base + ".weight", FileDType::i8, {n, k});
          std::vector<float> scales(at(n), 0.5F);
          if (is_bad(base)) scales[7] = bad;
          w.file.add(base + ".weight_scale", {n, 1}, scales);
        },
        quantization::Int8PerChannel(), ".weight_scale", "scale 7 is");
    refused(
        gptq_config(4, 32),
        [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
          auto m = moe_test::random_integers(w, 4, n, k, 32, Zeros::random);
          if (is_bad(base)) m.scales[at(5 * m.groups() + 1)] = bad;  // row 5, group 1; .scales are [groups, rows]
          moe_test::add_gptq(w, base, m, StoredZeros::minus_one);
        },
        quantization::WNa16<4, 32, true>(), ".scales", text("scale ", kI + 5, " is"));
    refused(
        {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}},
        [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
          add_nvfp4(w, base, n, k, ".weight", ".weight_scale_2", is_bad(base) ? bad : 1);
        },
        quantization::Nvfp4W4A16(), ".weight_scale_2", bad == 1e38F ? "the global scale 1e+38 is out of range" : "scale 0 is not finite");
  }
  refused(
      moe_test::nvfp4_config(),
      [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
        add_nvfp4(w, base, n, k);
        if (is_bad(base)) w.kept.back()[5] = 0x7F;
      },
      quantization::Nvfp4W4A16(), ".weight_scale", "NaN scale at row 0, column 5");
  for (int bad : {253, 255}) {
    refused(
        moe_test::mxfp4_config(),
        [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
          w.codes(base + ".weight_packed", FileDType::u8, {n, k / 2});
          std::vector<std::uint8_t> exponents(at(n * k / 32), 127);
          if (is_bad(base)) exponents[9] = static_cast<std::uint8_t>(bad);
          w.file.add(base + ".weight_scale", {n, k / 32}, exponents);
        },
        quantization::Mxfp4W4A8<>(), ".weight_scale",
        bad == 255 ? "NaN scale in row 2" : "exponent 253 in row 2 is out of range, at most 252");
  }
}
TEST(PackedExperts, AScaleOfAStackThatCannotBePackedIsRefused) {
  TemporaryDirectory const directory;
  auto const write = [&](std::size_t bad) {
    moe_test::write_checkpoint(directory.path(), kFp8Channels, [&](Writer& w, std::string const& base, std::int64_t, std::int64_t) {
      if (!base.ends_with("experts.0.gate_proj")) return;
      std::string const root = base.substr(0, base.find("0.gate_proj"));
      w.codes(root + "gate_up_proj", FileDType::f8_e4m3, {kE, 2 * kI, kH});
      w.codes(root + "down_proj", FileDType::f8_e4m3, {kE, kH, kI});
      std::vector<float> scales(at(kE * 2 * kI), 0.5F);
      if (bad < scales.size()) scales[bad] = 1e38F;
      w.file.add(root + "gate_up_proj_scale", {kE, 2 * kI, 1}, scales);
      w.scales(root + "down_proj_scale", {kE, kH, 1});
    });
  };
  write(at(kE * 2 * kI));
  expect_same_values<quantization::Fp8PerToken<>>(directory.path());
  write(at(2 * kI + 7));
  std::string const message = expect_error(ErrorCode::argument, [&] { expect_same_values<quantization::Fp8PerToken<>>(directory.path()); });
  EXPECT_NE(message.find("experts.gate_up_proj_scale' in "), std::string::npos) << message;
  EXPECT_NE(message.find(text("): scale ", 2 * kI + 7, " is out of range")), std::string::npos) << message;
}
/// Groups, zero points or scales of another shape than the codes: refused with the tensor's name.
TEST(PackedExperts, APackingThatDoesNotFitIsRefused) {
  auto const refused = [](ErrorCode code, int stated, std::string const& tensor, auto const& add) {
    SCOPED_TRACE(tensor);
    TemporaryDirectory const directory;
    moe_test::write_checkpoint(directory.path(), packed_integers_config(stated),
                               [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
                                 w.codes(base + ".weight_packed", FileDType::i32, {n, k / 8});
                                 add(w, base, n, k, base.ends_with("experts.1.up_proj"));
                               });
    expect_error(code, "experts.1.up_proj" + tensor, [&] { expect_same_values<quantization::WNa16<4, 32, true>>(directory.path()); });
  };
  auto const scales = [](Writer& w, std::string const& base, std::int64_t n, std::int64_t groups) {
    w.scales(base + ".weight_scale", {n, groups});
  };
  refused(ErrorCode::argument, 32, ".weight_scale",
          [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k, bool bad) { scales(w, base, bad ? n / 2 : n, k / 32); });
  refused(ErrorCode::config, 32, ".weight_packed", [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k, bool bad) {
    scales(w, base, n, k / (bad ? 64 : 32));  // another group than the configuration states
  });
  refused(ErrorCode::argument, 32, ".weight_zero_point", [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k, bool bad) {
    scales(w, base, n, k / 32);
    w.codes(base + ".weight_zero_point", FileDType::i32, {n / 8, bad ? k / 64 : k / 32});
  });
}
/// Types of other tensors than the form's, and experts in several forms: refused with the tensor's name and what was expected.
TEST(PackedExperts, ATensorOfAnotherTypeIsRefused) {
  auto const refused = [](ErrorCode code, json const& config, auto quant, std::string const& words, auto const& write) {
    SCOPED_TRACE(text(decltype(quant)::kName, ", ", words));
    TemporaryDirectory const directory;
    moe_test::write_checkpoint(directory.path(), config, [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
      write(w, base, n, k, base.ends_with("experts.1.up_proj"));
    });
    std::string const message = expect_error(code, [&] { expect_same_values<decltype(quant)>(directory.path()); });
    EXPECT_NE(message.find("experts.1.up_proj.weight"), std::string::npos) << message;
    EXPECT_NE(message.find(words), std::string::npos) << message;
  };
  refused(ErrorCode::argument, packed_integers_config(32), quantization::WNa16<4, 32>(), "(F32 [128, 16]): dtype F32, expected I32",
          [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k, bool bad) {
            w.codes(base + ".weight_packed", bad ? FileDType::f32 : FileDType::i32, {n, k / 8});
            w.scales(base + ".weight_scale", {n, k / 32});
          });
  refused(ErrorCode::argument, moe_test::mxfp4_config(), quantization::Mxfp4W4A16<>(), "(F32 [128, 4]): dtype F32, expected U8 or F8_E8M0",
          [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k, bool bad) {
            w.codes(base + ".weight_packed", FileDType::u8, {n, k / 2});
            if (bad) return w.scales(base + ".weight_scale", {n, k / 32});
            w.exponents(base + ".weight_scale", {n, k / 32});
          });
  refused(ErrorCode::config, moe_test::nvfp4_config(), quantization::Nvfp4W4A16(),
          "(I8 [128, 64]): stored as packed integers, the first expert as nvfp4",
          [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k, bool bad) {
            add_nvfp4(w, base + (bad ? ".other" : ""), n, k);
            if (bad) w.codes(base + ".weight_packed", FileDType::i8, {n, k / 2});
          });
  TemporaryDirectory const directory;
  json const asymmetric =
      moe_test::compressed_config("int-quantized", {{"num_bits", 8}, {"type", "int"}, {"strategy", "channel"}, {"symmetric", false}});
  moe_test::write_checkpoint(directory.path(), asymmetric, int8_rows);
  expect_error(ErrorCode::argument, "gate_proj.weight_zero_point' is missing",
               [&] { expect_same_values<quantization::Int8PerChannel>(directory.path()); });
}
TEST(PackedExperts, AStoreRefusesWeightsWhoseScaleIsNotFinite) {
  std::vector<float> w13(at(2 * 32 * 32), 0.5F), w2(at(32 * 32), 0.5F);
  auto const refused = [&](auto quant, float value) {
    using Quant = decltype(quant);
    experts::WeightStore<models::RuntimeLayer<float, float>, Quant> store(2, 32, 32, true);
    EXPECT_NO_THROW(store.set_expert(0, w13.data(), w2.data()));
    w2[40] = value;
    expect_error(ErrorCode::argument, text("w2 of expert 1 in ", Quant::kName, ": scale "),
                 [&] { store.set_expert(1, w13.data(), w2.data()); });
    w2[40] = 0.5F;
  };
  refused(quantization::Mxfp4W4A16<>(), std::numeric_limits<float>::quiet_NaN());
  refused(quantization::Mxfp8<>(), std::numeric_limits<float>::infinity());
  refused(quantization::Fp8Block<>(), std::numeric_limits<float>::quiet_NaN());
}
TEST(PackedExperts, IntegersOfCompressedTensors) {
  TemporaryDirectory const directory;
  json const config{
      {"quant_method", "compressed-tensors"},
      {"format", "pack-quantized"},
      {"config_groups", {{"group_0", {{"weights", {{"num_bits", 4}, {"type", "int"}, {"strategy", "group"}, {"group_size", 128}}}}}}}};
  moe_test::write_checkpoint(directory.path(), config, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
    w.codes(base + ".weight_packed", FileDType::i32, {n, k / 8});
    w.scales(base + ".weight_scale", {n, k / 128});
  });
  expect_same_values<quantization::Int4Group128>(directory.path());
}
// ---- shared experts as they are stored

template <class Weight>
using SharedFp8 = runner::shared::Separate<experts::Reference<float>, Weight, quantization::Fp8Block<>>;
using Fp8Layer =
    ModularKernel<models::RuntimeLayer<float, float>, routing::AnyRouter, quantization::Fp8Block<>, Local, experts::Reference<float>>;
using SharedInFp8 = Runner<Fp8Layer, models::AnyParts<float, SharedFp8>>;
using SharedDense = Runner<Fp8Layer, models::AnyParts<float, models::HostShared>>;

/// In the scheme the shared expert's rows are quantised, dense they are not; either way the block is that of the definition. A value that
/// lies between two codes may round the other way than in double.
TEST(SharedExperts, Fp8BlocksOfTheFile) {
  using Rows = quantization::Fp8Block<>;
  constexpr std::int64_t kRows = 33;
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), kFp8, fp8_blocks, {.hidden = kH, .intermediate = kI, .shared = 2 * kI});
  auto const w = io::load_checkpoint_layer<float>(directory.path(), 0);
  Writer random;
  auto const x = random.normal({kRows, kH});
  comm::Self<> self;
  auto const output = [&](auto& block) {
    std::vector<float> y(x.size());
    block.forward(make_rows(x.data(), kRows, kH), make_rows(y.data(), kRows, kH));
    return y;
  };
  auto in_scheme = load_runner<SharedInFp8>(directory.path(), 0, self, {.max_tokens_per_rank = kRows});
  auto dense = load_runner<SharedDense>(directory.path(), 0, self, {.max_tokens_per_rank = kRows});
  EXPECT_TRUE(in_scheme.shared_direct());
  EXPECT_FALSE(dense.shared_direct());
  auto const want_in_scheme = moe_test::definition<Rows>(w, x, kRows);
  auto const want_dense = moe_test::definition<Rows, quantization::None>(w, x, kRows);
  EXPECT_LT(moe_test::relative_error(output(in_scheme), want_in_scheme), 3e-3);
  EXPECT_LT(moe_test::relative_error(output(dense), want_dense), 3e-3);
  EXPECT_GT(moe_test::relative_error(want_in_scheme, want_dense), 1e-2);
}
TEST(SharedExperts, APolicyWithoutAnotherWayRefusesWhatIsNotStoredInItsScheme) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), kFp8,
                             [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
                               if (base.find("shared_expert.") == std::string::npos) return fp8_blocks(w, base, n, k);
                               w.file.add(base + ".weight", {n, k}, w.normal({n, k}));
                             },
                             {.hidden = kH, .intermediate = kI, .shared = kI});
  comm::Self<> self;
  expect_error(ErrorCode::config, "shared experts in fp8_block128: the checkpoint does not store them in fp8_block128",
               [&] { load_runner<SharedInFp8>(directory.path(), 0, self, {.max_tokens_per_rank = 1}); });
  load_runner<SharedDense>(directory.path(), 0, self, {.max_tokens_per_rank = 1});
}

// ---- GPTQ and AWQ: every packing that the readers take, beside the integers that were packed

struct Packing {
  std::string name;
  json config;
  int bits;
  std::int64_t group;
  Zeros zeros;
  StoredZeros stored;
  bool awq;
  bool by_activation = false;
};
std::vector<Packing> integer_packings() {
  std::vector<Packing> out;
  for (int bits : {4, 8}) {
    for (std::int64_t group : {32, 64, 128, -1}) {
      std::string const size = text(bits, " bits, groups of ", group);
      out.push_back(
          {"gptq without zero points, " + size, gptq_config(bits, group), bits, group, Zeros::symmetric, StoredZeros::none, false});
      out.push_back({"gptq, symmetric, " + size, gptq_config(bits, group), bits, group, Zeros::symmetric, StoredZeros::minus_one, false});
      out.push_back({"gptq, " + size, gptq_config(bits, group, "gptq"), bits, group, Zeros::random, StoredZeros::minus_one, false});
      out.push_back({"gptq_v2, " + size, gptq_config(bits, group, "gptq_v2"), bits, group, Zeros::random, StoredZeros::as_they_are, false});
    }
    out.push_back(
        {text("gptq by activation, ", bits, " bits"), gptq_config(bits, 32), bits, 32, Zeros::random, StoredZeros::minus_one, false, true});
  }
  for (std::int64_t group : {32, 64, 128, -1}) {
    json const gemm{{"quant_method", "awq"}, {"bits", 4}, {"group_size", group}, {"version", "gemm"}};
    json const old{{"quant_method", "awq"}, {"w_bit", 4}, {"q_group_size", group}, {"version", "GEMM"}};
    std::string const size = text("groups of ", group);
    out.push_back({"awq, " + size, gemm, 4, group, Zeros::random, StoredZeros::as_they_are, true});
    out.push_back({"awq, symmetric, " + size, old, 4, group, Zeros::symmetric, StoredZeros::as_they_are, true});
    out.push_back({"awq without zero points, " + size, gemm, 4, group, Zeros::symmetric, StoredZeros::none, true});
  }
  return out;
}
using Kept = std::map<std::string, moe_test::IntegerCodes>;
Kept write_integers(fs::path const& directory, Packing const& p) {
  Kept kept;
  moe_test::write_checkpoint(directory, p.config, [&](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
    auto m = moe_test::random_integers(w, p.bits, n, k, p.group, p.zeros);
    if (p.by_activation) {
      for (std::int64_t j = 0; j < k; ++j) m.order.push_back(static_cast<std::int32_t>(j % m.groups()));
    }
    p.awq ? moe_test::add_awq(w, base, m, p.stored) : moe_test::add_gptq(w, base, m, p.stored);
    kept.emplace(base, std::move(m));
  });
  return kept;
}
/// The matrices of expert e by the integers that were packed: w13 [2I, H], w2 [H, I].
std::pair<std::vector<float>, std::vector<float>> values_of(Kept const& kept, int e) {
  std::pair<std::vector<float>, std::vector<float>> out;
  for (char const* name : {"gate_proj", "up_proj", "down_proj"}) {
    auto const& m = kept.at(text("model.layers.0.mlp.experts.", e, '.', name));
    for (std::int64_t i = 0; i < m.n * m.k; ++i) {
      (std::string_view(name) == "down_proj" ? out.second : out.first).push_back(m.value(i / m.k, i % m.k));
    }
  }
  return out;
}
/// Whether Quant can hold what the packing stores.
template <int Bits, int Group, bool ZeroPoint>
bool holds(Packing const& p) {
  return p.bits == Bits && !p.by_activation && (p.group == -1 || p.group % Group == 0) && (ZeroPoint || p.zeros == Zeros::symmetric);
}
/// The block of a quantised scheme beside the block whose experts were widened while they were read.
template <class Quant>
void expect_same_output(fs::path const& directory) {
  comm::Self<> self;
  auto packed = load_runner<models::AnyBlock<Quant, Local>>(directory, 0, self, {.max_tokens_per_rank = 9});
  auto wide = load_runner<Any>(directory, 0, self, {.max_tokens_per_rank = 9});
  EXPECT_TRUE(packed.direct());
  EXPECT_FALSE(wide.direct());
  Writer random;
  auto const x = random.normal({9, kH});
  std::vector<float> a(x.size()), b(x.size());
  packed.forward(make_rows(x.data(), 9, kH), make_rows(a.data(), 9, kH));
  wide.forward(make_rows(x.data(), 9, kH), make_rows(b.data(), 9, kH));
  float largest = 0;
  for (float v : b) largest = std::max(largest, std::abs(v));
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], 2e-5F * largest) << i;
  EXPECT_GT(largest, 0.0F);
}

TEST(PackedExperts, EveryPackingOfGptqAndAwqIsReadAsItWasPacked) {
  for (Packing const& p : integer_packings()) {
    SCOPED_TRACE(p.name);
    TemporaryDirectory const directory;
    Kept const kept = write_integers(directory.path(), p);
    io::LayerDescription const d = io::from_config(io::HfConfig::from_file(directory.path()), 0);
    io::TensorStore const store(directory.path());
    io::ExpertReader const reader = io::LayerLoader::from_checkpoint(store, d, 0).experts();
    std::vector<float> w13(at(2 * kI * kH)), w2(at(kH * kI));
    for (int e = 0; e < kE; ++e) {
      reader.read(e, w13.data(), w2.data());
      auto const [want13, want2] = values_of(kept, e);
      ASSERT_EQ(w13, want13) << "expert " << e;
      ASSERT_EQ(w2, want2) << "expert " << e;
    }
    if (holds<4, 128, false>(p)) expect_same_values<quantization::Int4Group128>(directory.path());
    if (holds<4, 64, false>(p)) expect_same_values<quantization::WNa16<4, 64>>(directory.path());
    if (holds<4, 32, false>(p)) expect_same_values<quantization::WNa16<4, 32>>(directory.path());
    if (holds<4, 128, true>(p)) expect_same_values<quantization::Int4Group128Zero>(directory.path());
    if (holds<4, 32, true>(p)) expect_same_values<quantization::WNa16<4, 32, true>>(directory.path());
    if (holds<8, 128, false>(p)) expect_same_values<quantization::WNa16<8, 128>>(directory.path());
    if (holds<8, 32, true>(p)) expect_same_values<quantization::WNa16<8, 32, true>>(directory.path());
  }
}
TEST(PackedExperts, BlocksOfGptqAndAwqCheckpoints) {
  for (Packing const& p : integer_packings()) {
    SCOPED_TRACE(p.name);
    if (!holds<4, 128, true>(p)) continue;
    TemporaryDirectory const directory;
    write_integers(directory.path(), p);
    if (p.zeros == Zeros::symmetric) expect_same_output<quantization::Int4Group128>(directory.path());
    if (p.zeros == Zeros::random) expect_same_output<quantization::Int4Group128Zero>(directory.path());
  }
}
TEST(PackedExperts, WhatASchemeCannotHoldIsRefused) {
  comm::Self<> self;
  using Int4 = models::AnyBlock<quantization::Int4Group128, Local>;
  auto const refused = [&](Packing const& p, ErrorCode code, char const* part) {
    SCOPED_TRACE(p.name);
    TemporaryDirectory const directory;
    write_integers(directory.path(), p);
    expect_error(code, part, [&] { load_runner<Int4>(directory.path(), 0, self, {.max_tokens_per_rank = 1}); });
  };
  json const awq{{"quant_method", "awq"}, {"bits", 4}, {"group_size", 128}, {"version", "gemm"}};
  refused({"zero points", awq, 4, 128, Zeros::random, StoredZeros::as_they_are, true}, ErrorCode::config,
          "int4_group128 is symmetric, but row ");
  refused({"small groups", gptq_config(4, 32), 4, 32, Zeros::symmetric, StoredZeros::minus_one, false}, ErrorCode::config,
          "int4_group128 cannot hold 4 bit weights in groups of 32 with K 128");
  refused({"8 bits", gptq_config(8, 128), 8, 128, Zeros::symmetric, StoredZeros::minus_one, false}, ErrorCode::config,
          "int4_group128 cannot hold 8 bit weights in groups of 128");
  refused({"desc_act", gptq_config(4, 32), 4, 32, Zeros::symmetric, StoredZeros::minus_one, false, true}, ErrorCode::unsupported,
          "desc_act: its columns are in the order of activations, which int4_group128 cannot hold");
}

// ---- damaged files

TEST(PackedExperts, AFileThatIsCutOffOrVanishesWhileItIsRead) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), kFp8, fp8_blocks);
  fs::path const file = directory.path() / "model.safetensors";
  io::LayerDescription const d = io::from_config(io::HfConfig::from_file(directory.path()), 0);
  io::TensorStore const store(directory.path());
  io::ExpertReader const reader = io::LayerLoader::from_checkpoint(store, d, 0).experts();
  using Fp8 = quantization::Fp8Block<>;
  Fp8 const quant{};
  io::ExpertLoader<Fp8, float> const loader(store, d, reader, quant);
  std::vector<Fp8::WeightCode<float>> c13(at(2 * kI * kH)), c2(at(kH * kI));
  std::vector<float> s13(2), s2(1);
  fs::path const moved = directory.path() / "moved";
  fs::rename(file, moved);  // an open file is read on
  EXPECT_NO_THROW(loader.read(0, {c13.data(), c2.data(), s13.data(), s2.data()}));
  auto const size = fs::file_size(moved);
  fs::resize_file(moved, size - 5000);  // inside the last expert, which is the last in the file
  expect_error(ErrorCode::argument, text("ends at byte ", size - 5000, ", had ", size, " bytes when it was opened"),
               [&] { loader.read(kE - 1, {c13.data(), c2.data(), s13.data(), s2.data()}); });
}

TEST(PackedExperts, ACodeThatIsNotANumberIsRefused) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), kFp8, [](Writer& w, std::string const& base, std::int64_t n, std::int64_t k) {
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
  moe_test::write_checkpoint(directory.path(), kFp8, fp8_blocks);
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

TEST(PackedExperts, ProgressLineIsWrittenOverAndCleared) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), kFp8, fp8_blocks);
  comm::Self<> self;
  auto const written = [&](io::ProgressLine::Params p) {
    std::FILE* const file = std::tmpfile();
    EXPECT_NE(file, nullptr);
    p.to = file;
    load_runner<models::AnyBlock<quantization::Fp8Block<>, Local>>(
        directory.path(), 0, self, {.max_tokens_per_rank = 1, .threads = 1, .progress = io::ProgressLine(p)});
    std::string said(static_cast<std::size_t>(std::ftell(file)), ' ');
    EXPECT_EQ(std::fseek(file, 0, SEEK_SET), 0);
    EXPECT_EQ(std::fread(said.data(), 1, said.size(), file), said.size());
    std::fclose(file);
    return said;
  };
  EXPECT_EQ(written({.what = "experts", .terminal_only = false, .least_bytes = 0}),
            "\rexperts:  33 % of 0 MiB\rexperts:  66 % of 0 MiB\r" + std::string(39, ' ') + "\r");
  EXPECT_EQ(written({.shown = false, .terminal_only = false, .least_bytes = 0}), "");
  EXPECT_EQ(written({.terminal_only = false}), "") << "too little to show";
  EXPECT_EQ(written({.least_bytes = 0}), "") << "no terminal";
}

}  // namespace
