// SPDX-License-Identifier: Apache-2.0
// tests/gpu/eplb_runtime_hopper_test.cu: experts move between the expert slots of one GPU while layers serve, with every experts policy:
// those with packed weights pack them again, graphs continue, counts are read a step later. cuBLAS: cublas_eplb_test.cu.
#include <gtest/gtest.h>

#include <type_traits>

#include "batched_exchange.cuh"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/routing/device/route.cuh"
#include "tests/gpu/eplb_one_gpu.hpp"

namespace {

using namespace moe_test;
using quantization::Int8PerTensorStatic;
using quantization::Int8PerToken;

struct FixedLayer : EplbFixedLayer {
  template <class Params>
  void set(Params& p) const {
    EplbFixedLayer::set(p);
    using Quant = decltype(p.quantization);
    if constexpr (std::is_same_v<Quant, Int8PerTensorStatic>) p.quantization = Quant({.scale = 0.02F});
  }
};

TEST(EplbRuntime, CudaReference) { on_one_gpu<FixedLayer, quantization::None, experts::CudaReference>(); }
TEST(EplbRuntime, HopperContiguous) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::None, experts::HopperContiguous>();
  on_one_gpu<FixedLayer, quantization::Fp8Block<>, experts::HopperContiguous>();
}
TEST(EplbRuntime, HopperContiguousInt8) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, Int8PerToken, experts::HopperContiguous>();
  on_one_gpu<FixedLayer, Int8PerTensorStatic, experts::HopperContiguous>();
}
TEST(EplbRuntime, HopperW4A16PacksAgain) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::Int4Group128, experts::HopperW4A16>();
}
TEST(EplbRuntime, HopperW8A16PacksAgain) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::Int8PerChannel, experts::HopperW8A16>();
}
TEST(EplbRuntime, HopperW4A8PacksAgain) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::Mxfp4Fp8<>, experts::HopperW4A8>();
}

TEST(EplbRuntime, HopperW4A16PacksZeroPointsMxfp4AndNvfp4) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::Int4Group128Zero, experts::HopperW4A16>();
  on_one_gpu<FixedLayer, quantization::Mxfp4W4A16<>, experts::HopperW4A16>();
  on_one_gpu<FixedLayer, quantization::Nvfp4W4A16, experts::HopperW4A16>();
}
TEST(EplbRuntime, HopperW4A8PacksInt4) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::Int4Fp8<>, experts::HopperW4A8>();
  on_one_gpu<FixedLayer, quantization::Int4Fp8<32, true>, experts::HopperW4A8>();
}
TEST(EplbRuntime, HopperPacksOtherGroupsAndEightBits) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::WNa16<4, 32>, experts::HopperW4A16>();
  on_one_gpu<FixedLayer, quantization::WNa16<4, 64>, experts::HopperW4A16>();
  on_one_gpu<FixedLayer, quantization::Fp8PerChannel<>, experts::HopperW8A16>();
  on_one_gpu<FixedLayer, quantization::Mxfp8W8A16<>, experts::HopperW8A16>();
}
// Batches of rows by expert: of each expert slot, so that a move changes which batches have rows.
TEST(EplbRuntime, HopperMasked) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::None, experts::HopperMasked, LocalBatches>();
  on_one_gpu<FixedLayer, quantization::Fp8Block<>, experts::HopperMasked, GatheredBatches>();
}
TEST(EplbRuntime, BatchedPackedWeights) {
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  on_one_gpu<FixedLayer, quantization::Int4Group128, experts::HopperW4A16, LocalBatches>();
  on_one_gpu<FixedLayer, quantization::Int8PerChannel, experts::HopperW8A16, GatheredBatches>();
  on_one_gpu<FixedLayer, quantization::Mxfp4Fp8<>, experts::HopperW4A8, LocalBatches>();
}

// Counts of a step arrive with the next step, and all of them before a map changes.
TEST(StepLoads, OneStepLaterOnTheDevice) {
  eplb::MapTables<space::cuda> tables(ExpertMaps::initial(1, 2, 0));
  eplb::StepLoads<space::cuda> loads(tables);
  CudaStream stream;
  eplb::Table<std::int32_t> load(1, 2);
  for (std::int32_t step = 0; step < 5; ++step) {
    std::int32_t const counts[] = {step, 10 + step};
    Memory<space::cuda>::copy_from_host_async(tables.load_counter(0), counts, sizeof counts, stream);
    loads.end_step(step == 2, stream);
    EXPECT_EQ(loads.take(load), step > 0 && step != 3) << step;
    if (step > 0 && step != 3) {
      EXPECT_EQ(load.flat(), (std::vector<std::int32_t>{step - 1, 9 + step}));
    }
  }
  EXPECT_TRUE(loads.take(load, 0));
  EXPECT_EQ(load.flat(), (std::vector<std::int32_t>{4, 14}));
  EXPECT_FALSE(loads.take(load, 0));
}

}  // namespace
