// SPDX-License-Identifier: Apache-2.0
// tests/golden/runner_fused_shared_test.cpp: shared experts as further experts of the layer give what they give beside it, on every
// block file that has them; what cannot be fused is refused.
#include "moe/models/fused_shared.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "../expect_error.hpp"
#include "../gpu/block_file.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/quantization/none.hpp"

namespace {

using namespace moe;
using moe_test::BlockFile;
using moe_test::expect_error;
using Block = models::BlockRunner<quantization::None, backends::NoExpertParallel<>, experts::Reference<float>>;
using Weights = io::HostLayerWeights<float>;

struct Result {
  std::vector<float> output;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};
Result run(Weights const& weights, BlockFile const& f) {
  comm::Self<> self;
  Block block(self, Weights(weights), ExpertPlacement(static_cast<int>(weights.experts.size()), 1), f.rows());
  Result out{std::vector<float>(f.hidden.size()), {}, {}};
  block.forward(f.hidden, f.tokens.empty() ? nullptr : f.tokens.data(), out.output);
  out.ids = block.topk_ids();
  out.weights = block.topk_weights();
  return out;
}

TEST(FusedShared, N20_EqualsSeparate) {
  int fused_files = 0;
  moe_test::each_block_file([&](BlockFile const& f) {
    Weights const separate = io::load_block<float>(f.store);
    if (std::string const why = models::fusing_obstacle(separate); !why.empty()) {
      expect_error(ErrorCode::unsupported, why, [&] { models::with_fused_shared(separate); });
      return;
    }
    ++fused_files;
    Weights const fused = models::with_fused_shared(separate);
    Result const got = run(fused, f), want = run(separate, f);
    float largest = 0;
    for (float v : want.output) largest = std::max(largest, std::abs(v));
    for (std::size_t i = 0; i < want.output.size(); ++i) ASSERT_NEAR(got.output[i], want.output[i], 2e-6F * largest) << "value " << i;

    // R17: k columns as without, then the shared experts.
    std::size_t const k = static_cast<std::size_t>(separate.description.router.topk),
                      extra = fused.experts.size() - separate.experts.size();
    for (std::size_t t = 0; t < static_cast<std::size_t>(f.rows()); ++t) {
      for (std::size_t j = 0; j < k + extra; ++j) {
        std::int32_t const expected = j < k ? want.ids[t * k + j] : separate.description.router.num_experts + static_cast<int>(j - k);
        ASSERT_EQ(got.ids[t * (k + extra) + j], expected);
      }
    }
  });
  EXPECT_GE(fused_files, 2);
}

TEST(FusedShared, WhatALayerRefuses) {
  BlockFile const f(moe_test::golden_dir() / "moe_blocks" / "deepseek_v3_allneg_e16k4_g4_s1058.safetensors");
  Weights const fused = models::with_fused_shared(io::load_block<float>(f.store));
  int const all = static_cast<int>(fused.experts.size()), routed = fused.description.router.num_experts;
  comm::Self<> self;
  expect_error(ErrorCode::config, text("placement: ", routed, " physical experts, without a mapping expected num_experts ", all),
               [&] { Block block(self, Weights(fused), ExpertPlacement(routed, 1), f.rows()); });
  expect_error(ErrorCode::config, text("placement: ", all + all % 2, " physical experts, without a mapping expected num_experts ", routed),
               [&] { Block block(self, Weights(fused), ExpertPlacement(all + all % 2, 2), f.rows()); });
}

}  // namespace
