// SPDX-License-Identifier: Apache-2.0
// tests/unit/experts_quantized_products_test.cpp: the host experts on quantised rows and weights, against float64 products of the same
// matrices dequantised: both scale levels of nvfp4 (Q9), a scale for every 128 columns of fp8 blocks (Q13); scales that are refused.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string_view>
#include <type_traits>
#include <vector>

#include "expect_error.hpp"
#include "moe/activation/activation.hpp"
#include "moe/experts/onednn.hpp"
#include "moe/experts/reference.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/int4_fp8.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/mxfp8.hpp"
#include "moe/quantization/nvfp4.hpp"

namespace {

using namespace moe;

struct Config : LayerDefaults {
  using Activation = activation::Any;
};
using Values = std::vector<float>;

Values normals(std::size_t n, float scale, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Values v(n);
  for (float& x : v) x = scale * normal(random);
  return v;
}

/// One ungated expert, y = W2 relu(W1 x), for rows of x.
template <class Quant>
struct Problem {
  std::int64_t rows, hidden, intermediate;
  Values x, w1, w2;

  Problem(std::int64_t rows_, std::int64_t hidden_, std::int64_t intermediate_)
      : rows(rows_),
        hidden(hidden_),
        intermediate(intermediate_),
        x(normals(static_cast<std::size_t>(rows * hidden), 1.0F, 1)),
        w1(normals(static_cast<std::size_t>(intermediate * hidden), 1.0F / std::sqrt(static_cast<float>(hidden)), 2)),
        w2(normals(static_cast<std::size_t>(intermediate * hidden), 1.0F / std::sqrt(static_cast<float>(intermediate)), 3)) {}

  /// The output of `Experts` that read with `reader`, for rows quantised by `writer`.
  template <class Experts>
  Values computed(Quant const& writer, Quant const& reader) const {
    using Kernel = typename Experts::template Kernel<Config, Quant, ActivationFormat::standard>;
    experts::WeightStore<Config, Quant> store(1, hidden, intermediate, false, writer);
    store.set_expert(0, w1.data(), w2.data());
    std::int64_t const codes = Quant::payload_cols(hidden);
    std::int64_t const scales = Quant::scale_cols(hidden);
    std::vector<std::uint8_t> q(static_cast<std::size_t>(rows * codes));
    std::vector<typename Quant::Scale> s(static_cast<std::size_t>(rows * scales));
    for (std::int64_t r = 0; r < rows; ++r) {
      writer.template quantize_row<float>(x.data() + r * hidden, hidden, q.data() + r * codes, s.data() + r * scales);
    }
    std::vector<std::int32_t> const ids(static_cast<std::size_t>(rows), 0);
    Values const ones(static_cast<std::size_t>(rows), 1.0F);
    Values y(static_cast<std::size_t>(rows * hidden));
    Arena<space::host> arena;
    Kernel const kernel(Shape<Config>({hidden, intermediate, 1, 1}), store.view(), rows, reader, {.kind = activation::Kind::relu_no_mul},
                        {}, arena);
    kernel.apply({make_rows(static_cast<std::uint8_t const*>(q.data()), rows, codes),
                  make_rows(static_cast<typename Quant::Scale const*>(s.data()), rows, scales), make_rows(ids.data(), rows, 1),
                  make_rows(ones.data(), rows, 1)},
                 make_rows(y.data(), rows, hidden), {});
    return y;
  }

