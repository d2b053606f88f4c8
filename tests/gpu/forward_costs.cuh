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
#include <ostream>
#include <vector>

#include "moe/core/cuda_space.hpp"

namespace moe_test {

extern std::atomic<long> host_allocations;  ///< calls of operator new so far

/// Keeps a stream busy until the host sets words[0]; some seconds later it gives up and sets words[1].
__global__ inline void hold_stream(int volatile* words) {
  long long const start = clock64();
  while (words[0] == 0) {
    if (clock64() - start > 10'000'000'000LL) {
      words[1] = 1;
      return;
    }
  }
}

/// Calls forward(), which enqueues in `stream`, while the stream is held: it returns before the device goes on, allocates no host memory
/// and leaves the device's as it is. Prints what it takes on the host: the least of ten calls. The first calls are not judged.
/// calls_nccl: memory that NCCL takes on the host is not judged.
template <class Forward>
void expect_enqueues_only(cudaStream_t stream, char const* name, Forward const& forward, bool calls_nccl = false) {
  int* words = nullptr;
  moe::check_cuda(cudaMallocHost(&words, 2 * sizeof(int)), "cudaMallocHost");
  for (int i = 0; i < 2; ++i) forward();
  hold_stream<<<1, 1, 0, stream>>>(words);  // its first launch loads it
  words[0] = 1;
  moe::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  std::size_t free_before = 0, free_after = 0, total = 0;
  moe::check_cuda(cudaMemGetInfo(&free_before, &total), "cudaMemGetInfo");
  double least = 1e9;
  for (int i = 0; i < 10; ++i) {
    words[0] = words[1] = 0;
    hold_stream<<<1, 1, 0, stream>>>(words);
    long const allocations = host_allocations;
    auto const start = std::chrono::steady_clock::now();
    forward();
    least = std::min(least, std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
    if (!calls_nccl) {
      EXPECT_EQ(host_allocations - allocations, 0) << name << ": allocations on the host";
    }
    EXPECT_EQ(cudaStreamQuery(stream), cudaErrorNotReady) << name << " waited for the device";
    static_cast<void>(cudaGetLastError());  // the query's
    words[0] = 1;
    moe::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    EXPECT_EQ(words[1], 0) << name << " returned when the stream was no longer held";
  }
  moe::check_cuda(cudaMemGetInfo(&free_after, &total), "cudaMemGetInfo");
  EXPECT_EQ(free_after, free_before) << name << ": allocations on the device";
  std::printf("%s: %.1f us on the host\n", name, least);
  moe::check_cuda(cudaFreeHost(words), "cudaFreeHost");
}

/// What a call enqueues, as nodes of a graph.
struct GraphNodes {
  std::size_t kernels = 0, others = 0;
  friend bool operator==(GraphNodes const&, GraphNodes const&) = default;
  friend std::ostream& operator<<(std::ostream& out, GraphNodes const& n) {
    return out << n.kernels << " kernels and " << n.others << " other nodes";
  }
};

/// Calls forward(), which enqueues in `stream`, once as it is and once in a capture.
template <class Forward>
GraphNodes graph_nodes(cudaStream_t stream, Forward const& forward) {
  forward();
  moe::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  moe::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  forward();
  cudaGraph_t graph = nullptr;
  moe::check_cuda(cudaStreamEndCapture(stream, &graph), "cudaStreamEndCapture");
  std::size_t count = 0;
  moe::check_cuda(cudaGraphGetNodes(graph, nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  if (count > 0) moe::check_cuda(cudaGraphGetNodes(graph, nodes.data(), &count), "cudaGraphGetNodes");
  GraphNodes found;
  for (cudaGraphNode_t const node : nodes) {
    cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
    moe::check_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    ++(type == cudaGraphNodeTypeKernel ? found.kernels : found.others);
  }
  cudaGraphDestroy(graph);
  return found;
}

}  // namespace moe_test
