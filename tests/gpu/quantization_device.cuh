// SPDX-License-Identifier: Apache-2.0
// tests/gpu/quantization_device.cuh: the device's codes, scales and values of a scheme are the host's, bit for bit. Each file that includes
// this one takes some of the schemes, to keep compile times short.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "moe/quantization/rows/apply.hpp"
#include "moe/quantization/rows/quantize_rows.cuh"
#include "moe/quantization/schemes.hpp"

namespace {

using namespace moe::quantization;

/// Device memory with the bytes of a host vector.
template <class T>
class TypedCopy {
 public:
  explicit TypedCopy(std::vector<T> const& host) : size_(host.size()) {
    EXPECT_EQ(cudaMalloc(&data_, std::max<std::size_t>(1, size_ * sizeof(T))), cudaSuccess);
    EXPECT_EQ(cudaMemcpy(data_, host.data(), size_ * sizeof(T), cudaMemcpyHostToDevice), cudaSuccess);
  }
  TypedCopy(TypedCopy const&) = delete;
  TypedCopy& operator=(TypedCopy const&) = delete;
  ~TypedCopy() { cudaFree(data_); }
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
  TypedCopy<Act> device_x(x);
  TypedCopy<Code> device_q(q);
  TypedCopy<Scale> device_s(s);
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
  TypedCopy<float> device_out(out);
  dequantize_rows<Scheme, Act><<<kRows, 32>>>(scheme, device_q.get(), device_s.get(), cols, device_out.get());
  auto const got = device_out.read();
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_TRUE(float_bits(got[i]) == float_bits(out[i]) || (std::isnan(got[i]) && std::isnan(out[i])))
        << i << ": " << got[i] << ", " << out[i];
  }
}

template <class Scheme>
class QuantizationDevice : public testing::Test {};
TYPED_TEST_SUITE_P(QuantizationDevice);

TYPED_TEST_P(QuantizationDevice, RowsAreTheHostsBits) {
  for (std::int64_t const cols : {512, 2880, 320, 40, 37}) {  // whole steps, a partial step, a partial group, unaligned rows
    compare<TypeParam, float>(TypeParam{}, cols);
    compare<TypeParam, moe::bf16>(TypeParam{}, cols);
  }
  compare<TypeParam, moe::f16>(TypeParam{}, 512);
}

TYPED_TEST_P(QuantizationDevice, Q19_NoRowsNoLaunch) {
  auto const nothing = [](auto* data, std::int64_t width) { return moe::make_rows<moe::dynamic>(data, 0, width); };
  quantize_rows_on_device(TypeParam{}, nothing(static_cast<float const*>(nullptr), 128),
                          nothing(static_cast<typename TypeParam::template Payload<float>*>(nullptr), TypeParam::payload_cols(128)),
                          nothing(static_cast<typename TypeParam::Scale*>(nullptr), TypeParam::scale_cols(128)), nullptr);
  EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}

REGISTER_TYPED_TEST_SUITE_P(QuantizationDevice, RowsAreTheHostsBits, Q19_NoRowsNoLaunch);

}  // namespace
