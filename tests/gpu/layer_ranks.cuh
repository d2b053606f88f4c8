// SPDX-License-Identifier: Apache-2.0
// tests/gpu/layer_ranks.cuh: the ranks of a small layer on one GPU, driven by one thread, over simulated windows or a communicator of one
// rank; CudaReference experts, rows and routing of the test.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/all_to_all_v.cuh"
#include "moe/backends/collective/device/gather_exchange.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/backends/window/device/one_sided/exchange.hpp"
#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/backends/window/device/two_sided/exchange.hpp"
#include "moe/comm/self.hpp"
#include "moe/comm/simulated_peers.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "tests/gpu/normal_expert.hpp"
#include "tests/gpu/relative_error.hpp"
#include "tests/gpu/resident_ranks.hpp"

namespace moe_test {

using namespace moe;
using Cuda = space::cuda;
using Window = comm::SimulatedWindow;

struct RankConfig : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
inline constexpr int kHidden = 256, kIntermediate = 128, kExperts = 12, kTopK = 3, kRanks = 3;
inline constexpr std::int64_t kMost = 12;
using RankStore = experts::WeightStore<RankConfig, quantization::None, Cuda>;

/// The experts of a rank; an expert has the same weights on every rank.
inline RankStore store_of(std::vector<int> const& experts) {
  RankStore store(static_cast<std::int64_t>(experts.size()), kHidden, kIntermediate, true);
  for (std::size_t i = 0; i < experts.size(); ++i)
    set_normal_expert(store, static_cast<std::int64_t>(i), experts[i], kHidden, kIntermediate);
  return store;
}
/// The logical experts that a rank owns, in the order of its weights.
inline std::vector<int> experts_of(ExpertPlacement const& placement, int rank) {
  std::vector<int> out;
  for (std::int32_t const p : placement.local_to_physical(rank)) out.push_back(placement.logical(p));
  return out;
}

/// The communicators of all ranks of this process.
template <class Comm>
class Comms {
 public:
  explicit Comms(int ranks) : group_(ranks) {
    for (int r = 0; r < ranks; ++r) ranks_.emplace_back(group_, r);
  }
  int size() const { return group_.size(); }
  Comm& at(int r) { return ranks_[static_cast<std::size_t>(r)]; }

 private:
  comm::SimulatedGroup group_;
  std::vector<Comm> ranks_;
};
template <>
class Comms<comm::Self<Cuda>> {
 public:
  explicit Comms(int) {}
  static constexpr int size() { return 1; }
  comm::Self<Cuda>& at(int) { return self_; }

 private:
  comm::Self<Cuda> self_;
};

/// Few blocks, so that the kernels of all ranks fit on the GPU, and sizes that no host reads.
template <class Params>
Params shared_gpu(Params params) {
  if constexpr (requires { params.blocks; }) params.blocks = 8;
  if constexpr (requires { params.programmatic; }) params.programmatic = false;
  if constexpr (requires { params.window.timeout_ns; }) params.window.timeout_ns = 3'000'000'000ULL;
  if constexpr (requires { params.sizes; }) {
    if (params.sizes == backends::Sizes::automatic) params.sizes = backends::Sizes::fixed;
  }
  return params;
}

/// One rank: its layer, its arrays at fixed addresses, its stream, its graph.
template <class Backend, class Experts = experts::CudaReference>
class LayerRank {
 public:
  using Layer = ModularKernel<RankConfig, routing::AnyRouter, quantization::None, Backend, Experts>;

  /// experts: the rank's, in the order of its weights. p: all but the shape, the most rows and the backend's parameters.
  LayerRank(typename Backend::Comm& comm, std::vector<int> const& experts, typename Layer::Params p)
      : slots_(p.router.topk + p.router.num_fused_shared), num_experts_(p.router.num_experts), store_(store_of(experts)) {
    p.shape = {kHidden, kIntermediate, num_experts_ + p.router.num_fused_shared, slots_, false};
    p.max_tokens_per_rank = kMost;
    p.backend = shared_gpu(p.backend);
    layer_ = std::make_unique<Layer>(comm, store_.view(), p);
  }
  ~LayerRank() { stream_.synchronize(); }

