// SPDX-License-Identifier: Apache-2.0
// tests/unit/hopper_rounded_rows_test.cpp: rows in codes as bf16: each element is exact, what is left out multiplies sums, one rounding of
// the float32 intermediate gives the codes of the scheme where two would not, and the workspace has room.
#include "moe/experts/hopper/w4/rounded_rows.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "moe/experts/hopper/w4/rounded_sums.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w8a16.hpp"

namespace {

using namespace moe;
using namespace moe::hopper;

template <class Rows>
class RoundedRows : public testing::Test {};
using Formats = testing::Types<w4::Mxfp8Rows, w4::Mxfp4Rows, w4::Nvfp4Rows, w4::Fp8Rows, w4::Int8Rows>;
TYPED_TEST_SUITE(RoundedRows, Formats);

template <class Rows>
struct Stored {
  std::vector<typename Rows::template Payload<float>> codes;
  std::vector<typename Rows::Scale> scales;
  Stored(Rows const& scheme, std::vector<float> const& x)
      : codes(static_cast<std::size_t>(Rows::payload_cols(static_cast<std::int64_t>(x.size())))),
        scales(static_cast<std::size_t>(Rows::scale_cols(static_cast<std::int64_t>(x.size())))) {
    scheme.template quantize_row<float>(x.data(), static_cast<std::int64_t>(x.size()), codes.data(), scales.data());
  }
  typename Rows::Scale scale(std::size_t i) const {
    constexpr std::size_t kGroup = Rows::kActGroup == 0 ? 1U << 30 : static_cast<std::size_t>(Rows::kActGroup);
    return scales[i / kGroup];
  }
  /// Eight codes in the order of memory.
  std::uint64_t codes8(std::size_t at) const {
    std::uint64_t out = 0;
    constexpr int kPack = Rows::Codec::kPack;
    for (int i = 0; i < 8 / kPack; ++i) {
      out |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(codes[at / kPack + static_cast<std::size_t>(i)])) << (8 * i);
    }
    return out;
  }
};

std::vector<float> random_row(std::size_t n, std::mt19937& gen) {
  std::normal_distribution<float> normal;
  std::vector<float> x(n);
  for (float& v : x) v = std::ldexp(normal(gen), static_cast<int>(gen() % 24) - 12);
  return x;
}

TYPED_TEST(RoundedRows, ElementsAreExactAndTheRestMultipliesSums) {
  std::mt19937 gen(1);
  for (float global : {1.0F, 0.37F}) {
    TypeParam scheme{};
    W4Rows rows{};
    if constexpr (std::is_same_v<TypeParam, w4::Nvfp4Rows>) {
      scheme.act.global_scale = global;
      rows = {RowFormat::nvfp4, global};
    }
    for (int round = 0; round < 50; ++round) {
      std::vector<float> const x = random_row(256, gen);
      Stored<TypeParam> const stored(scheme, x);
      std::vector<float> want(x.size());
      scheme.template dequantize_row<float>(stored.codes.data(), stored.scales.data(), 256, want.data());
      for (std::size_t i = 0; i < x.size(); ++i) {
        auto const scale = stored.scale(i);
        float const part = w4::exact_part<TypeParam>(scale);
        bf16 const element = w4::exact_element<TypeParam>(stored.codes8(i / 8 * 8), static_cast<int>(i % 8), part);
        float const code = TypeParam::Codec::decode(
            quantization::detail::load_code<typename TypeParam::Codec>(stored.codes.data(), static_cast<std::int64_t>(i)), part);
        EXPECT_EQ(to_float(element), code) << "not exact in bf16";
        float const of_row = w4::kHasRowFactors<TypeParam> ? scheme.act.factor(scale) : 1.0F;
        EXPECT_FLOAT_EQ(to_float(element) * of_row * w4::common_part(rows), want[i]);
      }
    }
  }
}

TYPED_TEST(RoundedRows, NaNStaysInItsGroup) {
  std::vector<float> x(64, 1.0F);
  x[3] = std::numeric_limits<float>::quiet_NaN();
  Stored<TypeParam> const stored(TypeParam{}, x);
  auto const at = [&](std::size_t i) {
    float const of_row = w4::kHasRowFactors<TypeParam> ? TypeParam{}.act.factor(stored.scale(i)) : 1.0F;
    return of_row * to_float(w4::exact_element<TypeParam>(stored.codes8(i / 8 * 8), static_cast<int>(i % 8),
                                                          w4::exact_part<TypeParam>(stored.scale(i))));
  };
  constexpr bool kInt8 = std::is_same_v<TypeParam, w4::Int8Rows>;  // NaN becomes 0
  EXPECT_EQ(std::isnan(at(3)), !kInt8);
  EXPECT_EQ(std::isnan(at(63)), (std::is_same_v<TypeParam, w4::Fp8Rows>)) << "of one row with one scale, all elements";
}

