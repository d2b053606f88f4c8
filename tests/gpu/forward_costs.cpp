// SPDX-License-Identifier: Apache-2.0
// tests/gpu/forward_costs.cpp: operator new that counts its calls. In a .cpp, since nvcc would compile it for the device too.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

namespace moe_test {
std::atomic<long> host_allocations{0};

namespace {
void* counted(std::size_t n) {
  ++host_allocations;
  if (void* p = std::malloc(std::max<std::size_t>(n, 1))) return p;
  throw std::bad_alloc();
}
}  // namespace
}  // namespace moe_test

void* operator new(std::size_t n) { return moe_test::counted(n); }
void* operator new[](std::size_t n) { return moe_test::counted(n); }
void operator delete(void* p) noexcept { std::free(p); }
void operator delete[](void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }
void operator delete[](void* p, std::size_t) noexcept { std::free(p); }
