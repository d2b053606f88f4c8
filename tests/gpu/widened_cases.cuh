// SPDX-License-Identifier: Apache-2.0
// tests/gpu/widened_cases.cuh: random layers whose weights the Hopper experts widen in registers, and their error against the device oracle
// on dequantised weights.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "device_values.cuh"
#include "moe/core/layer_config.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/weights.hpp"
#include "moe/quantization/nvfp4.hpp"

namespace moe_test {

using namespace moe;

struct WidenedConfig : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Any;
};

struct Sizes {
  int experts, hidden, intermediate, topk;
};

/// Random codes (every one of them) and scales of one layer. `exponent`: of the mxfp4 scales, relative to sensible ones.
template <class Quant>
struct RandomWeights {
  using Code = typename Quant::template WeightCode<bf16>;
  using Scale = typename Quant::WeightScale;
  Buffer<Code, space::cuda> c13, c2;
  Buffer<Scale, space::cuda> s13, s2;
  Buffer<float, space::cuda> b13, b2;
  WeightsOf<WidenedConfig, Quant> view;

  RandomWeights(Sizes const& s, bool biases, std::mt19937_64& gen, int exponent = 0, float zero_offset = 0.0F, bool gated = true) {
    std::int64_t const rows13 = (gated ? 2 : 1) * s.intermediate;
    fill(c13, s13, s.experts, rows13, s.hidden, gen, exponent, zero_offset);
    fill(c2, s2, s.experts, s.hidden, s.intermediate, gen, -exponent, zero_offset);
    if (biases) {
      std::normal_distribution<float> normal;
      std::vector<float> first(static_cast<std::size_t>(s.experts * rows13));
      std::vector<float> second(static_cast<std::size_t>(s.experts) * s.hidden);
      for (float& v : first) v = normal(gen);
      for (float& v : second) v = normal(gen);
      b13 = upload(first);
      b2 = upload(second);
    }
    view.w13 = {make_blocks(static_cast<Code const*>(c13.data()), s.experts, rows13, Quant::weight_code_cols(s.hidden)),
                make_rows(static_cast<Scale const*>(s13.data()), s.experts, Quant::weight_scale_count(rows13, s.hidden)),
                make_rows(static_cast<float const*>(b13.data()), biases ? s.experts : 0, rows13), rows13, s.hidden};
    view.w2 = {make_blocks(static_cast<Code const*>(c2.data()), s.experts, s.hidden, Quant::weight_code_cols(s.intermediate)),
               make_rows(static_cast<Scale const*>(s2.data()), s.experts, Quant::weight_scale_count(s.hidden, s.intermediate)),
               make_rows(static_cast<float const*>(b2.data()), biases ? s.experts : 0, std::int64_t{s.hidden}), s.hidden, s.intermediate};
  }

 private:
  static void fill(Buffer<Code, space::cuda>& codes, Buffer<Scale, space::cuda>& scales, int experts, std::int64_t rows, std::int64_t cols,
                   std::mt19937_64& gen, int exponent, float zero_offset) {
    std::vector<Code> c(static_cast<std::size_t>(experts * rows * Quant::weight_code_cols(cols)));
    for (Code& v : c) v = static_cast<Code>(gen() >> 32);
    constexpr float kCodes = std::is_same_v<Code, std::int8_t> ? 74.0F : 4.6F;  // their standard deviation, of integers
    std::int64_t const count = Quant::weight_scale_count(rows, cols);
    std::vector<Scale> s(static_cast<std::size_t>(experts * count));
    float const sigma = 1.0F / std::sqrt(static_cast<float>(cols));
    for (Scale& v : s) {
      float const uniform = static_cast<float>(gen() % 1024) / 1024.0F;
      if constexpr (std::is_same_v<Quant, quantization::Nvfp4W4A16>) {  // 0.5 to 3.75; some are zero, subnormal or negative
        std::uint64_t const kind = gen() % 16;
        v = static_cast<std::uint8_t>(kind == 0 ? gen() % 8 : ((6 + gen() % 3) << 3) | (gen() % 8));
        if (kind == 1) v |= 0x80u;
      } else if constexpr (std::is_same_v<Scale, std::uint8_t>) {  // codes have a standard deviation of 2.9
        v = static_cast<std::uint8_t>(127 + exponent + std::ilogb(sigma / 2.9F) - static_cast<int>(gen() % 3));
      } else if constexpr (std::is_same_v<Scale, float>) {
        v = sigma / kCodes * (0.5F + uniform);
      } else {
        v = {sigma / kCodes * (0.5F + uniform), static_cast<float>(gen() % 16) + zero_offset};
      }
    }
    if constexpr (std::is_same_v<Quant, quantization::Nvfp4W4A16>) {
      for (int e = 0; e < experts; ++e) {
        Quant::set_weight_global(s.data() + e * count, rows, cols,
                                 std::ldexp(sigma / 5.8F, exponent) * (1.0F + 0.125F * static_cast<float>(e % 4)));
      }
    }
    codes = upload(c);
    scales = upload(s);
  }
};

