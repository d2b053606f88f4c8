// SPDX-License-Identifier: Apache-2.0
// tests/gpu/activated_rows_test.cu: activation fused with quantisation on the device: the codes and scales of the two steps.
#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/experts/common/activated_row.hpp"
#include "moe/quantization/rows/quantize_row.cuh"
#include "moe/quantization/schemes.hpp"

namespace {

using namespace moe::quantization;
using moe::activation::Any;
using moe::activation::Kind;
using moe::experts::ActivatedRow;

constexpr std::int64_t kRows = 9;

/// Row r of `in` computed both ways: in one step, and through a float32 row in memory.
template <class Scheme, class In>
__global__ void both_ways(Scheme scheme, Any act, In const* in, std::int64_t width, bool interleaved, float* h,
                          typename Scheme::template Payload<float>* q, typename Scheme::Scale* s) {
  std::int64_t const r = blockIdx.x, payload = Scheme::payload_cols(width), scales = Scheme::scale_cols(width);
  int const lane = static_cast<int>(threadIdx.x);
  ActivatedRow const row{act, in + r * width * (act.gated() ? 2 : 1), width, interleaved};
  quantize_row_warp<Scheme, float>(scheme, row, width, q + r * payload, s + r * scales, lane);
  for (std::int64_t i = lane; i < width; i += 32) h[r * width + i] = row[i];
  __syncwarp();
  quantize_row_warp<Scheme, float>(scheme, static_cast<float const*>(h + r * width), width, q + (kRows + r) * payload,
                                   s + (kRows + r) * scales, lane);
}

template <class Scheme>
class ActivatedRowsDevice : public testing::Test {};
using Schemes = testing::Types<None, Fp8PerToken<>, Fp8Group<>, Int8PerToken, Mxfp4<>, Nvfp4>;
TYPED_TEST_SUITE(ActivatedRowsDevice, Schemes);

template <class T>
std::vector<T> host(moe::Buffer<T, moe::space::cuda> const& b) {
  std::vector<T> v(static_cast<std::size_t>(b.size()));
  if (!v.empty()) b.copy_to_host(v.data());
  return v;
}

template <class Scheme, class In>
void compare(Kind kind, bool interleaved, std::int64_t width) {
  SCOPED_TRACE(moe::text(moe::activation::name(kind), ", ", width, " columns of ", sizeof(In), " bytes"));
  using Code = typename Scheme::template Payload<float>;
  Any const act{kind, {.limit = 7.0F}};
  std::mt19937 random(17);
  std::normal_distribution<float> normal(0.0F, 3.0F);
  std::vector<In> in(static_cast<std::size_t>(kRows * width * (act.gated() ? 2 : 1)));
  for (In& v : in) v = moe::from_float<In>(normal(random));
  moe::Buffer<In, moe::space::cuda> device_in(std::ssize(in));
  device_in.copy_from_host(in.data());
  moe::Buffer<float, moe::space::cuda> h(kRows * width);
  moe::Buffer<Code, moe::space::cuda> q(2 * kRows * Scheme::payload_cols(width));
  moe::Buffer<typename Scheme::Scale, moe::space::cuda> s(2 * kRows * Scheme::scale_cols(width));
  both_ways<Scheme, In><<<kRows, 32>>>(Scheme{}, act, device_in.data(), width, interleaved, h.data(), q.data(), s.data());
  moe::check_cuda(cudaDeviceSynchronize(), "both_ways");
  auto const codes = host(q);
  auto const scales = host(s);
  EXPECT_EQ(std::memcmp(codes.data(), codes.data() + codes.size() / 2, codes.size() / 2 * sizeof(Code)), 0);
  EXPECT_EQ(std::vector(scales.begin(), scales.begin() + std::ssize(scales) / 2),
            std::vector(scales.begin() + std::ssize(scales) / 2, scales.end()));
  // The intermediate values equal the definition's.
  auto const got = host(h);
  for (std::int64_t r = 0; r < kRows; ++r) {
    ActivatedRow const row{act, static_cast<In const*>(in.data()) + r * width * (act.gated() ? 2 : 1), width, interleaved};
    for (std::int64_t i = 0; i < width; ++i) {
      ASSERT_NEAR(got[static_cast<std::size_t>(r * width + i)], row[i], 1e-5F * std::max(1.0F, std::abs(row[i]))) << r << ' ' << i;
    }
  }
}

TYPED_TEST(ActivatedRowsDevice, EqualActivationThenQuantisation) {
  compare<TypeParam, moe::bf16>(Kind::silu, false, 512);
  compare<TypeParam, moe::bf16>(Kind::swigluoai, true, 512);
  compare<TypeParam, moe::bf16>(Kind::relu2_no_mul, false, 320);
  compare<TypeParam, moe::bf16>(Kind::situ, false, 36);
}

}  // namespace
