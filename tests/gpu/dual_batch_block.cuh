// SPDX-License-Identifier: Apache-2.0
// tests/gpu/dual_batch_block.cuh: one rank's block on the device, whose forwards run whole or in two halves, with fp8 Hopper experts and
// shared experts; and what must hold of it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/device/two_queues.hpp"
#include "moe/runner/runner.hpp"
#include "tests/expect_error.hpp"

namespace moe_test {

using namespace moe;

/// Batch invariant, so that a half's rows have the bits that they have in the whole batch.
struct DualConfig : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
  static constexpr bool batch_invariant = true;
};
struct DualParts : RunnerDefaults {
  using Shared = runner::shared::Dense<bf16>;
  using DualBatch = runner::dual_batch::Halves;
};

/// A forward calls the experts once, or in two halves twice.
struct CountExperts : NoProbe {
  int calls = 0;
  void begin(Phase p) { calls += p == Phase::experts ? 1 : 0; }
};

/// When FailingExperts throw, on the host, before they enqueue anything.
struct FailingCall {
  /// The call of apply() that throws, from now on: 1 is the next; 0: none.
  static inline int fails_on = 0;
  static void count() {
    if (fails_on > 0 && --fails_on == 0) throw Error(ErrorCode::internal, "experts: injected");
  }
};
template <class Inner>
struct FailingExperts : Inner {
  template <class Config, class Quant, ActivationFormat Format>
  class Kernel : public Inner::template Kernel<Config, Quant, Format> {
    using Base = typename Inner::template Kernel<Config, Quant, Format>;

   public:
    using Base::Base;
    template <class Tokens, class Out>
    void apply(Tokens const& tokens, Out out, cudaStream_t stream) const {
      FailingCall::count();
      Base::apply(tokens, out, stream);
    }
  };
};

template <class Backend, class Experts>
class DualBlock {
 public:
  static constexpr int kHidden = 512, kIntermediate = 256, kTopK = 4, kLocal = 4, kMost = 300, kSharedWidth = 128;
  static constexpr int kLayerSeeds = 100'000;
  using Quant = quantization::Fp8Block<>;
  using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
  using Layer = ModularKernel<DualConfig, Router, Quant, Backend, Experts>;
  using Block = Runner<Layer, DualParts>;

  /// workers: as runner::dual_batch::Halves::Params::expert_workers. Blocks of another `layer` have other weights and rows. overlap_rows:
  /// up to how many rows the shared experts run on a side stream.
  DualBlock(typename Backend::Comm& comm, typename Backend::Params const& params, int workers, int layer = 0, std::int64_t overlap_rows = 0)
      : rank_(comm.rank()),
        layer_(layer),
        num_experts_(kLocal * comm.size()),
        store_(kLocal, kHidden, kIntermediate, true),
        shared13_(device<bf16>(901 + kLayerSeeds * layer, 2 * kSharedWidth * kHidden, 0.05F)),
        shared2_(device<bf16>(902 + kLayerSeeds * layer, kHidden * kSharedWidth, 0.05F)),
        hidden_(kMost * kHidden),
        output_(kMost * kHidden),
        logits_(std::int64_t{kMost} * num_experts_) {
    for (int e = 0; e < kLocal; ++e) {
      int const seed = kLayerSeeds * layer + 2 * (rank_ * kLocal + e);
      store_.set_expert(e, normals(10 + seed, 2 * kIntermediate * kHidden, 0.05F).data(),
                        normals(11 + seed, kHidden * kIntermediate, 0.05F).data());
    }
    typename Block::Params p{.layer = {.shape = {kHidden, kIntermediate, num_experts_, kTopK, false},
                                       .max_tokens_per_rank = kMost,
                                       .placement = ExpertPlacement(num_experts_, comm.size()),
                                       .router = {num_experts_, kTopK},
                                       .backend = params}};
    p.shared.count = 1;
    p.shared.intermediate = kSharedWidth;
    p.shared.activation = {activation::Kind::silu, {}};
    p.shared.overlap_rows = overlap_rows;
    auto set = [](auto& to, bf16 const* codes, std::int64_t rows, std::int64_t cols) {
      to.codes = make_blocks(codes, 1, rows, cols);
      to.rows = rows;
      to.cols = cols;
    };
    set(p.shared.weights.w13, shared13_.data(), 2 * kSharedWidth, kHidden);
    set(p.shared.weights.w2, shared2_.data(), kHidden, kSharedWidth);
    p.dual_batch = {.min_rows = 2, .expert_workers = workers};
    block_.emplace(comm, store_.view(), p);
  }

