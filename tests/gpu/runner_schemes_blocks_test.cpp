// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_schemes_blocks_test.cpp: every family's block in the schemes that runner_experts_blocks_test.cpp leaves out, in both
// formats, against the block in the host space. Every scheme runs a quarter of the families, so that every family meets several schemes.
// moe-alone: one block on the device and one on the host for each scheme take a compiler as long as the other tests of blocks together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "batched_exchange.hpp"
#include "block_file.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/hopper/packed_store.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/experts/weights.hpp"
#include "moe/models/device_block.hpp"
#include "moe/models/fused_shared.hpp"
#include "moe/quantization/schemes.hpp"
#include "on_hopper.hpp"
#include "widened_block.hpp"

namespace {

using namespace moe;
using Cuda = space::cuda;
using Local = backends::NoExpertParallel<Cuda>;
using moe_test::BlockFile;
using moe_test::each_block_file;
using moe_test::Numbers;
using moe_test::relative_error;
using moe_test::Weights;
using quantization::Int4Fp8;
using quantization::WNa16;
using W4A16 = experts::HopperW4A16;
using W8A16 = experts::HopperW8A16;
using W4A8 = experts::HopperW4A8;
using W4A8Fp8Group32 = quantization::W4A8<quantization::Fp8Codec<>, 32>;

/// Quantised weights have their zero points in the middle: these get others, under which the same codes are other weights.
template <class Config, class Quant, class Space>
void change_zero_points(experts::WeightStore<Config, Quant, Space>& store) {
  if constexpr (std::is_same_v<typename Quant::WeightScale, quantization::ScaleZero>) {
    store.visit_tensors([](std::string_view name, auto view) {
      if constexpr (std::is_same_v<typename decltype(view)::value_type, quantization::ScaleZero>) {
        ASSERT_TRUE(name.ends_with("_scale")) << name;
        std::vector<quantization::ScaleZero> scales(view.size());
        std::size_t const bytes = scales.size() * sizeof(quantization::ScaleZero);
        Memory<Space>::copy_to_host(scales.data(), view.data_handle(), bytes);
        for (std::size_t i = 0; i < scales.size(); ++i) scales[i].zero = static_cast<float>(5 + i * i % 7);  // 5, 6, 7 and 9
        Memory<Space>::copy_from_host(view.data_handle(), scales.data(), bytes);
      }
    });
  }
}
/// Quantises the experts into a store.
template <class Config, class Quant, class Space>
void fill_store(experts::WeightStore<Config, Quant, Space>& store, Weights const& w) {
  std::int64_t const hidden = w.description.expert_hidden();
  for (std::int64_t e = 0; e < store.num_local(); ++e) {
    store.set_expert(e, w.w13.data() + e * w.w13_rows() * hidden, w.w2.data() + e * hidden * w.intermediate);
  }
  change_zero_points(store);
}
/// Into one of packed experts, which has no zero points that could be changed afterwards.
template <class Storages, class Config, class Quant, class Space>
void fill_store(experts::detail::PackedStore<Storages, Config, Quant, Space>& store, Weights const& w) {
  experts::WeightStore<Config, Quant> codes(store.num_local(), w.description.expert_hidden(), w.intermediate,
                                            w.w13_rows() == 2 * w.intermediate);
  fill_store(codes, w);
  auto const view = codes.view();
  store.pack(0, store.num_local(),
             {view.w13.codes.data_handle(), view.w2.codes.data_handle(), view.w13.scales.data_handle(), view.w2.scales.data_handle()});
}
/// For the constructor of a block.
auto fill_from(Weights const& w) {
  return [&w](auto& store) { fill_store(store, w); };
}

/// The families with number `turn` in every four, in sizes that all kernels take and rows of bf16: test(weights, rows, file).
template <class Test>
int each_fourth_block(int turn, Test test) {
  int at = 0, count = 0;
  each_block_file([&](BlockFile const& f) {
    if (at++ % 4 != turn % 4 || f.description.expert_norm) return;
    Weights const weights = moe_test::widened(io::load_block<float>(f.store), f.name);
    std::vector<float> hidden;
    Numbers(f.name + " rows").fill(hidden, f.rows() * weights.description.hidden, 1.0);
    test(weights, hidden, f);
    ++count;
  });
  EXPECT_GE(8 * count, at) << "of " << at << " files";
  return count;
}

/// On the device from its input to its output, enqueued and from a graph.
template <class Quant, class Experts>
std::vector<float> block_output(Weights const& weights, std::vector<float> const& hidden, std::vector<std::int64_t> const& tokens) {
  std::int64_t const width = weights.description.hidden, rows = static_cast<std::int64_t>(hidden.size()) / width;
  comm::Self<Cuda> self;
  models::DeviceBlock<Quant, Local, Experts> block(self, weights, ExpertPlacement(static_cast<int>(weights.experts.size()), 1), rows,
                                                   Quant{}, {}, {}, fill_from(weights));
  return moe_test::device_output(self, block, runner::capture_obstacle(block.runner()), width, hidden, tokens);
}

template <class Quant_, class Experts_, int Turn, int Permille>
struct Scheme {
  using Quant = Quant_;
  using Experts = Experts_;
  static constexpr int kTurn = Turn;
  /// Relative, of the whole output. Latent rows are rounded to bf16 on the device alone, so that some get another code: of 4 bits, up to a
  /// third of the value away.
  static double tolerance(Weights const& w) {
    constexpr bool kFourBitRows = Quant::kPayloadDType == DType::e2m1;
    return kFourBitRows && w.description.latent > 0 ? 0.1 : Permille * 1e-3;
  }
};

template <class S>
class RunnerSchemes : public testing::Test {
 protected:
  void SetUp() override {
    if (!moe_test::on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
};
// Tolerances of rows as they are and of rows in e4m3 as in runner_experts_blocks_test.cpp.
using Schemes =
    testing::Types<Scheme<WNa16<4, 32, true>, W4A16, 0, 15>, Scheme<WNa16<4, 64, true>, W4A16, 1, 15>,
                   Scheme<WNa16<4, 128, true>, W4A16, 2, 15>, Scheme<WNa16<4, 64>, W4A16, 3, 15>, Scheme<Int4Fp8<32, true>, W4A8, 0, 40>,
                   Scheme<Int4Fp8<64, true>, W4A8, 1, 40>, Scheme<Int4Fp8<128, true>, W4A8, 2, 40>, Scheme<Int4Fp8<64>, W4A8, 3, 40>,
                   Scheme<quantization::Fp8PerChannel<>, W8A16, 0, 15>, Scheme<quantization::Mxfp8W8A16<>, W8A16, 1, 15>,
                   Scheme<quantization::Int8PerToken, experts::HopperContiguous, 2, 20>, Scheme<quantization::Mxfp8<>, W8A16, 3, 40>,
                   Scheme<quantization::Mxfp4<>, W4A16, 0, 40>, Scheme<quantization::Mxfp4W4A8<>, W4A16, 1, 40>,
                   Scheme<quantization::Nvfp4, W4A16, 2, 40>, Scheme<quantization::W4A8Fp8, W4A16, 3, 40>,
                   Scheme<W4A8Fp8Group32, W4A16, 0, 40>, Scheme<quantization::W4A8Int8, W4A16, 1, 20>>;
TYPED_TEST_SUITE(RunnerSchemes, Schemes);

TYPED_TEST(RunnerSchemes, EqualTheHost) {
  using Quant = typename TypeParam::Quant;
  using Experts = typename TypeParam::Experts;
  each_fourth_block(TypeParam::kTurn, [](Weights const& weights, std::vector<float> const& hidden, BlockFile const& f) {
    std::vector<float> const want = moe_test::host_output<Quant>(weights, hidden, f.tokens, fill_from(weights));
    EXPECT_LT(relative_error(block_output<Quant, Experts>(weights, hidden, f.tokens), want), TypeParam::tolerance(weights));
    if (!models::fusing_obstacle(weights).empty()) return;
    Weights const fused = models::with_fused_shared(weights);
    std::vector<float> const of_fused = moe_test::host_output<Quant>(fused, hidden, f.tokens, fill_from(fused));
    EXPECT_LT(relative_error(block_output<Quant, Experts>(fused, hidden, f.tokens), of_fused), TypeParam::tolerance(fused)) << "fused";
  });
}

template <class S>
class BatchedSchemes : public RunnerSchemes<S> {};
using SchemesInBatches = testing::Types<Scheme<WNa16<4, 32, true>, W4A16, 1, 15>, Scheme<quantization::Nvfp4W4A16, W4A16, 2, 15>,
                                        Scheme<quantization::Mxfp8W8A16<>, W8A16, 3, 15>, Scheme<Int4Fp8<64, true>, W4A8, 0, 40>,
                                        Scheme<quantization::Mxfp4Fp8<>, W4A8, 1, 40>, Scheme<quantization::Mxfp8<>, W8A16, 2, 40>,
                                        Scheme<quantization::W4A8Int8, W4A16, 3, 20>>;
TYPED_TEST_SUITE(BatchedSchemes, SchemesInBatches);

// Gate, projections and shared experts on the host around the layer on the device.
TYPED_TEST(BatchedSchemes, EqualTheHost) {
  using Quant = typename TypeParam::Quant;
  using Block = models::BlockRunner<Quant, moe_test::LocalBatches, typename TypeParam::Experts, bf16, bf16, float>;
  each_fourth_block(TypeParam::kTurn, [](Weights const& weights, std::vector<float> const& hidden, BlockFile const& f) {
    // A batch has no weights; a backend would apply them on the way.
    if (weights.description.weight_on == io::WeightOn::expert_input) return;
    typename moe_test::LocalBatches::Comm self;
    Block block(self, Weights(weights), ExpertPlacement(static_cast<int>(weights.experts.size()), 1), f.rows(), Quant{}, {}, {},
                fill_from(weights));
    std::vector<float> got(hidden.size());
    block.forward(hidden, f.tokens.empty() ? nullptr : f.tokens.data(), got);
    std::vector<float> const want = moe_test::host_output<Quant>(weights, hidden, f.tokens, fill_from(weights));
    EXPECT_LT(relative_error(got, want), TypeParam::tolerance(weights));
  });
}

}  // namespace
