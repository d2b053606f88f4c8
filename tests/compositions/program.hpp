// SPDX-License-Identifier: Apache-2.0
// tests/compositions/program.hpp: what the programs of write_programs.py do with a composition: construct the layer and run it once.
#pragma once

#include <type_traits>

#include "moe/activation/activation.hpp"
#include "moe/modular_kernel.hpp"

namespace moe_test {

/// Sizes that every composition of the tool's list takes, and the elements with which the tool runs those of a space.
template <class Space>
struct Config : moe::LayerDefaults {
  static constexpr int hidden = 512, intermediate = 256, num_experts = 32, topk = 4;
  using Act = std::conditional_t<std::is_same_v<Space, moe::space::host>, float, moe::bf16>;
  using Weight = Act;
  using Activation = moe::activation::Silu;
};

template <class Backend, class Quant>
using Weights = moe::WeightsOf<Config<typename Backend::Space>, Quant>;

/// hidden and output [48, 512], logits [48, 32], in the memory of the backend's space.
template <class Backend>
struct Batch {
  using Act = typename Config<typename Backend::Space>::Act;
  Act const* hidden;
  float const* logits;
  Act* output;
};

template <class Router, class Quant, class Backend, class Experts>
void run(typename Backend::Comm& comm, Weights<Backend, Quant> const& weights, Batch<Backend> const& batch) {
  moe::ModularKernel<Config<typename Backend::Space>, Router, Quant, Backend, Experts> layer(
      comm, weights,
      {.max_tokens_per_rank = 48, .placement = moe::ExpertPlacement(32, comm.size()), .router = {.num_experts = 32, .topk = 4}});
  layer.forward(moe::make_rows<512>(batch.hidden, 48, 512), moe::make_rows<moe::dynamic>(batch.logits, 48, 32),
                moe::make_rows<512>(batch.output, 48, 512));
}

}  // namespace moe_test
