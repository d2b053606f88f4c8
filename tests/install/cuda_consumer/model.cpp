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
  using Memory = moe::Memory<Cuda>;
  moe::Buffer<moe::bf16, Cuda> hidden(2 * 16), output(2 * 16);
  moe::Buffer<float, Cuda> logits(2 * 4);
  std::vector<moe::bf16> rows(2 * 16, moe::from_float<moe::bf16>(1.0F));
  Memory::copy_from_host(hidden.data(), rows.data(), rows.size() * sizeof(moe::bf16));
  Memory::fill(logits.data(), 0, 2 * 4 * sizeof(float));
  layer.forward(moe::make_rows<16, moe::bf16 const>(hidden.data(), 2, 16), moe::make_rows(logits.data(), 2, 4),
                moe::make_rows<16>(output.data(), 2, 16));
  layer.wait();
  Memory::copy_to_host(rows.data(), output.data(), rows.size() * sizeof(moe::bf16));
  float const routed_by_the_layer = moe::to_float(rows.back());
  moe::Buffer<std::int32_t, Cuda> ids(2);  // expert 0 twice
  moe::Buffer<float, Cuda> ids_weights(2);
  Memory::fill(ids.data(), 0, 2 * sizeof(std::int32_t));
  ids_weights.copy_from_host(ones.data());
  layer.forward_routed(moe::make_rows<16, moe::bf16 const>(hidden.data(), 2, 16), moe::make_rows(ids.data(), 2, 1),
                       moe::make_rows(ids_weights.data(), 2, 1), moe::make_rows<16>(output.data(), 2, 16));
  layer.wait();
  Memory::copy_to_host(rows.data(), output.data(), rows.size() * sizeof(moe::bf16));
  float const last = moe::to_float(rows.back());  // silu(16) * 16 in 16 columns, summed
  std::printf("%g, expected 4096\n", static_cast<double>(last));
  return last == 4096.0F && routed_by_the_layer == 4096.0F ? 0 : 1;
}
