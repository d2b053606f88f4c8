// SPDX-License-Identifier: Apache-2.0
// tests/mpi/backend_allocation_test.cpp: prepare and finalize allocate no memory. This program replaces operator new and counts its calls.
// moe-ranks: 1 2 3
#include <atomic>
#include <cstdlib>
#include <new>

#include "exchange_harness.hpp"
#include "moe/quantization/fp8_group128.hpp"

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

template <class Backend, class Quant, class Partial>
void expect_no_allocation() {
  Comm comm(MPI_COMM_WORLD, {.timeout_ms = 20'000});
  Harness<Backend, float, Quant, Partial> h(comm, {.hidden = 256, .num_experts = 9, .k = 3});
  std::vector<Batch<float>> batches;
  for (int round = 0; round < 20; ++round) {
    batches.push_back(random_batch<float>(comm.rank(), round, random_rows(comm.rank(), round, 8), 256, 3, 9));
  }
  std::vector<float> out(8 * 256);
  std::size_t const arena_before = h.arena_bytes();
  long in_exchange = 0;
  for (auto const& b : batches) {  // the very first round as well
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
TEST(Allocation, Naive) {
  expect_no_allocation<NaiveBackend, moe::quantization::None, float>();
  expect_no_allocation<NaiveBackend, moe::quantization::Fp8Group<>, moe::bf16>();
}
TEST(Allocation, AllGatherReduceScatter) {
  expect_no_allocation<GatherBackend, moe::quantization::None, float>();
  expect_no_allocation<GatherBackend, moe::quantization::Fp8Group<>, moe::bf16>();
}
TEST(Allocation, AllToAllV) {
  expect_no_allocation<AllToAllBackend, moe::quantization::None, float>();
  expect_no_allocation<AllToAllBackend, moe::quantization::Fp8Group<>, moe::bf16>();
}

}  // namespace
