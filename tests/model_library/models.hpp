// SPDX-License-Identifier: Apache-2.0
// tests/model_library/models.hpp: the composition of the tested library.
#pragma once

#include <moe/activation/activation.hpp>
#include <moe/backends/no_expert_parallel.hpp>
#include <moe/core/layer_config.hpp>
#include <moe/experts/onednn.hpp>
#include <moe/quantization/none.hpp>
#include <moe/routing/softmax_topk.hpp>

namespace moe_test {

struct SmallConfig : moe::LayerDefaults {
  static constexpr int hidden = 16, intermediate = 8, num_experts = 4, topk = 1;
  using Activation = moe::activation::Relu2;
};
using SmallRouter = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;

}  // namespace moe_test