  /// Other rows and logits of this rank; the output is NaN.
  void bring(int seed) {
    std::vector<bf16> x, nan(kMost * kHidden, from_float<bf16>(NAN));
    int const first = kLayerSeeds * layer_ + 1000 * seed + rank_;
    for (float const v : normals(first, kMost * kHidden, 1.0F)) x.push_back(from_float<bf16>(v));
    hidden_.copy_from_host(x.data());
    output_.copy_from_host(nan.data());
    logits_.copy_from_host(normals(first + 500, std::int64_t{kMost} * num_experts_, 1.0F).data());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  void launch(std::int64_t rows, bool halves) { launch(rows, halves, stream_); }
  void launch(std::int64_t rows, bool halves, cudaStream_t stream) {
    block_->decide_dual_batch(halves);
    forward(rows, -1, stream);
  }
  /// With the verdict that holds: whether the batch ran in two halves. Rows from `valid` on are padding; -1: none.
  bool forward(std::int64_t rows, std::int64_t valid, cudaStream_t stream) {
    CountExperts probe;
    block_->forward(make_rows(static_cast<bf16 const*>(hidden_.data()), rows, kHidden),
                    make_rows(static_cast<float const*>(logits_.data()), rows, num_experts_), make_rows(output_.data(), rows, kHidden),
                    {.num_valid_rows = valid}, stream, probe);
    EXPECT_TRUE(probe.calls == 1 || probe.calls == 2) << probe.calls << " calls of the experts";
    return probe.calls == 2;
  }
  /// The bits of the output, once the stream of launch() has finished.
  std::vector<std::uint16_t> result(std::int64_t rows) {
    stream_.synchronize();
    block_->check();
    return bits(rows);
  }
  /// The same of a forward that is known to have finished.
  std::vector<std::uint16_t> bits(std::int64_t rows) {
    std::vector<bf16> y(kMost * kHidden);
    output_.copy_to_host(y.data());
    for (std::int64_t i = 0; i < rows * kHidden; ++i) EXPECT_TRUE(std::isfinite(to_float(y[static_cast<std::size_t>(i)]))) << "value " << i;
    std::vector<std::uint16_t> out(static_cast<std::size_t>(rows * kHidden));
    std::memcpy(out.data(), y.data(), 2 * out.size());
    return out;
  }
  bf16* hidden() { return hidden_.data(); }
  bf16 const* output() const { return output_.data(); }
  Block& block() { return *block_; }
  cudaStream_t stream() const { return stream_; }

  /// Whole and in halves: the same bits, called and from a graph that is replayed with other rows.
  void expect_same_bits(std::int64_t rows) {
    SCOPED_TRACE(text(Backend::kName, ", ", rows, " rows"));
    CudaGraph graph;
    for (int seed = 1; seed <= 3; ++seed) {
      bring(seed);
      launch(rows, false);
      auto const want = result(rows);
      bring(seed);
      launch(rows, true);
      EXPECT_EQ(result(rows), want) << "called";
      bring(seed);
      if (!graph) graph = CudaGraph(stream_, [&] { launch(rows, true); });
      graph.launch(stream_);
      EXPECT_EQ(result(rows), want) << "replayed";
    }
  }

 private:
  static std::vector<float> normals(int seed, std::int64_t n, float sigma) {
    std::mt19937 gen(static_cast<unsigned>(seed));
    std::normal_distribution<float> normal(0.0F, sigma);
    std::vector<float> out(static_cast<std::size_t>(n));
    for (float& v : out) v = normal(gen);
    return out;
  }
  template <class T>
  static Buffer<T, space::cuda> device(int seed, std::int64_t n, float sigma) {
    std::vector<T> values;
    for (float const v : normals(seed, n, sigma)) values.push_back(from_float<T>(v));
    Buffer<T, space::cuda> out(n);
    out.copy_from_host(values.data());
    return out;
  }

  int rank_;
  int layer_;
  int num_experts_;
  CudaStream stream_;
  experts::WeightStore<DualConfig, Quant, space::cuda> store_;
  Buffer<bf16, space::cuda> shared13_, shared2_, hidden_, output_;
  Buffer<float, space::cuda> logits_;
  std::optional<Block> block_;
};

}  // namespace moe_test
