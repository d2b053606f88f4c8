// SPDX-License-Identifier: Apache-2.0
// tests/gpu/load_runner_presets.cpp: blocks of model libraries in the CUDA space, loaded from checkpoints by a program that g++ compiles:
// the bundled checkpoints beside the outputs that transformers computed, and packed experts beside the definition.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <load_deepseek.hpp>
#include <load_packed.hpp>
#include <load_packed_shared.hpp>
#include <load_qwen.hpp>
#include <string>
#include <vector>

#include "expect_error.hpp"
#include "golden_dir.hpp"
#include "loaded_block.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/models/load_runner_cuda.hpp"
#include "moe/runner/description.hpp"
#include "on_hopper.hpp"
#include "packed_checkpoint.hpp"
#include "packed_definition.hpp"
#include "temporary_directory.hpp"

namespace {

using namespace moe;
namespace fs = std::filesystem;
using Cuda = space::cuda;
using moe_test::add_awq;
using moe_test::add_fp8_blocks;
using moe_test::add_gptq;
using moe_test::CheckpointWriter;
using moe_test::definition;
using moe_test::expect_near;
using moe_test::forward;
using moe_test::json;
using moe_test::random_integers;
using moe_test::relative_error;
using moe_test::store_row;
using moe_test::StoredZeros;
using moe_test::TemporaryDirectory;
using moe_test::Zeros;

class LoadOnGpu : public testing::Test {
 protected:
  void SetUp() override {
    if (!moe_test::on_hopper()) GTEST_SKIP() << "presets in the CUDA space need compute capability 9.0";
  }
};

/// Rows of moe_in are bf16: the block gets what transformers got.
template <class Block>
void expect_transformers(char const* checkpoint, int layer, double tolerance) {
  SCOPED_TRACE(text(checkpoint, ", layer ", layer));
  io::SafetensorsFile const file(moe_test::golden_checkpoint(checkpoint) / "moe_io.safetensors");
  auto const x = file.read<bf16>(text("layers.", layer, ".moe_in"));
  auto const want = file.read<float>(text("layers.", layer, ".moe_out_f32"));
  comm::Self<Cuda> self;
  std::int64_t done = 0, total = 0;
  auto block = load_runner<Block>(moe_test::golden_checkpoint(checkpoint), layer, self,
                                  {.max_tokens_per_rank = 364, .progress = [&](std::int64_t d, std::int64_t t) { done = d, total = t; }});
  EXPECT_GT(total, 0);
  EXPECT_EQ(done, total);
  for (std::int64_t rows : {1, 17, 364}) {
    EXPECT_LT(relative_error(forward(block, x.data(), rows), want.data()), tolerance) << rows << " rows";
  }
}

TEST_F(LoadOnGpu, Qwen3EqualsTransformers) {
  for (int layer : {0, 1}) expect_transformers<load_qwen::decode>("qwen3_moe_tiny", layer, 1.2e-2);
}
TEST_F(LoadOnGpu, DeepSeekV3EqualsTransformers) {
  for (int layer : {1, 2}) expect_transformers<load_deepseek::no_expert_parallel::none::prefill>("deepseek_v3_tiny", layer, 1.2e-2);
}
TEST_F(LoadOnGpu, APresetRefusesAnotherModel) {
  comm::Self<Cuda> self;
  moe_test::expect_error(ErrorCode::config, "hidden is 64, and TinyPacked fixes it to 256", [&] {
    load_runner<load_packed::no_expert_parallel::fp8_block128::decode>(moe_test::golden_checkpoint("qwen3_moe_tiny"), 0, self,
                                                                       {.max_tokens_per_rank = 1});
  });
}

// ---- experts that stay in the form in which the checkpoint stores them

constexpr moe_test::PackedSizes kSizes{.experts = 6, .hidden = 256, .intermediate = 128};

template <class Block, class Rows = quantization::None, class Write>
void expect_direct(json const& quantization, double tolerance, Write const& write) {
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), quantization, write, kSizes);
  comm::Self<Cuda> self;
  auto block = load_runner<Block>(directory.path(), 0, self, {.max_tokens_per_rank = 64});
  EXPECT_TRUE(block.direct());
  CheckpointWriter random;
  std::vector<bf16> x;
  for (float v : random.normal({64, kSizes.hidden})) x.push_back(from_float<bf16>(v));
  auto const want = definition<Rows>(io::load_checkpoint_layer<float>(directory.path(), 0), x, 64);
  for (std::int64_t rows : {1, 9, 64}) {
    expect_near(forward(block, x.data(), rows), want.data(), rows, tolerance);
  }
  moe_test::expect_graph_of_bits(self, block, x.data(), 9);
}

