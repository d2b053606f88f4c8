// SPDX-License-Identifier: Apache-2.0
// tests/gpu/user_program_test.cu: a user's program: one include for each policy, no explicit instantiation. One rank, so every backend over
// a communicator gives the same bits as no expert parallelism.
// moe-alone: what a user includes must be enough.
#include <gtest/gtest.h>

#include <cmath>
#include <moe/activation/activation.hpp>
#include <moe/backends/collective/device/all_to_all_v.cuh>
#include <moe/backends/collective/device/allgather_reduce_scatter.cuh>
#include <moe/backends/collective/device/naive.cuh>
#include <moe/backends/collective/device/no_expert_parallel.cuh>
#include <moe/experts/cuda_reference.cuh>
#include <moe/modular_kernel.hpp>
#include <moe/quantization/none.hpp>
#include <moe/routing/device/route.cuh>
#include <moe/routing/softmax_topk.hpp>
#include <vector>

namespace {

using namespace moe;
constexpr int kRows = 9, kHidden = 64, kIntermediate = 32, kExperts = 8;

struct Config : LayerDefaults {
  static constexpr int hidden = kHidden, intermediate = kIntermediate, num_experts = kExperts, topk = 2;
  using Activation = activation::Silu;
};
using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
using None = quantization::None;

std::vector<float> numbers(int seed, int count) {
  std::vector<float> out(static_cast<std::size_t>(count));
  for (float& v : out) v = 0.1F * std::sin(7.0F * static_cast<float>(seed++));
  return out;
}

template <class Backend>
std::vector<float> forward() {
  typename Backend::Comm comm;
  experts::WeightStore<Config, None, space::cuda> weights(kExperts, kHidden, kIntermediate, true);
  for (int e = 0; e < kExperts; ++e) {
    weights.set_expert(e, numbers(e, 2 * kIntermediate * kHidden).data(), numbers(-e, kHidden * kIntermediate).data());
  }
  ModularKernel<Config, Router, None, Backend, experts::CudaReference> layer(
      comm, weights.view(), {.max_tokens_per_rank = kRows, .placement = ExpertPlacement(kExperts, 1), .router = {kExperts, 2}});
  Buffer<float, space::cuda> hidden(kRows * kHidden), logits(kRows * kExperts), output(kRows * kHidden);
  hidden.copy_from_host(numbers(1, kRows * kHidden).data());
  logits.copy_from_host(numbers(2, kRows * kExperts).data());
  layer.forward(make_rows<kHidden, float const>(hidden.data(), kRows, kHidden),
                make_rows<dynamic, float const>(logits.data(), kRows, kExperts), make_rows<kHidden>(output.data(), kRows, kHidden));
  check_cuda(cudaDeviceSynchronize(), "forward");
  std::vector<float> host(kRows * kHidden);
  output.copy_to_host(host.data());
  return host;
}

TEST(UserProgram, EveryBackendOverACommunicator) {
  using Self = comm::Self<space::cuda>;
  std::vector<float> const alone = forward<backends::NoExpertParallel<space::cuda>>();
  float largest = 0;
  for (float const v : alone) largest = std::max(largest, std::abs(v));
  EXPECT_GT(largest, 0.0F);
  EXPECT_EQ(forward<backends::AllToAllV<Self>>(), alone);
  EXPECT_EQ(forward<backends::AllGatherReduceScatter<Self>>(), alone);
  EXPECT_EQ(forward<backends::Naive<Self>>(), alone);
}

}  // namespace
