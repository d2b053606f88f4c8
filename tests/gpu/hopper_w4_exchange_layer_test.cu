// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_w4_exchange_layer_test.cu: whole layers with weights of 4 and 8 bits over LowLatency and HighThroughput, between
// simulated ranks on one GPU, against one rank that holds all experts. Experts are limited by Params::workers, so that all ranks' kernels
// are resident together.
#include <gtest/gtest.h>

#include <type_traits>

#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/schemes.hpp"
#include "on_hopper.hpp"
#include "tests/gpu/exchange_layers.cuh"

namespace {

using namespace moe;
namespace exchange_layers = moe_test::exchange_layers;
using exchange_layers::HighThroughput;
using exchange_layers::LowLatency;
using exchange_layers::RankMajor;
using quantization::Int4Fp8;

template <class Quant_, class Experts_>
struct Pair {
  using Quant = Quant_;
  using Experts = Experts_;
};
template <class Quant>
using A8 = Pair<Quant, experts::HopperW4A8>;
template <class Quant>
using A16 = Pair<Quant, experts::HopperW4A16>;
using Pairs = testing::Types<A8<quantization::Mxfp4Fp8<>>, A8<Int4Fp8<128>>, A8<Int4Fp8<32, true>>, A16<quantization::Mxfp4W4A16<>>,
                             A16<quantization::Int4Group128>, A16<quantization::WNa16<4, 32, true>>,
                             Pair<quantization::Int8PerChannel, experts::HopperW8A16>>;

template <class P>
class PackedExchangeLayer : public testing::Test {
 protected:
  static_assert(requires(typename P::Experts::Params params) { params.workers; });
  void SetUp() override {
    if (!moe_test::on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
  /// In e4m3 a code of the intermediate near the border of two may differ, and ranks have few rows.
  static constexpr double kTolerance = std::is_same_v<typename P::Experts, experts::HopperW4A8> ? 2e-2 : 1e-2;
  template <class Backend>
  static void equals_one_rank(typename Backend::Params const& params, char const* what) {
    exchange_layers::layers_equal_one_rank<typename P::Quant, Backend, typename P::Experts>(params, what, kTolerance);
  }
};
TYPED_TEST_SUITE(PackedExchangeLayer, Pairs);

TYPED_TEST(PackedExchangeLayer, BatchedFormat) {
  TestFixture::template equals_one_rank<LowLatency>({}, "a row for each expert, outputs written into the window");
  TestFixture::template equals_one_rank<LowLatency>({.zero_copy = false}, "outputs copied");
  TestFixture::template equals_one_rank<LowLatency>({.deduplicate = true}, "a row for each rank, gathered by index");
  TestFixture::template equals_one_rank<LowLatency>({.masks = true}, "masks: rows at fixed places, gathered by index");
}
TYPED_TEST(PackedExchangeLayer, StandardFormat) {
  TestFixture::template equals_one_rank<RankMajor>({}, "rank major");
  TestFixture::template equals_one_rank<HighThroughput>({}, "high throughput");
}

}  // namespace
