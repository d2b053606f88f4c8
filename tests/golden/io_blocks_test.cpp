// SPDX-License-Identifier: Apache-2.0
// tests/golden/io_blocks_test.cpp: every block file and checkpoint is read, and what was read reproduces the reference values.
//
// The block's output is computed here from the file's own topk_ids and topk_weights by the plain definition, in double precision, so that a
// wrong weight, a wrong name mapping or a wrong description changes the output.
#include "moe/models/block_parts.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "block_definition.hpp"
#include "expect_error.hpp"
#include "golden_dir.hpp"
#include "moe/io/layer_description_json.hpp"

namespace {

using namespace moe::io;
using moe::models::compute_router_logits;
using namespace moe_test;
namespace fs = std::filesystem;

class Block : public ::testing::TestWithParam<fs::path> {};

TEST_P(Block, ReproducesLogitsAndOutput) {
  TensorStore const store(GetParam());
  auto const w = load_block<float>(store);
  LayerDescription const& d = w.description;
  auto const h = static_cast<std::size_t>(d.hidden), k = static_cast<std::size_t>(d.router.topk);

  auto const hidden = read<float>(store, "hidden");
  auto const logits = compute_router_logits(w, hidden);
  auto const expected_logits = read<float>(store, "router_logits");
  ASSERT_EQ(logits.size(), expected_logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) ASSERT_NEAR(logits[i], expected_logits[i], 1e-5) << "logit " << i;

  auto const ids = read<std::int32_t>(store, "topk_ids");
  auto const weights = read<float>(store, "topk_weights");
  auto const expected = read<float>(store, "expected");
  auto const gammas = store.contains("shared_gammas") ? read<float>(store, "shared_gammas") : std::vector<float>{};
  double const bound = max_abs(expected) * 1e-5;
  for (std::size_t t = 0; t < hidden.size() / h; ++t) {
    Row const x(hidden.begin() + static_cast<std::ptrdiff_t>(t * h), hidden.begin() + static_cast<std::ptrdiff_t>((t + 1) * h));
    Row const y = block_output(w, x, ids.data() + t * k, weights.data() + t * k, k,
                               gammas.empty() ? nullptr : gammas.data() + t * static_cast<std::size_t>(w.shared.count));
    for (std::size_t i = 0; i < h; ++i) ASSERT_NEAR(y[i], expected[t * h + i], bound) << "token " << t << ", column " << i;
  }
}

/// Expert parallelism and tensor parallelism, alone and together: what the ranks hold adds up to the block, its biases once.
TEST_P(Block, M2_P17_X9_PartsOfAllRanksAddUpToTheBlock) {
  TensorStore const store(GetParam());
  auto const whole = load_block<float>(store);
  LayerDescription const& d = whole.description;
  auto const h = static_cast<std::size_t>(d.hidden), k = static_cast<std::size_t>(d.router.topk);
  auto const hidden = read<float>(store, "hidden");
  auto const ids = read<std::int32_t>(store, "topk_ids");
  auto const weights = read<float>(store, "topk_weights");
  auto const expected = read<float>(store, "expected");
  auto const gammas = store.contains("shared_gammas") ? read<float>(store, "shared_gammas") : std::vector<float>{};
  for (auto const& [ep_size, tp_size] : {std::pair{1, 2}, std::pair{2, 2}, std::pair{4, 1}}) {
    SCOPED_TRACE(testing::Message() << ep_size << " x " << tp_size);
    if (d.expert_norm && tp_size > 1) {  // the norm needs the whole output of an expert
      moe_test::expect_error(moe::ErrorCode::unsupported, "tp_size 2: an expert's output is normalised as a whole",
                             [&] { (void)load_block<float>(store, {.tp_size = 2}); });
      continue;
    }
    std::vector<HostLayerWeights<float>> parts;
    for (int rank = 0; rank < ep_size * tp_size; ++rank) {  // moe_tp_rank runs fastest
      LoadOptions options{.tp_rank = rank % tp_size, .tp_size = tp_size};
      options.experts.emplace();
      for (int e = rank / tp_size; e < d.router.num_experts; e += ep_size) options.experts->push_back(e);
      parts.push_back(load_block<float>(store, options));
    }
    for (std::size_t t = 0; t < hidden.size() / h; t += 3) {
      Row const x(hidden.begin() + static_cast<std::ptrdiff_t>(t * h), hidden.begin() + static_cast<std::ptrdiff_t>((t + 1) * h));
      Row const in = expert_input(whole, x);
      float const* const gamma = gammas.empty() ? nullptr : gammas.data() + t * static_cast<std::size_t>(whole.shared.count);
      Row routed(in.size()), shared(h);
      for (std::size_t r = 0; r < parts.size(); ++r) {
        Row const part = routed_sum(parts[r], in, ids.data() + t * k, weights.data() + t * k, k);
        for (std::size_t i = 0; i < routed.size(); ++i) routed[i] += part[i];
        if (r >= static_cast<std::size_t>(tp_size)) continue;  // every expert-parallel rank has the same part of the shared experts
        Row const some = shared_sum(parts[r], x, gamma);
        for (std::size_t i = 0; i < h; ++i) shared[i] += some[i];
      }
      Row const y = finished(whole, in, ids.data() + t * k, weights.data() + t * k, k, routed, shared);
      for (std::size_t i = 0; i < h; ++i) ASSERT_NEAR(y[i], expected[t * h + i], max_abs(expected) * 1e-5) << "token " << t;
    }
  }
}

/// The metadata of a block file and the model's configuration in it describe the same block.
TEST_P(Block, ConfigurationAndMetadataAgree) {
  TensorStore const store(GetParam());
  auto from_metadata = to_json(from_block_metadata(store.metadata(), store.label()));
  auto config = to_json(from_config(HfConfig::from_text(store.metadata().at("config_json"), store.label()), 0));
  from_metadata.erase("layout");  // a configuration leaves the layout to the tensors' names and shapes
  config.erase("layout");
  config.erase("expert_capacity");  // the version that wrote the block file dropped no token (docs/semantics/routing.md)
  EXPECT_EQ(from_metadata, config);
}

/// Two ranks read disjoint bytes, and together all of the experts.
TEST_P(Block, ARankReadsItsOwnExpertsOnly) {
  std::uint64_t parts[2] = {};
  std::vector<float> w13;
  LoadOptions options{.shared = false};
  TensorStore const whole_store(GetParam());
  auto const whole = load_block<float>(whole_store, options);
  std::uint64_t const expert_bytes = (whole.w13.size() + whole.w2.size() + whole.w13_bias.size() + whole.w2_bias.size()) * sizeof(float);
  std::uint64_t const rest = whole_store.bytes_read() - expert_bytes;
  for (int rank : {0, 1}) {
    TensorStore const store(GetParam());
    options.experts.emplace();
    for (int e = rank; e < whole.description.router.num_experts; e += 2) options.experts->push_back(e);
    auto const part = load_block<float>(store, options);
    parts[rank] = store.bytes_read() - rest;
    auto const size = static_cast<std::size_t>(part.w13_rows() * part.description.expert_hidden());
    for (std::size_t l = 0; l < part.experts.size(); ++l) {
      auto const e = static_cast<std::size_t>(part.experts[l]);
      EXPECT_TRUE(std::equal(part.w13.begin() + static_cast<std::ptrdiff_t>(l * size),
                             part.w13.begin() + static_cast<std::ptrdiff_t>((l + 1) * size),
                             whole.w13.begin() + static_cast<std::ptrdiff_t>(e * size)));
    }
  }
  EXPECT_EQ(parts[0] + parts[1], expert_bytes);
  EXPECT_LE(parts[1], parts[0]);
}

INSTANTIATE_TEST_SUITE_P(Golden, Block, ::testing::ValuesIn(golden_blocks()),
                         [](auto const& param) { return param.param.stem().string(); });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Block);

