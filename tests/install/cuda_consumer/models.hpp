// SPDX-License-Identifier: Apache-2.0
// tests/install/cuda_consumer/models.hpp: the composition of the consumer's model library, for g++ and nvcc: no .cuh.
#pragma once

#include <moe/activation/activation.hpp>
#include <moe/backends/collective/device/no_expert_parallel.hpp>
#include <moe/experts/cuda_reference.hpp>
#include <moe/quantization/none.hpp>
#include <moe/routing/softmax_topk.hpp>

struct Config : moe::LayerDefaults {
  static constexpr int hidden = 16, intermediate = 16, num_experts = 4, topk = 1;
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
};
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
using Quantization = moe::quantization::None;
using Backend = moe::backends::NoExpertParallel<moe::space::cuda>;
using Experts = moe::experts::CudaReference;
