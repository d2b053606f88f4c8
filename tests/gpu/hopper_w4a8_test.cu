// SPDX-License-Identifier: Apache-2.0
// tests/gpu/hopper_w4a8_test.cu: the layer with mxfp4 weights and e4m3 activations equals the device oracle on dequantised weights and
// equally quantised activations: sizes with tails, biases, clamped activation, scales of any spread, missing ids, refused scales; and, on
// the host, folded scales and codes in e4m3.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/contract/check.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/device/route.cuh"
#include "moe/routing/softmax_topk.hpp"
#include "on_hopper.hpp"
#include "w4_composition.cuh"

namespace {

using namespace moe;
using moe_test::composition_output;
using moe_test::on_hopper;
using moe_test::upload;
using Quant = quantization::Mxfp4Fp8<>;
using Cuda = space::cuda;

struct Config : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Any;
};

#define NEEDS_HOPPER() \
  if (!on_hopper()) GTEST_SKIP() << "needs compute capability 9.0"

struct Sizes {
  int experts, hidden, intermediate, topk;
};

/// How the scales of neighbouring groups differ, in binades.
enum class Spread { usual, folds, wide, unused };

int exponent_offset(Spread spread, std::mt19937_64& gen) {
  switch (spread) {
    case Spread::usual: return -static_cast<int>(gen() % 3);
    case Spread::folds: return -static_cast<int>(gen() % 15);
    case Spread::wide: return gen() % 4 == 0 ? -90 + static_cast<int>(gen() % 60) : -static_cast<int>(gen() % 15);
    case Spread::unused: return gen() % 4 == 0 ? -1000 : -static_cast<int>(gen() % 3);
  }
  return 0;
}

/// Random codes and scales of one layer. Spread::unused: some groups have codes and a scale byte of zero.
struct RandomWeights {
  Buffer<std::uint8_t, Cuda> c13, c2, s13, s2;
  Buffer<float, Cuda> b13, b2;
  WeightsOf<Config, Quant> view;

  RandomWeights(Sizes const& s, bool biases, Spread spread, std::mt19937_64& gen) {
    std::int64_t const rows13 = 2 * s.intermediate;
    fill(c13, s13, s.experts * rows13, s.hidden, spread, gen);
    fill(c2, s2, std::int64_t{s.experts} * s.hidden, s.intermediate, spread, gen);
    if (biases) {
      std::normal_distribution<float> normal;
      std::vector<float> first(static_cast<std::size_t>(s.experts * rows13));
      std::vector<float> second(static_cast<std::size_t>(s.experts) * s.hidden);
      for (float& v : first) v = normal(gen);
      for (float& v : second) v = normal(gen);
      b13 = upload(first);
      b2 = upload(second);
    }
    auto const bytes = [](Buffer<std::uint8_t, Cuda> const& b) { return static_cast<std::uint8_t const*>(b.data()); };
    view.w13 = {make_blocks(bytes(c13), s.experts, rows13, s.hidden / 2),
                make_rows(bytes(s13), s.experts, Quant::weight_scale_count(rows13, s.hidden)),
                make_rows(static_cast<float const*>(b13.data()), biases ? s.experts : 0, rows13), rows13, s.hidden};
    view.w2 = {make_blocks(bytes(c2), s.experts, s.hidden, s.intermediate / 2),
               make_rows(bytes(s2), s.experts, Quant::weight_scale_count(s.hidden, s.intermediate)),
               make_rows(static_cast<float const*>(b2.data()), biases ? s.experts : 0, std::int64_t{s.hidden}), s.hidden, s.intermediate};
  }

