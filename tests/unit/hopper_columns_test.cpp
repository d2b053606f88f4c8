// SPDX-License-Identifier: Apache-2.0
// tests/unit/hopper_columns_test.cpp: the Hopper experts' units in blocks of columns: every unit once, in an order in which sums wait only
// for units before them, and the cut of the hidden size.
#include <gtest/gtest.h>

#include <vector>

#include "moe/experts/hopper/common/column_order.hpp"

namespace {

using namespace moe::hopper;

TEST(HopperColumns, OrderOfThreeBlocks) {
  ColumnUnits const u{3, 2, 1, 1};
  ColumnPlace const wanted[] = {{1, 0, 0}, {1, 0, 1}, {1, 1, 0}, {1, 1, 1}, {2, 0, 0}, {1, 2, 0}, {2, 1, 0}, {2, 2, 0}, {-1, 0, 0}};
  int number = 0;
  for (ColumnPlace const& place : wanted) {
    EXPECT_EQ(column_place(u, number), place) << number;
    ++number;
  }
  EXPECT_EQ(behind_first_sums(u), 5);
}

TEST(HopperColumns, EveryUnitOnceAndSumsBehindTheirProducts) {
  for (int blocks = 1; blocks <= kMostColumnBlocks; ++blocks) {
    for (ColumnUnits const u : {ColumnUnits{blocks, 7, 3, 5}, ColumnUnits{blocks, 4, 4, 1}, ColumnUnits{blocks, 1, 1, 9},
                                ColumnUnits{blocks, 0, 0, 2}, ColumnUnits{blocks, 6, 2, 0}, ColumnUnits{blocks, 0, 0, 0}}) {
      std::vector<int> products(static_cast<std::size_t>(blocks)), sums(products);
      int const total = (blocks - 1) * u.products + u.last_products + blocks * u.sums;
      for (int number = 0; number < total; ++number) {
        ColumnPlace const at = column_place(u, number);
        ASSERT_TRUE(at.phase == 1 || at.phase == 2) << number << " of " << total << ", blocks " << blocks;
        ASSERT_LT(at.block, blocks);
        auto const block = static_cast<std::size_t>(at.block);
        auto& seen = at.phase == 1 ? products : sums;
        EXPECT_EQ(at.local, seen[block]) << "in order, each once";
        ++seen[block];
        if (at.phase == 2) {
          EXPECT_EQ(products[block], at.block == blocks - 1 ? u.last_products : u.products) << "sums wait for earlier units only";
        }
        if (at.phase == 2 && at.block == 0 && seen[block] == u.sums) {
          EXPECT_EQ(behind_first_sums(u), number + 1);
        }
      }
      for (int b = 0; b < blocks; ++b) {
        EXPECT_EQ(products[static_cast<std::size_t>(b)], b == blocks - 1 ? u.last_products : u.products);
        EXPECT_EQ(sums[static_cast<std::size_t>(b)], u.sums);
      }
      EXPECT_EQ(column_place(u, total).phase, -1);
      EXPECT_EQ(column_place(u, 2'000'000'000).phase, -1) << "what a block that draws no more takes for its next number";
    }
  }
}

TEST(HopperColumns, CutsCoverTheHiddenSize) {
  EXPECT_EQ(cut_columns(2048, 4), (ColumnCut{4, 512}));
  EXPECT_EQ(cut_columns(7168, 4), (ColumnCut{4, 1792}));
  EXPECT_EQ(cut_columns(2880, 4), (ColumnCut{4, 768}));
  EXPECT_EQ(cut_columns(2880, 8), (ColumnCut{6, 512}));
  EXPECT_EQ(cut_columns(320, 2), (ColumnCut{2, 256}));
  EXPECT_EQ(cut_columns(8, 8), (ColumnCut{1, 256}));
  for (int hidden = 8; hidden <= 9000; hidden += 8) {
    for (int wanted = 1; wanted <= kMostColumnBlocks; ++wanted) {
      ColumnCut const cut = cut_columns(hidden, wanted);
      ASSERT_TRUE(covers(cut, hidden)) << hidden << " in " << wanted;
      ASSERT_LE(cut.blocks, wanted);
    }
  }
  EXPECT_FALSE(covers({0, 256}, 256));
  EXPECT_FALSE(covers({9, 256}, 2304));
  EXPECT_FALSE(covers({2, 128}, 256));
  EXPECT_FALSE(covers({2, 384}, 768));
  EXPECT_FALSE(covers({2, 256}, 256)) << "a block without columns";
  EXPECT_FALSE(covers({2, 256}, 520)) << "columns without a block";
}

TEST(HopperColumns, TokensOfAUnitOfSums) {
  EXPECT_EQ(tokens_of_sums(256), 64);
  EXPECT_EQ(tokens_of_sums(1024), 16);
  EXPECT_EQ(tokens_of_sums(7168), 8);
}

}  // namespace
