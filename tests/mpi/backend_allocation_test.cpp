// SPDX-License-Identifier: Apache-2.0
// tests/mpi/backend_allocation_test.cpp: prepare and finalize of every host exchange, and forwards of runners on grids of ranks, allocate
// no memory. This program replaces operator new and counts its calls.
// moe-ranks: 1 2 3 4
#include <atomic>
#include <cstdlib>
#include <new>

#include "moe/quantization/fp8_group128.hpp"
#include "runner_grid_test/harness.hpp"
#include "window_harness.hpp"

namespace {
std::atomic<long> allocations{0};
void* allocate(std::size_t bytes) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
void* take(std::size_t bytes) {
  void* p = allocate(bytes);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}
}  // namespace

void* operator new(std::size_t bytes) { return take(bytes); }
void* operator new[](std::size_t bytes) { return take(bytes); }
void* operator new(std::size_t bytes, std::nothrow_t const&) noexcept { return allocate(bytes); }
void* operator new[](std::size_t bytes, std::nothrow_t const&) noexcept { return allocate(bytes); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }

namespace {

using namespace moe_test;

/// H: a harness of an exchange.
template <class H>
void expect_no_allocation(int num_experts) {
  Comm comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  H h(comm, {.hidden = 256, .num_experts = num_experts, .k = 3});
  std::vector<Batch<float>> batches;
  for (int round = 0; round < 20; ++round) {
    batches.push_back(random_batch<float>(comm.rank(), round, random_rows(comm.rank(), round, 8), 256, 3, num_experts));
  }
  std::vector<float> out(8 * 256);
  std::size_t const arena_before = h.arena_bytes();
  long in_exchange = 0;
  for (auto const& b : batches) {  // including the first round
    long before = allocations;
    auto const tokens = h.exchange().prepare(b.tokens(), {});
    in_exchange += allocations - before;
    h.run_experts(tokens);
    before = allocations;
    h.exchange().finalize(moe::make_rows(out.data(), b.rows, 256), {});
    in_exchange += allocations - before;
  }
  EXPECT_EQ(in_exchange, 0);
  EXPECT_EQ(h.arena_bytes(), arena_before);
}

TEST(Allocation, CounterCounts) {
  long const before = allocations;
  ::operator delete(::operator new(3));  // the expression `new` could be optimised away, the call cannot
  EXPECT_GT(allocations, before);
}
template <class Backend, class Quant, class Partial>
void of_backend() {
  expect_no_allocation<Harness<Backend, float, Quant, Partial>>(9);
}
TEST(Allocation, Naive) {
  of_backend<NaiveBackend, moe::quantization::None, float>();
  of_backend<NaiveBackend, moe::quantization::Fp8Group<>, moe::bf16>();
}
TEST(Allocation, AllGatherReduceScatter) {
  of_backend<GatherBackend, moe::quantization::None, float>();
  of_backend<GatherBackend, moe::quantization::Fp8Group<>, moe::bf16>();
}
TEST(Allocation, AllToAllV) {
  of_backend<AllToAllBackend, moe::quantization::None, float>();
  of_backend<AllToAllBackend, moe::quantization::Fp8Group<>, moe::bf16>();
}

template <class Case>
class WindowAllocation : public testing::Test {};
using WindowCases = testing::Types<LowLatencyCase, DeduplicatedCase, HighThroughputCase, OneSidedCase, TwoSidedCase, PplxCase>;
TYPED_TEST_SUITE(WindowAllocation, WindowCases, CaseNames);
TYPED_TEST(WindowAllocation, PrepareAndFinalize) { expect_no_allocation<WindowHarness<TypeParam>>(12); }

// Runners: tensor parallel ranks, with and without sequence parallelism, whole and in chunks. The first forward is counted, too.
// false: the rules refuse the grid.
template <class Backend, class Parts>
bool grid_allocates_nothing(grid::Grid const& g, bool sequence_parallel) {
  using namespace grid;
  moe::BackendFacts facts = Backend::kFacts;
  facts.sequence_parallel = sequence_parallel;
  MoeParallel const parallel = parallel_of(g, world_rank(), facts);
  Model const m{
      .form = {true, true, sequence_parallel ? SharedOutput::complete : SharedOutput::partial}, .experts = 12, .padding = kLatent};
  if (runner::parallel_conflict(parallel) != nullptr || parallel.use_sp_moe() != sequence_parallel) return false;
  Rank<Backend, experts::Reference<float>, Parts> rank(g, m, world_rank(), facts);
  std::vector<float> const x = tokens(rank.moe, m.hidden);
  std::vector<float> out(x.size());
  auto const rows = static_cast<std::int64_t>(x.size()) / m.hidden;
  std::size_t const bytes = rank.runner.bytes();
  for (int round = 0; round < 3; ++round) {
    long const before = allocations;
    rank.runner.forward(make_rows(x.data(), rows, m.hidden), make_rows(out.data(), rows, m.hidden));
    EXPECT_EQ(allocations - before, 0) << "tp " << g.tp << ", sp " << sequence_parallel << ", round " << round;
  }
  EXPECT_EQ(rank.runner.bytes(), bytes);
  return true;
}
template <class Backend>
class GridAllocation : public testing::Test {};
using GridBackends =
    testing::Types<moe::backends::NoExpertParallel<>, moe::backends::AllGatherReduceScatter<moe::comm::Mpi>,
                   moe::backends::AllToAllV<moe::comm::Mpi>, moe::backends::LowLatency<Window>, moe::backends::HighThroughput<Window>>;
TYPED_TEST_SUITE(GridAllocation, GridBackends);
TYPED_TEST(GridAllocation, Forward) {
  int const n = grid::world_size();
  int ran[2] = {};  // without and with sequence parallelism
  for (int const tp : {1, 2, n}) {
    if (n % tp != 0) continue;
    for (bool const sequence_parallel : {false, true}) {
      bool const legal = grid_allocates_nothing<TypeParam, grid::RankParts>({tp, n / tp, 1, true}, sequence_parallel);
      EXPECT_EQ((grid_allocates_nothing<TypeParam, grid::RankChunkParts>({tp, n / tp, 1, true}, sequence_parallel)), legal);
      ran[sequence_parallel ? 1 : 0] += legal ? 1 : 0;
    }
  }
  EXPECT_GT(ran[0], 0);
  EXPECT_EQ(ran[1] > 0, n == 4 && TypeParam::kFacts.sequence_parallel) << "a TP group of two with DP ranks beside it";
}

}  // namespace
