// SPDX-License-Identifier: Apache-2.0
// tests/gpu/packed_cases.cuh: the error of the Hopper experts that pack weights and convert them in registers, against the device oracle on
// dequantised weights, and the cases that every such policy must pass.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "device_values.cuh"
#include "moe/core/cuda_space.hpp"
#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/experts/cuda_reference.cuh"
#include "packed_layers.cuh"
#include "relative_error.hpp"

namespace moe_test {

template <class Quant, class Experts>
using StandardKernel = typename Experts::template Kernel<PackedConfig, Quant, ActivationFormat::standard>;
template <class Quant, class Experts>
using BatchedKernel = typename Experts::template Kernel<PackedConfig, Quant, ActivationFormat::batched>;

/// [tokens, hidden] of the oracle and of the experts under test.
struct Outputs {
  std::vector<float> want;
  std::vector<bf16> got;
};

/// The outputs of `Experts` and of the oracle, after checking that a second run gives the same bits. Workspace and output hold NaN before
/// each.
template <class Quant, class Experts>
Outputs outputs_of(LayerShape const& sizes, RandomWeights<Quant> const& weights, RandomCall<Quant> const& call, activation::Any const& act,
                   typename Experts::Params const& params = {}) {
  Shape<PackedConfig> const shape(sizes);
  std::int64_t const tokens = call.x.count;
  auto const count = static_cast<std::size_t>(tokens * sizes.hidden);
  Outputs out{std::vector<float>(count), std::vector<bf16>(count)};
  {
    Arena<space::cuda> arena;
    StandardKernel<Quant, experts::CudaReference> oracle(shape, weights.view, tokens, Quant{}, act, {}, arena);
    Buffer<float, space::cuda> y(static_cast<std::int64_t>(count));
    oracle.apply(call.batch, make_rows(y.data(), tokens, std::int64_t{sizes.hidden}), nullptr);
    y.copy_to_host(out.want.data());
  }
  Arena<space::cuda> arena;
  StandardKernel<Quant, Experts> kernel(shape, weights.view, tokens, Quant{}, act, params, arena);
  Buffer<bf16, space::cuda> y(static_cast<std::int64_t>(count));
  std::vector<bf16> again(count);
  StoredRows<Quant> const poison(std::vector<bf16>(count, from_float<bf16>(std::numeric_limits<float>::quiet_NaN())), sizes.hidden);
  StandardTokensOf<PackedConfig, Quant> bad = call.batch;
  bad.rows = poison.element_rows();
  for (auto* result : {&out.got, &again}) {
    kernel.apply(bad, make_rows(y.data(), tokens, std::int64_t{sizes.hidden}), nullptr);  // leaves NaN all over the workspace
    Memory<space::cuda>::fill(y.data(), 0xFF, y.bytes());
    kernel.apply(call.batch, make_rows(y.data(), tokens, std::int64_t{sizes.hidden}), nullptr);
    y.copy_to_host(result->data());
  }
  EXPECT_EQ(std::memcmp(out.got.data(), again.data(), count * sizeof(bf16)), 0) << "not repeatable";
  return out;
}

/// The relative error of `Experts` against the oracle on one random batch.
template <class Quant, class Experts>
double standard_error(Sizes const& s, int tokens, Load load, std::uint64_t seed, bool biases = false, activation::Any const& act = kSilu,
                      int exponent = 0, bool weight_on_input = false, Scales scales = Scales::positive,
                      typename Experts::Params const& params = {}) {
  std::mt19937_64 gen(seed);
  RandomWeights<Quant> const weights(s, biases, gen, exponent, 0.0F, act.gated(), scales);
  RandomCall<Quant> const call(s, tokens, load, gen);
  LayerShape const shape{s.hidden, s.intermediate, s.experts, s.topk, weight_on_input};
  Outputs const out = outputs_of<Quant, Experts>(shape, weights, call, act, params);
  return relative_error(out.got, out.want);
}

/// Params::workers: the products run on that many multiprocessors, and the sums are right with any number; a negative one is refused.
template <class Quant, class Experts>
void workers_limit_the_multiprocessors(double tolerance) {
  Sizes const s{8, 256, 256, 2};
  for (int workers : {1, 7}) {
    for (int tokens : {3, 300}) {
      double const error =
          standard_error<Quant, Experts>(s, tokens, Load::random, 660, true, kSilu, 0, false, Scales::of_bf16, {.workers = workers});
      EXPECT_LT(error, tolerance) << workers << " workers, " << tokens << " tokens";
    }
  }
  std::mt19937_64 gen(661);
  RandomWeights<Quant> const weights(s, false, gen);
  RandomCall<Quant> const call(s, 64, Load::random, gen);
  Shape<PackedConfig> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  auto const kernel = [&](Arena<space::cuda>& arena, int workers) {
    return std::make_unique<StandardKernel<Quant, Experts>>(shape, weights.view, 64, Quant{}, kSilu,
                                                            typename Experts::Params{.workers = workers}, arena);
  };
  Buffer<bf16, space::cuda> y(64 * s.hidden);
  auto const most_blocks = [&](int workers) {  // of the grid of the layer kernel, whose blocks need most of the shared memory
    Arena<space::cuda> arena;
    auto const limited = kernel(arena, workers);
    CudaStream stream;
    cudaGraph_t graph = nullptr;
    EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    limited->apply(call.batch, make_rows(y.data(), 64, std::int64_t{s.hidden}), stream);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    std::size_t count = 8;
    cudaGraphNode_t nodes[8];
    EXPECT_EQ(cudaGraphGetNodes(graph, nodes, &count), cudaSuccess);
    unsigned most = 0;
    for (std::size_t i = 0; i < count; ++i) {
      cudaGraphNodeType type{};
      EXPECT_EQ(cudaGraphNodeGetType(nodes[i], &type), cudaSuccess);
      if (type != cudaGraphNodeTypeKernel) continue;
      cudaKernelNodeParams node{};
      EXPECT_EQ(cudaGraphKernelNodeGetParams(nodes[i], &node), cudaSuccess);
      if (node.sharedMemBytes > 100'000) most = std::max(most, node.gridDim.x);
    }
    cudaGraphDestroy(graph);
    return most;
  };
  EXPECT_EQ(most_blocks(7), 7U);
  EXPECT_GT(most_blocks(0), 50U) << "all multiprocessors";
  std::optional<Error> const error = error_of([&] {
    Arena<space::cuda> arena;
    kernel(arena, -1);
  });
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), ErrorCode::config);
  EXPECT_EQ(error->message(), text(Experts::kName, ": workers -1 must be at least 0"));
}

