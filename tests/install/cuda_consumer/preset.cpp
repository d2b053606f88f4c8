// SPDX-License-Identifier: Apache-2.0
// tests/install/cuda_consumer/preset.cpp: links a block of a preset in the CUDA space; g++ compiles it.
#include <cstdio>
#include <cstdlib>
#include <gpt_oss_20b.hpp>

int main(int argc, char**) {
  using Block = gpt_oss_20b::decode;
  if (argc > 1) {  // needs a Hopper GPU
    moe::experts::WeightStore<Block::Layer::Config, Block::Layer::Quant, moe::space::cuda> weights(32, 2880, 2880, true);
    weights.visit_tensors([](char const*, auto const&) {});  // all zeros
    moe::comm::Self<moe::space::cuda> self;
    Block block(self, weights.view(), {.layer = {.max_tokens_per_rank = 1, .placement = moe::ExpertPlacement(32, 1)}});
    block.forward(moe::make_rows(static_cast<moe::bf16 const*>(nullptr), 0, 2880),
                  moe::make_rows(static_cast<moe::bf16*>(nullptr), 0, 2880));
    std::printf("%zu bytes\n", block.bytes());
  }
  return Block::Layer::Config::num_experts == 32 ? EXIT_SUCCESS : EXIT_FAILURE;
}
