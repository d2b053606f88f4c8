// SPDX-License-Identifier: Apache-2.0
// comm/wait_times.hpp: how long the receives of collectives over MPI have waited for each rank.
#pragma once

#include <mpi.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe::comm::detail {

class WaitTimes {
 public:
  WaitTimes() = default;
  WaitTimes(int ranks, std::size_t max_requests) : waited_ns_(static_cast<std::size_t>(ranks)), arrived_(max_requests) {}

  /// A wait begins.
  void begin() {
    start_ = std::chrono::steady_clock::now();
    std::fill(arrived_.begin(), arrived_.end(), false);
  }
  /// Adds the time since begin() to the ranks whose receives have ended since the last call. The first `receives` requests are receives.
  void note(std::vector<MPI_Request> const& requests, std::vector<int> const& peers, std::size_t receives, bool all_done) {
    auto const now = static_cast<std::uint64_t>(std::chrono::nanoseconds(std::chrono::steady_clock::now() - start_).count());
    for (std::size_t i = 0; i < receives; ++i) {
      int done = all_done ? 1 : 0;
      if (!arrived_[i] && !all_done) MPI_Request_get_status(requests[i], &done, MPI_STATUS_IGNORE);
      if (arrived_[i] || done == 0 || peers[i] < 0) continue;
      arrived_[i] = true;
      waited_ns_[static_cast<std::size_t>(peers[i])] += now;
    }
  }
  std::vector<std::uint64_t> const& waited_ns() const { return waited_ns_; }

 private:
  std::chrono::steady_clock::time_point start_;
  std::vector<std::uint64_t> waited_ns_;  // [ranks]
  std::vector<bool> arrived_;             // [requests] receives that are counted
};

}  // namespace moe::comm::detail
