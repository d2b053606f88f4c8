// SPDX-License-Identifier: Apache-2.0
// tests/gpu/forward_costs.cuh: what a forward on the device must not do on the host: allocate, or wait for the device. forward_costs.cpp
// replaces operator new.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>

#include "moe/core/cuda_space.hpp"
#include "tests/gpu/held_stream.cuh"

namespace moe_test {

extern std::atomic<long> host_allocations;  ///< calls of operator new so far

/// Calls forward(), which enqueues in `stream`, while the stream is held: it returns before the device goes on, allocates no host memory
/// and leaves the device's as it is. Prints what it takes on the host: the least of ten calls. The first calls are not judged.
/// calls_nccl: memory that NCCL takes on the host is not judged.
template <class Forward>
void expect_enqueues_only(cudaStream_t stream, char const* name, Forward const& forward, bool calls_nccl = false) {
  for (int i = 0; i < 2; ++i) forward();
  HeldStream held(stream);
  std::size_t free_before = 0, free_after = 0, total = 0;
  moe::check_cuda(cudaMemGetInfo(&free_before, &total), "cudaMemGetInfo");
  double least = 1e9;
  for (int i = 0; i < 10; ++i) {
    held.hold();
    long const allocations = host_allocations;
    auto const start = std::chrono::steady_clock::now();
    forward();
    least = std::min(least, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    if (!calls_nccl) {
      EXPECT_EQ(host_allocations - allocations, 0) << name << ": allocations on the host";
    }
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady) << name << " waited for the device";
    static_cast<void>(cudaGetLastError());  // the query's
    EXPECT_TRUE(held.release()) << name << " returned when the stream was no longer held";
  }
  moe::check_cuda(cudaMemGetInfo(&free_after, &total), "cudaMemGetInfo");
  EXPECT_EQ(free_after, free_before) << name << ": allocations on the device";
  std::printf("%s: %.1f us on the host\n", name, least);
}

}  // namespace moe_test