TEST(Block, M10_TheSharedExpertsGateIsPartOfTheOutput) {
  int gated = 0;
  for (fs::path const& path : golden_blocks()) {
    TensorStore const store(path);
    auto w = load_block<float>(store);
    if (w.description.shared.gate != SharedGate::sigmoid) continue;
    ++gated;
    auto const h = static_cast<std::size_t>(w.description.hidden), k = static_cast<std::size_t>(w.description.router.topk);
    auto const hidden = read<float>(store, "hidden"), expected = read<float>(store, "expected"),
               weights = read<float>(store, "topk_weights");
    auto const ids = read<std::int32_t>(store, "topk_ids");
    Row const x(hidden.begin(), hidden.begin() + static_cast<std::ptrdiff_t>(h));
    EXPECT_NEAR(block_output(w, x, ids.data(), weights.data(), k, nullptr)[0], expected[0], max_abs(expected) * 1e-5);
    w.description.shared.gate = SharedGate::none;
    EXPECT_GT(std::abs(block_output(w, x, ids.data(), weights.data(), k, nullptr)[0] - expected[0]), 1e-3) << path;
  }
  EXPECT_GE(gated, 2);
}

class Checkpoint : public ::testing::TestWithParam<std::string> {};
/// The folder of a checkpoint: in the reference data, or in this project's selection, which has additional ones.
fs::path checkpoint_directory(std::string const& name) {
  fs::path const whole = moe_test::golden_checkpoint(name);
  return fs::exists(whole) ? whole : fs::path(MOE_TEST_DATA) / "checkpoints" / name;
}
std::vector<std::string> checkpoints() {
  std::set<std::string> names;
  for (auto const& entry : fs::directory_iterator(fs::path(MOE_TEST_DATA) / "checkpoints")) names.insert(entry.path().filename().string());
  return {names.begin(), names.end()};
}

