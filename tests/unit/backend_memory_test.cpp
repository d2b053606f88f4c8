// SPDX-License-Identifier: Apache-2.0
// tests/unit/backend_memory_test.cpp: an exchange that does not fit is refused before it is built, with what would fit (case P18). That the
// formulas are the memory of the exchanges is in tests/mpi/exchange_memory_test.cpp.
#include "moe/backends/common/memory.hpp"

#include <gtest/gtest.h>

#include "expect_error.hpp"

namespace {

using namespace moe::backends;

/// bf16 outputs, e4m3 rows with a float scale for 128 elements; 28 experts are 448 on 16 ranks, replicas included.
constexpr std::int64_t kHidden = 5120;
constexpr ExchangeSize kSize{
    .ranks = 16, .max_tokens = 2048, .topk = 8, .local_experts = 28, .row_bytes = kHidden + 4 * kHidden / 128, .output_bytes = 2 * kHidden};
constexpr std::int64_t kLimit = std::int64_t{1} << 35;

TEST(ExchangeMemory, P18_TooLarge) {
  auto const bytes = [](ExchangeSize const& s) { return low_latency_memory(s).total(); };
  auto const refused = [&](char const* words) {
    moe_test::expect_error(moe::ErrorCode::config, words, [&] { check_memory("low_latency", kSize, kLimit, bytes); });
  };
  refused("low_latency: 38547750912 bytes needed, 34359738368 available, for max_tokens_per_rank = 2048");
  refused("the largest max_tokens_per_rank that fits is 1825");
  ExchangeSize size = kSize;
  size.max_tokens = 1825;
  EXPECT_NO_THROW(check_memory("low_latency", size, kLimit, bytes));
  size.max_tokens = 1826;
  EXPECT_GT(bytes(size), kLimit);
}

TEST(ExchangeMemory, P18_TooLargeBetweenGpus) {
  DeviceExchangeSize size{.ranks = 16, .max_tokens = 2048, .topk = 8, .local_experts = 28, .hidden = kHidden};
  auto const bytes = [](DeviceExchangeSize const& s) { return low_latency_window(s); };
  moe_test::expect_error(moe::ErrorCode::config, "low_latency: 28486795264 bytes needed, 1000000000 available",
                         [&] { check_memory("low_latency", size, 1'000'000'000, bytes); });
  size.max_tokens = largest_max_tokens(size, 1'000'000'000, bytes);
  EXPECT_EQ(size.max_tokens, 71);
  EXPECT_LE(bytes(size), 1'000'000'000);
  ++size.max_tokens;
  EXPECT_GT(bytes(size), 1'000'000'000);
}

TEST(ExchangeMemory, NoBytesFitNoTokensAndAllBytesFitAll) {
  auto const bytes = [](ExchangeSize const& s) { return high_throughput_memory(s).total(); };
  EXPECT_EQ(largest_max_tokens(kSize, 0, bytes), 0);
  EXPECT_EQ(largest_max_tokens(kSize, bytes(kSize), bytes), kSize.max_tokens);
}

}  // namespace
