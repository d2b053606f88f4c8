// SPDX-License-Identifier: Apache-2.0
// tests/gpu/held_stream.cuh: what a call costs on the host: a stream that stays busy while calls are enqueued, and the nodes that a call
// becomes in a graph.
#pragma once

#include <cstddef>
#include <ostream>
#include <vector>

#include "moe/core/cuda_space.hpp"

namespace moe_test {

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

/// A stream that the host holds and lets go on.
class HeldStream {
 public:
  explicit HeldStream(cudaStream_t stream) : stream_(stream) {
    moe::check_cuda(cudaMallocHost(&words_, 2 * sizeof(int)), "cudaMallocHost");
    hold();  // its first launch loads the kernel
    release();
  }
  HeldStream(HeldStream const&) = delete;
  HeldStream& operator=(HeldStream const&) = delete;
  ~HeldStream() {
    words_[0] = 1;
    cudaStreamSynchronize(stream_);
    cudaFreeHost(words_);
  }
  /// Work that is enqueued from now on waits for release().
  void hold() {
    words_[0] = words_[1] = 0;
    hold_stream<<<1, 1, 0, stream_>>>(words_);
    moe::check_launch("hold_stream");
  }
  /// Lets the stream go on and waits for it. False if it was no longer held.
  bool release() {
    words_[0] = 1;
    moe::check_cuda(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
    return words_[1] == 0;
  }

 private:
  cudaStream_t stream_;
  int* words_ = nullptr;
};

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
