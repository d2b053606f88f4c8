// SPDX-License-Identifier: Apache-2.0
// examples/load_block.cpp: an MoE block of a checkpoint directory in one call: example_load_block [checkpoint] [layer]
#include <cstdio>
#include <cstdlib>
#include <moe/io/progress_line.hpp>
#include <moe/models/load_runner_host.hpp>
#include <moe/moe.hpp>

using Block = moe::models::AnyBlock<moe::quantization::None, moe::backends::NoExpertParallel<>>;

int main(int argc, char** argv) try {
  char const* const word = argc > 2 ? argv[2] : "1";
  char* end = nullptr;
  std::int64_t const layer = std::strtoll(word, &end, 10);
  if (end == word || *end != '\0') return std::printf("layer: \"%s\", expected a whole number\n", word), 2;
  char const* const checkpoint = argc > 1 ? argv[1] : "tests/data/checkpoints/qwen3_moe_tiny";
  moe::comm::Self<> self;
  auto block = moe::load_runner<Block>(checkpoint, layer, self, {.max_tokens_per_rank = 16, .progress = moe::io::ProgressLine()});

  std::int64_t const hidden = block.runner().hidden();
  std::vector<float> const x(static_cast<std::size_t>(16 * hidden), 0.5F);
  std::vector<float> y(x.size());
  block.forward(moe::make_rows(x.data(), 16, hidden), moe::make_rows(y.data(), 16, hidden));
  std::printf("%s: %d experts, output %f\n", block.description().model_type.c_str(), block.placement().num_logical(), y[0]);
} catch (moe::Error const& error) {
  std::printf("%s\n", error.what());
  return 1;
}
