// SPDX-License-Identifier: Apache-2.0
// tests/mpi/exchange_memory_test.cpp: the formulas of backends/common/memory.hpp against the memory that exchanges allocate.
// moe-ranks: 1 3
#include "moe/backends/common/memory.hpp"

#include <type_traits>

#include "window_harness.hpp"

namespace {

using namespace moe_test;
using moe::backends::ExchangeMemory;
using moe::backends::ExchangeSize;

constexpr std::int64_t kHidden = 512;
constexpr std::int64_t kTokens = 64;
constexpr int kTopK = 4;

class Memory : public testing::Test {
 protected:
  Comm comm{MPI_COMM_WORLD, {.timeout_ms = 30'000}};
  int experts() const { return 5 * comm.size(); }
  ExchangeSize size() const { return {comm.size(), kTokens, kTopK, 5, kHidden * 4, kHidden * 4}; }

  /// Within 2 % of the whole, plus a small constant.
  static void expect_near(std::int64_t real, std::int64_t formula, char const* what) {
    EXPECT_LE(std::abs(static_cast<double>(real - formula)), 0.02 * static_cast<double>(real) + 64 * 1024)
        << what << ": " << real << " bytes, the formula says " << formula;
  }
  template <class Case>
  void expect_window(ExchangeMemory const& formula) {
    SCOPED_TRACE(Case::kName);
    WindowHarness<Case> h(comm, {.hidden = kHidden, .num_experts = experts(), .k = kTopK, .max_tokens = kTokens});
    expect_near(h.exchange().window().bytes(), formula.window, "window");
    expect_near(static_cast<std::int64_t>(h.arena_bytes()), formula.arena, "arena");
  }
};

TEST_F(Memory, OverWindows) {
  using namespace moe::backends;
  expect_window<LowLatencyCase>(low_latency_memory(size()));
  expect_window<DeduplicatedCase>(low_latency_deduplicated_memory(size()));
  expect_window<HighThroughputCase>(high_throughput_memory(size()));
  expect_window<OneSidedCase>(high_throughput_memory(size()));
  auto const queues = TwoSidedCase::params();
  expect_window<TwoSidedCase>(two_sided_memory(size(), queues.queue_depth, queues.queue_entry_bytes));
  expect_window<PplxCase>(pplx_memory(size()));
}

TEST_F(Memory, OverCommunicators) {
  auto const arena_of = [&]<class Backend>(std::type_identity<Backend>) {
    Harness<Backend> const h(comm, {.hidden = kHidden, .num_experts = experts(), .k = kTopK, .max_tokens = kTokens});
    return static_cast<std::int64_t>(h.arena_bytes());
  };
  using namespace moe::backends;
  expect_near(arena_of(std::type_identity<Naive<Comm>>()), gather_memory(size()).arena, "naive");
  expect_near(arena_of(std::type_identity<AllGatherReduceScatter<Comm>>()), gather_memory(size()).arena, "allgather_reduce_scatter");
  expect_near(arena_of(std::type_identity<AllToAllV<Comm>>()), all_to_all_v_memory(size()).arena, "all_to_all_v");
}

}  // namespace
