// SPDX-License-Identifier: Apache-2.0
// tests/model_library/preset_test.cpp: a preset's block from a library, against the same block computed by hand.
#include <gtest/gtest.h>

#include <cmath>
#include <moe/backends/window/host/high_throughput.hpp>
#include <moe_test_preset.hpp>
#include <moe_test_preset_int8.hpp>
#include <type_traits>
#include <vector>

namespace {

using Model = moe_test::SmallModel;
using Block = moe_test_preset::decode;
using Fp8 = moe_test_preset::no_expert_parallel::fp8_block128::decode;
using Layer = Block::Layer;

// The plain names are what the preset prefers: its own quantisation, and on one GPU no exchange.
static_assert(std::is_same_v<Block, moe_test_preset::no_expert_parallel::none::decode>);
static_assert(std::is_same_v<moe_test_preset::prefill, moe_test_preset::no_expert_parallel::none::prefill>);
static_assert(std::is_same_v<Layer::Backend, moe::backends::NoExpertParallel<>>);
static_assert(!std::is_same_v<moe_test_preset::low_latency::fp8_block128::decode, Fp8>);
static_assert(Block::Layer::Config::hidden == 64 && std::is_same_v<Block::Layer::Config::Weight, moe::bf16>);
// What moe::models::Qwen3_30B_A3B prefers of the same backends, and of others.
template <class Backend>
using Qwen3 = moe::models::PresetRunner<moe::models::Qwen3_30B_A3B, moe::quantization::None, Backend>;
template <class Backend>
using DeepSeek = moe::models::PresetRunner<moe::models::DeepSeek_V3, moe::quantization::Fp8Block<>, Backend>;
using Local = moe::backends::NoExpertParallel<>;
using Low = moe::backends::LowLatency<moe::comm::MpiShared>;
using moe::models::ChosenRunner;
using moe::models::Phase;
static_assert(std::is_same_v<ChosenRunner<moe::models::Qwen3_30B_A3B, Phase::decode, Qwen3<Low>, Qwen3<Local>>, Qwen3<Local>>);
static_assert(std::is_same_v<ChosenRunner<moe::models::DeepSeek_V3, Phase::decode, DeepSeek<Local>, DeepSeek<Low>>, DeepSeek<Low>>);
// A model of several GPUs takes another backend for prefill.
using High = moe::backends::HighThroughput<moe::comm::MpiShared>;
template <Phase P>
using ChosenDeepSeek = ChosenRunner<moe::models::DeepSeek_V3, P, DeepSeek<Local>, DeepSeek<Low>, DeepSeek<High>>;
static_assert(std::is_same_v<ChosenDeepSeek<Phase::prefill>, DeepSeek<High>>);
static_assert(std::is_same_v<ChosenDeepSeek<Phase::decode>, DeepSeek<Low>>);

/// Expert e: gate rows 0.5, up rows (e + 1) / 64, down rows 1 / 128: silu(32) (e + 1) for a row of ones.
template <class Runner>
void expect_block_by_hand() {
  using moe::bf16;
  moe::experts::WeightStore<typename Runner::Layer::Config, typename Runner::Layer::Quant> weights(8, 64, 128, true);
  std::vector<float> const w2(64 * 128, 1.0F / 128);
  for (int e = 0; e < 8; ++e) {
    std::vector<float> w13(256 * 64, 0.5F);
    std::fill(w13.begin() + 128 * 64, w13.end(), static_cast<float>(e + 1) / 64);
    weights.set_expert(e, w13.data(), w2.data());
  }
  // Logits of expert e: e - 8 where x is 1, so that experts 7 and 6 are chosen with the softmax of 0 and 1.
  std::vector<float> gate(8 * 64);
  for (int e = 0; e < 8; ++e) std::fill_n(gate.begin() + e * 64, 64, static_cast<float>(e - 8) / 64);
  std::vector<bf16> const shared13(64 * 64, moe::from_float<bf16>(1.0F / 64)), shared2(64 * 32, moe::from_float<bf16>(1.0F / 32));

  moe::comm::Self<> self;
  typename Runner::Params p{.layer = {.max_tokens_per_rank = 4, .placement = moe::ExpertPlacement(8, 1)}};
  p.gate.weight = moe::make_rows(static_cast<float const*>(gate.data()), 8, 64);
  p.shared.count = 1;
  p.shared.intermediate = 32;
  p.shared.weights.w13 = {moe::make_blocks(shared13.data(), 1, 64, 64), {}, {}, 64, 64};
  p.shared.weights.w2 = {moe::make_blocks(shared2.data(), 1, 64, 32), {}, {}, 64, 32};
  Runner block(self, weights.view(), p);
  std::vector<float> const x(3 * 64, 1.0F);
  std::vector<float> y(3 * 64);
  block.forward(moe::make_rows(x.data(), 3, 64), moe::make_rows(y.data(), 3, 64));
  float const w7 = 1.0F / (1.0F + std::exp(-1.0F));
  float const silu32 = 32.0F / (1.0F + std::exp(-32.0F)), silu1 = 1.0F / (1.0F + std::exp(-1.0F));
  float const wanted = silu32 * (w7 * 8 + (1 - w7) * 7) + silu1;
  for (float v : y) EXPECT_NEAR(v, wanted, 2e-2F * wanted);
  EXPECT_EQ(block.topk_ids()(2, 0), 7);
  EXPECT_EQ(block.topk_ids()(2, 1), 6);
  EXPECT_NEAR(block.topk_weights()(0, 0), w7, 1e-6F);
}

TEST(PresetLibrary, BlockEqualsTheDefinition) { expect_block_by_hand<Block>(); }
TEST(PresetLibrary, BlockOfAnotherQuantisation) { expect_block_by_hand<Fp8>(); }
TEST(PresetLibrary, BlockOfInt8Rows) { expect_block_by_hand<moe_test_preset_int8::decode>(); }

}  // namespace
