// SPDX-License-Identifier: Apache-2.0
// tests/gpu/quantization_test.cu: the device's codes, scales and values are the host's, bit for bit, for every scheme.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "moe/quantization/apply.hpp"
#include "moe/quantization/quantize_rows.cuh"
#include "moe/quantization/schemes.hpp"

namespace {

using namespace moe::quantization;

/// Device memory with the bytes of a host vector.
template <class T>
class OnDevice {
 public:
  explicit OnDevice(std::vector<T> const& host) : size_(host.size()) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<std::size_t>(1, size_ * sizeof(T))), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  OnDevice(OnDevice const&) = delete;
  OnDevice& operator=(OnDevice const&) = delete;
  ~OnDevice() { cudaFree(data_); }
  T* get() { return data_; }
  std::vector<T> read() {
    std::vector<T> host(size_);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(host.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost), cudaSuccess);
    return host;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
};

template <class T>
testing::AssertionResult same_bytes(std::vector<T> const& got, std::vector<T> const& want) {
  if (got.size() != want.size()) return testing::AssertionFailure() << got.size() << " elements, expected " << want.size();
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0) return testing::AssertionFailure() << "element " << i << " of " << got.size();
  }
  return testing::AssertionSuccess();
}

/// Rows of very different size, with zeros, subnormals, NaN and infinities among them.
template <class Act>
std::vector<Act> hard_rows(std::int64_t rows, std::int64_t cols) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  std::vector<Act> x(static_cast<std::size_t>(rows * cols));
  for (std::int64_t r = 0; r < rows; ++r) {
    float const size = std::exp2(static_cast<float>(r % 60 - 30));
    for (std::int64_t c = 0; c < cols; ++c) {
      float v = normal(random) * size * (r % 3 == 0 ? std::exp2(4 * normal(random)) : 1.0F);
      if (r % 7 == 1) v = 0.0F;
      if (r % 11 == 2 && c % 97 == 5) v = std::numeric_limits<float>::quiet_NaN();
      if (r % 11 == 3 && c % 97 == 6) v = -std::numeric_limits<float>::infinity();
      if (r % 11 == 4) v = std::ldexp(v, -100);
      if (r % 11 == 5) v = std::ldexp(v > 1 ? 448.0F : v, 60);
      x[static_cast<std::size_t>(r * cols + c)] = moe::from_float<Act>(v);
    }
  }
  return x;
}

template <class Scheme, class Act>
__global__ void dequantize_rows(Scheme scheme, typename Scheme::template Payload<Act> const* q, typename Scheme::Scale const* s,
                                std::int64_t cols, float* out) {
  std::int64_t const r = blockIdx.x;
  dequantize_row_warp<Scheme, Act>(scheme, q + r * Scheme::payload_cols(cols), s + r * Scheme::scale_cols(cols), cols, out + r * cols,
                                   static_cast<int>(threadIdx.x));
}

