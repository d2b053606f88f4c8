// SPDX-License-Identifier: Apache-2.0
// runner/device/side_stream.hpp: a second stream beside the caller's, forked and joined by events, also while a graph is captured. Plain
// host C++.
#pragma once

#include "moe/core/cuda_space.hpp"

namespace moe::runner {

/// Of a memory space: there is one in the CUDA space.
template <class Space>
class SideStream;

/// Work between fork() and join() on the side stream runs beside the main stream's. What both touch is the caller's to keep apart: the side
/// stream reads what was written before fork(), and the main stream reads its results after join(). One fork at a time.
template <>
class SideStream<space::cuda> {
 public:
  SideStream() {
    check_cuda(cudaEventCreateWithFlags(&forked_, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    if (cudaError_t const status = cudaEventCreateWithFlags(&joined_, cudaEventDisableTiming); status != cudaSuccess) {
      cudaEventDestroy(forked_);
      check_cuda(status, "cudaEventCreateWithFlags");
    }
  }
  SideStream(SideStream const&) = delete;
  SideStream& operator=(SideStream const&) = delete;
  ~SideStream() {
    cudaEventDestroy(forked_);
    cudaEventDestroy(joined_);
  }

  /// The side stream, ordered after all work of `main` so far. If `main` is being captured, the side stream is too, until join().
  cudaStream_t fork(cudaStream_t main) {
    check_cuda(cudaEventRecord(forked_, main), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(side_, forked_, 0), "cudaStreamWaitEvent");
    return side_;
  }
  /// Orders later work of `main` after all work of the side stream.
  void join(cudaStream_t main) {
    check_cuda(cudaEventRecord(joined_, side_), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(main, joined_, 0), "cudaStreamWaitEvent");
  }

 private:
  CudaStream side_;
  cudaEvent_t forked_ = nullptr;
  cudaEvent_t joined_ = nullptr;
};

}  // namespace moe::runner
