// SPDX-License-Identifier: Apache-2.0
// runner/device/two_queues.hpp: the two queues of a dual batch as streams: the caller's, and one beside it of high priority, ordered by
// events, also while a graph is captured. Plain host C++.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/core/cuda_space.hpp"
#include "moe/runner/dual_batch.hpp"

namespace moe::runner {

template <>
class TwoQueues<space::cuda> {
 public:
  /// steps: of the schedule.
  explicit TwoQueues(std::size_t steps) : events_(steps + 2) {
    int least = 0;
    int greatest = 0;
    check_cuda(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    try {
      check_cuda(cudaStreamCreateWithPriority(&communication_, cudaStreamNonBlocking, greatest), "cudaStreamCreateWithPriority");
      for (cudaEvent_t& event : events_) check_cuda(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    } catch (...) {
      release();
      throw;
    }
  }
  TwoQueues(TwoQueues const&) = delete;
  TwoQueues& operator=(TwoQueues const&) = delete;
  ~TwoQueues() { release(); }

  void fork(cudaStream_t main) {
    main_ = main;
    order(events_[events_.size() - 2], main_, communication_);
  }
  cudaStream_t of(Queue queue) const { return queue == Queue::compute ? main_ : communication_; }
  void record(std::size_t step, Queue queue) { check_cuda(cudaEventRecord(events_[step], of(queue)), "cudaEventRecord"); }
  void wait(std::size_t step, Queue queue) { check_cuda(cudaStreamWaitEvent(of(queue), events_[step], 0), "cudaStreamWaitEvent"); }
  void join() { order(events_.back(), communication_, main_); }

 private:
  /// Work of `later` from now on runs after the work of `earlier` so far.
  static void order(cudaEvent_t event, cudaStream_t earlier, cudaStream_t later) {
    check_cuda(cudaEventRecord(event, earlier), "cudaEventRecord");
    check_cuda(cudaStreamWaitEvent(later, event, 0), "cudaStreamWaitEvent");
  }
  void release() {
    for (cudaEvent_t event : events_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    if (communication_ != nullptr) cudaStreamDestroy(communication_);
  }

  cudaStream_t main_ = nullptr;
  cudaStream_t communication_ = nullptr;
  std::vector<cudaEvent_t> events_;  // of each step, of fork(), of join()
};

}  // namespace moe::runner
