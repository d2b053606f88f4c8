// SPDX-License-Identifier: Apache-2.0
// tests/install/model_library/model.cpp: runs a layer of the consumer's model library: relu²(16) in 8 columns, summed.
#include <moe/comm/self.hpp>

#include <consumer_models.hpp>
#include <cstdio>
#include <vector>

int main() {
  moe::experts::WeightStore<Config, Quantization> weights(4, 16, 8, false);
  std::vector<float> const ones(8 * 16, 1.0F);
  for (int e = 0; e < 4; ++e) weights.set_expert(e, ones.data(), ones.data());
  moe::comm::Self<> self;
  moe::ModularKernel<Config, Router, Quantization, Backend, Experts> layer(
      self, weights.view(), {.max_tokens_per_rank = 2, .placement = moe::ExpertPlacement(4, 1), .router = {.num_experts = 4, .topk = 1}});
  std::vector<float> const hidden(2 * 16, 1.0F), logits(2 * 4, 0.0F);
  std::vector<float> output(2 * 16);
  layer.forward(moe::make_rows<16>(hidden.data(), 2, 16), moe::make_rows(logits.data(), 2, 4), moe::make_rows<16>(output.data(), 2, 16));
  std::printf("%g, expected 2048\n", static_cast<double>(output[16]));
  return output[16] == 2048.0F ? 0 : 1;
}
