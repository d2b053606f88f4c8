// SPDX-License-Identifier: Apache-2.0
// core/cuda_graph.hpp: what a function enqueues in a stream, as a CUDA graph. Plain host C++.
#pragma once

#include <utility>

#include "moe/core/cuda_space.hpp"

namespace moe {

/// An owned executable graph, or none.
class CudaGraph {
 public:
  CudaGraph() = default;
  /// Captures what enqueue() puts into `stream`. Kernels must have been loaded: call it once before. E_STATE if it does what a graph cannot
  /// hold; what it throws, after the capture has ended.
  template <class Enqueue>
  CudaGraph(cudaStream_t stream, Enqueue&& enqueue) {
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
    cudaGraph_t graph = nullptr;
    try {
      enqueue();
    } catch (...) {
      cudaStreamEndCapture(stream, &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();  // what the capture left must not look like a failed launch later
      throw;
    }
    if (cudaError_t const status = cudaStreamEndCapture(stream, &graph); status != cudaSuccess) {
      cudaGetLastError();
      throw Error(ErrorCode::state, text("capture: a call did what a graph cannot hold: ", cudaGetErrorString(status)));
    }
    cudaError_t const status = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check_cuda(status, "cudaGraphInstantiate");
  }
  CudaGraph(CudaGraph&& other) noexcept : exec_(std::exchange(other.exec_, nullptr)) {}
  CudaGraph& operator=(CudaGraph&& other) noexcept {
    std::swap(exec_, other.exec_);
    return *this;
  }
  ~CudaGraph() {
    if (exec_ != nullptr) cudaGraphExecDestroy(exec_);
  }
  explicit operator bool() const { return exec_ != nullptr; }
  /// Enqueues the graph.
  void launch(cudaStream_t stream) const { check_cuda(cudaGraphLaunch(exec_, stream), "cudaGraphLaunch"); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

}  // namespace moe
