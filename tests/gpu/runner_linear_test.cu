// SPDX-License-Identifier: Apache-2.0
// tests/gpu/runner_linear_test.cu: linear layers of a block on the device against sums in double: gates in true float32, projections, and
// shared experts; sizes that do not divide, strides, zero rows, the same bits again, and captured graphs.
// moe-alone: it is compiled for every architecture.
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "device_values.cuh"
#include "expect_error.hpp"
#include "moe/core/cuda_graph.hpp"
#include "moe/runner/device/dense_shared.cuh"
#include "moe/runner/device/linear.cuh"

namespace {

using namespace moe;
using moe_test::DeviceBuffer;
using moe_test::excess;
using moe_test::floats;
using moe_test::Values;
using moe_test::worst_error;
using runner::Sums;
using Cuda = space::cuda;

/// x · wᵀ + bias in double.
template <class X, class W>
std::vector<double> product(Values<X> const& x, std::int64_t rows, std::int64_t x_stride, Values<W> const& w, std::int64_t n,
                            std::int64_t k, Values<float> const* bias = nullptr) {
  std::vector<double> y(static_cast<std::size_t>(rows * n));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = bias == nullptr ? 0.0 : bias->at(j);
      for (std::int64_t i = 0; i < k; ++i) sum += static_cast<double>(x.at(r * x_stride + i)) * w.at(j * k + i);
      y[static_cast<std::size_t>(r * n + j)] = sum;
    }
  }
  return y;
}

