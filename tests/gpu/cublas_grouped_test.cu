// SPDX-License-Identifier: Apache-2.0
// tests/gpu/cublas_grouped_test.cu: the experts through cuBLAS equal the device oracle: element types, sizes, activations, biases, odd
// loads, both formats, poisoned memory and idle experts, captured graphs, and refused arguments.
// moe-alone: the registers of its kernels are tested.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "../expect_error.hpp"
#include "device_values.cuh"
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/contract/check.hpp"
#include "moe/experts/cublas_grouped.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"
#include "relative_error.hpp"

namespace {

using namespace moe;
using Cuda = space::cuda;
using moe_test::expect_error;
using moe_test::relative_error;
using moe_test::upload;
using quantization::None;

template <class T>
struct Config : LayerDefaults {
  using Act = T;
  using Weight = T;
  using Activation = activation::Any;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
template <class T>
constexpr double kTolerance = std::is_same_v<T, float>  ? 2e-6
                              : std::is_same_v<T, bf16> ? 6e-3
                                                        : 1e-3;

struct Sizes {
  int experts, hidden, intermediate, topk;
};
enum class Load { random, one_expert, some_missing, all_missing };

template <class T>
Buffer<T, Cuda> normals(std::int64_t count, float sigma, std::mt19937& gen) {
  std::normal_distribution<float> normal(0.0F, sigma);
  std::vector<T> v(static_cast<std::size_t>(count));
  for (T& x : v) x = from_float<T>(normal(gen));
  return upload(v);
}

/// Random weights; expert `poisoned` (if any) has NaN only.
template <class T>
struct Weights {
  Buffer<T, Cuda> c13, c2;
  Buffer<float, Cuda> b13, b2;
  WeightsOf<Config<T>, None> view;

