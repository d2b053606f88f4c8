// SPDX-License-Identifier: Apache-2.0
// tests/unit/experts_host_products_test.cpp: inner products on the host: the bits of each are those of its 16 partial sums, whatever rows
// and columns are computed beside it.
#include "moe/experts/common/host_products.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.hpp"

namespace {

using namespace moe;
using experts::detail::Resident;
using moe_test::normal;

TEST(HostProducts, EachAloneAndTogether) {
  constexpr std::int64_t kRows = 9, kColumns = 11, kStride = 150;
  auto const a = normal(1, kRows * kStride, 1.0F), b = normal(2, kColumns * kStride, 1.0F);
  for (std::int64_t const k : {0, 1, 15, 16, 17, 64, 100, 150}) {
    for (std::int64_t rows = 1; rows <= kRows; ++rows) {
      for (std::int64_t columns = 1; columns <= kColumns; ++columns) {
        for (auto const where : {Resident::memory, Resident::cache}) {
          std::vector<float> c(static_cast<std::size_t>(kRows * kColumns), -1.0F);
          experts::detail::dot_products(rows, columns, k, a.data(), kStride, b.data(), kStride, c.data(), kColumns, where);
          for (std::int64_t i = 0; i < kRows * kColumns; ++i) {
            std::int64_t const row = i / kColumns, column = i % kColumns;
            bool const inside = row < rows && column < columns;
            float const alone = experts::detail::dot(a.data() + row * kStride, b.data() + column * kStride, k);
            ASSERT_EQ(c[static_cast<std::size_t>(i)], inside ? alone : -1.0F)
                << row << ", " << column << " of " << rows << " x " << columns << ", " << k << " deep";
          }
        }
      }
    }
  }
}

TEST(HostProducts, SixteenPartialSums) {
  for (std::int64_t const k : {1, 7, 16, 33, 64, 100}) {
    auto const a = normal(3, k, 1.0F), b = normal(4, k, 1.0F);
    double lanes[16] = {};
    double size = 0;
    for (std::int64_t i = 0; i < k; ++i) {
      double const product = static_cast<double>(a[static_cast<std::size_t>(i)]) * b[static_cast<std::size_t>(i)];
      lanes[i % 16] += product;
      size += std::abs(product);
    }
    double sum = 0;
    for (double const lane : lanes) sum += lane;
    // k / 16 additions in a lane, four of lanes, each half a unit in the last place.
    EXPECT_NEAR(experts::detail::dot(a.data(), b.data(), k), sum, size * static_cast<double>(k / 16 + 5) * 0x1p-24) << k;
  }
  // 2^24 + 1 is 2^24: ones survive only in lanes of their own, and 16 lanes of them only if lanes are added before.
  std::vector<float> const ones(32, 1.0F);
  std::vector<float> big(32, 1.0F);
  big[0] = 0x1p24F;
  EXPECT_EQ(experts::detail::dot(big.data(), ones.data(), 32), 0x1p24F + 30.0F);
}

TEST(HostProducts, ColumnsPerTask) {
  EXPECT_EQ(experts::detail::shared_columns(64, 2048), 32);
  EXPECT_EQ(experts::detail::shared_columns(512, 256), 64);
  EXPECT_EQ(experts::detail::shared_columns(1000, 256), 128);
  EXPECT_EQ(experts::detail::shared_columns(2880, 32), 32);
  EXPECT_EQ(experts::detail::shared_columns(8192, 16), 16) << "no more than the scratch holds";
}

}  // namespace