/// X5: all tokens to one expert; some or all choices without an expert; a quarter of the experts in use.
template <class Quant, class Experts>
void skewed_loads_equal_oracle(Sizes const& s, double tolerance) {
  std::uint64_t seed = 100;
  for (Load load : {Load::one_expert, Load::some_missing, Load::all_missing, Load::few_experts}) {
    for (int tokens : {1, 40, 700}) {
      EXPECT_LT((standard_error<Quant, Experts>(s, tokens, load, ++seed)), tolerance) << static_cast<int>(load) << ", " << tokens;
    }
  }
}

/// X19: a captured call of at most so many kernels follows the row count in device memory, rows past it are not looked at.
template <class Quant, class Experts>
void graph_follows_the_devices_row_count(std::size_t most_kernels = 4) {
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
  EXPECT_LE(nodes, most_kernels);
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
void batched_equals_oracle(double tolerance, int hidden = 256, int intermediate = 320) {
  Sizes const s{5, hidden, intermediate, 1};
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

/// Scale bytes of mxfp4 at an end of their range, in the up rows of w13 or in w2, and magnitudes of rows and other scales under which every
/// sum is finite and no product is subnormal.
struct ScaleEnd {
  char const* name;
  int rows, gate, up;      ///< exponents of the rows, and of the scales of gate and up rows beside the usual ones
  int first_up, first_w2;  ///< the least of three neighbouring bytes; -1: the usual ones, of up rows times 2^up
  int output;              ///< exponent of the output's root mean square, some binades more or less
};
inline constexpr ScaleEnd kScaleEnds[] = {{"w2 with bytes 250 to 252", 0, 0, -12, -1, 250, 115},
                                          {"w2 with bytes 0 to 2", 0, 0, 20, -1, 0, -103},
                                          {"up rows with bytes 250 to 252", -30, 30, 0, 250, -1, 97},
                                          {"up rows with bytes 0 to 2", 100, -100, 0, 0, -1, -23}};

/// Of experts with a gate.
template <class Quant>
void apply(ScaleEnd const& end, Sizes const& s, RandomWeights<Quant>& weights, std::mt19937_64& gen) {
  std::vector<std::uint8_t> s13(static_cast<std::size_t>(weights.s13.size())), s2(static_cast<std::size_t>(weights.s2.size()));
  weights.s13.copy_to_host(s13.data());
  weights.s2.copy_to_host(s2.data());
  auto const near = [&gen](int first) { return static_cast<std::uint8_t>(first + static_cast<int>(gen() % 3)); };
  std::size_t const groups = s13.size() / static_cast<std::size_t>(s.experts * 2 * s.intermediate);
  for (std::size_t i = 0; i < s13.size(); ++i) {
    bool const gate = static_cast<int>(i / groups) % (2 * s.intermediate) < s.intermediate;
    s13[i] = !gate && end.first_up >= 0 ? near(end.first_up) : static_cast<std::uint8_t>(s13[i] + (gate ? end.gate : end.up));
  }
  for (std::uint8_t& v : s2) v = end.first_w2 >= 0 ? near(end.first_w2) : v;
  weights.s13.copy_from_host(s13.data());
  weights.s2.copy_from_host(s2.data());
}

/// Products with the least and the largest scales of mxfp4 are those of the oracle. Were any of these bytes read as its neighbour, the
/// error would be 0.1 or more.
template <class Quant, class Experts>
void ends_of_scales_equal_oracle(double tolerance, double few_rows_tolerance) {
  Sizes const s{4, 256, 384, 2};
  LayerShape const shape{s.hidden, s.intermediate, s.experts, s.topk};
  for (ScaleEnd const& end : kScaleEnds) {
    for (activation::Kind kind : {activation::Kind::silu, activation::Kind::gelu}) {
      for (int tokens : {1, 5, 70, 300}) {
        std::mt19937_64 gen(670);
        RandomWeights<Quant> weights(s, false, gen);
        apply(end, s, weights, gen);
        RandomCall<Quant> const call(s, tokens, Load::random, gen, end.rows);
        Outputs const out = outputs_of<Quant, Experts>(shape, weights, call, activation::Any{kind});
        double square = 0;
        for (float v : out.want) square += static_cast<double>(v) * v;
        double const size = std::sqrt(square / static_cast<double>(out.want.size()));
        EXPECT_TRUE(std::isfinite(size) && std::abs(std::ilogb(size) - end.output) < 6) << end.name << ": " << size;
        EXPECT_LT(relative_error(out.got, out.want), tokens < 50 ? few_rows_tolerance : tolerance)
            << end.name << ", " << activation::name(kind) << ", " << tokens << " tokens";
      }
    }
  }
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