/// The widened weights of each layer give the recorded float32 logits and outputs.
TEST_P(Checkpoint, ReproducesLogitsAndOutput) {
  fs::path const directory = checkpoint_directory(GetParam());
  TensorStore const io(directory / "moe_io.safetensors");
  HfConfig const config = HfConfig::from_file(directory);
  auto const layers = moe_layers(config);
  ASSERT_EQ(layers.size(), 2U);
  for (std::int64_t const layer : layers) {
    auto const w = load_checkpoint_layer<float>(directory, layer);
    std::string const p = "layers." + std::to_string(layer) + ".";
    auto const hidden = read<float>(io, p + "moe_in");
    auto const logits = compute_router_logits(w, hidden);
    auto const expected_logits = read<float>(io, p + "router_logits_f32");
    ASSERT_EQ(logits.size(), expected_logits.size());
    for (std::size_t i = 0; i < logits.size(); ++i)
      ASSERT_NEAR(logits[i], expected_logits[i], 2e-5) << "layer " << layer << ", logit " << i;

    auto const ids = read<std::int32_t>(io, p + "topk_ids_f32");
    auto const weights = read<float>(io, p + "topk_weights_f32");
    auto const expected = read<float>(io, p + "moe_out_f32");
    auto const gammas = io.contains(p + "shared_gammas_f32") ? read<float>(io, p + "shared_gammas_f32") : std::vector<float>{};
    auto const h = static_cast<std::size_t>(w.description.hidden), k = static_cast<std::size_t>(w.description.router.topk);
    for (std::size_t t = 0; t < hidden.size() / h; t += 7) {
      Row const x(hidden.begin() + static_cast<std::ptrdiff_t>(t * h), hidden.begin() + static_cast<std::ptrdiff_t>((t + 1) * h));
      Row const y = block_output(w, x, ids.data() + t * k, weights.data() + t * k, k,
                                 gammas.empty() ? nullptr : gammas.data() + t * static_cast<std::size_t>(w.shared.count));
      for (std::size_t i = 0; i < h; ++i)
        ASSERT_NEAR(y[i], expected[t * h + i], max_abs(expected) * 1e-5) << "layer " << layer << ", token " << t;
    }

    // bf16 weights are kept as they are in the file.
    auto const kept = load_checkpoint_layer<moe::bf16>(directory, layer);
    ASSERT_EQ(kept.w13.size(), w.w13.size());
    for (std::size_t i = 0; i < kept.w13.size(); ++i) ASSERT_EQ(moe::to_float(kept.w13[i]), w.w13[i]);
  }
}
TEST_P(Checkpoint, LayerOutOfRangeNamesTheBound) {
  fs::path const directory = checkpoint_directory(GetParam());
  for (std::int64_t layer : {99, -1}) {
    try {
      (void)load_checkpoint_layer<float>(directory, layer);
      ADD_FAILURE() << "no error";
    } catch (moe::Error const& error) {
      EXPECT_EQ(error.code(), moe::ErrorCode::argument);
      EXPECT_TRUE(error.message().starts_with("layer " + std::to_string(layer) + " is out of range [0, ")) << error.what();
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Golden, Checkpoint, ::testing::ValuesIn(checkpoints()), [](auto const& param) { return param.param; });

/// Where transformers 5.23.0 computed the block file, save_pretrained() wrote a checkpoint, too: tests/data/write_families.py.
TEST(Checkpoint, EveryBlockFileOfTransformers523HasOne) {
  auto const names = checkpoints();
  int count = 0;
  for (fs::path const& path : golden_blocks()) {
    if (TensorStore(path).metadata().at("transformers") != "5.23.0") continue;
    std::string const stem = path.stem().string();
    EXPECT_TRUE(std::ranges::count(names, stem.substr(0, stem.rfind("_e")) + "_tiny") == 1) << stem;
    ++count;
  }
  EXPECT_EQ(count, 36);
}

/// Of every model type there is a block that its own code computed: in tests/data, or in the whole set of the reference data.
TEST(Block, EveryModelTypeHasAFile) {
  if (std::getenv("MOE_GOLDEN_DIR") == nullptr) GTEST_SKIP() << "tests/data has a selection";
  std::set<std::string, std::less<>> blocks;
  for (fs::path const& path : golden_blocks()) blocks.insert(TensorStore(path).metadata().at("model_type"));
  for (std::string_view const type : known_model_types()) {
    if (type == "kimi_k2") continue;  // DeepSeek-V3's block under another name
    EXPECT_TRUE(blocks.contains(type)) << type;
  }
}

TEST(Checkpoint, ADenseLayerIsRefusedWithTheReason) {
  fs::path const directory = moe_test::golden_checkpoint("deepseek_v3_tiny");
  if (!fs::exists(directory)) GTEST_SKIP() << directory << " is not there";
  try {
    (void)load_checkpoint_layer<float>(directory, 0);
    ADD_FAILURE() << "no error";
  } catch (moe::Error const& error) {
    EXPECT_EQ(error.code(), moe::ErrorCode::argument);
    EXPECT_NE(error.message().find("layer 0 of"), std::string::npos);
    EXPECT_NE(error.message().find("is dense (first_k_dense_replace = 1), it has no experts"), std::string::npos) << error.what();
  }
}

/// The released dequantisation of mxfp4 blocks, transposed as that code gives it.
TEST(Mxfp4, DequantisesAsTheReferenceDoes) {
  fs::path const path = moe_test::golden_dir() / "quant" / "mxfp4_dequant_seed2031.safetensors";
  if (!fs::exists(path)) GTEST_SKIP() << path << " is not there";
  TensorStore const store(path);
  auto const expected = read<float>(store, "dequant_f32");  // [E, 32 G, rows]
  auto const shape = store.at("blocks").shape();
  std::int64_t const experts = shape[0], rows = shape[1], k = shape[2] * 32;
  std::vector<float> out(static_cast<std::size_t>(rows * k));
  for (std::int64_t e = 0; e < experts; ++e) {
    detail::read_mxfp4_rows(store.at("blocks"), store.at("scales"), e * rows, rows, k, out.data());
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < k; ++j) {
        ASSERT_EQ(out[static_cast<std::size_t>(i * k + j)], expected[static_cast<std::size_t>((e * k + j) * rows + i)]);
      }
    }
  }
}

/// The value tables of the 8-bit and 4-bit formats.
TEST(Tables, AreTheReferenceTables) {
  fs::path const path = moe_test::golden_dir() / "quant" / "tables.safetensors";
  if (!fs::exists(path)) GTEST_SKIP() << path << " is not there";
  TensorStore const store(path);
  auto const same = [](float a, float b) { return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b); };
  auto const e4m3 = read<float>(store, "e4m3fn"), e5m2 = read<float>(store, "e5m2"), e8m0 = read<float>(store, "e8m0fnu"),
             e2m1 = read<float>(store, "e2m1");
  for (std::size_t i = 0; i < 256; ++i) {
    EXPECT_TRUE(same(kE4m3Values[i], e4m3[i])) << i;
    EXPECT_TRUE(same(kE5m2Values[i], e5m2[i])) << i;
    EXPECT_TRUE(same(e8m0_value(static_cast<std::uint8_t>(i)), e8m0[i])) << i;
  }
  for (std::size_t i = 0; i < 16; ++i) EXPECT_TRUE(same(kE2m1Values[i], e2m1[i])) << i;
}

}  // namespace
