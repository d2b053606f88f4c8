// SPDX-License-Identifier: Apache-2.0
// tests/unit/runner_device_plan_test.cpp: how the kernel for products with few outputs cuts its work: plans that have a kernel, that cover
// the output, and whose order of sums does not depend on the rows.
#include "moe/runner/device/small_product.hpp"

#include <gtest/gtest.h>

#include <sstream>

namespace {

using namespace moe::runner::device;

TEST(RunnerDevicePlan, EveryPlanHasAKernelAndCoversTheOutput) {
  for (std::int64_t const k : {1, 33, 512, 2048, 7168, 16384}) {
    for (std::int64_t const n : {1, 8, 64, 160, 256, 384, 1024}) {
      for (std::int64_t const rows : {1, 16, 17, 33, 64, 65, 128, 1000, 8192}) {
        SmallProductPlan const p = choose_small_product(rows, n, k);
        bool const kernel = (p.row_tiles == 1 && (p.col_tiles == 1 || p.col_tiles == 2)) || (p.row_tiles == 2 && p.col_tiles == 2) ||
                            (p.row_tiles == 4 && p.col_tiles == 2) || (p.row_tiles == 8 && (p.col_tiles == 2 || p.col_tiles == 4));
        EXPECT_TRUE(kernel) << p;
        EXPECT_TRUE(p.cluster == 1 || p.cluster == 2 || p.cluster == 4 || p.cluster == 8) << p;
        EXPECT_GE(thread_blocks(p, rows, n) / p.cluster * (16 * p.row_tiles) * (8 * p.col_tiles), rows * n) << p;
        EXPECT_EQ(p.cluster, choose_small_product(1, 8, k).cluster) << "the order of a sum depends on K alone";
      }
    }
  }
}
TEST(RunnerDevicePlan, GateOfDeepSeekV3) {
  EXPECT_EQ(choose_small_product(1, 256, 7168), (SmallProductPlan{.row_tiles = 1, .col_tiles = 2, .cluster = 8}));
  EXPECT_EQ(choose_small_product(128, 256, 7168), (SmallProductPlan{.row_tiles = 8, .col_tiles = 2, .cluster = 8}));
  std::ostringstream out;
  out << choose_small_product(16, 64, 2048);
  EXPECT_EQ(out.str(), "SmallProductPlan{row_tiles 1, col_tiles 1, cluster 8}");
}

}  // namespace
