// SPDX-License-Identifier: Apache-2.0
// tests/headers/checked.hpp: what the timed config check names: a user's configuration and policies of both spaces.
#pragma once

#include <moe/activation/activation.hpp>
#include <moe/backends/no_expert_parallel.hpp>
#include <moe/experts/hopper_contiguous.hpp>
#include <moe/experts/reference.hpp>
#include <moe/quantization/fp8_block128.hpp>
#include <moe/quantization/none.hpp>
#include <moe/routing/softmax_topk.hpp>

namespace moe_test {

struct Checked : moe::LayerDefaults {
  static constexpr int hidden = 2048, intermediate = 768, num_experts = 128, topk = 8;
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
};
using CheckedRouter = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;

}  // namespace moe_test