  Weights(Sizes const& s, bool gated, bool biases, std::mt19937& gen, int poisoned = -1) {
    std::int64_t const rows13 = (gated ? 2 : 1) * s.intermediate;
    c13 = normals<T>(s.experts * rows13 * s.hidden, 1.0F / std::sqrt(static_cast<float>(s.hidden)), gen);
    c2 = normals<T>(static_cast<std::int64_t>(s.experts) * s.hidden * s.intermediate, 1.0F / std::sqrt(static_cast<float>(s.intermediate)),
                    gen);
    if (poisoned >= 0) {
      Memory<Cuda>::fill(c13.data() + poisoned * rows13 * s.hidden, 0xFF, static_cast<std::size_t>(rows13 * s.hidden) * sizeof(T));
    }
    if (biases) {
      b13 = normals<float>(s.experts * rows13, 1.0F, gen);
      b2 = normals<float>(static_cast<std::int64_t>(s.experts) * s.hidden, 1.0F, gen);
    }
    float const* const none = nullptr;
    view.w13 = {make_blocks(static_cast<T const*>(c13.data()), s.experts, rows13, std::int64_t{s.hidden}),
                make_rows(none, s.experts, std::int64_t{0}),
                make_rows(static_cast<float const*>(b13.data()), biases ? s.experts : 0, rows13), rows13, s.hidden};
    view.w2 = {make_blocks(static_cast<T const*>(c2.data()), s.experts, std::int64_t{s.hidden}, std::int64_t{s.intermediate}),
               make_rows(none, s.experts, std::int64_t{0}),
               make_rows(static_cast<float const*>(b2.data()), biases ? s.experts : 0, std::int64_t{s.hidden}), s.hidden, s.intermediate};
  }
};

std::vector<std::int32_t> make_ids(Sizes const& s, int tokens, Load load, std::mt19937& gen, int idle = -1) {
  std::vector<std::int32_t> ids;
  std::vector<std::int32_t> pool;
  for (int e = 0; e < s.experts; ++e) {
    if (e != idle) pool.push_back(e);
  }
  for (int t = 0; t < tokens; ++t) {
    for (std::size_t j = 0; j < static_cast<std::size_t>(s.topk); ++j) {
      std::swap(pool[j], pool[j + gen() % (pool.size() - j)]);
      std::int32_t id = pool[j];
      if (load == Load::one_expert) id = j == 0 ? s.experts - 1 : kNoExpert;
      if ((load == Load::some_missing && gen() % 3 == 0) || load == Load::all_missing) id = kNoExpert;
      ids.push_back(id);
    }
  }
  return ids;
}

struct Case {
  Sizes sizes{8, 64, 96, 2};
  int tokens = 33;
  Load load = Load::random;
  activation::Any act{};
  bool biases = false;
  bool on_input = false;
  bool fixed = false;
  int idle = -1;  ///< an expert without rows, with NaN weights
};

/// The relative error on one random batch, workspace and output poisoned before.
template <class T>
double standard_error(Case const& c, unsigned seed) {
  std::mt19937 gen(seed);
  Sizes const& s = c.sizes;
  Weights<T> const weights(s, c.act.gated(), c.biases, gen, c.idle);
  Shape<Config<T>> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk, c.on_input});
  auto const x = normals<T>(static_cast<std::int64_t>(c.tokens) * s.hidden, 1.0F, gen);
  auto const w = normals<float>(static_cast<std::int64_t>(c.tokens) * s.topk, 0.5F, gen);
  auto const ids = upload(make_ids(s, c.tokens, c.load, gen, c.idle));
  auto const poison = upload(std::vector<T>(static_cast<std::size_t>(c.tokens) * s.hidden, from_float<T>(kNan)));
  StandardTokensOf<Config<T>, None> batch{};
  batch.rows = make_rows(x.data(), c.tokens, std::int64_t{s.hidden});
  batch.topk_ids = make_rows(ids.data(), c.tokens, std::int64_t{s.topk});
  batch.topk_weights = make_rows(w.data(), c.tokens, std::int64_t{s.topk});
  auto const count = static_cast<std::size_t>(c.tokens) * s.hidden;
  std::vector<float> want(count);
  Arena<Cuda> arena;
  {
    experts::CudaReference::Kernel<Config<T>, None, ActivationFormat::standard> oracle(shape, weights.view, c.tokens, {}, c.act, {}, arena);
    Buffer<float, Cuda> y(static_cast<std::int64_t>(count));
    oracle.apply(batch, make_rows(y.data(), c.tokens, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(want.data());
  }
  experts::CublasGrouped::Kernel<Config<T>, None, ActivationFormat::standard> kernel(shape, weights.view, c.tokens, {}, c.act, {c.fixed},
                                                                                     arena);
  Buffer<T, Cuda> y(static_cast<std::int64_t>(count));
  StandardTokensOf<Config<T>, None> bad = batch;
  bad.rows = make_rows(poison.data(), c.tokens, std::int64_t{s.hidden});
  std::vector<T> got(count);
  std::vector<T> again(count);
  for (auto* result : {&got, &again}) {
    kernel.apply(bad, make_rows(y.data(), c.tokens, std::int64_t{s.hidden}), nullptr);
    Memory<Cuda>::fill(y.data(), 0xFF, y.bytes());
    kernel.apply(batch, make_rows(y.data(), c.tokens, std::int64_t{s.hidden}), nullptr);
    y.copy_to_host(result->data());
  }
  EXPECT_EQ(std::memcmp(got.data(), again.data(), count * sizeof(T)), 0) << "not repeatable";
  return relative_error(got, want);
}

template <class T>
void many_cases() {
  unsigned seed = 10;
  for (int tokens : {1, 2, 7, 64, 222, 1024}) {
    EXPECT_LT(standard_error<T>({.sizes = {8, 128, 192, 2}, .tokens = tokens}, ++seed), kTolerance<T>) << tokens << " tokens";
  }
  for (bool fixed : {false, true}) {
    EXPECT_LT(standard_error<T>({.sizes = {8, 80, 40, 3}, .tokens = 37, .fixed = fixed}, ++seed), kTolerance<T>) << "odd sizes";
    EXPECT_LT(standard_error<T>({.sizes = {6, 50, 22, 2}, .tokens = 19, .fixed = fixed}, ++seed), kTolerance<T>)
        << "not a multiple of 16 bytes";
    for (Load load : {Load::one_expert, Load::some_missing, Load::all_missing}) {
      EXPECT_LT(standard_error<T>({.load = load, .biases = true, .fixed = fixed}, ++seed), kTolerance<T>) << static_cast<int>(load);
    }
    EXPECT_LT(standard_error<T>({.sizes = {1, 64, 64, 1}, .fixed = fixed}, ++seed), kTolerance<T>) << "one expert";
    EXPECT_LT(standard_error<T>({.biases = true, .on_input = true, .fixed = fixed}, ++seed), kTolerance<T>) << "weight on input";
  }
  for (int k = 0; k < activation::kKinds; ++k) {
    activation::Any act{static_cast<activation::Kind>(k)};
    act.constants.limit = 1.5F;
    EXPECT_LT(standard_error<T>({.act = act, .biases = true}, ++seed), kTolerance<T>) << activation::name(act.kind);
  }
}
TEST(CublasGrouped, X3_X5_X6_Float32) { many_cases<float>(); }
TEST(CublasGrouped, X3_X5_X6_Bf16) { many_cases<bf16>(); }
TEST(CublasGrouped, X3_X5_X6_Fp16) { many_cases<f16>(); }

TEST(CublasGrouped, X4_WeightsOfIdleExpertsAreNotRead) {
  EXPECT_LT(standard_error<bf16>({.idle = 3}, 77), kTolerance<bf16>);
  EXPECT_LT(standard_error<float>({.fixed = true, .idle = 3}, 78), kTolerance<float>) << "read, but only into rows that are not there";
}

template <class T>
void batched(bool fixed) {
  Sizes const s{5, 64, 96, 1};
  constexpr std::int64_t kCapacity = 70;
  std::mt19937 gen(600);
  Weights<T> const weights(s, true, true, gen);
  Shape<Config<T>> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  std::vector<std::int32_t> const counts{0, 1, kCapacity, 9, 33};
  std::normal_distribution<float> normal;
  std::vector<T> x(static_cast<std::size_t>(s.experts * kCapacity * s.hidden));
  for (std::size_t i = 0; i < x.size(); ++i) {
    std::size_t const row = i / static_cast<std::size_t>(s.hidden);
    bool const valid = static_cast<int>(row % kCapacity) < counts[row / kCapacity];
    x[i] = from_float<T>(valid ? normal(gen) : kNan);
  }
  auto const device_x = upload(x);
  auto const device_counts = upload(counts);
  BatchedTokensOf<Config<T>, None> batch{};
  batch.rows = make_blocks(device_x.data(), s.experts, kCapacity, std::int64_t{s.hidden});
  batch.expert_num_tokens = make_vector(device_counts.data(), s.experts);
  Arena<Cuda> arena;
  experts::CudaReference::Kernel<Config<T>, None, ActivationFormat::batched> oracle(shape, weights.view, kCapacity, {}, {}, {}, arena);
  experts::CublasGrouped::Kernel<Config<T>, None, ActivationFormat::batched> kernel(shape, weights.view, kCapacity, {}, {}, {fixed}, arena);
  Buffer<float, Cuda> want(static_cast<std::int64_t>(x.size()));
  Buffer<T, Cuda> got(static_cast<std::int64_t>(x.size()));
  Memory<Cuda>::fill(want.data(), 0, want.bytes());
  Memory<Cuda>::fill(got.data(), 0, got.bytes());
  oracle.apply(batch, make_blocks(want.data(), s.experts, kCapacity, std::int64_t{s.hidden}), nullptr);
  kernel.apply(batch, make_blocks(got.data(), s.experts, kCapacity, std::int64_t{s.hidden}), nullptr);
  std::vector<float> a(x.size());
  std::vector<T> b(x.size());
  want.copy_to_host(a.data());
  got.copy_to_host(b.data());
  for (std::size_t i = 0; i < b.size(); ++i) {
    std::size_t const row = i / static_cast<std::size_t>(s.hidden);
    if (static_cast<int>(row % kCapacity) < counts[row / kCapacity]) continue;
    if (!fixed) ASSERT_EQ(to_float(b[i]), 0.0F) << "wrote row " << row;
    b[i] = from_float<T>(0.0F);
  }
  EXPECT_LT(relative_error(b, a), 1.5 * kTolerance<T>);

  // The same rows in one list, in another order, found by index.
  std::int64_t const rows = s.experts * kCapacity;
  std::vector<std::int32_t> gather(static_cast<std::size_t>(rows));
  std::vector<T> list(x.size());
  for (std::int64_t r = 0; r < rows; ++r) {
    gather[static_cast<std::size_t>(r)] = static_cast<std::int32_t>(rows - 1 - r);
    std::copy_n(x.data() + r * s.hidden, s.hidden, list.data() + (rows - 1 - r) * s.hidden);
  }
  auto const device_list = upload(list);
  auto const device_gather = upload(gather);
  batch.rows = make_blocks(device_list.data(), 1, rows, std::int64_t{s.hidden});
  batch.gather = make_rows(device_gather.data(), s.experts, kCapacity);
  kernel.apply(batch, make_blocks(got.data(), s.experts, kCapacity, std::int64_t{s.hidden}), nullptr);
  std::vector<T> c(x.size());
  got.copy_to_host(c.data());
  for (std::size_t i = 0; i < c.size(); ++i) {
    std::size_t const row = i / static_cast<std::size_t>(s.hidden);
    if (static_cast<int>(row % kCapacity) < counts[row / kCapacity]) ASSERT_EQ(to_float(c[i]), to_float(b[i])) << "gathered, at " << i;
  }
}
TEST(CublasGrouped, Batched) {
  batched<float>(false);
  batched<bf16>(false);
  batched<f16>(true);
}

TEST(CublasGrouped, X19_GraphWithFixedGroupsFollowsTheDevicesRowCount) {
  Sizes const s{8, 64, 96, 2};
  constexpr int kTokens = 64;
  std::mt19937 gen(500);
  Weights<float> const weights(s, true, false, gen);
  Shape<Config<float>> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  Arena<Cuda> arena;
  experts::CublasGrouped::Kernel<Config<float>, None, ActivationFormat::standard> kernel(shape, weights.view, kTokens, {}, {}, {true},
                                                                                         arena);
  auto const x = normals<float>(kTokens * s.hidden, 1.0F, gen);
  auto const w = normals<float>(kTokens * s.topk, 1.0F, gen);
  auto const ids = upload(make_ids(s, kTokens, Load::random, gen));
  auto rows = upload(std::vector<std::int32_t>{kTokens});
  StandardTokensOf<Config<float>, None> batch{};
  batch.rows = make_rows(x.data(), kTokens, std::int64_t{s.hidden});
  batch.topk_ids = make_rows(ids.data(), kTokens, std::int64_t{s.topk});
  batch.topk_weights = make_rows(w.data(), kTokens, std::int64_t{s.topk});
  batch.num_rows = rows.data();
  Buffer<float, Cuda> y(kTokens * s.hidden);
  auto const out = make_rows(y.data(), kTokens, std::int64_t{s.hidden});
  CudaStream stream;
  kernel.apply(batch, out, stream);  // cuBLAS loads its kernels outside the capture
  stream.synchronize();
  std::vector<float> full(static_cast<std::size_t>(y.size()));
  y.copy_to_host(full.data());
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  kernel.apply(batch, out, stream);
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  for (std::int32_t count : {kTokens, 1, 17, 0, kTokens}) {
    rows.copy_from_host(&count);
    Memory<Cuda>::fill(y.data(), 0xFF, y.bytes());
    ASSERT_EQ(cudaGraphLaunch(exec, stream), cudaSuccess);
    stream.synchronize();
    std::vector<float> got(full.size());
    y.copy_to_host(got.data());
    for (std::size_t i = 0; i < got.size(); ++i) {
      bool const valid = static_cast<std::int64_t>(i) < count * s.hidden;
      ASSERT_NEAR(got[i], valid ? full[i] : 0.0F, 1e-5) << count << " rows, at " << i;
    }
  }
  cudaGraphExecDestroy(exec);
  cudaGraphDestroy(graph);
}

TEST(CublasGrouped, Refusals) {
  Sizes const s{4, 64, 32, 1};
  std::mt19937 gen(700);
  Weights<float> const weights(s, true, false, gen);
  using Kernel = experts::CublasGrouped::Kernel<Config<float>, None, ActivationFormat::standard>;
  Shape<Config<float>> const shape(LayerShape{s.hidden, s.intermediate, s.experts, s.topk});
  Arena<Cuda> arena;
  expect_error(ErrorCode::argument,
               [&] { Kernel(Shape<Config<float>>(LayerShape{s.hidden, 48, 4, 1}), weights.view, 8, {}, {}, {}, arena); });
  expect_error(ErrorCode::argument,
               [&] { Kernel(shape, weights.view, 8, {}, activation::Any{activation::Kind::relu2_no_mul}, {}, arena); });
  Kernel const kernel(shape, weights.view, 8, {}, {}, {}, arena);
  Buffer<float, Cuda> x(16 * 64);
  Buffer<std::int32_t, Cuda> ids(16);
  StandardTokensOf<Config<float>, None> batch{};
  auto const set = [&](std::int64_t rows, std::int64_t id_rows, std::int64_t columns) {
    batch.rows = make_rows(static_cast<float const*>(x.data()), rows, columns);
    batch.topk_ids = make_rows(static_cast<std::int32_t const*>(ids.data()), id_rows, std::int64_t{1});
    batch.topk_weights = make_rows(static_cast<float const*>(x.data()), id_rows, std::int64_t{1});
  };
  auto const y = make_rows(x.data(), 16, std::int64_t{64});
  set(9, 9, 64);
  expect_error(ErrorCode::argument, [&] { kernel.apply(batch, y, nullptr); });  // more rows than it was made for
  set(8, 7, 64);
  expect_error(ErrorCode::argument, [&] { kernel.apply(batch, y, nullptr); });  // X12: ids of other rows
  set(8, 8, 32);
  expect_error(ErrorCode::argument, [&] { kernel.apply(batch, y, nullptr); });  // X12: columns
  set(8, 8, 64);
  CudaStream stream;
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), cudaSuccess);
  expect_error(ErrorCode::state, [&] { kernel.apply(batch, y, stream); });  // captured
  ASSERT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  cudaGraphDestroy(graph);
}

using Router = routing::SoftmaxTopK<routing::Renormalize::yes>;
template <class T, class Quant>
using Compose = Composition<Config<T>, Router, Quant, backends::NoExpertParallel<Cuda>, experts::CublasGrouped>;
static_assert(Compose<float, None>::kLegal && Compose<bf16, None>::kLegal && Compose<f16, None>::kLegal);
static_assert(!Compose<bf16, quantization::Fp8Block<>>::kLegal);

}  // namespace
