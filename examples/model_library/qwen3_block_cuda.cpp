// SPDX-License-Identifier: Apache-2.0
// examples/model_library/qwen3_block_cuda.cpp: an MoE block of a Qwen3-30B-A3B checkpoint on a GPU: qwen3_block_cuda checkpoint layer.
// g++ compiles it; the library of moe_add_model_library(qwen3_30b MODEL moe::models::Qwen3_30B_A3B SPACE cuda) has the kernels.
#include <cstdio>
#include <cstdlib>
#include <moe/models/load_runner_cuda.hpp>
#include <qwen3_30b.hpp>
#include <vector>

using Cuda = moe::space::cuda;

int main(int argc, char** argv) try {
  char* end = nullptr;
  std::int64_t const layer = argc == 3 ? std::strtoll(argv[2], &end, 10) : 0;
  if (argc != 3 || end == argv[2] || *end != '\0') return std::printf("usage: %s checkpoint layer\n", argv[0]), 2;
  moe::comm::Self<Cuda> self;
  auto block = moe::load_runner<qwen3_30b::decode>(argv[1], layer, self, {.max_tokens_per_rank = 16});

  std::int64_t const hidden = block.runner().hidden();
  std::vector<moe::bf16> host(static_cast<std::size_t>(16 * hidden), moe::from_float<moe::bf16>(0.5F));
  moe::Buffer<moe::bf16, Cuda> x(16 * hidden), y(16 * hidden);
  x.copy_from_host(host.data());
  block.forward(moe::make_rows(static_cast<moe::bf16 const*>(x.data()), 16, hidden), moe::make_rows(y.data(), 16, hidden));
  block.runner().wait();
  y.copy_to_host(host.data());
  std::printf("%d experts, output %f\n", block.placement().num_logical(), static_cast<double>(moe::to_float(host[0])));
} catch (moe::Error const& error) {
  std::printf("%s\n", error.what());
  return 1;
}
