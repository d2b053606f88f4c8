// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_eplb_dual_batch_test.cu: experts move between the expert slots of one GPU while blocks serve: a runner with its gate
// inside and shared experts on a side stream, whole and in two halves, called and replayed from a graph. Every step's output is that of a
// runner without load balancing: bit for bit where a row's bits do not depend on its expert's other rows. Layers without a runner:
// eplb_runtime_hopper_test.cu.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/comm/self.hpp"
#include "moe/comm/simulated_peers.hpp"
#include "moe/core/buffer.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/linear.cuh"
#include "moe/runner/device/row_kernels.cuh"
#include "moe/runner/device/two_queues.hpp"
#include "moe/runner/runner.hpp"
#include "tests/gpu/eplb_device_serving.hpp"

namespace {

using namespace moe_test;
using Self = comm::Self<space::cuda>;
using Window = comm::SimulatedWindow;

/// What surrounds both layers of a model: gate rows of length 1, so that a step along one of them adds as much to its logit as the tests of
/// layers add to their logits, and one shared expert each.
class Surroundings {
 public:
  static constexpr int kWidth = 128, kHidden = EplbConfig::hidden, kExperts = EplbConfig::num_experts;
  static Surroundings const& of(int layer) {
    static Surroundings const all[] = {Surroundings(0), Surroundings(1)};
    return all[layer];
  }
  std::vector<float> gate;
  Buffer<float, space::cuda> device_gate{kExperts * kHidden};
  Buffer<bf16, space::cuda> w13{2 * kWidth * kHidden}, w2{kHidden * kWidth};

 private:
  explicit Surroundings(int layer) : gate(normal(9000 + layer, kExperts * kHidden)) {
    for (int e = 0; e < kExperts; ++e) {
      float* const row = gate.data() + e * kHidden;
      float squares = 0;
      for (int h = 0; h < kHidden; ++h) squares += row[h] * row[h];
      for (int h = 0; h < kHidden; ++h) row[h] /= std::sqrt(squares);
    }
    device_gate.copy_from_host(gate.data());
    fill(w13, 9100 + layer);
    fill(w2, 9200 + layer);
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  static void fill(Buffer<bf16, space::cuda>& to, int seed) {
    std::vector<bf16> values;
    for (float const v : normal(seed, to.size(), 0.05F)) values.push_back(from_float<bf16>(v));
    to.copy_from_host(values.data());
  }
};

struct WholeParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Shared = runner::shared::Dense<bf16>;
};
struct HalvesParts : WholeParts {
  using DualBatch = runner::dual_batch::Halves;
};
struct InvariantConfig : EplbConfig {
  static constexpr bool batch_invariant = true;
};

/// Layers with all that surrounds them (eplb_device_serving.hpp).
template <class Parts, class ConfigT = EplbConfig>
struct BlocksWith : EplbFixedLayer {
  using Config = ConfigT;
  template <class Layer>
  using Block = Runner<Layer, Parts>;

  static std::vector<float> const& gate(int layer) { return Surroundings::of(layer).gate; }
  template <class Params>
  void set_block(Params& p, int layer) const {
    constexpr int kHidden = Surroundings::kHidden, kWidth = Surroundings::kWidth;
    Surroundings const& around = Surroundings::of(layer);
    p.gate.weight = make_rows(around.device_gate.data(), std::int64_t{Surroundings::kExperts}, std::int64_t{kHidden});
    p.shared.count = 1;
    p.shared.intermediate = kWidth;
    p.shared.activation = {activation::Kind::silu, {}};
    auto const take = [](auto& to, Buffer<bf16, space::cuda> const& from, std::int64_t rows, std::int64_t cols) {
      to.codes = make_blocks(from.data(), 1, rows, cols);
      to.rows = rows;
      to.cols = cols;
    };
    take(p.shared.weights.w13, around.w13, 2 * kWidth, kHidden);
    take(p.shared.weights.w2, around.w2, kHidden, kWidth);
    if constexpr (runner::detail::kPresent<typename Parts::DualBatch>) p.dual_batch.min_rows = 2;  // every batch of these tests
  }
};

/// same_bits: a row's bits depend neither on the rows beside it nor on the slot that holds its expert, and its choices are added in the
/// order of the choice.
template <class Parts, class Config, class Quant, class Backend, class Experts>
void serves(typename Backend::Comm& tokens, bool same_bits) {
  Self weights;
  eplb::SelfGroup group;
  for (MoveMode const mode : {MoveMode::pause, MoveMode::stepwise, MoveMode::background}) {
    for (bool const graphs : {false, true}) {
      expect_same_while_moving<Quant, Backend, Experts>(tokens, weights, group, mode, graphs, BlocksWith<Parts, Config>{}, same_bits);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}
/// Over windows of one rank.
template <class Quant, template <class> class Backend, class Experts, class Config = EplbConfig>
void serves_in_halves(bool same_bits) {
  comm::SimulatedGroup group(1);
  comm::SimulatedRank rank(group, 0);
  serves<HalvesParts, Config, Quant, Backend<Window>, Experts>(rank, same_bits);
}

TEST(RunnerEplb, WholeBatches) {
  Self tokens;
  serves<WholeParts, EplbConfig, quantization::None, backends::NoExpertParallel<space::cuda>, experts::CudaReference>(tokens, true);
}
TEST(RunnerEplb, HalvesSummedByTheExperts) { serves_in_halves<quantization::None, backends::HighThroughput, experts::CudaReference>(true); }
TEST(RunnerEplb, HalvesSummedByTheExchange) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  serves_in_halves<quantization::Fp8Block<>, backends::LowLatency, experts::HopperMasked, InvariantConfig>(true);
}
// Both halves use the layer's kernel, which packs its weights again. How K is cut depends on an expert's rows, so a float32 sum may round
// to a neighbouring bf16 value (2^-8 relative). Estimate for random weights, relative to the largest output: 0.010 from the 256
// intermediates, 2^-8 from each choice's output and 2^-8 from their sum: 0.018, below the bound 0.03 of expect_near_outputs().
TEST(RunnerEplb, HalvesOfPackedWeights) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  serves_in_halves<quantization::Int4Group128, backends::HighThroughput, experts::HopperW4A16>(false);
}

}  // namespace