  /// The same in float64 of the dequantised matrices, the intermediate quantised and back as the definition asks.
  Values expected(Quant const& quant) const {
    auto const dequantized = [&](Values const& w, std::int64_t out, std::int64_t in) {
      std::vector<std::uint8_t> codes(static_cast<std::size_t>(out * Quant::weight_code_cols(in)));
      std::vector<typename Quant::WeightScale> scales(static_cast<std::size_t>(Quant::weight_scale_count(out, in)));
      quant.template quantize_weight<float>(w.data(), out, in, codes.data(), scales.data());
      Values d(w.size());
      for (std::int64_t r = 0; r < out; ++r) {
        quant.template dequantize_weight_row<float>(codes.data(), scales.data(), out, in, r, d.data() + r * in);
      }
      return d;
    };
    auto const there_and_back = [&](float* row, std::int64_t n) {
      std::vector<std::uint8_t> q(static_cast<std::size_t>(Quant::payload_cols(n)));
      std::vector<typename Quant::Scale> s(static_cast<std::size_t>(Quant::scale_cols(n)));
      quant.template quantize_row<float>(row, n, q.data(), s.data());
      quant.template dequantize_row<float>(q.data(), s.data(), n, row);
    };
    auto const product = [](Values const& w, float const* row, std::int64_t out, std::int64_t in, float* to) {
      for (std::int64_t o = 0; o < out; ++o) {
        double sum = 0;
        for (std::int64_t i = 0; i < in; ++i) sum += static_cast<double>(w[static_cast<std::size_t>(o * in + i)]) * row[i];
        to[o] = static_cast<float>(sum);
      }
    };
    Values const a = dequantized(w1, intermediate, hidden), b = dequantized(w2, hidden, intermediate);
    Values y(static_cast<std::size_t>(rows * hidden));
    Values row(static_cast<std::size_t>(hidden)), h(static_cast<std::size_t>(intermediate));
    for (std::int64_t r = 0; r < rows; ++r) {
      std::copy_n(x.data() + r * hidden, hidden, row.data());
      there_and_back(row.data(), hidden);
      product(a, row.data(), intermediate, hidden, h.data());
      for (float& v : h) v = std::max(v, 0.0F);
      there_and_back(h.data(), intermediate);
      product(b, h.data(), hidden, intermediate, y.data() + r * hidden);
    }
    return y;
  }
};

/// |a - b| / |b|, 2-norms.
double distance(Values const& a, Values const& b) {
  double difference = 0, norm = 0;
  for (std::size_t i = 0; i < b.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    norm += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / norm);
}

template <class Experts>
class QuantizedProducts : public testing::Test {};
using AllExperts = testing::Types<experts::Reference<>, experts::OneDnn>;
TYPED_TEST_SUITE(QuantizedProducts, AllExperts);

TYPED_TEST(QuantizedProducts, Q9_Nvfp4AgainstItsDequantizedProduct) {
  using quantization::Nvfp4;
  Problem<Nvfp4> const p(12, 512, 256);
  std::uint32_t amax = 0;
  for (float const v : p.x) amax = std::max(amax, quantization::abs_bits(v));
  float const input_scale = quantization::Nvfp4Codec::global_from_amax(amax);
  Nvfp4 const scheme({.global_scale = input_scale});
  Values const expected = p.expected(scheme);
  EXPECT_LT(distance(p.computed<TypeParam>(scheme, scheme), expected), 1e-2);
  Nvfp4 const reciprocal({.global_scale = 1.0F / input_scale});
  EXPECT_GT(distance(p.computed<TypeParam>(scheme, reciprocal), expected), 10.0) << "a reciprocal must be seen";
}

TYPED_TEST(QuantizedProducts, Q13_BlockFp8ScalesEveryKBlock) {
  using Quant = quantization::Fp8Block<>;
  Problem<Quant> p(9, 7168, 128);  // blocks of very different size, so that one scale for all of them gives another product
  auto const block = [&](std::size_t i) { return static_cast<std::size_t>(static_cast<std::int64_t>(i) % p.hidden) / 128; };
  for (std::size_t i = 0; i < p.x.size(); ++i) p.x[i] *= std::exp2(static_cast<float>(block(i) % 7));
  Values const expected = p.expected({});
  EXPECT_LT(distance(p.computed<TypeParam>({}, {}), expected), 1e-2);

  Problem<Quant> plain = p;  // as if every block had the scale of the first
  for (std::size_t i = 0; i < p.x.size(); ++i) plain.x[i] *= std::exp2(-static_cast<float>(block(i) % 7));
  EXPECT_GT(distance(plain.expected({}), expected), 1e-2) << "the blocks' scales must matter";
}

/// Experts are constructed with the second of two experts' scale 3 of w2 replaced.
template <class Experts, class Quant>
void expect_scale_refused(typename Quant::WeightScale bad, std::string_view fault) {
  using Kernel = typename Experts::template Kernel<Config, Quant, ActivationFormat::batched>;
  constexpr std::int64_t kHidden = 128, kIntermediate = 128;
  experts::WeightStore<Config, Quant> store(2, kHidden, kIntermediate, false);
  Values const w = normals(kHidden * kIntermediate, 0.1F, 4);
  for (std::int64_t e : {0, 1}) store.set_expert(e, w.data(), w.data());
  auto const construct = [&] {
    Arena<space::host> arena;
    Kernel const kernel(Shape<Config>({kHidden, kIntermediate, 2, 1}), store.view(), 4, {}, {.kind = activation::Kind::relu_no_mul}, {},
                        arena);
  };
  EXPECT_NO_THROW(construct());
  store.visit_tensors([&](std::string_view name, auto const& view) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(*view.data_handle())>, typename Quant::WeightScale>) {
      if (name == "w2_scale") row_ptr(view, 1)[3] = bad;
    }
  });
  moe_test::expect_error(ErrorCode::argument,
                         text("expert weights: w2 of expert 1 in ", Quant::kName, ": scale 3 is not finite or out of range: ", fault),
                         construct);
}
TYPED_TEST(QuantizedProducts, ScalesThatAreNotFiniteAreRefused) {
  float const nan = std::numeric_limits<float>::quiet_NaN();
  expect_scale_refused<TypeParam, quantization::Int4Fp8<32>>(nan, "nan, magnitude at most 2.26855e+37");
  expect_scale_refused<TypeParam, quantization::Int4Fp8<32>>(3e37F, "3e+37, magnitude at most 2.26855e+37");  // times a code of up to 15
  expect_scale_refused<TypeParam, quantization::Int4Fp8<32, true>>({1.0F, 16.0F}, "its zero point is 16, expected 0 to 15");
  expect_scale_refused<TypeParam, quantization::Int8PerChannel>(-std::numeric_limits<float>::infinity(),
                                                                "-inf, magnitude at most 2.65846e+36");
  expect_scale_refused<TypeParam, quantization::Mxfp4W4A16<>>(253, "exponent 253, at most 252");
  expect_scale_refused<TypeParam, quantization::Mxfp8W8A16<>>(247, "exponent 247, at most 246");
  expect_scale_refused<TypeParam, quantization::Nvfp4W4A16>(0xFF, "nan");
}
TYPED_TEST(QuantizedProducts, BlockScalesThatAreNotFiniteAreRefused) {
  using Quant = quantization::Fp8Block<>;
  using Kernel = typename TypeParam::template Kernel<Config, Quant, ActivationFormat::batched>;
  experts::WeightStore<Config, Quant> store(1, 128, 128, false);
  Values const w = normals(128 * 128, 0.1F, 5);
  store.set_expert(0, w.data(), w.data());
  store.visit_tensors([&](std::string_view name, auto const& view) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(*view.data_handle())>, float>) {
      if (name == "w13_scale") *view.data_handle() = std::numeric_limits<float>::quiet_NaN();
    }
  });
  moe_test::expect_error(ErrorCode::argument, "expert weights: w13 of expert 0 in fp8_block128: scale 0 is not finite", [&] {
    Arena<space::host> arena;
    Kernel const kernel(Shape<Config>({128, 128, 1, 1}), store.view(), 4, {}, {.kind = activation::Kind::relu_no_mul}, {}, arena);
  });
}

}  // namespace
