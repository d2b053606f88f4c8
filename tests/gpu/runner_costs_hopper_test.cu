// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_costs_hopper_test.cu: a forward of a block allocates nothing and waits for nothing, with packed weights, cuBLAS, experts
// that route inside, shared experts in the checkpoint's scheme and among the routed ones; and shared experts on a side stream are a path of
// the block's graph beside that of its layer. CudaReference: runner_cases_test.cu; exchanges: exchange_layer_graphs_test.cu.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "device_values.cuh"
#include "forward_costs.cuh"
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/cublas_grouped.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/experts/monolithic.cuh"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/device/stored_shared.hpp"
#include "moe/runner/runner.hpp"
#include "normal_expert.hpp"
#include "on_hopper.hpp"

namespace {

using namespace moe;
using Cuda = space::cuda;
using moe_test::DeviceBuffer;
using moe_test::Values;
constexpr int kHidden = 256, kIntermediate = 256, kExperts = 8, kTopK = 2, kWidth = 128;
constexpr std::int64_t kRows = 48;

struct Config : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};
struct GateParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
};
struct DenseParts : GateParts {
  using Shared = runner::shared::Dense<bf16>;
};
template <class Experts, class Quant>
struct StoredParts : GateParts {
  using Shared = runner::shared::Stored<Experts, bf16, Quant>;
};

/// One shared expert, for the parameters of either policy.
class DenseWeights {
 public:
  template <class Params>
  void set(Params& p) const {
    auto const take = [](auto& to, Values<bf16> const& from, std::int64_t rows, std::int64_t cols) {
      to.codes = make_blocks(from.device.data(), 1, rows, cols);
      to.rows = rows;
      to.cols = cols;
    };
    take(p.weights.w13, w13_, 2 * kWidth, kHidden);
    take(p.weights.w2, w2_, kHidden, kWidth);
  }

 private:
  std::mt19937 gen_{77};
  Values<bf16> w13_{2 * kWidth * kHidden, 0.06F, gen_}, w2_{kHidden * kWidth, 0.09F, gen_};
};
template <class Quant>
class StoredWeights {
 public:
  StoredWeights() { moe_test::set_normal_expert(store_, 0, 77, kHidden, kWidth); }
  template <class Params>
  void set(Params& p) const {
    p.stored = store_.view();
  }

 private:
  experts::WeightStore<runner::shared::ConfigOf<bf16, bf16>, Quant, Cuda> store_{1, kHidden, kWidth, true};
};
template <class Policy>
struct WeightsOfShared {
  using type = DenseWeights;
};
template <class Experts, class Quant>
struct WeightsOfShared<runner::shared::Stored<Experts, bf16, Quant>> {
  using type = StoredWeights<Quant>;
};

/// A block on one rank.
template <class Quant, class Experts, class Parts>
class Block {
 public:
  using Layer = ModularKernel<Config, routing::AnyRouter, Quant, backends::NoExpertParallel<Cuda>, Experts>;
  using R = Runner<Layer, Parts>;
  static constexpr bool kShared = runner::detail::kPresent<typename Parts::Shared>;

  /// beside: the most rows with which shared experts run on a side stream; fused: shared experts among the routed ones.
  Block(std::int64_t beside, int fused)
      : store_(kExperts + fused, kHidden, kIntermediate, true), runner_(comm_, weights(fused), params(beside, fused)) {}

  void forward() { runner_.forward(x(), y(), {}, stream_); }
  void forward_layer() { runner_.layer().forward(x(), make_rows(logits_.device.data(), kRows, std::int64_t{kExperts}), y(), {}, stream_); }
  /// Whether the last forward wrote numbers, some of them not zero.
  bool plausible() {
    stream_.synchronize();
    runner_.check();
    double largest = 0;
    for (float const v : moe_test::floats(output_)) {
      if (!std::isfinite(v)) return false;
      largest = std::max(largest, static_cast<double>(std::abs(v)));
    }
    return largest > 0;
  }
  cudaStream_t stream() const { return stream_; }