template <class W, class X, class Y>
void equals_double(std::int64_t n, std::int64_t k, std::vector<std::int64_t> const& row_counts, std::int64_t pad = 0,
                   bool with_bias = false, Sums sums = Sums::blocked) {
  std::mt19937 gen(7);
  std::int64_t const most = *std::max_element(row_counts.begin(), row_counts.end());
  std::int64_t const stride = k + pad;
  Values<X> const x(most * stride, 1.0F, gen);
  Values<W> const w(n * k, 0.05F, gen);
  Values<float> const bias(n, 1.0F, gen);
  Arena<Cuda> arena;
  runner::Linear<Cuda, W, X, Y> linear(w.rows(n, k), with_bias ? bias.device.data() : nullptr, sums, most, arena);
  CudaStream stream;
  for (std::int64_t const rows : row_counts) {
    SCOPED_TRACE(text(rows, " rows of ", k, " to ", n));
    DeviceBuffer<Y> y(rows * n);
    Memory<Cuda>::fill(y.data(), 0xff, y.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    linear.apply(x.rows(rows, k, stride), make_rows(y.data(), rows, n), stream);
    auto const first = floats(y);
    EXPECT_LE(excess<Y>(first, product(x, rows, stride, w, n, k, with_bias ? &bias : nullptr), 0x1p-22 * std::sqrt(static_cast<double>(k))),
              1.0);
    linear.apply(x.rows(rows, k, stride), make_rows(y.data(), rows, n), stream);
    EXPECT_EQ(floats(y), first) << "the same bits again";
  }
}

TEST(RunnerLinear, Float32GateOfBf16Rows) { equals_double<float, bf16, float>(64, 256, {1, 2, 16, 17, 40, 128, 129, 300}); }
TEST(RunnerLinear, DeepGates) {  // clusters of eight blocks
  equals_double<float, bf16, float>(24, 7168, {1, 16, 20, 40, 70, 130}, 0, false, Sums::per_row);
  equals_double<float, bf16, float>(40, 4100, {1, 30, 64, 130}, 0, false, Sums::per_row);
}
TEST(RunnerLinear, Float32GateOfF16Rows) { equals_double<float, f16, float>(64, 256, {1, 16, 33, 200}); }
TEST(RunnerLinear, Float32GateOfFloat32Rows) { equals_double<float, float, float>(48, 192, {1, 16, 33, 130}); }
TEST(RunnerLinear, Bf16GateOfBf16Rows) {
  equals_double<bf16, bf16, float>(256, 512, {1, 3, 16, 64, 128, 129, 257});
  equals_double<bf16, bf16, float>(256, 512, {1, 3, 16, 64, 128, 129, 257}, 0, false, Sums::per_row);
  equals_double<f16, f16, float>(40, 96, {1, 3, 70}, 0, false, Sums::per_row);
  equals_double<bf16, bf16, bf16>(40, 96, {1, 3, 70}, 0, true);  // a gate in the model's type
}
TEST(RunnerLinear, GateWithBias) {
  equals_double<bf16, bf16, float>(32, 96, {1, 100, 200}, 0, true);
  equals_double<float, bf16, float>(32, 96, {1, 100, 200}, 0, true);
}
TEST(RunnerLinear, SizesThatDoNotDivide) {
  equals_double<float, bf16, float>(5, 33, {1, 7, 21});
  equals_double<bf16, bf16, float>(7, 20, {1, 18});
  equals_double<float, float, float>(3, 9, {2});
  equals_double<float, bf16, float>(40, 1, {3});
}
TEST(RunnerLinear, StridedRows) {
  equals_double<float, bf16, float>(24, 64, {1, 19, 140}, 8);
  equals_double<bf16, bf16, bf16>(640, 64, {1, 19, 140}, 8);
  equals_double<float, bf16, float>(24, 64, {5}, 3);
}
TEST(RunnerLinear, Projections) {
  equals_double<bf16, bf16, bf16>(768, 128, {1, 5, 64, 100});
  equals_double<f16, f16, f16>(768, 128, {1, 5, 64});
  equals_double<float, float, float>(768, 128, {1, 5, 64});
  equals_double<f16, f16, float>(64, 128, {1, 20});
}
/// float32 weights, each a value of T.
template <class T>
Values<float> values_of(std::int64_t count, float sigma, std::mt19937& gen) {
  Values<float> w(count, sigma, gen);
  for (float& v : w.host) v = to_float(from_float<T>(v));
  w.device = moe_test::upload(w.host);
  return w;
}
/// A row has the same bits alone, among few and among many rows.
template <class W, class X>
void rows_do_not_depend_on_their_batch(std::int64_t n, std::int64_t k, [[maybe_unused]] bool exact = false) {
  std::mt19937 gen(21);
  std::int64_t const most = 700;
  Values<X> const x(most * k, 1.0F, gen);
  Values<W> w(n * k, 0.05F, gen);
  if constexpr (std::is_same_v<W, float>) {
    if (exact) w = values_of<X>(n * k, 0.05F, gen);
  }
  Arena<Cuda> arena;
  runner::Linear<Cuda, W, X, float> linear(w.rows(n, k), nullptr, Sums::per_row, most, arena);
  EXPECT_EQ(linear.unread_weight() != nullptr, exact) << linear.choice();
  auto const run = [&](std::int64_t first, std::int64_t rows) {
    DeviceBuffer<float> y(rows * n);
    linear.apply(make_rows(x.device.data() + first * k, rows, k), make_rows(y.data(), rows, n), nullptr);
    return floats(y);
  };
  auto const all = run(0, most);
  for (std::int64_t const rows : {1, 16, 17, 40, 90, 128, 300}) {
    std::int64_t const first = most - rows;
    EXPECT_EQ(run(first, rows), std::vector<float>(all.begin() + first * n, all.end())) << rows << " rows";
  }
}
TEST(RunnerLinear, EveryNumberOfRowsBelowAFewAtMost) {  // an algorithm for 3 or 4 rows may take no fewer
  constexpr std::array<int, 2> kSizes[] = {{16, 64}, {96, 64}, {48, 64}, {64, 24}, {768, 128}};
  for (Sums const sums : {Sums::blocked, Sums::per_row}) {
    for (auto [n, k] : kSizes) {
      equals_double<float, float, float>(n, k, {1, 2, 3}, 0, false, sums);
      equals_double<float, float, float>(n, k, {1, 4, 5, 7, 9, 13, 15, 17, 23, 31, 33}, 0, false, sums);
      equals_double<bf16, bf16, bf16>(n, k, {1, 2, 3}, 0, false, sums);
    }
  }
}
TEST(RunnerLinear, PerRowSumsDoNotDependOnTheBatch) {
  rows_do_not_depend_on_their_batch<bf16, bf16>(64, 2048);
  rows_do_not_depend_on_their_batch<bf16, bf16>(256, 7168);
  rows_do_not_depend_on_their_batch<float, bf16>(32, 1056);
  rows_do_not_depend_on_their_batch<float, bf16>(256, 7168, true);  // weights that are values of bf16
  rows_do_not_depend_on_their_batch<float, bf16>(128, 2048, true);
}

/// float32 weights that are values of the rows' element: once their copy is made they are not read, and the sums are float32. The product
/// that reads them in each call differs only in the order and rounding of its sums. A row's bits do not depend on its batch or on the most
/// rows.
template <class X, class Y>
void narrow_product_equals_double(std::int64_t n, std::int64_t k, bool with_bias = false, std::int64_t most = 300) {
  SCOPED_TRACE(text(n, " outputs of ", k));
  std::mt19937 gen(11);
  Values<X> const x(most * k, 1.0F, gen);
  Values<float> w = values_of<X>(n * k, 0.05F, gen);
  Values<float> const bias(n, 1.0F, gen);
  float const* const b = with_bias ? bias.device.data() : nullptr;
  Arena<Cuda> arena;
  using Product = runner::Linear<Cuda, float, X, Y>;
  Product const in_place(w.rows(n, k), b, Sums::per_row, most, arena, runner::WeightReads::every_call);
  EXPECT_EQ(in_place.choice(), "float32 products: the weights may change in place");
  EXPECT_EQ(in_place.unread_weight(), nullptr);
  auto const run = [&](Product const& product, std::int64_t first, std::int64_t rows) {
    DeviceBuffer<Y> y(rows * n);
    Memory<Cuda>::fill(y.data(), 0xff, y.bytes());
    check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
    product.apply(make_rows(x.device.data() + first * k, rows, k), make_rows(y.data(), rows, n), nullptr);
    return floats(y);
  };
  double const depth = std::sqrt(static_cast<double>(k));
  auto const want = product(x, most, k, w, n, k, with_bias ? &bias : nullptr);
  auto const wide = run(in_place, 0, most);
  EXPECT_LE(excess<Y>(wide, want, 0x1p-22 * depth), 1.0);

  for (Sums const sums : {Sums::per_row, Sums::blocked}) {  // the sums do not depend on the rows either way
    Product const narrow(w.rows(n, k), b, sums, most, arena);
    std::string const element(name(dtype_of<X>));
    EXPECT_EQ(narrow.choice(), element + " products with float32 sums, through cuBLASLt: every float32 weight is a value of " + element);
    ASSERT_EQ(narrow.unread_weight(), w.device.data());
    Product const few(w.rows(n, k), b, sums, 17, arena);
    Memory<Cuda>::fill(w.device.data(), 0xff, w.device.bytes());  // NaN
    auto const all = run(narrow, 0, most);
    EXPECT_LE(excess<Y>(all, want, 0x1p-20 * depth), 1.0) << "a rounding to bf16 would be 0x1p-9";
    EXPECT_EQ(run(narrow, 0, most), all) << "the same bits again";
    for (std::int64_t const rows : {1, 2, 3, 15, 16, 17, 40, 90, 128, 129}) {
      std::vector<float> const last(all.end() - rows * n, all.end());
      EXPECT_EQ(run(narrow, most - rows, rows), last) << rows << " rows";
      if (rows <= 17) {
        EXPECT_EQ(run(few, most - rows, rows), last) << rows << " of at most 17 rows";
      }
    }
    w.device.copy_from_host(w.host.data());
  }
}
TEST(RunnerLinear, Float32WeightsThatAreValuesOfTheRowsElement) {
  narrow_product_equals_double<bf16, float>(24, 7168);
  narrow_product_equals_double<bf16, float>(64, 2048, true);
  narrow_product_equals_double<bf16, float>(16, 64);
  narrow_product_equals_double<bf16, float>(160, 72, true);
  narrow_product_equals_double<f16, float>(64, 256);
  narrow_product_equals_double<bf16, bf16>(768, 128);  // a projection
}
/// Few outputs: whatever cuBLASLt has for them, the result is right and a row's bits are those of a large batch.
TEST(RunnerLinear, Float32WeightsOfFewOutputs) {
  std::mt19937 gen(12);
  for (std::int64_t const n : {1, 4, 6, 7, 8}) {
    Values<float> const w = values_of<bf16>(n * 64, 0.05F, gen);
    Values<bf16> const x(200 * 64, 1.0F, gen);
    Arena<Cuda> arena;
    runner::Linear<Cuda, float, bf16, float> const linear(w.rows(n, 64), nullptr, Sums::per_row, 200, arena);
    std::printf("%d outputs: %s\n", static_cast<int>(n), linear.choice().c_str());
    EXPECT_NE(linear.choice(), "");
    DeviceBuffer<float> y(200 * n), one(n);
    linear.apply(x.rows(200, 64), make_rows(y.data(), 200, n), nullptr);
    auto const all = floats(y);
    EXPECT_LE(excess<float>(all, product(x, 200, 64, w, n, 64)), 1.0);
    linear.apply(x.rows(1, 64), make_rows(one.data(), 1, n), nullptr);
    EXPECT_EQ(floats(one), std::vector<float>(all.begin(), all.begin() + n));
  }
}
TEST(RunnerLinear, Float32WeightsThatAreNotValuesOfTheRowsElement) {
  std::mt19937 gen(13);
  constexpr std::int64_t kOut = 24, kIn = 64, kRows = 20;
  Values<float> w = values_of<bf16>(kOut * kIn, 0.05F, gen);
  Values<bf16> const x(kRows * kIn, 1.0F, gen);
  Arena<Cuda> arena;
  auto const expect_float32 = [&](auto const& linear, std::string const& why, Values<float> const& weights, std::int64_t k) {
    SCOPED_TRACE(why);
    EXPECT_EQ(linear.choice(), "float32 products: " + why);
    EXPECT_EQ(linear.unread_weight(), nullptr);
    DeviceBuffer<float> y(kRows * kOut);
    linear.apply(x.rows(kRows, k, kIn), make_rows(y.data(), kRows, kOut), nullptr);
    EXPECT_LE(excess<float>(floats(y), product(x, kRows, kIn, weights, kOut, k)), 1.0);
  };
  using Gate = runner::Linear<Cuda, float, bf16, float>;
  Values<float> const narrow(kOut * 20, 0.05F, gen);
  expect_float32(Gate(narrow.rows(kOut, 20), nullptr, Sums::per_row, kRows, arena), "rows of 20 bf16 are not a multiple of 16 bytes",
                 narrow, 20);
  w.host.back() = 0x1.01p0F;  // between two values of bf16
  w.device = moe_test::upload(w.host);
  expect_float32(Gate(w.rows(kOut, kIn), nullptr, Sums::per_row, kRows, arena), "the weight [23, 63] = 1.00390625 is not a value of bf16",
                 w, kIn);
  // The first row alone, of rows that are apart: the others are not looked at.
  Values<float> const apart = values_of<bf16>(kOut * kIn, 0.05F, gen);
  EXPECT_NE(Gate(make_strided_rows(apart.device.data(), kOut / 2, kIn / 2, 2 * kIn), nullptr, Sums::per_row, kRows, arena).unread_weight(),
            nullptr);
  // Rows of float32, and weights in the rows' element: no choice.
  Values<bf16> const same(kOut * kIn, 1.0F, gen);
  EXPECT_EQ((runner::Linear<Cuda, float, float, float>(w.rows(kOut, kIn), nullptr, Sums::per_row, kRows, arena).choice()), "");
  EXPECT_EQ((runner::Linear<Cuda, bf16, bf16, float>(same.rows(kOut, kIn), nullptr, Sums::per_row, kRows, arena).choice()), "");
}
TEST(RunnerLinear, RowsBesideACopyOfTheWeightsAreAligned) {
  std::mt19937 gen(14);
  Values<float> const w = values_of<bf16>(24 * 64, 0.05F, gen);
  Values<bf16> const x(8 * 80, 1.0F, gen);
  Arena<Cuda> arena;
  runner::Linear<Cuda, float, bf16, float> const linear(w.rows(24, 64), nullptr, Sums::per_row, 8, arena);
  DeviceBuffer<float> y(8 * 24);
  auto const apply = [&](std::int64_t offset, std::int64_t stride) {
    linear.apply(make_strided_rows(x.device.data() + offset, 4, 64, stride), make_rows(y.data(), 4, 24), nullptr);
  };
  apply(8, 72);
  moe_test::expect_error(ErrorCode::argument, "linear: x: the base address is not a multiple of 16 bytes", [&] { apply(4, 64); });
  moe_test::expect_error(ErrorCode::argument, "linear: x: row stride 134 bytes is not a multiple of 16", [&] { apply(0, 67); });
}
TEST(RunnerLinear, RowsBesideAreNotWritten) {  // columns past the last, rows past the last: nothing is read there
  std::mt19937 gen(9);
  Values<bf16> const x(20 * 64, 1.0F, gen);
  Values<float> const w(8 * 64, 0.1F, gen);
  Arena<Cuda> arena;
  runner::Linear<Cuda, float, bf16, float> linear(w.rows(8, 64), nullptr, Sums::per_row, 20, arena);
  DeviceBuffer<float> y(20 * 8);
  Memory<Cuda>::fill(y.data(), 0xff, y.bytes());
  linear.apply(x.rows(3, 64), make_rows(y.data(), 3, 8), nullptr);
  auto const out = floats(y);
  for (std::size_t i = 3 * 8; i < out.size(); ++i) ASSERT_TRUE(std::isnan(out[i])) << "row " << i / 8 << " was written";
}
TEST(RunnerLinear, ZeroRowsAndWrongSizes) {
  std::mt19937 gen(3);
  Values<bf16> const x(8 * 64, 1.0F, gen);
  Values<bf16> const w(1024 * 64, 1.0F, gen);
  Arena<Cuda> arena;
  runner::Linear<Cuda, bf16, bf16, bf16> linear(w.rows(1024, 64), nullptr, Sums::blocked, 4, arena);
  DeviceBuffer<bf16> y(8 * 1024);
  linear.apply(x.rows(0, 64), make_rows(y.data(), 0, 1024), nullptr);
  moe_test::expect_error(ErrorCode::argument, "linear: x 5 x 64",
                         [&] { linear.apply(x.rows(5, 64), make_rows(y.data(), 5, 1024), nullptr); });
  moe_test::expect_error(ErrorCode::argument, "y 4 x 1000", [&] { linear.apply(x.rows(4, 64), make_rows(y.data(), 4, 1000), nullptr); });
}
TEST(RunnerLinear, CapturedInAGraph) {
  std::mt19937 gen(4);
  Values<bf16> x(32 * 256, 1.0F, gen);
  Values<bf16> const w(1024 * 256, 0.1F, gen);
  Values<float> const gate(64 * 256, 0.1F, gen);
  Arena<Cuda> arena;
  runner::Linear<Cuda, bf16, bf16, bf16> linear(w.rows(1024, 256), nullptr, Sums::blocked, 32, arena);
  runner::Linear<Cuda, float, bf16, float> router(gate.rows(64, 256), nullptr, Sums::per_row, 32, arena);
  Values<float> const exact = values_of<bf16>(64 * 256, 0.1F, gen);
  runner::Linear<Cuda, float, bf16, float> narrow(exact.rows(64, 256), nullptr, Sums::per_row, 32, arena);
  DeviceBuffer<bf16> y(32 * 1024);
  DeviceBuffer<float> logits(32 * 64), narrow_logits(32 * 64);
  CudaStream stream;
  auto const run = [&] {
    linear.apply(x.rows(32, 256), make_rows(y.data(), 32, 1024), stream);
    router.apply(x.rows(32, 256), make_rows(logits.data(), 32, 64), stream);
    narrow.apply(x.rows(32, 256), make_rows(narrow_logits.data(), 32, 64), stream);
  };
  CudaGraph const graph(stream, run);
  Values<bf16> const other(32 * 256, 1.0F, gen);
  x.device.copy_from_host(other.host.data());
  check_cuda(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  graph.launch(stream);
  EXPECT_LE(excess<bf16>(floats(y), product(other, 32, 256, w, 1024, 256)), 1.0);
  EXPECT_LE(excess<float>(floats(logits), product(other, 32, 256, gate, 64, 256)), 1.0);
  EXPECT_LE(excess<float>(floats(narrow_logits), product(other, 32, 256, exact, 64, 256)), 1.0);
  auto const replayed = floats(y);
  run();
  EXPECT_EQ(floats(y), replayed);
}

struct SharedCase {
  std::int64_t rows, hidden, intermediate, count;
  activation::Kind kind;
  bool sigmoid = false, joint = false;
};

/// Σ_s g_s W2_s act(W13_s x) in double, rounded nowhere.
template <class T>
std::vector<double> shared_reference(SharedCase const& c, Values<T> const& x, Values<T> const& w13, Values<T> const& w2,
                                     Values<float> const& gate, Values<float> const& joint) {
  activation::Any const act{c.kind, {}};
  std::int64_t const rows13 = (act.gated() ? 2 : 1) * c.intermediate;
  std::vector<double> y(static_cast<std::size_t>(c.rows * c.hidden));
  std::vector<double> inter(static_cast<std::size_t>(c.intermediate));
  auto const dot = [&](std::int64_t row, auto const& v, std::int64_t at) {
    double sum = 0.0;
    for (std::int64_t h = 0; h < c.hidden; ++h) sum += static_cast<double>(x.at(row * c.hidden + h)) * v.at(at + h);
    return sum;
  };
  for (std::int64_t t = 0; t < c.rows; ++t) {
    double const sigmoid = c.sigmoid ? 1.0 / (1.0 + std::exp(-dot(t, gate, 0))) : 1.0;
    for (std::int64_t s = 0; s < c.count; ++s) {
      double const g = sigmoid * (c.joint ? joint.at(t * c.count + s) : 1.0F);
      for (std::int64_t i = 0; i < c.intermediate; ++i) {
        double const gate_value = dot(t, w13, (s * rows13 + i) * c.hidden);
        double const up = act.gated() ? dot(t, w13, (s * rows13 + c.intermediate + i) * c.hidden) : 0.0;
        inter[static_cast<std::size_t>(i)] = act(static_cast<float>(gate_value), static_cast<float>(up));
      }
      for (std::int64_t h = 0; h < c.hidden; ++h) {
        double sum = 0.0;
        for (std::int64_t i = 0; i < c.intermediate; ++i) {
          sum += inter[static_cast<std::size_t>(i)] * w2.at((s * c.hidden + h) * c.intermediate + i);
        }
        y[static_cast<std::size_t>(t * c.hidden + h)] += g * sum;
      }
    }
  }
  return y;
}

template <class T>
void shared_equals_double(SharedCase const& c) {
  SCOPED_TRACE(text(c.rows, " rows, hidden ", c.hidden, ", ", c.count, " x ", c.intermediate, ", ", activation::name(c.kind)));
  std::mt19937 gen(11);
  activation::Any const act{c.kind, {}};
  std::int64_t const rows13 = (act.gated() ? 2 : 1) * c.intermediate;
  Values<T> const x(c.rows * c.hidden, 1.0F, gen);
  Values<T> const w13(c.count * rows13 * c.hidden, 0.1F, gen);
  Values<T> const w2(c.count * c.hidden * c.intermediate, 0.1F, gen);
  Values<float> const gate(c.hidden, 0.1F, gen);
  Values<float> const joint(c.rows * c.count, 1.0F, gen);
  runner::device::DenseSharedParams<T> params;
  params.weights.w13 = {make_blocks(w13.device.data(), c.count, rows13, c.hidden), {}, {}, rows13, c.hidden};
  params.weights.w2 = {make_blocks(w2.device.data(), c.count, c.hidden, c.intermediate), {}, {}, c.hidden, c.intermediate};
  params.activation = act;
  params.sigmoid_gate = c.sigmoid ? gate.device.data() : nullptr;
  params.joint_weights = c.joint;
  Arena<Cuda> arena;
  runner::device::DenseShared<T> shared(params, c.hidden, c.rows, arena);
  arena.seal();
  CudaStream stream;
  shared.run(x.rows(c.rows, c.hidden), c.joint ? joint.rows(c.rows, c.count) : Rows<float const>{}, stream);
  check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  ASSERT_EQ(shared.output().extent(0), c.rows);
  std::vector<T> host(static_cast<std::size_t>(c.rows * c.hidden));
  Memory<Cuda>::copy_to_host(host.data(), shared.output().data_handle(), host.size() * sizeof(T));
  std::vector<float> got;
  for (T v : host) got.push_back(to_float(v));
  double const tolerance = std::is_same_v<T, float> ? 2e-5 : std::is_same_v<T, bf16> ? 4e-2 : 6e-3;
  EXPECT_LT(worst_error(got, shared_reference(c, x, w13, w2, gate, joint)), tolerance);
}

TEST(RunnerSharedExperts, EqualDouble) {
  using activation::Kind;
  shared_equals_double<bf16>({5, 128, 64, 1, Kind::silu});
  shared_equals_double<bf16>({33, 64, 96, 1, Kind::silu, true});
  shared_equals_double<bf16>({9, 128, 40, 3, Kind::gelu_tanh, false, true});
  shared_equals_double<bf16>({4, 64, 48, 1, Kind::relu2_no_mul});
  shared_equals_double<bf16>({3, 64, 20, 2, Kind::silu, false, true});
  shared_equals_double<f16>({7, 64, 64, 2, Kind::silu});
  shared_equals_double<float>({6, 72, 36, 2, Kind::gelu, true});
}
TEST(RunnerSharedExperts, WrongSizesAreRefused) {
  std::mt19937 gen(1);
  Values<bf16> const w(64 * 64, 1.0F, gen);
  runner::device::DenseSharedParams<bf16> params;
  params.weights.w13 = {make_blocks(w.device.data(), 1, 32, 64), {}, {}, 32, 64};
  params.weights.w2 = {make_blocks(w.device.data(), 1, 64, 32), {}, {}, 64, 32};
  Arena<Cuda> arena;
  moe_test::expect_error(ErrorCode::argument, "64 rows of w13", [&] { runner::device::DenseShared<bf16>(params, 64, 4, arena); });
  params.activation.kind = activation::Kind::relu_no_mul;
  params.joint_weights = true;
  runner::device::DenseShared<bf16> shared(params, 64, 4, arena);
  moe_test::expect_error(ErrorCode::argument, "expected 2 x 1", [&] { shared.run(w.rows(2, 64), {}, nullptr); });
}

}  // namespace