template <class Scheme, class Act>
void compare(Scheme const& scheme, std::int64_t cols) {
  SCOPED_TRACE(moe::text(Scheme::kName, ", ", cols, " columns of ", sizeof(Act), " bytes"));
  constexpr std::int64_t kRows = 130;
  using Code = typename Scheme::template Payload<Act>;
  using Scale = typename Scheme::Scale;
  auto const x = hard_rows<Act>(kRows, cols);
  std::int64_t const payload = Scheme::payload_cols(cols), scales = Scheme::scale_cols(cols);
  std::vector<Code> q(static_cast<std::size_t>(kRows * payload));
  std::vector<Scale> s(static_cast<std::size_t>(kRows * scales));
  OnDevice<Act> device_x(x);
  OnDevice<Code> device_q(q);
  OnDevice<Scale> device_s(s);
  auto const rows_of = [](auto* data, std::int64_t width) { return moe::make_rows<moe::dynamic>(data, kRows, width); };
  quantize_rows(scheme, rows_of(x.data(), cols), rows_of(q.data(), payload), rows_of(s.data(), scales));
  quantize_rows_on_device(scheme, rows_of(static_cast<Act const*>(device_x.get()), cols), rows_of(device_q.get(), payload),
                          rows_of(device_s.get(), scales), nullptr);
  EXPECT_TRUE(same_bytes(device_q.read(), q));
  EXPECT_TRUE(same_bytes(device_s.read(), s));

  std::vector<float> out(x.size());
  for (std::int64_t r = 0; r < kRows; ++r) {
    scheme.template dequantize_row<Act>(q.data() + r * payload, s.data() + r * scales, cols, out.data() + r * cols);
  }
  OnDevice<float> device_out(out);
  dequantize_rows<Scheme, Act><<<kRows, 32>>>(scheme, device_q.get(), device_s.get(), cols, device_out.get());
  auto const got = device_out.read();
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_TRUE(float_bits(got[i]) == float_bits(out[i]) || (std::isnan(got[i]) && std::isnan(out[i])))
        << i << ": " << got[i] << ", " << out[i];
  }
}

template <class Scheme>
class QuantizationDevice : public testing::Test {};
using Schemes = testing::Types<None, Fp8PerTensorStatic, Fp8PerToken<>, Fp8PerToken<ScaleFloor::min_scale>,
                               Fp8PerToken<ScaleFloor::amax_1e10, ScaleFormat::ue8m0>, Fp8Group<>, Fp8Group<128, ScaleFormat::ue8m0>,
                               Fp8Block<>, Fp8Block<128, ScaleFormat::f32_pow2, ScaleFloor::amax_1e4>, Int8PerToken, Int8PerTensorStatic,
                               Int8Group<>, Mxfp8<>, Mxfp8<MxRule::even>, Mxfp4<>, Mxfp4<MxRule::ocp>, Nvfp4, W4A8Fp8>;
TYPED_TEST_SUITE(QuantizationDevice, Schemes);

TYPED_TEST(QuantizationDevice, RowsAreTheHostsBits) {
  for (std::int64_t const cols : {512, 2880, 320, 40, 37}) {  // whole steps, a partial step, a partial group, unaligned rows
    compare<TypeParam, float>(TypeParam{}, cols);
    compare<TypeParam, moe::bf16>(TypeParam{}, cols);
  }
  compare<TypeParam, moe::f16>(TypeParam{}, 512);
}

TYPED_TEST(QuantizationDevice, Q19_NoRowsNoLaunch) {
  auto const nothing = [](auto* data, std::int64_t width) { return moe::make_rows<moe::dynamic>(data, 0, width); };
  quantize_rows_on_device(TypeParam{}, nothing(static_cast<float const*>(nullptr), 128),
                          nothing(static_cast<typename TypeParam::template Payload<float>*>(nullptr), TypeParam::payload_cols(128)),
                          nothing(static_cast<typename TypeParam::Scale*>(nullptr), TypeParam::scale_cols(128)), nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

TEST(QuantizationDeviceBatched, OnlyCountedRowsAreTouched) {
  constexpr std::int64_t kExperts = 3, kCapacity = 5, kHidden = 256;
  auto const x = hard_rows<moe::bf16>(kExperts * kCapacity, kHidden);
  std::vector<std::int32_t> const counts{2, 0, 5};
  std::vector<std::uint8_t> q(x.size(), 0xAB);
  std::vector<float> s(kExperts * kCapacity * 2, -1.0F);
  OnDevice<moe::bf16> device_x(x);
  OnDevice<std::int32_t> device_counts(counts);
  OnDevice<std::uint8_t> device_q(q);
  OnDevice<float> device_s(s);
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
    OnDevice<std::uint8_t> device_linear(linear), device_swizzled(swizzled);
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
    OnDevice<std::uint8_t> e4m3(blank), e5m2(blank), e2m1(blank);
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
