// SPDX-License-Identifier: Apache-2.0
// runner/device/two_queues.hpp: the two queues of a dual batch as streams: the caller's, and one beside it of high priority, ordered by
// events, also while a graph is captured. Plain host C++.
#pragma once

#include <cstddef>
#include <vector>

#include "moe/core/cuda_space.hpp"
#include "moe/runner/device/priority_stream.hpp"
#include "moe/runner/dual_batch.hpp"

namespace moe::runner {

template <>
class TwoQueues<space::cuda> {
 public:
  /// steps: of the schedule.
  explicit TwoQueues(std::size_t steps) : events_(steps + 2) {}

  void fork(cudaStream_t main) {
    main_ = main;
    order(events_[events_.size() - 2], main_, communication_);
  }
  cudaStream_t of(Queue queue) const { return queue == Queue::compute ? main_ : communication_; }
  void record(std::size_t step, Queue queue) { events_[step].record(of(queue)); }
  void wait(std::size_t step, Queue queue) { events_[step].make_wait(of(queue)); }
  void join() { order(events_.back(), communication_, main_); }

 private:
  /// Work of `later` from now on runs after the work of `earlier` so far.
  static void order(CudaMark const& event, cudaStream_t earlier, cudaStream_t later) {
    event.record(earlier);
    event.make_wait(later);
  }

  cudaStream_t main_ = nullptr;
  device::PriorityStream communication_{device::PriorityStream::kAllLevels};
  std::vector<CudaMark> events_;  // of each step, of fork(), of join()
};

}  // namespace moe::runner
