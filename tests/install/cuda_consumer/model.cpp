// SPDX-License-Identifier: Apache-2.0
// tests/install/cuda_consumer/model.cpp: a program that g++ compiles and whose layer nvcc has compiled. Linked without a GPU; on one it
// runs.
#include <moe/comm/self.hpp>

#include <consumer_models.hpp>
#include <cstdio>
#include <vector>

int main() {
  using Cuda = moe::space::cuda;
  moe::experts::WeightStore<Config, Quantization, Cuda> weights(4, 16, 16, true);
  std::vector<float> const ones(2 * 16 * 16, 1.0F);
  for (int e = 0; e < 4; ++e) weights.set_expert(e, ones.data(), ones.data());
  moe::comm::Self<Cuda> self;
  moe::ModularKernel<Config, Router, Quantization, Backend, Experts> layer(
      self, weights.view(), {.max_tokens_per_rank = 2, .placement = moe::ExpertPlacement(4, 1), .router = {.num_experts = 4, .topk = 1}});
  moe::Buffer<moe::bf16, Cuda> hidden(2 * 16), output(2 * 16);
  moe::Buffer<float, Cuda> logits(2 * 4);
  layer.forward(moe::make_rows<16>(hidden.data(), 2, 16), moe::make_rows(logits.data(), 2, 4), moe::make_rows<16>(output.data(), 2, 16));
  layer.wait();
  std::printf("%d rows routed\n", static_cast<int>(layer.topk_ids().extent(0)));
}
