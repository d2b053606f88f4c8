// SPDX-License-Identifier: Apache-2.0
// examples/guide/demo_layer.hpp: what the guide's programs share: a small layer, its weights and tokens, and the comparison of two outputs.
#pragma once

#include <cmath>
#include <cstdio>
#include <moe/moe.hpp>
#include <vector>

namespace guide {

struct Config : moe::LayerDefaults {
  static constexpr int hidden = 64, intermediate = 128, num_experts = 8, topk = 2;
  using Activation = moe::activation::Silu;
};
using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;

/// Data of the examples: samples of a sine between -scale and scale.
inline std::vector<float> numbers(std::size_t count, float scale) {
  std::vector<float> out(count);
  for (std::size_t i = 0; i < count; ++i) out[i] = scale * std::sin(0.37F * static_cast<float>(i) + 1.0F);
  return out;
}

/// The output [16, 64] of a layer of these policies on one rank.
template <class RouterT, class Quant, class Backend, class Experts>
std::vector<float> run(typename RouterT::Params router) {
  auto const w13 = numbers(2 * 128 * 64, 0.2F), w2 = numbers(64 * 128, 0.2F), hidden = numbers(16 * 64, 1.0F),
             logits = numbers(16 * 8, 3.0F);
  std::vector<float> output(16 * 64);
  moe::experts::WeightStore<Config, Quant> weights(8, 64, 128, true);
  for (int expert = 0; expert < 8; ++expert) weights.set_expert(expert, w13.data(), w2.data());
  moe::comm::Self<> self;
  moe::ModularKernel<Config, RouterT, Quant, Backend, Experts> layer(
      self, weights.view(), {.max_tokens_per_rank = 16, .placement = moe::ExpertPlacement(8, 1), .router = router});
  layer.forward(moe::make_rows<64, float const>(hidden.data(), 16, 64), moe::make_rows<moe::dynamic, float const>(logits.data(), 16, 8),
                moe::make_rows<64>(output.data(), 16, 64));
  return output;
}

/// 0 if no element differs by more than `tolerance` times the largest magnitude of `want`, else 1 with a message: an exit code.
inline int compare(std::vector<float> const& got, std::vector<float> const& want, float tolerance) {
  float largest = 0.0F, error = 0.0F;
  for (std::size_t i = 0; i < want.size(); ++i) {
    largest = std::fmax(largest, std::fabs(want[i]));
    error = std::fmax(error, std::fabs(got[i] - want[i]));
  }
  bool const equal = largest > 0.0F && error <= tolerance * largest;
  std::printf("%s: largest value %g, largest difference %g\n", equal ? "passed" : "FAILED", largest, error);
  return equal ? 0 : 1;
}

}  // namespace guide
