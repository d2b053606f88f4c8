// SPDX-License-Identifier: Apache-2.0
// tests/install/model_library/models.hpp: the composition of the consumer's model library.
#pragma once

#include <moe/activation/activation.hpp>
#include <moe/backends/no_expert_parallel.hpp>
#include <moe/experts/reference.hpp>
#include <moe/quantization/none.hpp>
#include <moe/routing/softmax_topk.hpp>

struct Config : moe::LayerDefaults {
  static constexpr int hidden = 16, intermediate = 8, num_experts = 4, topk = 1;
  using Activation = moe::activation::Relu2;
};
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
using Quantization = moe::quantization::None;
using Backend = moe::backends::NoExpertParallel<>;
using Experts = moe::experts::Reference<>;