// Why GEMM1 stores float32: through bf16 one element in some thirty gets another code.
TEST(RoundedRowsTwice, BfloatBeforeTheCodesChangesThem) {
  std::mt19937 gen(2);
  w4::Mxfp8Rows const scheme{};
  int different = 0;
  for (int round = 0; round < 100; ++round) {
    std::vector<float> const x = random_row(256, gen);
    std::vector<float> narrow = x;
    for (float& v : narrow) v = to_float(from_float<bf16>(v));
    Stored<w4::Mxfp8Rows> const once(scheme, x);
    Stored<w4::Mxfp8Rows> const twice(scheme, narrow);
    for (std::size_t i = 0; i < x.size(); ++i) different += once.codes[i] != twice.codes[i] ? 1 : 0;
  }
  EXPECT_GT(different, 100 * 256 / 100);
}

// The threads of a warpgroup write each element of a brick's rows once, and read each of their sums once.
TEST(RoundedRowsSums, EveryElementHasOneThread) {
  constexpr int kColumns = 80;
  for (bool const gated : {true, false}) {
    int const features = gated ? 32 : 64;
    std::vector<int> written(static_cast<std::size_t>(kColumns * features));
    for (int thread = 0; thread < 128; ++thread) {
      std::vector<int> read(kColumns / 2);
      for (int i = 0; i < kColumns / 4; ++i) {
        for (int half = 0; half < 2; ++half) {
          ++read[static_cast<std::size_t>(w4::position_of_sum(half, i))];
          if (gated && half == 1) continue;
          int const feature = w4::feature_of_thread(thread, gated) + 8 * half;
          ++written.at(static_cast<std::size_t>(w4::row_of_sum(thread, i) * features + feature));
        }
      }
      EXPECT_EQ(std::count(read.begin(), read.end(), 1), kColumns / 2);
    }
    EXPECT_EQ(std::count(written.begin(), written.end(), 1), kColumns * features) << (gated ? "gated" : "ungated");
  }
}

// mma's and wgmma's layout of sums: registers 0 and 1 are row r of columns c and c + 1, 2 and 3 row r + 8; of the next 8 columns 4 on.
TEST(RoundedRowsSums, LieAsTheTensorCoresLeaveThem) {
  for (int thread : {0, 1, 2, 3, 4, 37, 127}) {
    for (int i = 0; i < 20; ++i) {
      for (int half = 0; half < 2; ++half) {
        int const position = w4::position_of_sum(half, i);
        EXPECT_EQ(position % 4 / 2, half);
        EXPECT_EQ(w4::row_of_sum(thread, i), position / 4 * 8 + thread % 4 * 2 + position % 2);
      }
    }
    EXPECT_EQ(w4::feature_of_thread(thread, false), thread / 32 * 16 + thread % 32 / 4);
  }
}

TEST(RoundedRowsWorkspace, PartsDoNotOverlap) {
  w4::RoundedWorkspace const w = w4::plan_rounded_workspace(2048, 7, 21, 192, 128);
  EXPECT_EQ(w.x, 2048);
  EXPECT_GE(w.x_factors, w.x + 7 * 192 * 2);
  EXPECT_GE(w.wide, w.x_factors + 7 * 4);
  EXPECT_GE(w.inter_factors, w.wide + 21 * 128 * 4);
  EXPECT_GE(w.bytes, w.inter_factors + 21 * 4);
  for (std::int64_t at : {w.x_factors, w.wide, w.inter_factors, w.bytes}) EXPECT_EQ(at % 1024, 0);
}

using experts::HopperW4A16;
using experts::HopperW8A16;
using quantization::MxRule;
template <class Experts, class Quant>
constexpr RowFormat kFormat = [] {
  if constexpr (std::is_same_v<Experts, HopperW8A16>) {
    return experts::detail::rounded_rows<experts::detail::W8Storage<Quant>>();
  } else {
    return experts::detail::rounded_rows<experts::detail::W4Storage<Quant>>();
  }
}();
static_assert(kFormat<HopperW8A16, quantization::Mxfp8<>> == RowFormat::mxfp8);
static_assert(kFormat<HopperW8A16, quantization::Mxfp8W8A16<>> == RowFormat::bf16);
static_assert(kFormat<HopperW4A16, quantization::Mxfp4W4A8<>> == RowFormat::mxfp8);
static_assert(kFormat<HopperW4A16, quantization::Mxfp4<>> == RowFormat::mxfp4);
static_assert(kFormat<HopperW4A16, quantization::Nvfp4> == RowFormat::nvfp4);
static_assert(kFormat<HopperW4A16, quantization::W4A8Fp8> == RowFormat::fp8);
static_assert(kFormat<HopperW4A16, quantization::W4A8Int8> == RowFormat::int8);
static_assert(!HopperW8A16::supports_quantization<quantization::Mxfp8<MxRule::ocp>>());
static_assert(!HopperW4A16::supports_quantization<quantization::Mxfp4<MxRule::even>>());

}  // namespace
