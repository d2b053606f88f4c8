// SPDX-License-Identifier: Apache-2.0
// tests/unit/bench_products_test.cpp: the command line of runner_products_bench, its choice among ways, and the library's table of choices
// that it prints beside them.
#include "bench/products.hpp"

#include <gtest/gtest.h>

#include <initializer_list>

#include "moe/runner/device/product_choices.hpp"

namespace {

using namespace moe_bench;
using moe::runner::Sums;
using moe::runner::device::kProductChoices;
using moe::runner::device::prefers_small_product;

ProductOptions options(std::initializer_list<char const*> arguments) {
  std::vector<std::string> words{"runner_products_bench"};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  return product_options(static_cast<int>(argv.size()), argv.data());
}
std::vector<std::string> names(ProductOptions const& o) {
  std::vector<std::string> out;
  for (auto const& [name, shape] : o.shapes) out.push_back(name);
  return out;
}
std::string refusal(std::initializer_list<char const*> arguments) {
  try {
    options(arguments);
  } catch (BadArgument const& error) {
    return error.what();
  }
  return "taken";
}

TEST(BenchProducts, AllShapesWithoutArguments) {
  ProductOptions const o = options({});
  EXPECT_EQ(o.shapes.size(), kProductShapes.size());
  EXPECT_EQ(o.rows, (std::vector<int>{1, 8, 32, 64, 128, 256, 512, 1024, 4096}));
  EXPECT_EQ(o.json, "");
}
TEST(BenchProducts, ShapesByPartsOfTheirNamesAndRowsInOrder) {
  ProductOptions const o = options({"--shapes", "latent,deepseek", "--rows", "128,4,128", "--json", "out.json"});
  EXPECT_EQ(names(o), (std::vector<std::string>{"gate-deepseek-v3", "latent-nemotron-3-super", "shared-deepseek-v3"}));
  EXPECT_EQ(o.rows, (std::vector<int>{4, 128}));
  EXPECT_EQ(o.json, "out.json");
  EXPECT_EQ(options({"--shapes", "all"}).shapes.size(), kProductShapes.size());
}
TEST(BenchProducts, WhatItDoesNotKnow) {
  EXPECT_EQ(refusal({"--row", "1"}), "option --row is unknown; known: --shapes, --rows, --json");
  EXPECT_EQ(refusal({"--rows"}), "--rows has no value");
  EXPECT_EQ(refusal({"--rows", "0"}), "--rows: 0 is not a number from 1");
  EXPECT_EQ(refusal({"--rows", "1,many"}), "--rows: many is not a number from 1");
  for (char const* const shapes : {"qwen4", "latent,qwen4", ""}) {
    EXPECT_NE(refusal({"--shapes", shapes}).find("is unknown; known: all, gate-deepseek-v3, "), std::string::npos) << shapes;
  }
}
TEST(BenchProducts, EveryShapeHasRowsOfWholeScaleBlocksWhereALayerComputesIt) {
  for (auto const& [name, shape] : kProductShapes) {
    if (shape.part == Part::gate) continue;
    EXPECT_EQ(shape.hidden % 128, 0) << name;
    EXPECT_EQ(shape.width % 128, 0) << name;
  }
}

TEST(BenchProducts, TheFastestIsTodaysUnlessAnotherIsClearlyFaster) {
  EXPECT_EQ(fastest({10.0, 9.8, 12.0}, 0), 0U) << "2 % faster: may be noise";
  EXPECT_EQ(fastest({10.0, 9.6, 9.5}, 0), 2U);
  EXPECT_EQ(fastest({10.0, 9.6, 9.5}, 1), 1U);
  EXPECT_EQ(fastest({5.0, 10.0}, 1), 0U);
  EXPECT_EQ(fastest({kNotTimed, 10.0, 9.0}, 0), 2U) << "today's is wrong";
  EXPECT_EQ(fastest({10.0, kNotTimed}, 0), 0U);
  EXPECT_EQ(fastest({kNotTimed, kNotTimed}, 1), 1U);
}
TEST(BenchProducts, RangesOfRowsWithOneFastestWay) {
  EXPECT_EQ(ranges({1, 8, 32, 64}, {"a", "a", "b", "a"}), "a up to 8, b up to 32, a");
  EXPECT_EQ(ranges({1, 8}, {"a", "a"}), "a");
  EXPECT_EQ(ranges({128}, {"b"}), "b");
}

/// The values of the table, as measured; whoever changes one changes the log and the pages that name it.
TEST(BenchProducts, TheLibrarysChoices) {
  EXPECT_EQ(kProductChoices.shared_beside_rows, 256);
  EXPECT_FALSE(kProductChoices.shared_in_scheme);
  EXPECT_TRUE(prefers_small_product(Sums::blocked, true, 1, 256));
  EXPECT_TRUE(prefers_small_product(Sums::blocked, true, 32, 512));
  EXPECT_FALSE(prefers_small_product(Sums::blocked, true, 33, 512));
  EXPECT_FALSE(prefers_small_product(Sums::blocked, true, 32, 513));
  EXPECT_FALSE(prefers_small_product(Sums::blocked, false, 1, 256)) << "a projection";
  EXPECT_FALSE(prefers_small_product(Sums::per_row, true, 1, 256)) << "a gate: the same bits in any batch";
}

}  // namespace
