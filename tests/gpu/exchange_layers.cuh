// SPDX-License-Identifier: Apache-2.0
// tests/gpu/exchange_layers.cuh: whole layers over window exchanges between simulated ranks on one GPU, compared with one rank that holds
// all experts. A test of a program includes it in one file.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/simulated_peers.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "tests/gpu/normal_expert.hpp"
#include "tests/gpu/resident_ranks.hpp"

namespace moe_test::exchange_layers {

using namespace moe;
using ExchangeRouter = routing::SoftmaxTopK<routing::Renormalize::yes>;
using Window = comm::SimulatedWindow;
using LowLatency = backends::LowLatency<Window>;
using RankMajor = backends::LowLatencyRankMajor<Window>;
using HighThroughput = backends::HighThroughput<Window>;

struct ExchangeConfig : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
inline constexpr int kHidden = 512;
inline constexpr int kIntermediate = 256;
inline constexpr int kExperts = 12;
inline constexpr int kTopK = 4;
inline constexpr int kRanks = 3;
inline constexpr std::int64_t kMaxTokens = 16;

/// One rank: its tokens, its layer, its stream.
template <class Quant, class Backend, class Experts>
class RankLayer {
 public:
  using Layer = ModularKernel<ExchangeConfig, ExchangeRouter, Quant, Backend, Experts>;

  RankLayer(typename Backend::Comm& comm, int rank, ExpertPlacement const& placement, typename Backend::Params const& params,
            std::int64_t max_tokens = kMaxTokens)
      : store_(placement.num_local(rank), kHidden, kIntermediate, true) {
    for (int p = 0; p < placement.num_physical(); ++p) {
      if (placement.owner(p) == rank) set_normal_expert(store_, placement.local(p), placement.logical(p), kHidden, kIntermediate);
    }
    typename Layer::Params p{.shape = {kHidden, kIntermediate, kExperts, kTopK, false},
                             .max_tokens_per_rank = max_tokens,
                             .placement = placement,
                             .router = typename ExchangeRouter::Params{kExperts, kTopK},
                             .backend = params};
    // The experts' blocks become resident while the dispatch before them still waits: the blocks of all ranks must leave room for the last
    // dispatch.
    if constexpr (requires { p.experts.workers; }) p.experts.workers = 24;
    layer_ = std::make_unique<Layer>(comm, store_.view(), p);
  }
  /// Rows and logits of `rank`.
  void bring(int rank, std::int64_t rows, unsigned seed) {
    rows_ = rows;
    std::mt19937 gen(seed * 31 + static_cast<unsigned>(rank));
    std::normal_distribution<float> normal;
    std::vector<bf16> x(kMaxTokens * kHidden);
    std::vector<float> z(kMaxTokens * kExperts);
    for (auto& v : x) v = from_float<bf16>(normal(gen));
    for (auto& v : z) v = normal(gen);
    hidden_.copy_from_host(x.data());
    logits_.copy_from_host(z.data());
    std::vector<bf16> y(kMaxTokens * kHidden, from_float<bf16>(NAN));
    output_.copy_from_host(y.data());
  }
  void launch() {
    layer_->forward(make_rows(static_cast<bf16 const*>(hidden_.data()), rows_, kHidden),
                    make_rows(static_cast<float const*>(logits_.data()), rows_, kExperts), make_rows(output_.data(), rows_, kHidden), {},
                    stream_);
  }
  std::vector<float> result() {
    stream_.synchronize();
    if constexpr (requires { layer_->exchange().check(); }) layer_->exchange().check();
    std::vector<bf16> y(kMaxTokens * kHidden);
    output_.copy_to_host(y.data());
    std::vector<float> out;
    for (std::int64_t i = 0; i < rows_ * kHidden; ++i) out.push_back(to_float(y[static_cast<std::size_t>(i)]));
    return out;
  }

 private:
  experts::WeightStore<ExchangeConfig, Quant, space::cuda> store_;
  std::unique_ptr<Layer> layer_;
  CudaStream stream_;
  Buffer<bf16, space::cuda> hidden_{kMaxTokens * kHidden};
  Buffer<float, space::cuda> logits_{kMaxTokens * kExperts};
  Buffer<bf16, space::cuda> output_{kMaxTokens * kHidden};
  std::int64_t rows_ = 0;
};

/// Every rank's output equals, within `tolerance`, that of one rank with cuda_reference, with both placements and several numbers of rows.
template <class Quant, class Backend, class Experts>
void layers_equal_one_rank(typename Backend::Params params, char const* what, double tolerance = 1e-2) {
  SCOPED_TRACE(what);
  params.blocks = 10;
  params.programmatic = false;
  params.window.timeout_ns = 3'000'000'000ULL;
  {  // A kernel's first launch must not wait for a rank that waits for another rank: one rank alone launches all kernels first.
    comm::SimulatedGroup group(1);
    comm::SimulatedRank one(group, 0);
    RankLayer<Quant, Backend, Experts> first(one, 0, ExpertPlacement(kExperts, 1), params, kRanks * kMaxTokens);
    first.bring(0, kMaxTokens, 1);
    first.launch();
    first.result();
  }
  for (ExpertPlacement const& placement :
       {ExpertPlacement(kExperts, kRanks), ExpertPlacement(kExperts, kRanks, PlacementStrategy::round_robin)}) {
    comm::SimulatedGroup group(kRanks);
    std::vector<comm::SimulatedRank> comms;
    for (int r = 0; r < kRanks; ++r) comms.emplace_back(group, r);
    std::vector<std::unique_ptr<RankLayer<Quant, Backend, Experts>>> ranks;
    for (int r = 0; r < kRanks; ++r) {
      ranks.push_back(std::make_unique<RankLayer<Quant, Backend, Experts>>(comms[static_cast<std::size_t>(r)], r, placement, params));
    }
    comm::Self<space::cuda> self;
    RankLayer<Quant, backends::NoExpertParallel<space::cuda>, experts::CudaReference> alone(self, 0, ExpertPlacement(kExperts, 1), {});
    for (unsigned seed = 0; seed < 3; ++seed) {
      auto const rows = [&](int r) { return static_cast<std::int64_t>((static_cast<int>(seed) * 5 + r * 7) % 17); };
      for (int r = 0; r < kRanks; ++r) ranks[static_cast<std::size_t>(r)]->bring(r, rows(r), seed);
      check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      for (auto& rank : ranks) rank->launch();
      for (int r = 0; r < kRanks; ++r) {
        auto const got = ranks[static_cast<std::size_t>(r)]->result();
        alone.bring(r, rows(r), seed);
        check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
        alone.launch();
        auto const want = alone.result();
        ASSERT_EQ(got.size(), want.size());
        double error = 0, norm = 1e-30;
        for (std::size_t i = 0; i < got.size(); ++i) {
          ASSERT_TRUE(std::isfinite(got[i])) << "row " << i / kHidden;
          error += std::pow(static_cast<double>(got[i]) - want[i], 2);
          norm += std::pow(static_cast<double>(want[i]), 2);
        }
        EXPECT_LT(std::sqrt(error / norm), tolerance) << "rank " << r << ", round " << seed;
      }
    }
  }
}

}  // namespace moe_test::exchange_layers