 private:
  static void fill(Buffer<std::uint8_t, Cuda>& codes, Buffer<std::uint8_t, Cuda>& scales, std::int64_t rows, std::int64_t cols,
                   Spread spread, std::mt19937_64& gen) {
    std::vector<std::uint8_t> c(static_cast<std::size_t>(rows * cols / 2));
    std::vector<std::uint8_t> s(static_cast<std::size_t>(rows * cols / 32));
    for (std::uint8_t& v : c) v = static_cast<std::uint8_t>(gen());
    int const usual = 127 + std::ilogb(1.0F / std::sqrt(static_cast<float>(cols)) / 2.9F);
    for (std::size_t g = 0; g < s.size(); ++g) {
      int const offset = exponent_offset(spread, gen);
      s[g] = static_cast<std::uint8_t>(std::max(0, usual + offset));
      if (offset == -1000) std::memset(&c[g * 16], 0, 16);
    }
    codes = upload(c);
    scales = upload(s);
  }
};

activation::Any const kSilu{};
activation::Any const kGptOss{activation::Kind::swigluoai_halves, {1.702F, 1.0F, 7.0F, 4.0F, 25.0F}};

/// The relative error against the oracle, after checking that a second run gives the same bits.
double layer_error(Sizes const& s, int tokens, std::uint64_t seed, bool biases, activation::Any const& act, Spread spread,
                   bool missing = false) {
  std::mt19937_64 gen(seed);
  RandomWeights const weights(s, biases, spread, gen);
  Shape<Config> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  auto const rows = static_cast<std::size_t>(tokens);
  auto const hidden = static_cast<std::size_t>(s.hidden);
  auto const groups = static_cast<std::size_t>(Quant::scale_cols(s.hidden));
  std::normal_distribution<float> normal;
  std::vector<std::uint8_t> codes(rows * hidden);
  std::vector<float> scales(rows * groups);
  std::vector<float> row(hidden);
  for (std::size_t t = 0; t < rows; ++t) {
    for (float& v : row) v = normal(gen) * (t % 5 == 4 ? 100.0F : 1.0F);
    Quant{}.template quantize_row<float>(row.data(), s.hidden, &codes[t * hidden], &scales[t * groups]);
  }
  std::vector<float> w(rows * static_cast<std::size_t>(s.topk));
  std::vector<std::int32_t> ids(w.size());
  for (std::size_t i = 0; i < w.size(); ++i) {
    w[i] = 0.05F + std::abs(normal(gen));
    std::size_t const j = i % static_cast<std::size_t>(s.topk);
    ids[i] = static_cast<std::int32_t>((i / static_cast<std::size_t>(s.topk) * 7 + j) % static_cast<std::size_t>(s.experts));
    if (missing && gen() % 3 == 0 && i > 0) ids[i] = kNoExpert;  // one token keeps its expert: zeros have no relative error
  }
  auto const device_codes = upload(codes);
  auto const device_scales = upload(scales);
  auto const device_w = upload(w);
  auto const device_ids = upload(ids);
  StandardTokensOf<Config, Quant> batch{};
  batch.rows = make_rows(static_cast<std::uint8_t const*>(device_codes.data()), tokens, std::int64_t{s.hidden});
  batch.scales = make_rows(static_cast<float const*>(device_scales.data()), tokens, static_cast<std::int64_t>(groups));
  batch.topk_ids = make_rows(device_ids.data(), tokens, std::int64_t{s.topk});
  batch.topk_weights = make_rows(device_w.data(), tokens, std::int64_t{s.topk});

  std::vector<float> want(rows * hidden);
  {
    Arena<Cuda> arena;
    experts::CudaReference::Kernel<Config, Quant, ActivationFormat::standard> oracle(shape, weights.view, tokens, Quant{}, act, {}, arena);
    Buffer<float, Cuda> y(static_cast<std::int64_t>(want.size()));
    oracle.apply(batch, make_rows(y.data(), tokens, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(want.data());
  }
  Arena<Cuda> arena;
  experts::HopperW4A8::Kernel<Config, Quant, ActivationFormat::standard> kernel(shape, weights.view, tokens, Quant{}, act, {}, arena);
  Buffer<bf16, Cuda> y(static_cast<std::int64_t>(want.size()));
  std::vector<bf16> got(want.size());
  std::vector<bf16> again(want.size());
  for (auto* result : {&got, &again}) {
    Memory<Cuda>::fill(y.data(), 0xFF, y.bytes());
    kernel.apply(batch, make_rows(y.data(), tokens, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(result->data());
  }
  EXPECT_EQ(std::memcmp(got.data(), again.data(), got.size() * sizeof(bf16)), 0) << "not repeatable";
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    error += std::pow(static_cast<double>(to_float(got[i])) - static_cast<double>(want[i]), 2);
    norm += std::pow(static_cast<double>(want[i]), 2);
  }
  EXPECT_GT(norm, 0.0);
  double const relative = std::sqrt(error / norm);
  std::printf("%d x %d x %d, %d tokens: %.2e\n", s.experts, s.hidden, s.intermediate, tokens, relative);
  return relative;
}

constexpr double kTolerance = 1e-2;

TEST(HopperW4A8, Sizes) {
  NEEDS_HOPPER();
  for (int tokens : {1, 7, 64, 300}) {
    EXPECT_LT(layer_error({8, 256, 256, 2}, tokens, 1, false, kSilu, Spread::usual), kTolerance) << tokens;
    EXPECT_LT(layer_error({4, 320, 96, 2}, tokens, 2, true, kSilu, Spread::usual), kTolerance) << tokens << ", tails";
    EXPECT_LT(layer_error({4, 64, 32, 1}, tokens, 3, true, kSilu, Spread::usual, true), kTolerance) << tokens << ", less than a group";
  }
}

TEST(HopperW4A8, GptOssWithBiases) {
  NEEDS_HOPPER();
  for (int tokens : {1, 9, 150}) {
    EXPECT_LT(layer_error({4, 2880, 2880, 2}, tokens, 10, true, kGptOss, Spread::usual), kTolerance) << tokens;
  }
}

TEST(HopperW4A8, ScalesOfAnySpread) {
  NEEDS_HOPPER();
  for (Spread spread : {Spread::folds, Spread::wide, Spread::unused}) {
    for (int tokens : {3, 90}) {
      EXPECT_LT(layer_error({2, 576, 384, 2}, tokens, 20, false, kSilu, spread), kTolerance) << static_cast<int>(spread) << ", " << tokens;
    }
  }
}

TEST(HopperW4A8, ScaleBytesWithoutFiniteWeightsAreRefused) {
  NEEDS_HOPPER();
  Sizes const s{2, 128, 128, 1};
  std::mt19937_64 gen(30);
  RandomWeights const weights(s, false, Spread::usual, gen);
  Shape<Config> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  auto const construct = [&](std::uint8_t byte) {
    std::uint8_t* const at = const_cast<std::uint8_t*>(weights.s2.data()) + 5;
    Memory<Cuda>::fill(at, byte, 1);
    Arena<Cuda> arena;
    experts::HopperW4A8::Kernel<Config, Quant, ActivationFormat::standard> kernel(shape, weights.view, 4, Quant{}, kSilu, {}, arena);
  };
  EXPECT_NO_THROW(construct(252));
  EXPECT_NO_THROW(construct(0));
  for (int byte : {253, 254, 255}) EXPECT_THROW(construct(static_cast<std::uint8_t>(byte)), Error) << byte;
}

using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
template <class Q, class Experts>
using Compose = Composition<Config, Router, Q, backends::NoExpertParallel<Cuda>, Experts>;
static_assert(Compose<Quant, experts::HopperW4A8>::kLegal);
static_assert(!Compose<quantization::None, experts::HopperW4A8>::kLegal);
static_assert(!Compose<Quant, experts::HopperW4A16>::kLegal);

TEST(HopperW4A8, CompositionEqualsOracle) {
  NEEDS_HOPPER();
  for (std::int64_t rows : {1, 50}) {
    auto const got = composition_output<Config, Quant, experts::HopperW4A8>(rows);
    auto const want = composition_output<Config, Quant, experts::CudaReference>(rows);
    double error = 0;
    double norm = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      error += std::pow(static_cast<double>(to_float(got[i]) - to_float(want[i])), 2);
      norm += std::pow(static_cast<double>(to_float(want[i])), 2);
    }
    EXPECT_GT(norm, 0.0);
    EXPECT_LT(std::sqrt(error / norm), kTolerance) << rows << " rows";
  }
}

}  // namespace
