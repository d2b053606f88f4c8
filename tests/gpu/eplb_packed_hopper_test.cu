// SPDX-License-Identifier: Apache-2.0
// tests/gpu/eplb_packed_hopper_test.cu: experts that were packed before their layers were constructed move between the expert slots of one
// GPU as bricks and factors while the layers serve. Nothing is packed again.
#include <gtest/gtest.h>

#include "batched_exchange.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/routing/device/route.cuh"
#include "tests/gpu/eplb_one_gpu.hpp"

namespace {

using namespace moe_test;

struct PackedLayer : EplbFixedLayer {
  using OwnStores = void;  // StoreOf
};

class EplbPacked : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
};

TEST_F(EplbPacked, HopperW4A16) {
  on_one_gpu<PackedLayer, quantization::Mxfp4W4A16<>, experts::HopperW4A16>();
  on_one_gpu<PackedLayer, quantization::WNa16<4, 32, true>, experts::HopperW4A16>();
  on_one_gpu<PackedLayer, quantization::Nvfp4W4A16, experts::HopperW4A16>();
}
TEST_F(EplbPacked, HopperW8A16) {
  on_one_gpu<PackedLayer, quantization::Int8PerChannel, experts::HopperW8A16>();
  on_one_gpu<PackedLayer, quantization::Mxfp8W8A16<>, experts::HopperW8A16>();
}
TEST_F(EplbPacked, HopperW4A8) {
  on_one_gpu<PackedLayer, quantization::Mxfp4Fp8<>, experts::HopperW4A8>();
  on_one_gpu<PackedLayer, quantization::Int4Fp8<>, experts::HopperW4A8>();
}
TEST_F(EplbPacked, Batched) {
  on_one_gpu<PackedLayer, quantization::Int4Group128, experts::HopperW4A16, LocalBatches>();
  on_one_gpu<PackedLayer, quantization::Mxfp4Fp8<>, experts::HopperW4A8, LocalBatches>();
}

}  // namespace
