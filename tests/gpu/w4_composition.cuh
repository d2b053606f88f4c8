// SPDX-License-Identifier: Apache-2.0
// tests/gpu/w4_composition.cuh: the output of a whole layer on one rank, for tests that compare two experts policies.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "device_values.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/comm/self.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"

namespace moe_test {

/// The output of `rows` random tokens: [rows, 256], on the host. Weights come from a WeightStore. The same for every experts policy.
template <class Config, class Quant, class Experts>
std::vector<moe::bf16> composition_output(std::int64_t rows) {
  constexpr int kHidden = 256;
  constexpr int kIntermediate = 128;
  constexpr int kExperts = 8;
  using Router = moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>;
  using Layer = moe::ModularKernel<Config, Router, Quant, moe::backends::NoExpertParallel<moe::space::cuda>, Experts>;
  std::mt19937 gen(800);
  std::normal_distribution<float> normal;
  moe::experts::WeightStore<Config, Quant, moe::space::cuda> store(kExperts, kHidden, kIntermediate, true);
  std::vector<float> w13(2 * kIntermediate * kHidden);
  std::vector<float> w2(kHidden * kIntermediate);
  for (int e = 0; e < kExperts; ++e) {
    for (float& v : w13) v = normal(gen) / 16.0F;
    for (float& v : w2) v = normal(gen) / 11.0F;
    store.set_expert(e, w13.data(), w2.data());
  }
  moe::comm::Self<moe::space::cuda> comm;
  Layer layer(comm, store.view(),
              typename Layer::Params{.shape = {kHidden, kIntermediate, kExperts, 2, false},
                                     .max_tokens_per_rank = rows,
                                     .placement = moe::ExpertPlacement(kExperts, 1),
                                     .router = typename Router::Params{kExperts, 2}});
  std::vector<moe::bf16> x(static_cast<std::size_t>(rows * kHidden));
  std::vector<float> z(static_cast<std::size_t>(rows * kExperts));
  for (moe::bf16& v : x) v = moe::from_float<moe::bf16>(normal(gen));
  for (float& v : z) v = normal(gen);
  auto const hidden = upload(x);
  auto const logits = upload(z);
  DeviceBuffer<moe::bf16> output(rows * kHidden);
  layer.forward(moe::make_rows(hidden.data(), rows, kHidden), moe::make_rows(logits.data(), rows, kExperts),
                moe::make_rows(output.data(), rows, kHidden), {}, moe::Stream<moe::space::cuda>{});
  output.copy_to_host(x.data());
  return x;
}

}  // namespace moe_test
