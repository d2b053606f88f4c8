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
#include <exception>

#include "moe/core/cuda_space.hpp"
#include "tests/gpu/held_stream.cuh"

namespace moe_test {

extern std::atomic<long> host_allocations;  ///< calls of operator new so far

/// Whether call() calls cudaMalloc, cudaFree or the like: CUDA refuses them to a thread that captures and invalidates the capture, so the
/// thread captures a stream that the call does not use. Stream-ordered allocations (cudaMallocAsync) are not seen. Other processes on the
/// same GPU, which change its free memory, do not matter.
template <class Call>
bool allocates_on_device(Call const& call) {
  moe::CudaStream const unused;
  moe::check_cuda(cudaStreamBeginCapture(unused, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  bool refused = false;
  std::exception_ptr other;
  try {
    call();
  } catch (moe::Error const& e) {
    refused = e.code() == moe::ErrorCode::cuda;
    if (!refused) other = std::current_exception();
  } catch (...) {
    other = std::current_exception();
  }
  cudaGraph_t graph = nullptr;
  refused = cudaStreamEndCapture(unused, &graph) != cudaSuccess || refused;
  if (graph != nullptr) cudaGraphDestroy(graph);
  static_cast<void>(cudaGetLastError());  // what was refused must not look like a failed launch later
  if (other != nullptr) std::rethrow_exception(other);
  return refused;
}

/// What a forward calls that a capturing thread must not. Then the check of device memory is whether the free memory changes, and no other
/// process may use the GPU.
struct ForwardCalls {
  bool nccl = false;            ///< NCCL, whose memory on the host is not counted either
  bool queries_events = false;  ///< cudaEventQuery()
};

/// Calls forward(), which enqueues in `stream`, while the stream is held: it returns before the device goes on and allocates neither host
/// memory nor device memory. Prints what it takes on the host: the least of ten calls. The first calls do not count.
template <class Forward>
void expect_enqueues_only(cudaStream_t stream, char const* name, Forward const& forward, ForwardCalls calls = {}) {
  for (int i = 0; i < 2; ++i) forward();
  HeldStream held(stream);
  std::size_t free_before = 0, free_after = 0, total = 0;  // as ForwardCalls says
  moe::check_cuda(cudaMemGetInfo(&free_before, &total), "cudaMemGetInfo");
  double least = 1e9;
  for (int i = 0; i < 10; ++i) {
    held.hold();
    long const allocations = host_allocations;
    auto const start = std::chrono::steady_clock::now();
    forward();
    least = std::min(least, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    if (!calls.nccl) {
      EXPECT_EQ(host_allocations - allocations, 0) << name << ": allocations on the host";
    }
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady) << name << " waited for the device";
    static_cast<void>(cudaGetLastError());  // the query's
    EXPECT_TRUE(held.release()) << name << " returned when the stream was no longer held";
  }
  moe::check_cuda(cudaMemGetInfo(&free_after, &total), "cudaMemGetInfo");
  if (calls.nccl || calls.queries_events) {
    EXPECT_EQ(free_after, free_before) << name << ": allocations on the device";
  } else {
    EXPECT_FALSE(allocates_on_device(forward)) << name << ": allocations on the device";
    moe::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  std::printf("%s: %.1f us on the host\n", name, least);
}

}  // namespace moe_test