enum class Load { random, one_expert, some_missing, all_missing, few_experts };

inline std::vector<std::int32_t> make_ids(Sizes const& s, int tokens, Load load, std::mt19937_64& gen) {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> pool(static_cast<std::size_t>(s.experts));
  for (int e = 0; e < s.experts; ++e) pool[static_cast<std::size_t>(e)] = e;
  auto const used = static_cast<std::size_t>(load == Load::few_experts ? std::max(s.topk, s.experts / 4) : s.experts);
  for (int t = 0; t < tokens; ++t) {
    for (std::size_t j = 0; j < static_cast<std::size_t>(s.topk); ++j) std::swap(pool[j], pool[j + gen() % (used - j)]);
    for (int j = 0; j < s.topk; ++j) {
      std::int32_t id = pool[static_cast<std::size_t>(j)];
      if (load == Load::one_expert) id = j == 0 ? s.experts - 1 : kNoExpert;
      if ((load == Load::some_missing && gen() % 3 == 0) || load == Load::all_missing) id = kNoExpert;
      ids.push_back(id);
    }
  }
  return ids;
}

template <class T>
double relative_error(std::vector<bf16> const& got, std::vector<T> const& want, std::size_t count) {
  double error = 0;
  double norm = 0;
  for (std::size_t i = 0; i < count; ++i) {
    double const w = static_cast<double>(to_float(want[i]));
    error += std::pow(static_cast<double>(to_float(got[i])) - w, 2);
    norm += w * w;
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

inline activation::Any const kSilu{};
inline activation::Any const kGptOss{activation::Kind::swigluoai_halves, {1.702F, 1.0F, 7.0F, 4.0F, 25.0F}};

/// `Experts` and the oracle on one random batch: the relative error, after checking that a second run gives the same bits. Workspace and
/// output hold NaN before each.
template <class Quant, class Experts>
double standard_error(Sizes const& s, int tokens, Load load, std::uint64_t seed, bool biases = false, activation::Any const& act = kSilu,
                      int exponent = 0, bool weight_on_input = false) {
  std::mt19937_64 gen(seed);
  RandomWeights<Quant> const weights(s, biases, gen, exponent, 0.0F, act.gated());
  Shape<WidenedConfig> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk, weight_on_input});
  std::vector<bf16> x(static_cast<std::size_t>(tokens) * s.hidden);
  std::vector<float> w(static_cast<std::size_t>(tokens) * s.topk);
  std::normal_distribution<float> normal;
  for (bf16& v : x) v = from_float<bf16>(normal(gen));
  for (float& v : w) v = 0.05F + std::abs(normal(gen));
  auto const device_x = upload(x);
  auto const device_w = upload(w);
  auto const device_ids = upload(make_ids(s, tokens, load, gen));
  StandardTokensOf<WidenedConfig, Quant> batch{};
  batch.rows = make_rows(device_x.data(), tokens, std::int64_t{s.hidden});
  batch.topk_ids = make_rows(device_ids.data(), tokens, std::int64_t{s.topk});
  batch.topk_weights = make_rows(device_w.data(), tokens, std::int64_t{s.topk});

  auto const count = static_cast<std::size_t>(tokens) * s.hidden;
  std::vector<float> want(count);
  {
    Arena<space::cuda> arena;
    experts::CudaReference::Kernel<WidenedConfig, Quant, ActivationFormat::standard> oracle(shape, weights.view, tokens, Quant{}, act, {},
                                                                                            arena);
    Buffer<float, space::cuda> y(static_cast<std::int64_t>(count));
    oracle.apply(batch, make_rows(y.data(), tokens, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(want.data());
  }
  Arena<space::cuda> arena;
  typename Experts::template Kernel<WidenedConfig, Quant, ActivationFormat::standard> kernel(shape, weights.view, tokens, Quant{}, act, {},
                                                                                             arena);
  Buffer<bf16, space::cuda> y(static_cast<std::int64_t>(count));
  std::vector<bf16> got(count);
  std::vector<bf16> again(count);
  auto const poison = upload(std::vector<bf16>(x.size(), from_float<bf16>(std::numeric_limits<float>::quiet_NaN())));
  StandardTokensOf<WidenedConfig, Quant> bad = batch;
  bad.rows = make_rows(poison.data(), tokens, std::int64_t{s.hidden});
  for (auto* result : {&got, &again}) {
    kernel.apply(bad, make_rows(y.data(), tokens, std::int64_t{s.hidden}), nullptr);  // leaves NaN all over the workspace
    Memory<space::cuda>::fill(y.data(), 0xFF, y.bytes());
    kernel.apply(batch, make_rows(y.data(), tokens, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(result->data());
  }
  EXPECT_EQ(std::memcmp(got.data(), again.data(), count * sizeof(bf16)), 0) << "not repeatable";
  return relative_error(got, want, count);
}

}  // namespace moe_test
