// SPDX-License-Identifier: Apache-2.0
// tests/golden/runner_expert_norm_test.cpp: Muse-Spark, whose experts' outputs are normalised before the sum: its block file and its
// checkpoint through runners against the output of its class in transformers, and checkpoints that lack the norm.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "../gpu/block_file.hpp"
#include "../temporary_directory.hpp"
#include "expect_error.hpp"
#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/reference.hpp"
#include "moe/io/safetensors_writer.hpp"
#include "moe/models/fused_shared.hpp"
#include "moe/models/load_runner_host.hpp"
#include "moe/models/model_defaults.hpp"
#include "moe/models/preset_host.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/routers.hpp"

namespace {

namespace fs = std::filesystem;
using namespace moe;
using moe_test::expect_error;
using quantization::None;
using Local = backends::NoExpertParallel<>;

fs::path block_path() {
  for (fs::path const& path : moe_test::golden_blocks()) {
    if (path.filename().string().starts_with("muse_spark_text_")) return path;
  }
  throw Error(ErrorCode::internal, "no block file of muse_spark_text");
}
fs::path checkpoint() { return fs::path(MOE_TEST_DATA) / "checkpoints" / "muse_spark_text_tiny"; }

/// The largest difference, relative to the largest value of `want`.
double error(std::vector<float> const& got, std::vector<float> const& want) {
  double worst = 0, largest = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(want[i])));
    worst = std::max(worst, std::abs(static_cast<double>(got[i]) - want[i]));
  }
  return worst / largest;
}

template <class Backend, class Experts>
void expect_block(moe_test::BlockFile const& f) {
  EXPECT_LT(error(f.run<None, Backend, Experts, float>(), f.expected), 1e-5) << Backend::kName << ", " << Experts::kName;
}
TEST(ExpertNorm, BlockFileEqualsTransformers) {
  moe_test::BlockFile const f(block_path());
  ASSERT_TRUE(f.description.expert_norm);
  expect_block<Local, experts::Reference<>>(f);
  expect_block<Local, experts::OneDnn>(f);
  expect_block<backends::AllToAllV<comm::Self<>>, experts::OneDnn>(f);
  auto const without = f.run<None, Local, experts::OneDnn, float>([](auto& w) { w.description.expert_norm = false; });
  EXPECT_GT(error(without, f.expected), 0.1) << "the norm is part of the output";
  auto const other = f.run<None, Local, experts::OneDnn, float>([](auto& w) { w.expert_norm[0] *= 2; });
  EXPECT_GT(error(other, f.expected), 1e-3) << "so is its weight";
  expect_error(ErrorCode::unsupported, "fused shared experts: ", [&] { (void)models::with_fused_shared(io::load_block<float>(f.store)); });
}

// ---- the checkpoint

using Any = models::AnyBlock<None, Local>;
struct TinyMuse : models::ModelDefaults {
  static constexpr char const* kName = "TinyMuse";
  using Router = routing::BiasedTopK<routing::Scoring::sigmoid, routing::Renormalize::yes>;
  static constexpr int hidden = 24, block_hidden = 32, intermediate = 16, num_experts = 8, topk = 3;
  static constexpr float routed_scaling_factor = 1.5F;
  static constexpr ExpertNorm expert_norm = ExpertNorm::always;
};
struct WithoutNorm : TinyMuse {
  static constexpr ExpertNorm expert_norm = ExpertNorm::none;
};
template <class Model>
using Preset = models::PresetRunner<Model, None, Local>;

template <class Block>
double error_of_layer(fs::path const& folder, int layer) {
  comm::Self<> self;
  io::SafetensorsFile const file(checkpoint() / "moe_io.safetensors");
  auto const x = file.read<float>(text("layers.", layer, ".moe_in")), want = file.read<float>(text("layers.", layer, ".moe_out_f32"));
  auto block = load_runner<Block>(folder, layer, self, {.max_tokens_per_rank = 364});
  std::int64_t const h = block.runner().hidden(), rows = static_cast<std::int64_t>(x.size()) / h;
  std::vector<float> y(x.size());
  block.forward(make_rows(x.data(), rows, h), make_rows(y.data(), rows, h));
  return error(y, want);
}
TEST(ExpertNorm, CheckpointEqualsTransformers) {
  for (int layer : {1, 2}) {
    EXPECT_LT(error_of_layer<Any>(checkpoint(), layer), 1e-5) << layer;
    EXPECT_LT(error_of_layer<Preset<TinyMuse>>(checkpoint(), layer), 1e-5) << layer;
  }
  expect_error(ErrorCode::config, "expert_norm is 1, and TinyMuse fixes it to 0",
               [] { (void)error_of_layer<Preset<WithoutNorm>>(checkpoint(), 1); });
}

constexpr char const* kNorm = "layers.1.mlp.experts.post_expert_norm.weight";

/// The checkpoint with a norm of layer 1 of another width; 0: without it.
void write_with_norm(fs::path const& folder, std::size_t width) {
  fs::copy_file(checkpoint() / "config.json", folder / "config.json");
  io::SafetensorsFile const file(checkpoint() / "model.safetensors");
  io::SafetensorsWriter writer;
  for (auto const& [name, info] : file.tensors()) {
    auto values = file.read<float>(info);
    if (name != kNorm) {
      writer.add<float>(name, info.shape, std::move(values));
    } else if (width > 0) {
      writer.add<float>(name, {static_cast<std::int64_t>(width)}, std::vector<float>(width, 0.5F));
    }
  }
  writer.write(folder / "model.safetensors");
}

TEST(ExpertNorm, ACheckpointWithoutTheNormNamesItsTensor) {
  moe_test::TemporaryDirectory const folder;
  write_with_norm(folder.path(), 0);
  expect_error(ErrorCode::argument, text("layer 1: tensor '", kNorm, "' is missing in "),
               [&] { (void)error_of_layer<Any>(folder.path(), 1); });
  EXPECT_LT(error_of_layer<Any>(folder.path(), 2), 1e-5) << "the other layer is whole";
}
TEST(ExpertNorm, ANormOfAnotherWidthNamesTensorAndShapes) {
  moe_test::TemporaryDirectory const folder;
  write_with_norm(folder.path(), 23);
  for (std::string const& part : {std::string(kNorm), std::string("shape [23], expected [24]")}) {
    expect_error(ErrorCode::argument, part, [&] { (void)error_of_layer<Any>(folder.path(), 1); });
  }
}
TEST(ExpertNorm, APartOfEachExpertIsRefused) {
  expect_error(ErrorCode::unsupported, "tp_size 2: an expert's output is normalised as a whole",
               [] { (void)io::load_checkpoint_layer<float>(checkpoint(), 1, {.tp_size = 2}); });
}

}  // namespace
