// SPDX-License-Identifier: Apache-2.0
// tests/install/model_library/preset.cpp: links a block of a preset, and shows what it would hold.
#include <cstdio>
#include <cstdlib>
#include <olmoe.hpp>

int main(int argc, char**) {
  using Block = olmoe::decode;
  if (argc > 1) {  // some gigabytes
    moe::experts::WeightStore<Block::Layer::Config, Block::Layer::Quant> weights(64, 2048, 1024, true);
    weights.visit_tensors([](char const*, auto const&) {});  // all zeros
    moe::comm::Self<> self;
    Block const block(self, weights.view(), {.layer = {.max_tokens_per_rank = 1, .placement = moe::ExpertPlacement(64, 1)}});
    std::printf("%zu bytes\n", block.bytes());
  }
  return Block::Layer::Config::topk == 8 ? EXIT_SUCCESS : EXIT_FAILURE;
}
