// SPDX-License-Identifier: Apache-2.0
// tests/unit/experts_activated_row_test.cpp: activation fused with quantisation gives the two steps' codes and scales, bit for bit.
#include "moe/experts/common/activated_row.hpp"

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/quantization/schemes.hpp"

namespace {

using namespace moe::quantization;
using moe::activation::Any;
using moe::activation::Kind;
using moe::experts::ActivatedRow;

template <class Scheme>
class ActivatedRows : public testing::Test {};
using Schemes = testing::Types<None, Fp8PerTensorStatic, Fp8PerToken<>, Fp8Group<>, Fp8Block<128, ScaleFormat::ue8m0>, Int8PerToken,
                               Int8Group<>, Mxfp8<>, Mxfp4<>, Nvfp4, W4A8Fp8>;
TYPED_TEST_SUITE(ActivatedRows, Schemes);

TYPED_TEST(ActivatedRows, EqualActivationThenQuantisation) {
  using Payload = typename TypeParam::template Payload<float>;
  for (auto const& [kind, interleaved] :
       {std::pair{Kind::silu, false}, std::pair{Kind::swigluoai, true}, std::pair{Kind::relu2_no_mul, false}, std::pair{Kind::situ, false},
        std::pair{Kind::gelu, false}}) {
    Any const act{kind, {.limit = 7.0F}};
    for (std::int64_t const width : {256, 200}) {
      std::mt19937 random(17);
      std::normal_distribution<float> normal(0.0F, 3.0F);
      std::vector<float> in(static_cast<std::size_t>((act.gated() ? 2 : 1) * width)), h(static_cast<std::size_t>(width));
      for (float& v : in) v = normal(random);
      moe::activation::apply_row(act, in.data(), std::ssize(in), h.data(), width, interleaved);
      TypeParam const scheme{};
      auto const codes = static_cast<std::size_t>(TypeParam::payload_cols(width));
      auto const scales = static_cast<std::size_t>(TypeParam::scale_cols(width));
      std::vector<Payload> q(codes), fused_q(codes);
      std::vector<typename TypeParam::Scale> s(scales), fused_s(scales);
      scheme.template quantize_row<float>(h.data(), width, q.data(), s.data());
      scheme.template quantize_row<float>(ActivatedRow{act, static_cast<float const*>(in.data()), width, interleaved}, width,
                                          fused_q.data(), fused_s.data());
      EXPECT_EQ(fused_q, q) << moe::activation::name(kind) << ' ' << width;
      EXPECT_EQ(fused_s, s) << moe::activation::name(kind) << ' ' << width;
    }
  }
}

}  // namespace
