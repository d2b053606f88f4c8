// SPDX-License-Identifier: Apache-2.0
// tests/compositions/program.cuh: what the programs of write_programs.py do with a composition: construct the layer and run it once.
#pragma once

#include "moe/activation/activation.hpp"
#include "moe/modular_kernel.hpp"

namespace moe_test {

/// Sizes that every composition of the tool's list takes.
struct Config : moe::LayerDefaults {
  static constexpr int hidden = 512, intermediate = 256, num_experts = 32, topk = 4;
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
};

/// hidden and output [48, 512], logits [48, 32], in device memory.
struct Batch {
  moe::bf16 const* hidden;
  float const* logits;
  moe::bf16* output;
};

template <class Router, class Quant, class Backend, class Experts>
void run(typename Backend::Comm& comm, moe::WeightsOf<Config, Quant> const& weights, Batch const& batch) {
  moe::ModularKernel<Config, Router, Quant, Backend, Experts> layer(
      comm, weights,
      {.max_tokens_per_rank = 48, .placement = moe::ExpertPlacement(32, comm.size()), .router = {.num_experts = 32, .topk = 4}});
  layer.forward(moe::make_rows<512>(batch.hidden, 48, 512), moe::make_rows<moe::dynamic>(batch.logits, 48, 32),
                moe::make_rows<512>(batch.output, 48, 512));
}

}  // namespace moe_test
