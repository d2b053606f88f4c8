// SPDX-License-Identifier: Apache-2.0
// tests/gpu/quantization_test.cu: fp8 per tensor and token, batches, layouts and casts on the device: the host's bits.
#include "quantization_device.cuh"

namespace {

using RowSchemes = testing::Types<None, Fp8PerTensorStatic, Fp8PerToken<>, Fp8PerToken<ScaleFloor::min_scale>,
                                  Fp8PerToken<ScaleFloor::amax_1e10, ScaleFormat::ue8m0>, W4A8Fp8>;
INSTANTIATE_TYPED_TEST_SUITE_P(Rows, QuantizationDevice, RowSchemes);

TEST(QuantizationDeviceBatched, OnlyCountedRowsAreTouched) {
  constexpr std::int64_t kExperts = 3, kCapacity = 5, kHidden = 256;
  auto const x = hard_rows<moe::bf16>(kExperts * kCapacity, kHidden);
  std::vector<std::int32_t> const counts{2, 0, 5};
  std::vector<std::uint8_t> q(x.size(), 0xAB);
  std::vector<float> s(kExperts * kCapacity * 2, -1.0F);
  TypedCopy<moe::bf16> device_x(x);
  TypedCopy<std::int32_t> device_counts(counts);
  TypedCopy<std::uint8_t> device_q(q);
  TypedCopy<float> device_s(s);
  auto const blocks_of = [](auto* data, std::int64_t width) { return moe::make_blocks(data, kExperts, kCapacity, width); };
  quantize_batched(Fp8Block<>{}, blocks_of(x.data(), kHidden), counts, blocks_of(q.data(), kHidden), blocks_of(s.data(), 2));
  quantize_batched_on_device(Fp8Block<>{}, blocks_of(static_cast<moe::bf16 const*>(device_x.get()), kHidden), device_counts.get(),
                             blocks_of(device_q.get(), kHidden), blocks_of(device_s.get(), 2), nullptr);
  EXPECT_TRUE(same_bytes(device_q.read(), q));
  EXPECT_TRUE(same_bytes(device_s.read(), s));
}

TEST(QuantizationDeviceLayouts, Q8_SwizzleIsTheHosts) {
  for (std::int64_t const rows : {1, 127, 128, 129}) {
    SwizzledScales const layout{rows, 5};
    std::vector<std::uint8_t> linear(static_cast<std::size_t>(rows * 5)), swizzled(static_cast<std::size_t>(layout.size()), 0xEE);
    for (std::size_t i = 0; i < linear.size(); ++i) linear[i] = static_cast<std::uint8_t>(i * 7 % 251);
    TypedCopy<std::uint8_t> device_linear(linear), device_swizzled(swizzled);
    swizzle(layout, linear.data(), swizzled.data());
    swizzle_on_device(layout, device_linear.get(), 5, device_swizzled.get(), nullptr);
    EXPECT_TRUE(same_bytes(device_swizzled.read(), swizzled)) << rows;
  }
}

/// Every float8 cast of every bf16 pattern and of its float neighbours.
__global__ void cast_all(std::uint8_t* e4m3, std::uint8_t* e5m2, std::uint8_t* e2m1, std::uint32_t spread) {
  std::uint32_t const i = blockIdx.x * blockDim.x + threadIdx.x;
  float const v = bits_float((i << 16) + spread);
  e4m3[i] = encode_e4m3(v);
  e5m2[i] = encode_e5m2(v);
  e2m1[i] = encode_e2m1(v);
}
TEST(QuantizationDeviceFormats, CastsAreTheHosts) {
  for (std::uint32_t const spread : {0U, 1U, 0x7FFFU, 0x8000U, 0x8001U, 0xFFFFU}) {
    std::vector<std::uint8_t> const blank(65536);
    TypedCopy<std::uint8_t> e4m3(blank), e5m2(blank), e2m1(blank);
    cast_all<<<256, 256>>>(e4m3.get(), e5m2.get(), e2m1.get(), spread);
    auto const got4 = e4m3.read(), got5 = e5m2.read(), got2 = e2m1.read();
    for (std::uint32_t i = 0; i < 65536; ++i) {
      float const v = bits_float((i << 16) + spread);
      ASSERT_EQ(+got4[i], +encode_e4m3(v)) << v;
      ASSERT_EQ(+got5[i], +encode_e5m2(v)) << v;
      ASSERT_EQ(+got2[i], +encode_e2m1(v)) << v;
    }
  }
}

}  // namespace
