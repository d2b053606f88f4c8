// SPDX-License-Identifier: Apache-2.0
// tests/gpu/held_stream.cuh: what a call costs on the host: a stream that stays busy while calls are enqueued, and the nodes that a call
// becomes in a graph, with their order.
#pragma once

#include <algorithm>
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
  std::size_t all() const { return kernels + others; }
  friend bool operator==(GraphNodes const&, GraphNodes const&) = default;
  friend std::ostream& operator<<(std::ostream& out, GraphNodes const& n) {
    return out << n.kernels << " kernels and " << n.others << " other nodes";
  }
};

/// The graph of a call that enqueues in `stream`: it is made once as it is and once in a capture.
class CapturedCall {
 public:
  template <class Forward>
  CapturedCall(cudaStream_t stream, Forward const& forward) {
    forward();
    moe::check_cuda(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    moe::check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    forward();
    moe::check_cuda(cudaStreamEndCapture(stream, &graph_), "cudaStreamEndCapture");
    std::size_t count = 0;
    moe::check_cuda(cudaGraphGetNodes(graph_, nullptr, &count), "cudaGraphGetNodes");
    nodes_.resize(count);
    if (count > 0) moe::check_cuda(cudaGraphGetNodes(graph_, nodes_.data(), &count), "cudaGraphGetNodes");
  }
  CapturedCall(CapturedCall const&) = delete;
  CapturedCall& operator=(CapturedCall const&) = delete;
  ~CapturedCall() { cudaGraphDestroy(graph_); }

  GraphNodes nodes() const {
    GraphNodes found;
    for (cudaGraphNode_t const node : nodes_) {
      cudaGraphNodeType type = cudaGraphNodeTypeEmpty;
      moe::check_cuda(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
      ++(type == cudaGraphNodeTypeKernel ? found.kernels : found.others);
    }
    return found;
  }
  /// For each node, how many nodes neither precede nor follow it, in ascending order.
  std::vector<std::size_t> beside() const {
    std::size_t const n = nodes_.size();
    std::vector<std::vector<bool>> before = edges();
    for (std::size_t via = 0; via < n; ++via) {
      for (std::size_t a = 0; a < n; ++a) {
        for (std::size_t b = 0; before[a][via] && b < n; ++b) {
          if (before[via][b]) before[a][b] = true;
        }
      }
    }
    std::vector<std::size_t> out;
    for (std::size_t a = 0; a < n; ++a) {
      std::size_t count = 0;
      for (std::size_t b = 0; b < n; ++b) count += a != b && !before[a][b] && !before[b][a] ? 1 : 0;
      out.push_back(count);
    }
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  /// [a][b]: an edge leads from a to b, of any kind (programmatic launches too).
  std::vector<std::vector<bool>> edges() const {
    std::size_t count = 0;
    moe::check_cuda(cudaGraphGetEdges(graph_, nullptr, nullptr, nullptr, &count), "cudaGraphGetEdges");
    std::vector<cudaGraphNode_t> from(count), to(count);
    std::vector<cudaGraphEdgeData> data(count);
    if (count > 0) moe::check_cuda(cudaGraphGetEdges(graph_, from.data(), to.data(), data.data(), &count), "cudaGraphGetEdges");
    auto const index = [&](cudaGraphNode_t node) {
      return static_cast<std::size_t>(std::find(nodes_.begin(), nodes_.end(), node) - nodes_.begin());
    };
    std::vector<std::vector<bool>> out(nodes_.size(), std::vector<bool>(nodes_.size()));
    for (std::size_t i = 0; i < count; ++i) out[index(from[i])][index(to[i])] = true;
    return out;
  }

  cudaGraph_t graph_ = nullptr;
  std::vector<cudaGraphNode_t> nodes_;
};

/// Calls forward(), which enqueues in `stream`, once as it is and once in a capture.
template <class Forward>
GraphNodes graph_nodes(cudaStream_t stream, Forward const& forward) {
  return CapturedCall(stream, forward).nodes();
}

/// What CapturedCall::beside() is of two paths of so many nodes, and `common` nodes before the fork and after the join.
inline std::vector<std::size_t> two_paths(std::size_t common, std::size_t one, std::size_t other) {
  std::vector<std::size_t> out(common, 0);
  out.insert(out.end(), one, other);
  out.insert(out.end(), other, one);
  std::sort(out.begin(), out.end());
  return out;
}

}  // namespace moe_test
