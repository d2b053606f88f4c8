// SPDX-License-Identifier: Apache-2.0
// tests/gpu/packed_cases.cuh: random layers whose weights the Hopper experts pack and convert in registers, their error against the device
// oracle on dequantised weights, and the cases that every such policy must pass.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "device_values.cuh"
#include "moe/core/cuda_space.hpp"
#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "moe/experts/weights.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "relative_error.hpp"

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

/// Random codes (every one of them) and scales of one layer. `exponent`: of the mxfp4 scales, relative to sensible ones. `bf16_scales`:
/// of int4, those that a checkpoint in bf16 may have.
template <class Quant>
struct RandomWeights {
  using Code = typename Quant::template WeightCode<bf16>;
  using Scale = typename Quant::WeightScale;
  Buffer<Code, space::cuda> c13, c2;
  Buffer<Scale, space::cuda> s13, s2;
  Buffer<float, space::cuda> b13, b2;
  WeightsOf<PackedConfig, Quant> view;

  RandomWeights(Sizes const& s, bool biases, std::mt19937_64& gen, int exponent = 0, float zero_offset = 0.0F, bool gated = true,
                bool bf16_scales = false) {
    std::int64_t const rows13 = (gated ? 2 : 1) * s.intermediate;
    fill(c13, s13, s.experts, rows13, s.hidden, gen, exponent, zero_offset, bf16_scales);
    fill(c2, s2, s.experts, s.hidden, s.intermediate, gen, -exponent, zero_offset, bf16_scales);
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
                   std::mt19937_64& gen, int exponent, float zero_offset, bool bf16_scales) {
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
      } else {
        float scale = sigma / kCodes * (0.5F + uniform);
        if (bf16_scales) scale = to_float(from_float<bf16>(scale));
        if constexpr (std::is_same_v<Scale, float>) {
          v = scale;
        } else {
          v = {scale, static_cast<float>(gen() % 16) + zero_offset};
        }
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
    std::vector<Element> e(rows.size());
    std::vector<Scale> s(static_cast<std::size_t>(count * Quant::scale_cols(hidden)));
    for (std::int64_t r = 0; r < count; ++r) {
      Quant{}.template quantize_row<bf16>(rows.data() + r * hidden, hidden, e.data() + r * hidden,
                                          s.data() + r * Quant::scale_cols(hidden));
    }
    elements = upload(e);
    if (!s.empty()) scales = upload(s);
  }
  Rows<Element const> element_rows() const { return make_rows(static_cast<Element const*>(elements.data()), count, hidden); }
  Rows<Scale const> scale_rows() const { return make_rows(static_cast<Scale const*>(scales.data()), count, Quant::scale_cols(hidden)); }
  /// `blocks` blocks of equally many rows.
  Blocks<Element const> element_blocks(std::int64_t blocks) const {
    return make_blocks(static_cast<Element const*>(elements.data()), blocks, count / blocks, hidden);
  }
  Blocks<Scale const> scale_blocks(std::int64_t blocks) const {
    return make_blocks(static_cast<Scale const*>(scales.data()), blocks, count / blocks, Quant::scale_cols(hidden));
  }
};

inline std::vector<bf16> random_rows(Sizes const& s, int tokens, std::mt19937_64& gen, std::normal_distribution<float>& normal) {
  std::vector<bf16> rows(static_cast<std::size_t>(tokens) * s.hidden);
  for (bf16& v : rows) v = from_float<bf16>(normal(gen));
  return rows;
}

/// Random rows and router weights of one call, on the device.
template <class Quant>
struct RandomCall {
  std::normal_distribution<float> normal;
  StoredRows<Quant> x;
  Buffer<float, space::cuda> w;
  Buffer<std::int32_t, space::cuda> ids;
  StandardTokensOf<PackedConfig, Quant> batch{};