TEST_F(LoadOnGpu, Fp8BlocksOfTheFile) {
  expect_direct<load_packed::no_expert_parallel::fp8_block128::decode, quantization::Fp8Block<>>(moe_test::fp8_block_config(), 1.2e-2,
                                                                                                 add_fp8_blocks);
}
/// The shared expert too, in the scheme or dense.
TEST_F(LoadOnGpu, Fp8SharedExpertOfTheFile) {
  using Block = load_packed_shared::decode;
  using Fp8 = quantization::Fp8Block<>;
  moe_test::PackedSizes sizes = kSizes;
  sizes.shared = 384;
  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), moe_test::fp8_block_config(), add_fp8_blocks, sizes);
  std::vector<bf16> x;
  for (float v : CheckpointWriter().normal({64, kSizes.hidden})) x.push_back(from_float<bf16>(v));
  auto const w = io::load_checkpoint_layer<float>(directory.path(), 0);
  comm::Self<Cuda> self;
  for (bool const in_scheme : {true, false}) {
    auto block = load_runner<Block>(directory.path(), 0, self, {.max_tokens_per_rank = 64, .shared_in_scheme = in_scheme});
    EXPECT_EQ(block.shared_direct(), in_scheme);
    EXPECT_EQ(block.runner().shared_choice(), in_scheme ? "fp8_block128 with hopper_contiguous, the checkpoint's codes"
                                                        : "dense, unquantised: not asked for (shared_in_scheme)");
    auto const want = in_scheme ? definition<Fp8>(w, x, 64) : definition<Fp8, quantization::None>(w, x, 64);
    for (std::int64_t rows : {1, 9, 64}) expect_near(forward(block, x.data(), rows), want.data(), rows, 1.2e-2);
  }
}
/// The gate of a file in bf16 is computed in bf16, and its float32 weights are no longer read; that of a file in float32 is read as it is.
TEST_F(LoadOnGpu, GateInTheElementOfTheFile) {
  comm::Self<Cuda> self;
  auto in_bf16 = load_runner<load_deepseek::no_expert_parallel::none::prefill>(moe_test::golden_checkpoint("deepseek_v3_tiny"), 1, self,
                                                                               {.max_tokens_per_rank = 17});
  std::string const choice = in_bf16.runner().gate_choice();
  EXPECT_EQ(choice, "bf16 products with float32 sums, through cuBLASLt: every float32 weight is a value of bf16");
  EXPECT_NE(in_bf16.runner().unread_gate_weight(), nullptr);
  std::vector<std::string> const lines = runner::description(in_bf16.runner());
  EXPECT_EQ(std::count(lines.begin(), lines.end(), "gate: " + choice), 1);

  TemporaryDirectory const directory;
  moe_test::write_checkpoint(directory.path(), moe_test::fp8_block_config(), add_fp8_blocks, kSizes);
  auto in_float32 =
      load_runner<load_packed::no_expert_parallel::fp8_block128::decode>(directory.path(), 0, self, {.max_tokens_per_rank = 1});
  EXPECT_HAS(in_float32.runner().gate_choice(), "float32 products: the weight [0, ");
  EXPECT_EQ(in_float32.runner().unread_gate_weight(), nullptr);
}
/// bf16 experts of the file, quantised while they are read. A scale a channel is a scale a row of the weights.
TEST_F(LoadOnGpu, Qwen3QuantisedWhileItIsRead) {
  using Rows = quantization::Fp8PerToken<>;
  fs::path const checkpoint = moe_test::golden_checkpoint("qwen3_moe_tiny");
  auto w = io::load_checkpoint_layer<float>(checkpoint, 1);
  auto const store = [](std::vector<float>& matrix, std::int64_t cols) {
    for (auto row = matrix.begin(); row != matrix.end(); row += cols) {
      std::vector<double> values(row, row + cols);
      store_row<Rows>(values);
      std::copy(values.begin(), values.end(), row);
    }
  };
  store(w.w13, w.description.hidden);
  store(w.w2, w.intermediate);
  auto const x = io::SafetensorsFile(checkpoint / "moe_io.safetensors").read<bf16>("layers.1.moe_in");
  auto const want = definition<Rows>(w, x, 364);
  comm::Self<Cuda> self;
  auto block = load_runner<load_qwen::no_expert_parallel::fp8_per_token::decode>(checkpoint, 1, self, {.max_tokens_per_rank = 364});
  for (std::int64_t rows : {1, 17, 364}) {
    expect_near(forward(block, x.data(), rows), want.data(), rows, 1.2e-2);
  }
}
TEST_F(LoadOnGpu, GptqOfTheFile) {
  expect_direct<load_packed::no_expert_parallel::int4_group128::decode>(
      {{"quant_method", "gptq"}, {"bits", 4}, {"group_size", 128}}, 1.2e-2,
      [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
        add_gptq(w, base, random_integers(w, 4, n, k, 128, Zeros::symmetric), StoredZeros::minus_one);
      });
}
TEST_F(LoadOnGpu, AwqOfTheFile) {
  expect_direct<load_packed::no_expert_parallel::int4_group128::decode>(
      {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 128}, {"version", "gemm"}}, 1.2e-2,
      [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
        add_awq(w, base, random_integers(w, 4, n, k, 128, Zeros::symmetric), StoredZeros::as_they_are);
      });
}
/// As Kimi-K2-Thinking is stored.
TEST_F(LoadOnGpu, Int4InGroupsOf32OfTheFile) {
  expect_direct<load_packed::no_expert_parallel::int4_group32::decode>(
      moe_test::packed_integers_config(32), 1.2e-2, [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
        moe_test::add_packed_integers(w, base, random_integers(w, 4, n, k, 32, Zeros::symmetric));
      });
}
TEST_F(LoadOnGpu, Mxfp4OfTheFile) {
  expect_direct<load_packed::no_expert_parallel::mxfp4_w4a16::decode>(moe_test::mxfp4_config(), 1.2e-2, moe_test::add_mxfp4);
}
TEST_F(LoadOnGpu, Nvfp4OfTheFile) {
  expect_direct<load_packed::no_expert_parallel::nvfp4_w4a16::decode>(
      moe_test::nvfp4_config(), 1.2e-2,
      [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) { moe_test::add_nvfp4(w, base, n, k); });
}
/// Rows in e4m3, as those of fp8 blocks.
TEST_F(LoadOnGpu, Mxfp4UnderFp8RowsOfTheFile) {
  expect_direct<load_packed::no_expert_parallel::mxfp4_fp8::decode, quantization::Mxfp4Fp8<>>(moe_test::mxfp4_config(), 1.2e-2,
                                                                                              moe_test::add_mxfp4);
}
TEST_F(LoadOnGpu, Int4UnderFp8RowsOfTheFile) {
  expect_direct<load_packed::no_expert_parallel::int4_group32_fp8::decode, quantization::Int4Fp8<32>>(
      moe_test::packed_integers_config(32), 1.2e-2, [](CheckpointWriter& w, std::string const& base, std::int64_t n, std::int64_t k) {
        moe_test::add_packed_integers(w, base, random_integers(w, 4, n, k, 32, Zeros::symmetric));
      });
}

}  // namespace