  /// Rows of a seed, with logits, and routing of which rows at or past `valid` have no expert. The output is NaN.
  void bring(unsigned seed, std::int64_t valid) {
    std::mt19937 gen(seed);
    std::normal_distribution<float> normal;
    std::vector<bf16> x(kMost * kHidden);
    std::vector<float> logits(static_cast<std::size_t>(kMost * num_experts_)), weights(static_cast<std::size_t>(kMost * slots_));
    std::vector<std::int32_t> ids(weights.size(), kNoExpert), all(static_cast<std::size_t>(num_experts_));
    for (auto& v : x) v = from_float<bf16>(normal(gen));
    for (auto& v : logits) v = normal(gen);
    for (std::size_t e = 0; e < all.size(); ++e) all[e] = static_cast<std::int32_t>(e);
    for (std::int64_t t = 0; t < kMost; ++t) {
      std::shuffle(all.begin(), all.end(), gen);
      for (int j = 0; j < slots_; ++j) {
        auto const slot = static_cast<std::size_t>(t * slots_ + j);
        weights[slot] = std::abs(normal(gen));
        if (t < valid) ids[slot] = all[static_cast<std::size_t>(j)];
      }
    }
    hidden_.copy_from_host(x.data());
    logits_.copy_from_host(logits.data());
    route(ids, weights);
    check_cuda(cudaMemset(output_.data(), 0xff, output_.bytes()), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  /// The routing of the next forward_routed().
  void route(std::vector<std::int32_t> const& ids, std::vector<float> const& weights) {
    ids_.copy_from_host(ids.data());
    weights_.copy_from_host(weights.data());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");  // the rank's stream does not wait for the default stream
  }
  void forward(std::int64_t rows, ForwardOptions const& options = {}) { forward(rows, options, stream_); }
  void forward(std::int64_t rows, ForwardOptions const& options, cudaStream_t stream) {
    layer_->forward(x(rows), make_rows(static_cast<float const*>(logits_.data()), rows, num_experts_), y(rows), options, stream);
  }
  void forward_routed(std::int64_t rows) {
    layer_->forward_routed(x(rows), make_rows(static_cast<std::int32_t const*>(ids_.data()), rows, slots_),
                           make_rows(static_cast<float const*>(weights_.data()), rows, slots_), y(rows), {}, stream_);
  }
  /// forward_routed() of all rows as a graph.
  void capture() {
    replay_ = CudaGraph(stream_, [this] { forward_routed(kMost); });
  }
  void replay() { replay_.launch(stream_); }
  /// [rows, H], after the stream and the exchange's check.
  std::vector<float> result(std::int64_t rows) {
    layer_->wait(stream_);
    stream_.synchronize();
    layer_->check();
    std::vector<bf16> values(static_cast<std::size_t>(output_.size()));
    output_.copy_to_host(values.data());
    std::vector<float> out;
    for (std::int64_t i = 0; i < rows * kHidden; ++i) out.push_back(to_float(values[static_cast<std::size_t>(i)]));
    return out;
  }
  template <class T>
  std::vector<T> routed(T const* from, std::int64_t rows) const {
    std::vector<T> out(static_cast<std::size_t>(rows * slots_));
    if (rows > 0) Memory<Cuda>::copy_to_host(out.data(), from, out.size() * sizeof(T));
    return out;
  }
  /// The layer's choice of the last forward().
  std::vector<std::int32_t> topk_ids(std::int64_t rows) { return routed<std::int32_t>(layer_->topk_ids().data_handle(), rows); }
  std::vector<float> topk_weights(std::int64_t rows) { return routed<float>(layer_->topk_weights().data_handle(), rows); }
  Layer& layer() { return *layer_; }
  CudaStream& stream() { return stream_; }
  Rows<bf16 const> x(std::int64_t rows) const { return make_rows(static_cast<bf16 const*>(hidden_.data()), rows, kHidden); }
  Rows<bf16> y(std::int64_t rows) { return make_rows(output_.data(), rows, kHidden); }

 private:
  int slots_, num_experts_;
  RankStore store_;
  std::unique_ptr<Layer> layer_;
  CudaStream stream_;
  CudaGraph replay_;
  Buffer<bf16, Cuda> hidden_{kMost * kHidden}, output_{kMost * kHidden};
  Buffer<float, Cuda> logits_{kMost * num_experts_}, weights_{kMost * slots_};
  Buffer<std::int32_t, Cuda> ids_{kMost * slots_};
};

/// One rank that holds `experts` experts and takes `slots` of them for a row, all given by the test.
class OneRank : public LayerRank<backends::NoExpertParallel<Cuda>> {
 public:
  OneRank(int experts, int slots)
      : LayerRank(self(), all(experts), {.placement = ExpertPlacement(experts, 1), .router = {.num_experts = experts, .topk = slots}}) {}

 private:
  static comm::Self<Cuda>& self() {
    static comm::Self<Cuda> comm;
    return comm;
  }
  static std::vector<int> all(int n) {
    std::vector<int> out(static_cast<std::size_t>(n));
    for (int e = 0; e < n; ++e) out[static_cast<std::size_t>(e)] = e;
    return out;
  }
};

}  // namespace moe_test
