// SPDX-License-Identifier: Apache-2.0
// tests/unit/bench_given_routing_test.cpp: a benchmark reads each rank's part of a given routing and refuses a bad file.
#include "bench/given_routing.hpp"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>

namespace {

using moe_bench::GivenRouting;

constexpr int kRanks = 2, kTokens = 3, kTopk = 2, kExperts = 5;
constexpr std::size_t kSlots = kRanks * kTokens * kTopk;

class GivenRoutingTest : public testing::Test {
 protected:
  std::string const file = testing::TempDir() + "given_routing_" + testing::UnitTest::GetInstance()->current_test_info()->name() + ".bin";
  std::vector<std::int32_t> ids{0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 4};
  std::vector<float> weights = std::vector<float>(kSlots);

  void SetUp() override {
    for (std::size_t i = 0; i < kSlots; ++i) weights[i] = static_cast<float>(i) / 8;
  }
  void TearDown() override { std::filesystem::remove(file); }

  void write() const {
    std::ofstream out(file, std::ios::binary);
    out.write(reinterpret_cast<char const*>(ids.data()), static_cast<std::streamsize>(ids.size() * 4));
    out.write(reinterpret_cast<char const*>(weights.data()), static_cast<std::streamsize>(weights.size() * 4));
  }
  GivenRouting read(int rank) const { return {file, {kExperts, kTopk}, kTokens, rank, kRanks}; }
  /// The message for rank 1, which must be E_ARG.
  std::string refusal() const {
    auto const error = moe::error_of([&] { read(1); });
    EXPECT_TRUE(error && error->code() == moe::ErrorCode::argument);
    return error ? error->message() : "";
  }
};

TEST_F(GivenRoutingTest, EachRankTakesItsPart) {
  write();
  for (int rank = 0; rank < kRanks; ++rank) {
    GivenRouting const mine = read(rank);
    auto const first = rank * kTokens * kTopk;
    EXPECT_EQ(mine.ids, std::vector<std::int32_t>(ids.begin() + first, ids.begin() + first + kTokens * kTopk));
    EXPECT_EQ(mine.weights, std::vector<float>(weights.begin() + first, weights.begin() + first + kTokens * kTopk));
  }
}

TEST_F(GivenRoutingTest, BadFilesAreRefused) {
  EXPECT_EQ(refusal(), "--routing: " + file + " cannot be read");
  weights.pop_back();
  write();
  EXPECT_EQ(refusal(), "--routing: " + file + " has 92 bytes, expected 96 (2 ranks, 3 tokens, top 2, 8 bytes each)");
  weights.push_back(std::numeric_limits<float>::infinity());
  write();
  EXPECT_EQ(refusal(), "--routing: " + file + ", rank 1, slot 1 of token 2: the weight inf is not finite");
  ids[10] = kExperts;
  write();
  EXPECT_EQ(refusal(), "--routing: " + file + ", rank 1, slot 0 of token 2: expert 5 is outside [0, 5)");
  ids[10] = 4;
  write();
  EXPECT_EQ(refusal(), "--routing: " + file + ", rank 1, slot 1 of token 2: expert 4 occurs twice");
}

}  // namespace
