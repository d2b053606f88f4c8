// SPDX-License-Identifier: Apache-2.0
// tests/model_library/load_cuda_test.cpp: a block of gpt-oss-120b's checkpoint on a GPU: load_cuda_test CHECKPOINT [LAYER]. The build
// links it; no test runs it.
#include <cstdio>
#include <cstdlib>
#include <gpt_oss_120b.hpp>
#include <moe/models/load_runner_cuda.hpp>

using Block = gpt_oss_120b::decode;
using Cuda = moe::space::cuda;

int main(int argc, char** argv) try {
  if (argc < 2) return 77;
  moe::comm::Self<Cuda> self;
  auto block = moe::load_runner<Block>(argv[1], argc > 2 ? std::atoi(argv[2]) : 0, self, {.max_tokens_per_rank = 1});
  moe::Buffer<moe::bf16, Cuda> x(2880), y(2880);
  moe::Memory<Cuda>::fill(x.data(), 0, x.bytes());
  block.forward(moe::make_rows(static_cast<moe::bf16 const*>(x.data()), 1, 2880), moe::make_rows(y.data(), 1, 2880));
  block.runner().wait();
  std::printf("%s: %s\n", block.description().model_type.c_str(), block.direct() ? "the checkpoint's own codes" : "converted");
} catch (moe::Error const& error) {
  std::printf("%s\n", error.what());
  return 1;
}