 private:
  Rows<bf16 const> x() const { return hidden_.rows(kRows, kHidden); }
  Rows<bf16> y() { return make_rows(output_.data(), kRows, std::int64_t{kHidden}); }
  typename Layer::Weights weights(int fused) {
    for (int e = 0; e < kExperts + fused; ++e) moe_test::set_normal_expert(store_, e, e, kHidden, kIntermediate);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    return store_.view();
  }
  typename R::Params params(std::int64_t beside, int fused) const {
    typename R::Params p{.layer = {.shape = {kHidden, kIntermediate, kExperts + fused, kTopK + fused, false},
                                   .max_tokens_per_rank = kRows,
                                   .placement = ExpertPlacement(kExperts + fused, 1),
                                   .router = {.num_experts = kExperts, .topk = kTopK, .num_fused_shared = fused}}};
    if constexpr (requires { p.layer.experts.fixed_groups; }) p.layer.experts.fixed_groups = true;
    p.gate.weight = gate_.rows(kExperts, kHidden);
    if constexpr (kShared) {
      p.shared.count = 1;
      p.shared.intermediate = kWidth;
      p.shared.activation = {activation::Kind::silu, {}};
      p.shared.overlap_rows = beside;
      shared_.set(p.shared);
    }
    return p;
  }

  std::mt19937 gen_{5};
  comm::Self<Cuda> comm_;
  CudaStream stream_;
  experts::WeightStore<Config, Quant, Cuda> store_;
  typename WeightsOfShared<typename Parts::Shared>::type shared_;
  Values<bf16> hidden_{kRows * kHidden, 1.0F, gen_};
  Values<float> gate_{kExperts * kHidden, 0.06F, gen_}, logits_{kRows * kExperts, 1.0F, gen_};
  DeviceBuffer<bf16> output_{kRows * kHidden};
  R runner_;
};

/// Shared experts before the layer and beside it.
template <class Quant, class Experts, class Parts = DenseParts>
void enqueues_only(int fused = 0) {
  using Tested = Block<Quant, Experts, Parts>;
  for (std::int64_t const beside : {std::int64_t{0}, kRows}) {
    if (!Tested::kShared && beside > 0) continue;
    Tested block(beside, fused);
    std::string const name = text(Experts::kName, ", ", Quant::kName, beside > 0 ? ", shared experts beside the layer" : "");
    SCOPED_TRACE(name);
    moe_test::expect_enqueues_only(block.stream(), name.c_str(), [&] { block.forward(); });
    EXPECT_TRUE(block.plausible());
    moe_test::CapturedCall const whole(block.stream(), [&] { block.forward(); });
    std::size_t const nodes = whole.nodes().all();
    std::size_t const layer = moe_test::graph_nodes(block.stream(), [&] { block.forward_layer(); }).all();
    if (beside == 0) {
      EXPECT_EQ(whole.beside(), std::vector<std::size_t>(nodes, 0)) << "one stream";
      continue;
    }
    ASSERT_GT(nodes, layer + 2) << "a gate, and what adds the shared output";
    EXPECT_EQ(whole.beside(), moe_test::two_paths(2, layer, nodes - layer - 2)) << "no node of one path waits for the other";
  }
}

TEST(RunnerCosts, PackedWeights) {
  if (!moe_test::on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  enqueues_only<quantization::Int4Group128, experts::HopperW4A16>();
  enqueues_only<quantization::Mxfp4W4A16<>, experts::HopperW4A16>();
  enqueues_only<quantization::Nvfp4W4A16, experts::HopperW4A16>();
  enqueues_only<quantization::Int8PerChannel, experts::HopperW8A16>();
  enqueues_only<quantization::Mxfp4Fp8<>, experts::HopperW4A8>();
  enqueues_only<quantization::Int4Fp8<>, experts::HopperW4A8>();
}
TEST(RunnerCosts, CublasWithFixedGroups) { enqueues_only<quantization::None, experts::CublasGrouped>(); }
TEST(RunnerCosts, ExpertsThatRouteInside) {
  enqueues_only<quantization::None, experts::Monolithic<experts::CudaReference>>();
  if (moe_test::on_hopper()) enqueues_only<quantization::Fp8Block<>, experts::Monolithic<experts::HopperContiguous>>();
}
TEST(RunnerCosts, SharedExpertsInTheCheckpointsScheme) {
  if (!moe_test::on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  using Fp8 = quantization::Fp8Block<>;
  using Int4 = quantization::Int4Group128;
  enqueues_only<Fp8, experts::HopperContiguous, StoredParts<experts::HopperContiguous, Fp8>>();
  enqueues_only<Int4, experts::HopperW4A16, StoredParts<experts::HopperW4A16, Int4>>();
}
TEST(RunnerCosts, SharedExpertsAmongTheRoutedOnes) {
  enqueues_only<quantization::None, experts::CudaReference, GateParts>(2);
  if (moe_test::on_hopper()) enqueues_only<quantization::Fp8Block<>, experts::HopperContiguous, GateParts>(2);
}

}  // namespace
