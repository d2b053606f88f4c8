// SPDX-License-Identifier: Apache-2.0
// tests/unit/models_device_experts_test.cpp: which experts a block on the device takes for a scheme, sizes and a device, and why not
// others.
#include "moe/models/device_experts.hpp"

#include <gtest/gtest.h>

#include <string>
#include <type_traits>

#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/monolithic.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/fp8_per_token.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/int8_per_token.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"
#include "moe/quantization/none.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/runner/on_host.hpp"

namespace {

using namespace moe;
using models::ExpertsList;
using Local = backends::NoExpertParallel<space::cuda>;
using Hopper = experts::HopperContiguous;
using W4 = experts::HopperW4A16;
using W8 = experts::HopperW8A16;
using Reference = experts::CudaReference;
using quantization::None;
using Fp8Block = quantization::Fp8Block<>;
using Fp8Token = quantization::Fp8PerToken<>;
using Mxfp4 = quantization::Mxfp4W4A16<>;
template <class Quant, class Act = bf16>
using For = models::ExpertsFor<Quant, Local, Act>;

static_assert(std::is_same_v<For<None>, ExpertsList<Hopper, Reference>>);
static_assert(std::is_same_v<For<None, float>, ExpertsList<Reference>>);
static_assert(std::is_same_v<For<Fp8Block>, ExpertsList<Hopper, Reference>>);
static_assert(std::is_same_v<For<Mxfp4>, ExpertsList<W4, Reference>>);
static_assert(std::is_same_v<For<quantization::Int4Group128>, ExpertsList<W4, Reference>>);
static_assert(std::is_same_v<For<quantization::Int8PerToken>, ExpertsList<Hopper, Reference>>);
static_assert(std::is_same_v<For<quantization::Int8PerChannel>, ExpertsList<W8, Reference>>);
static_assert(std::is_same_v<For<quantization::Fp8PerChannel<>>, ExpertsList<W8, Reference>>);
static_assert(std::is_same_v<For<quantization::Mxfp8W8A16<>>, ExpertsList<W8, Reference>>);
static_assert(std::is_same_v<For<quantization::WNa16<4, 32>>, ExpertsList<W4, Reference>>);
static_assert(std::is_same_v<For<quantization::Nvfp4W4A16>, ExpertsList<W4, Reference>>);
static_assert(std::is_same_v<For<quantization::Mxfp4Fp8<>>, ExpertsList<experts::HopperW4A8, Reference>>);
static_assert(std::is_same_v<models::ExpertsFor<quantization::Int8PerChannel, Local, float>, ExpertsList<Reference>>);
static_assert(std::is_same_v<models::ExpertsFor<None, Local, bf16, ExpertsList<W4>>, ExpertsList<>>);

/// A layer on the device behind rows in host memory says of its experts what the layer says.
template <class Experts>
using Behind = runner::OnHost<ModularKernel<models::RuntimeLayer<bf16, bf16>, routing::AnyRouter, None, Local, Experts>>;
static_assert(runner::detail::kMonolithic<Behind<experts::Monolithic<Reference>>> && !runner::detail::kMonolithic<Behind<Reference>>);

TEST(DeviceExperts, Obstacles) {
  auto const with = [](auto experts, auto quant, models::ExpertsNeeds const& needs) {
    return models::experts_obstacle<typename decltype(experts)::type, typename decltype(quant)::type, bf16>(needs);
  };
  std::type_identity<Hopper> const hopper;
  std::type_identity<W4> const w4;
  std::type_identity<W8> const w8;
  std::type_identity<Reference> const reference;
  std::type_identity<None> const none;
  std::type_identity<Fp8Block> const block;
  std::type_identity<Fp8Token> const token;
  std::type_identity<quantization::Int8PerToken> const int8;
  std::type_identity<Mxfp4> const mxfp4;
  std::type_identity<quantization::Int8PerChannel> const channel;
  std::type_identity<experts::HopperW4A8> const w4a8;
  std::type_identity<quantization::Mxfp4Fp8<>> const mxfp4_fp8;
  using activation::Kind;

  EXPECT_EQ(with(hopper, none, {90, 4096, 1536}), "");
  EXPECT_EQ(with(hopper, none, {90, 4096, 1540}), "hopper_contiguous: intermediate 1540 is not a multiple of 8");
  EXPECT_EQ(with(hopper, none, {90, 4100, 1536}), "hopper_contiguous: hidden 4100 is not a multiple of 8");
  EXPECT_EQ(with(hopper, none, {100, 4096, 1536}), "hopper_contiguous: not for none on a device of architecture 100");
  EXPECT_EQ(with(hopper, block, {90, 4096, 1472}), "hopper_contiguous: intermediate 1472 is not a multiple of 128");
  EXPECT_EQ(with(hopper, token, {90, 4096, 1472, Kind::relu2_no_mul, true}), "");
  EXPECT_EQ(with(hopper, token, {90, 4104, 1472}), "hopper_contiguous: hidden 4104 is not a multiple of 16");
  EXPECT_EQ(with(hopper, int8, {90, 4096, 1472, Kind::relu2_no_mul, true}), "");
  EXPECT_EQ(with(hopper, int8, {90, 4096, 1480}), "hopper_contiguous: intermediate 1480 is not a multiple of 16");
  EXPECT_EQ(with(w4, mxfp4, {90, 2880, 2880, Kind::swigluoai}), "");
  EXPECT_EQ(with(w4, mxfp4, {90, 2848, 2880, Kind::swigluoai}), "hopper_w4a16: hidden 2848 is not a multiple of 64");
  EXPECT_EQ(with(w4, mxfp4, {90, 2880, 2880, Kind::gelu}), "");
  EXPECT_EQ(with(w4, mxfp4, {90, 2880, 2880, Kind::silu, true}), "");
  EXPECT_EQ(with(w8, channel, {90, 2880, 1441, Kind::gelu, true}), "");
  EXPECT_EQ(with(w8, channel, {90, 2848, 1441}), "hopper_w8a16: hidden 2848 is not a multiple of 64");
  EXPECT_EQ(with(w8, channel, {89, 2880, 1441}), "hopper_w8a16: not for int8_per_channel on a device of architecture 89");
  EXPECT_EQ(with(w4a8, mxfp4_fp8, {90, 2880, 2880, Kind::gelu}), "");
  EXPECT_EQ(with(w4a8, mxfp4_fp8, {90, 2880, 2880, Kind::silu, true}), "");
  EXPECT_EQ(with(w4a8, mxfp4_fp8, {90, 2848, 2880}), "hopper_w4a8: hidden 2848 is not a multiple of 64");
  EXPECT_EQ(with(reference, block, {80, 100, 36, Kind::gelu, true}), "");
  EXPECT_NE(with(reference, block, {75, 100, 36}), "");
  EXPECT_EQ(with(hopper, none, {.architecture = 90, .hidden = 4096, .intermediate = 1536, .expert_norm = true}),
            "hopper_contiguous: no norm of an expert's output before the weighted sum");
  EXPECT_EQ(with(reference, block, {.architecture = 80, .hidden = 100, .intermediate = 36, .expert_norm = true}), "");

  models::ExpertsNeeds const native{.architecture = 90, .hidden = 4096, .intermediate = 1536, .refuse_emulation = true};
  EXPECT_EQ(with(hopper, block, native), "");
  EXPECT_EQ(with(w4, mxfp4, native), "") << "widened codes are multiplied on the tensor cores";
  EXPECT_EQ(with(reference, block, native),
            "cuda_reference: fp8_block128 is emulated on a device of architecture 90, and native execution was required");
}

}  // namespace
