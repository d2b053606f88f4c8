// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_exact_weights_test.cpp: whether float32 weights are values of a narrower element: the decision by which a float32 gate
// on the device is computed in the element of its rows.
#include "moe/runner/device/exact_weights.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

#include "numbers.hpp"

namespace {

using namespace moe;
using runner::device::convert_exactly;
using runner::device::InexactWeight;

/// Values of rows that lie one after the other, and what was read of them.
struct Source {
  std::vector<float> values;
  std::int64_t cols;
  std::vector<std::pair<std::int64_t, std::int64_t>> reads = {};  // first row, rows

  template <class T>
  std::optional<InexactWeight> convert(std::vector<T>& to) {
    std::int64_t const rows = cols == 0 ? 0 : static_cast<std::int64_t>(values.size()) / cols;
    auto const read = [this](std::int64_t first, std::int64_t count, float* out) {
      reads.emplace_back(first, count);
      std::copy_n(values.begin() + first * cols, count * cols, out);
    };
    return convert_exactly(rows, cols, read, to);
  }
};

template <class T>
bool holds(float value) {
  T to{};
  return convert_exactly(&value, 1, &to) == 1;
}

TEST(RunnerExactWeights, SingleValues) {
  constexpr float kLeast = std::numeric_limits<float>::denorm_min();
  for (float const v : {0.0F, -0.0F, 1.0F, -1.5F, 0x1.fep0F, 0x1.02p-100F, 0x1p127F, 0x1p-133F, std::numeric_limits<float>::infinity()}) {
    EXPECT_TRUE(holds<bf16>(v)) << v;
  }
  for (float const v : {0.1F, 0x1.01p0F, 0x1.000002p0F, std::numeric_limits<float>::max(), kLeast, 0x1p-134F, std::nanf("")}) {
    EXPECT_FALSE(holds<bf16>(v)) << v;
  }
  for (float const v : {0.0F, 0x1.ffcp0F, 65504.0F, 0x1p-24F, -0x1.8p-17F}) EXPECT_TRUE(holds<f16>(v)) << v;
  for (float const v : {0x1.ffep0F, 65536.0F, 0x1p-25F, 0x1.02p-18F, std::nanf("")}) EXPECT_FALSE(holds<f16>(v)) << v;
}

TEST(RunnerExactWeights, WeightsOfACheckpointInBf16AreItsValues) {
  Source source{moe_test::bf16_numbers(1, 24 * 40), 40};
  std::vector<bf16> to;
  EXPECT_FALSE(source.convert(to));
  ASSERT_EQ(to.size(), source.values.size());
  for (std::size_t i = 0; i < to.size(); ++i) ASSERT_EQ(to_float(to[i]), source.values[i]) << i;
}

TEST(RunnerExactWeights, OneOtherValueIsFoundWhereItIs) {
  constexpr std::int64_t kRows = 9, kCols = 33;
  for (auto const& [row, col] : {std::pair<std::int64_t, std::int64_t>{0, 0}, {0, 32}, {4, 7}, {8, 32}}) {
    Source source{moe_test::bf16_numbers(2, kRows * kCols), kCols};
    float& value = source.values[static_cast<std::size_t>(row * kCols + col)];
    value = 0x1.01p0F;  // half way between two values of bf16
    std::vector<bf16> to;
    auto const inexact = source.convert(to);
    ASSERT_TRUE(inexact) << row << ", " << col;
    EXPECT_EQ(inexact->row, row);
    EXPECT_EQ(inexact->col, col);
    EXPECT_EQ(inexact->value, value);
  }
}

TEST(RunnerExactWeights, InWords) {
  EXPECT_EQ(runner::device::describe({3, 17, 0.1F}, DType::bf16), "the weight [3, 17] = 0.100000001 is not a value of bf16");
  EXPECT_EQ(runner::device::describe({0, 2, 0x1.01p0F}, DType::f16), "the weight [0, 2] = 1.00390625 is not a value of f16");
}

/// More rows than are read at once; the pass ends at the first value that does not fit.
TEST(RunnerExactWeights, OnePass) {
  constexpr std::int64_t kRows = 100, kCols = 7168;
  Source source{std::vector<float>(static_cast<std::size_t>(kRows * kCols), 0.5F), kCols};
  std::vector<bf16> to;
  EXPECT_FALSE(source.convert(to));
  std::int64_t next = 0;
  for (auto const& [first, count] : source.reads) {
    EXPECT_EQ(first, next);
    next += count;
  }
  EXPECT_EQ(next, kRows) << "each row once";
  EXPECT_GT(source.reads.size(), 1U);
  EXPECT_EQ(std::count_if(to.begin(), to.end(), [](bf16 v) { return to_float(v) == 0.5F; }), kRows * kCols);

  source.reads.clear();
  source.values[0] = 0.1F;
  auto const inexact = source.convert(to);
  ASSERT_TRUE(inexact);
  EXPECT_EQ(inexact->row + inexact->col, 0);
  EXPECT_EQ(source.reads.size(), 1U);
  source.values[0] = 0.5F;
  source.values.back() = 0.1F;
  auto const last = source.convert(to);
  ASSERT_TRUE(last);
  EXPECT_EQ(last->row, kRows - 1);
  EXPECT_EQ(last->col, kCols - 1);
}

TEST(RunnerExactWeights, NoValues) {
  std::vector<f16> to(3);
  Source none{{}, 8};
  EXPECT_FALSE(none.convert(to));
  EXPECT_TRUE(to.empty());
  Source no_columns{{}, 0};
  EXPECT_FALSE(no_columns.convert(to));
  EXPECT_TRUE(no_columns.reads.empty());
}

}  // namespace
