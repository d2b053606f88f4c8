// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_w4_scale_range_test.cu: int4 weights whose rows lie up to 90 binades apart equal the device oracle in each output
// column, relative to the column's own magnitude, with bf16 and with e4m3 activations.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <vector>

#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "on_hopper.hpp"
#include "packed_cases.cuh"

namespace {

using namespace moe;
using moe_test::kSilu;
using moe_test::Load;
using moe_test::RandomWeights;
using moe_test::Scales;
using moe_test::Sizes;
using quantization::Int4Fp8;
using quantization::WNa16;

constexpr Sizes kSizes{4, 384, 384, 2};
constexpr int kBlock = 128;  ///< features of the intermediate that have one magnitude, and one scale in e4m3
constexpr int kBlocks = kSizes.intermediate / kBlock;

/// A scale of int4, alone or with its zero point.
float& scale_of(float& v) { return v; }
float& scale_of(quantization::ScaleZero& v) { return v.scale; }
std::uint8_t zero_of(float) { return 8; }
std::uint8_t zero_of(quantization::ScaleZero const& v) { return static_cast<std::uint8_t>(v.zero); }

/// Which magnitudes the rows have, in binades.
struct Pattern {
  char const* name;
  /// Of a row of w2, which makes an output column.
  int (*column)(int column);
  /// Of the up rows of a block of features. Gate rows are as usual, since an activation needs them so.
  int (*up)(int block);
};
int far_columns(int h) { return h % 3 == 0 ? 0 : -(40 + h * 7 % 51); }
int near_and_far_columns(int h) { return (h % 2 == 0 ? 1 : -1) * (h * 13 % 46); }
int usual(int) { return 0; }
int far_blocks(int b) { return 45 * b; }
constexpr Pattern kPatterns[] = {{"columns 40 to 90 binades below others", far_columns, usual},
                                 {"columns up to 90 binades apart", near_and_far_columns, usual},
                                 {"up rows 45 and 90 binades above gate rows", usual, far_blocks},
                                 {"both", far_columns, far_blocks}};

/// Multiplies the scales of each row by the pattern's power of two. Column h reads block h % kBlocks of the intermediate alone: other codes
/// are the zero point, or the largest block would hide the others.
template <class Quant>
void apply(Pattern const& pattern, RandomWeights<Quant>& weights) {
  using Code = typename Quant::template WeightCode<bf16>;
  using Scale = typename Quant::WeightScale;
  constexpr int kRows13 = 2 * kSizes.intermediate;
  std::vector<Scale> s13(static_cast<std::size_t>(weights.s13.size()));
  std::vector<Scale> s2(static_cast<std::size_t>(weights.s2.size()));
  std::vector<Code> c2(static_cast<std::size_t>(weights.c2.size()));
  weights.s13.copy_to_host(s13.data());
  weights.s2.copy_to_host(s2.data());
  weights.c2.copy_to_host(c2.data());
  std::size_t const groups13 = s13.size() / (kSizes.experts * kRows13);
  std::size_t const groups2 = s2.size() / (kSizes.experts * kSizes.hidden);
  for (std::size_t i = 0; i < s13.size(); ++i) {
    int const feature = static_cast<int>(i / groups13 % kRows13) - kSizes.intermediate;  // of an up row
    if (feature >= 0) scale_of(s13[i]) = std::ldexp(scale_of(s13[i]), pattern.up(feature / kBlock));
  }
  for (std::size_t i = 0; i < s2.size(); ++i) {
    scale_of(s2[i]) = std::ldexp(scale_of(s2[i]), pattern.column(static_cast<int>(i / groups2 % kSizes.hidden)));
  }
  constexpr std::size_t kRowBytes = kSizes.intermediate / 2;
  for (std::size_t i = 0; i < c2.size(); ++i) {
    std::size_t const row = i / kRowBytes;  // of all experts
    std::size_t const k = i % kRowBytes * 2;
    if (k / kBlock == row % kSizes.hidden % kBlocks) continue;
    std::uint8_t const zero = zero_of(s2[row * groups2 + k * groups2 / kSizes.intermediate]);
    c2[i] = static_cast<Code>(zero | zero << 4);
  }
  weights.s13.copy_from_host(s13.data());
  weights.s2.copy_from_host(s2.data());
  weights.c2.copy_from_host(c2.data());
}

/// The largest relative error of an output column, and the exponent of the smallest and of the largest column.
struct ColumnErrors {
  double worst = 0;
  int least = 1000;
  int most = -1000;
};
ColumnErrors column_errors(moe_test::Outputs const& out, std::size_t columns) {
  ColumnErrors result;
  for (std::size_t h = 0; h < columns; ++h) {
    double error = 0;
    double norm = 0;
    for (std::size_t i = h; i < out.want.size(); i += columns) {
      double const want = out.want[i];
      double const difference = static_cast<double>(to_float(out.got[i])) - want;
      error += difference * difference;
      norm += want * want;
    }
    double const relative = std::sqrt(error / norm);
    result.worst = std::isfinite(relative) ? std::max(result.worst, relative) : INFINITY;
    result.least = std::min(result.least, std::ilogb(std::sqrt(norm)));
    result.most = std::max(result.most, std::ilogb(std::sqrt(norm)));
  }
  return result;
}

template <class Quant_, class Experts_>
struct Pair {
  using Quant = Quant_;
  using Experts = Experts_;
};
template <int Group, bool ZeroPoint>
using A8 = Pair<Int4Fp8<Group, ZeroPoint>, experts::HopperW4A8>;
template <int Group, bool ZeroPoint>
using A16 = Pair<WNa16<4, Group, ZeroPoint>, experts::HopperW4A16>;
using Pairs = testing::Types<A8<32, false>, A8<64, false>, A8<128, false>, A8<32, true>, A8<64, true>, A8<128, true>, A16<32, false>,
                             A16<64, false>, A16<128, false>, A16<32, true>, A16<64, true>, A16<128, true>>;

template <class P>
class HopperW4ScaleRange : public testing::Test {
 protected:
  void SetUp() override {
    if (!moe_test::on_hopper()) GTEST_SKIP() << "needs compute capability 9.0";
  }
  /// Of a column with few rows, whose sum may nearly cancel; in e4m3 one code of the intermediate that differs is a sixteenth of a feature,
  /// of some hundred. A column whose scales became zero is off by 1.
  static double tolerance(int tokens) {
    if (std::is_same_v<typename P::Experts, experts::HopperW4A16>) return tokens < 50 ? 2e-2 : 1e-2;
    return tokens < 50 ? 6e-2 : 3e-2;
  }
  static void columns_equal_oracle(activation::Any const& act, std::uint64_t seed) {
    for (Pattern const& pattern : kPatterns) {
      for (int tokens : {16, 40, 200}) {  // tiles of 16, of the middle kernel and of the largest
        SCOPED_TRACE(text(pattern.name, ", ", tokens, " tokens"));
        std::mt19937_64 gen(seed);
        RandomWeights<typename P::Quant> weights(kSizes, false, gen, 0, 0.0F, true, Scales::of_bf16);
        apply(pattern, weights);
        moe_test::RandomCall<typename P::Quant> const call(kSizes, tokens, Load::random, gen);
        LayerShape const shape{kSizes.hidden, kSizes.intermediate, kSizes.experts, kSizes.topk};
        auto const out = moe_test::outputs_of<typename P::Quant, typename P::Experts>(shape, weights, call, act);
        ColumnErrors const errors = column_errors(out, kSizes.hidden);
        EXPECT_LT(errors.worst, tolerance(tokens));
        EXPECT_GT(errors.most - errors.least, 80) << "columns that lie far apart";
      }
    }
  }
};
TYPED_TEST_SUITE(HopperW4ScaleRange, Pairs);

TYPED_TEST(HopperW4ScaleRange, Q22_EveryColumnEqualsTheOracle) { TestFixture::columns_equal_oracle(kSilu, 1); }
TYPED_TEST(HopperW4ScaleRange, Q22_EveryColumnEqualsTheOracleUnderAnyActivation) {
  TestFixture::columns_equal_oracle(activation::Any{activation::Kind::gelu}, 2);
}

}  // namespace
