// SPDX-License-Identifier: Apache-2.0
// runner/device/event_probe.hpp: a probe that measures the device time of each stage of a forward between two events. Plain host C++.
#pragma once

#include <array>
#include <cstddef>
#include <deque>
#include <vector>

#include "moe/core/cuda_space.hpp"
#include "moe/layer/options.hpp"

namespace moe::runner {

/// Records an event before and after each stage on its stream: the forward's, or that of the stage of one half of a batch, whose times then
/// overlap those of the other half. A stage that another stream runs beside the forward's (shared experts on a side stream) takes the time
/// of its launch. Not for a stream that is being captured. It takes memory when a forward has more stages than those before.
class EventProbe {
 public:
  /// Seconds.
  struct Times {
    std::array<double, kNumPhases> phases{};
    double total = 0;  ///< from the begin of the first stage to the end of the last
  };

  explicit EventProbe(cudaStream_t stream) : main_(stream), current_(stream) {}

  void begin(Phase phase) { begin(phase, main_); }
  void begin(Phase phase, cudaStream_t stream) {
    drop_open_stage();
    stages_.push_back(phase);
    current_ = stream;
    mark();
  }
  void end(Phase) { mark(); }

  /// Times of the forwards since the last call, and forgets them. Waits for their last events.
  Times take() {
    drop_open_stage();
    Times times;
    for (std::size_t i = 0; i < stages_.size(); ++i) {
      times.phases[static_cast<std::size_t>(stages_[i])] += kSecond * events_[2 * i + 1].since(events_[2 * i]);
    }
    if (used_ > 0) times.total = kSecond * events_[used_ - 1].since(events_[0]);
    stages_.clear();
    used_ = 0;
    return times;
  }

 private:
  static constexpr double kSecond = 1e-3;  // of milliseconds

  /// Of a stage that threw.
  void drop_open_stage() {
    if (used_ % 2 == 0) return;
    stages_.pop_back();
    --used_;
  }
  void mark() {
    if (used_ == events_.size()) events_.emplace_back();
    events_[used_++].record(current_);
  }

  cudaStream_t main_, current_;
  std::deque<CudaEvent> events_;  // two of each stage
  std::size_t used_ = 0;
  std::vector<Phase> stages_;
};

}  // namespace moe::runner
