// SPDX-License-Identifier: Apache-2.0
// tests/gpu/packed_layers.cuh: random layers and calls for the Hopper experts that pack weights and convert them in registers.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include "device_values.cuh"
#include "moe/activation/activation.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/core/types.hpp"
#include "moe/quantization/nvfp4.hpp"

namespace moe_test {

using namespace moe;

struct PackedConfig : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Any;
};

struct Sizes {
  int experts, hidden, intermediate, topk;
};

inline Buffer<float, space::cuda> normal_biases(std::int64_t count, std::mt19937_64& gen) {
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (float& v : values) v = normal(gen);
  return upload(values);
}

/// Scales of integers: all positive; positive and exact in bf16, as those of most checkpoints are; one in 16 negative or zero.
enum class Scales { positive, of_bf16, any_sign };

/// Random codes (every one of them) and scales of one layer. `exponent`: the scales of w13 are sensible ones times that power of two, those
/// of w2 divided by it. `wanted`: the scales of integers.
template <class Quant>
struct RandomWeights {
  using Code = typename Quant::template WeightCode<bf16>;
  using Scale = typename Quant::WeightScale;
  Buffer<Code, space::cuda> c13, c2;
  Buffer<Scale, space::cuda> s13, s2;
  Buffer<float, space::cuda> b13, b2;
  WeightsOf<PackedConfig, Quant> view;