  RandomCall(Sizes const& s, int tokens, Load load, std::mt19937_64& gen) : x(random_rows(s, tokens, gen, normal), s.hidden) {
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

template <class Quant, class Experts>
using StandardKernel = typename Experts::template Kernel<PackedConfig, Quant, ActivationFormat::standard>;
template <class Quant, class Experts>
using BatchedKernel = typename Experts::template Kernel<PackedConfig, Quant, ActivationFormat::batched>;

/// `Experts` and the oracle on one random batch: the relative error, after checking that a second run gives the same bits. Workspace and
/// output hold NaN before each.
template <class Quant, class Experts>
double standard_error(Sizes const& s, int tokens, Load load, std::uint64_t seed, bool biases = false, activation::Any const& act = kSilu,
                      int exponent = 0, bool weight_on_input = false, bool bf16_scales = false) {
  std::mt19937_64 gen(seed);
  RandomWeights<Quant> const weights(s, biases, gen, exponent, 0.0F, act.gated(), bf16_scales);
  Shape<PackedConfig> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk, weight_on_input});
  RandomCall<Quant> const call(s, tokens, load, gen);
  auto const count = static_cast<std::size_t>(tokens) * s.hidden;
  std::vector<float> want(count);
  {
    Arena<space::cuda> arena;
    StandardKernel<Quant, experts::CudaReference> oracle(shape, weights.view, tokens, Quant{}, act, {}, arena);
    Buffer<float, space::cuda> y(static_cast<std::int64_t>(count));
    oracle.apply(call.batch, make_rows(y.data(), tokens, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(want.data());
  }
  Arena<space::cuda> arena;
  StandardKernel<Quant, Experts> kernel(shape, weights.view, tokens, Quant{}, act, {}, arena);
  Buffer<bf16, space::cuda> y(static_cast<std::int64_t>(count));
  std::vector<bf16> got(count);
  std::vector<bf16> again(count);
  StoredRows<Quant> const poison(std::vector<bf16>(count, from_float<bf16>(std::numeric_limits<float>::quiet_NaN())), s.hidden);
  StandardTokensOf<PackedConfig, Quant> bad = call.batch;
  bad.rows = poison.element_rows();
  for (auto* result : {&got, &again}) {
    kernel.apply(bad, make_rows(y.data(), tokens, std::int64_t{s.hidden}), nullptr);  // leaves NaN all over the workspace
    Memory<space::cuda>::fill(y.data(), 0xFF, y.bytes());
    kernel.apply(call.batch, make_rows(y.data(), tokens, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(result->data());
  }
  EXPECT_EQ(std::memcmp(got.data(), again.data(), count * sizeof(bf16)), 0) << "not repeatable";
  return relative_error(got, want);
}

/// X19: a captured call follows the row count in device memory, rows past it are not looked at.
template <class Quant, class Experts>
void graph_follows_the_devices_row_count() {
  Sizes const s{8, 256, 192, 2};
  constexpr int kTokens = 64;
  std::mt19937_64 gen(500);
  RandomWeights<Quant> const weights(s, false, gen);
  Arena<space::cuda> arena;
  StandardKernel<Quant, Experts> kernel(Shape<PackedConfig>(LayerShape{s.hidden, s.intermediate, s.experts, s.topk}), weights.view, kTokens,
                                        Quant{}, kSilu, {}, arena);
  RandomCall<Quant> call(s, kTokens, Load::random, gen);
  auto rows = upload(std::vector<std::int32_t>{kTokens});
  call.batch.num_rows = rows.data();
  auto const count = static_cast<std::size_t>(kTokens * s.hidden);
  Buffer<bf16, space::cuda> y(static_cast<std::int64_t>(count));
  CudaStream stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  kernel.apply(call.batch, make_rows(y.data(), kTokens, std::int64_t{s.hidden}), stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  std::size_t nodes = 0;
  ASSERT_EQ(cudaGraphGetNodes(graph, nullptr, &nodes), cudaSuccess);
  EXPECT_LE(nodes, 4U);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  auto const replay = [&](std::int32_t valid) {
    rows.copy_from_host(&valid);
    Memory<space::cuda>::fill(y.data(), 0xFF, y.bytes());
    EXPECT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    stream.synchronize();
    std::vector<bf16> got(count);
    y.copy_to_host(got.data());
    return got;
  };
  std::vector<bf16> const full = replay(kTokens);
  EXPECT_TRUE(std::any_of(full.begin(), full.end(), [](bf16 v) { return to_float(v) != 0.0F; }));
  for (std::int32_t valid : {1, 17, 0, kTokens}) {
    EXPECT_LT(relative_error(replay(valid), full, static_cast<std::size_t>(valid) * s.hidden), 1e-2) << valid << " rows";
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

/// Batches with an empty and a full expert, NaN past the counts, equal the oracle; the same rows in one list, found by index, have the same
/// bits.
template <class Quant, class Experts>
void batched_equals_oracle(double tolerance) {
  Sizes const s{5, 256, 320, 1};
  constexpr int kCapacity = 70;
  std::mt19937_64 gen(600);
  RandomWeights<Quant> const weights(s, true, gen);
  Shape<PackedConfig> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  std::vector<std::int32_t> const counts{0, 1, kCapacity, 9, 33};
  std::vector<bf16> x(static_cast<std::size_t>(s.experts) * kCapacity * s.hidden);
  std::normal_distribution<float> normal;
  for (std::size_t i = 0; i < x.size(); ++i) {
    std::size_t const row = i / static_cast<std::size_t>(s.hidden);
    bool const valid = static_cast<int>(row % kCapacity) < counts[row / kCapacity];
    x[i] = from_float<bf16>(valid ? normal(gen) : std::numeric_limits<float>::quiet_NaN());
  }
  StoredRows<Quant> const stored(x, s.hidden);
  auto const device_counts = upload(counts);
  BatchedTokensOf<PackedConfig, Quant> batch{};
  batch.rows = stored.element_blocks(s.experts);
  batch.scales = stored.scale_blocks(s.experts);
  batch.expert_num_tokens = make_vector(device_counts.data(), s.experts);
  Arena<space::cuda> arena;
  BatchedKernel<Quant, experts::CudaReference> oracle(shape, weights.view, kCapacity, {}, kSilu, {}, arena);
  BatchedKernel<Quant, Experts> kernel(shape, weights.view, kCapacity, {}, kSilu, {}, arena);
  Buffer<float, space::cuda> want(static_cast<std::int64_t>(x.size()));
  Buffer<bf16, space::cuda> got(static_cast<std::int64_t>(x.size()));
  Memory<space::cuda>::fill(want.data(), 0, want.bytes());
  oracle.apply(batch, make_blocks(want.data(), s.experts, kCapacity, std::int64_t{s.hidden}), nullptr);
  std::vector<float> expected(x.size());
  want.copy_to_host(expected.data());
  auto const run = [&] {
    Memory<space::cuda>::fill(got.data(), 0, got.bytes());
    kernel.apply(batch, make_blocks(got.data(), s.experts, kCapacity, std::int64_t{s.hidden}), nullptr);
    std::vector<bf16> out(x.size());
    got.copy_to_host(out.data());
    return out;
  };
  std::vector<bf16> const plain = run();
  EXPECT_LT(relative_error(plain, expected), tolerance);

  std::int64_t const rows = std::int64_t{s.experts} * kCapacity;
  std::vector<std::int32_t> gather(static_cast<std::size_t>(rows));
  std::vector<bf16> list(x.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    gather[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(rows - 1 - r);
    std::copy_n(x.data() + r * s.hidden, s.hidden, list.data() + (rows - 1 - r) * s.hidden);
  }
  StoredRows<Quant> const stored_list(list, s.hidden);
  auto const device_gather = upload(gather);
  batch.rows = stored_list.element_blocks(1);
  batch.scales = stored_list.scale_blocks(1);
  batch.gather = make_rows(device_gather.data(), s.experts, std::int64_t{kCapacity});
  std::vector<bf16> const gathered = run();
  EXPECT_EQ(std::memcmp(plain.data(), gathered.data(), plain.size() * sizeof(bf16)), 0) << "gathered";
}

/// Weights replaced in place are packed again, at a width that leaves half a brick of padding.
template <class Quant, class Experts>
void weights_changed_in_place_are_packed_anew(int intermediate = 96) {
  using Kernel = StandardKernel<Quant, Experts>;
  Sizes const s{4, 128, intermediate, 2};
  std::mt19937_64 gen(650);
  RandomWeights<Quant> weights(s, false, gen);
  RandomWeights<Quant> const others(s, false, gen);
  Shape<PackedConfig> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  Arena<space::cuda> arena;
  Kernel kernel(shape, weights.view, 8, Quant{}, kSilu, {}, arena);
  Kernel const fresh(shape, others.view, 8, Quant{}, kSilu, {}, arena);
  RandomCall<Quant> const call(s, 8, Load::random, gen);
  Buffer<bf16, space::cuda> y(8 * s.hidden);
  auto const run = [&](Kernel const& k) {
    std::vector<bf16> out(static_cast<std::size_t>(y.size()));
    k.apply(call.batch, make_rows(y.data(), 8, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(out.data());
    return out;
  };
  auto const want = run(fresh);
  double const before = relative_error(run(kernel), want);
  EXPECT_TRUE(std::isfinite(before) && before > 0.1) << before;
  Memory<space::cuda>::copy_async(weights.c13.data(), others.c13.data(), weights.c13.bytes(), nullptr);
  Memory<space::cuda>::copy_async(weights.c2.data(), others.c2.data(), weights.c2.bytes(), nullptr);
  Memory<space::cuda>::copy_async(weights.s13.data(), others.s13.data(), weights.s13.bytes(), nullptr);
  Memory<space::cuda>::copy_async(weights.s2.data(), others.s2.data(), weights.s2.bytes(), nullptr);
  kernel.weights_changed(nullptr);
  auto const got = run(kernel);
  EXPECT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(bf16)), 0);
}

/// The error with which a kernel of these weights is refused; none if they fit.
template <class Experts, class Quant>
std::optional<Error> refusal(RandomWeights<Quant> const& weights, LayerShape const& shape, activation::Any const& act = kSilu) {
  return error_of([&] {
    Arena<space::cuda> arena;
    StandardKernel<Quant, Experts> kernel(Shape<PackedConfig>(shape), weights.view, 8, Quant{}, act, {}, arena);
  });
}
template <class Experts, class Quant>
std::optional<ErrorCode> refusal_of(RandomWeights<Quant> const& weights, LayerShape const& shape, activation::Any const& act = kSilu) {
  std::optional<Error> const error = refusal<Experts>(weights, shape, act);
  return error ? std::optional(error->code()) : std::nullopt;
}
/// The message of its E_UNSUPPORTED; empty if the weights fit.
template <class Experts, class Quant>
std::string refusal_message(RandomWeights<Quant> const& weights, LayerShape const& shape) {
  std::optional<Error> const error = refusal<Experts>(weights, shape);
  if (!error) return "";
  EXPECT_EQ(error->code(), ErrorCode::unsupported);
  return error->message();
}

}  // namespace moe_test