  RandomWeights(Sizes const& s, bool biases, std::mt19937_64& gen, int exponent = 0, float zero_offset = 0.0F, bool gated = true,
                Scales wanted = Scales::positive) {
    std::int64_t const rows13 = (gated ? 2 : 1) * s.intermediate;
    fill(c13, s13, s.experts, rows13, s.hidden, gen, exponent, zero_offset, wanted);
    fill(c2, s2, s.experts, s.hidden, s.intermediate, gen, -exponent, zero_offset, wanted);
    if (biases) {
      b13 = normal_biases(s.experts * rows13, gen);
      b2 = normal_biases(std::int64_t{s.experts} * s.hidden, gen);
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
                   std::mt19937_64& gen, int exponent, float zero_offset, Scales wanted) {
    std::vector<Code> c(static_cast<std::size_t>(experts * rows * Quant::weight_code_cols(cols)));
    constexpr bool kE4m3 = Quant::kWeightDType == DType::e4m3;
    constexpr bool kNvfp4 = std::is_base_of_v<quantization::Nvfp4Weights, Quant>;
    static_assert(sizeof(Code) == 1);
    for (Code& v : c) {
      auto bits = static_cast<std::uint8_t>(gen() >> 32);
      if (kE4m3 && (bits & 0x7F) == 0x7F) bits = 0;  // every code that is a number
      v = std::bit_cast<Code>(bits);
    }
    constexpr float kCodes = kE4m3 ? 104.0F : std::is_same_v<Code, std::int8_t> ? 74.0F : 4.6F;  // their standard deviation
    std::int64_t const count = Quant::weight_scale_count(rows, cols);
    std::vector<Scale> s(static_cast<std::size_t>(experts * count));
    float const sigma = 1.0F / std::sqrt(static_cast<float>(cols));
    for (Scale& v : s) {
      float const uniform = static_cast<float>(gen() % 1024) / 1024.0F;
      if constexpr (kNvfp4) {  // 0.5 to 3.75; some are zero, subnormal or negative
        std::uint64_t const kind = gen() % 16;
        v = static_cast<std::uint8_t>(kind == 0 ? gen() % 8 : ((6 + gen() % 3) << 3) | (gen() % 8));
        if (kind == 1) v |= 0x80u;
      } else if constexpr (std::is_same_v<Scale, std::uint8_t>) {  // e2m1 has a standard deviation of 2.9
        v = static_cast<std::uint8_t>(127 + exponent + std::ilogb(sigma / (kE4m3 ? kCodes : 2.9F)) - static_cast<int>(gen() % 3));
      } else {
        float scale = std::ldexp(sigma / kCodes * (0.5F + uniform), exponent);
        if (wanted == Scales::of_bf16) scale = to_float(from_float<bf16>(scale));
        if (wanted == Scales::any_sign && gen() % 16 == 0) scale *= gen() % 2 == 0 ? 0.0F : -1.0F;
        if constexpr (std::is_same_v<Scale, float>) {
          v = scale;
        } else {
          v = {scale, static_cast<float>(gen() % 16) + zero_offset};
        }
      }
    }
    if constexpr (kNvfp4) {
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

inline activation::Any const kSilu{};
inline activation::Any const kGptOss{activation::Kind::swigluoai_halves, {1.702F, 1.0F, 7.0F, 4.0F, 25.0F}};

/// Rows of `hidden` as a backend hands them to experts, on the device.
template <class Quant>
struct StoredRows {
  using Element = typename Quant::template Payload<bf16>;
  using Scale = typename Quant::Scale;
  std::int64_t hidden, count;
  Buffer<Element, space::cuda> elements;
  Buffer<Scale, space::cuda> scales;

  StoredRows(std::vector<bf16> const& rows, std::int64_t row_elements)
      : hidden(row_elements), count(static_cast<std::int64_t>(rows.size()) / row_elements) {
    std::int64_t const columns = Quant::payload_cols(hidden);
    std::vector<Element> e(static_cast<std::size_t>(count * columns));
    std::vector<Scale> s(static_cast<std::size_t>(count * Quant::scale_cols(hidden)));
    for (std::int64_t r = 0; r < count; ++r) {
      Quant{}.template quantize_row<bf16>(rows.data() + r * hidden, hidden, e.data() + r * columns,
                                          s.data() + r * Quant::scale_cols(hidden));
    }
    elements = upload(e);
    if (!s.empty()) scales = upload(s);
  }
  Rows<Element const> element_rows() const {
    return make_rows(static_cast<Element const*>(elements.data()), count, Quant::payload_cols(hidden));
  }
  Rows<Scale const> scale_rows() const { return make_rows(static_cast<Scale const*>(scales.data()), count, Quant::scale_cols(hidden)); }
  /// `blocks` blocks of equally many rows.
  Blocks<Element const> element_blocks(std::int64_t blocks) const {
    return make_blocks(static_cast<Element const*>(elements.data()), blocks, count / blocks, Quant::payload_cols(hidden));
  }
  Blocks<Scale const> scale_blocks(std::int64_t blocks) const {
    return make_blocks(static_cast<Scale const*>(scales.data()), blocks, count / blocks, Quant::scale_cols(hidden));
  }
};

inline std::vector<bf16> random_rows(Sizes const& s, int tokens, std::mt19937_64& gen, std::normal_distribution<float>& normal,
                                     int exponent) {
  std::vector<bf16> rows(static_cast<std::size_t>(tokens) * s.hidden);
  for (bf16& v : rows) v = from_float<bf16>(std::ldexp(normal(gen), exponent));
  return rows;
}

/// Random rows, times that power of two, and router weights of one call, on the device.
template <class Quant>
struct RandomCall {
  std::normal_distribution<float> normal;
  StoredRows<Quant> x;
  Buffer<float, space::cuda> w;
  Buffer<std::int32_t, space::cuda> ids;
  StandardTokensOf<PackedConfig, Quant> batch{};

  RandomCall(Sizes const& s, int tokens, Load load, std::mt19937_64& gen, int exponent = 0)
      : x(random_rows(s, tokens, gen, normal, exponent), s.hidden) {
    std::vector<float> weights(static_cast<std::size_t>(tokens) * s.topk);
    for (float& v : weights) v = 0.05F + std::abs(normal(gen));
    w = upload(weights);
    ids = upload(make_ids(s, tokens, load, gen));
    batch.rows = x.element_rows();
    batch.scales = x.scale_rows();
    batch.topk_ids = make_rows(static_cast<std::int32_t const*>(ids.data()), tokens, std::int64_t{s.topk});
    batch.topk_weights = make_rows(static_cast<float const*>(w.data()), tokens, std::int64_t{s.topk});
  }
};

}  // namespace moe_test
