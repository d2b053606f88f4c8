// SPDX-License-Identifier: Apache-2.0
// eplb/step_loads.hpp: the counts of each engine step on the host, without waiting for the step that was just enqueued.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>

#include "moe/comm/deadline.hpp"
#include "moe/core/space.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/map_tables.hpp"
#include "moe/eplb/maps.hpp"

namespace moe::eplb {

/// Host space: a step's counts can be taken at its end. CUDA space: one step later, so that the device never runs out of work; the host
/// is then at most one step ahead of the counts. All memory is taken at construction.
template <class Space>
class StepLoads {
 public:
  using StreamType = Stream<Space>;
  static constexpr int kLag = Space::kKind == SpaceKind::host ? 0 : 1;

  /// The tables are borrowed. timeout_ms: how long take() waits for a step (0: for ever).
  explicit StepLoads(MapTables<Space>& tables, std::int64_t timeout_ms = comm::kDefaultTimeoutMs)
      : tables_(tables), timeout_ms_(timeout_ms), buffers_{Counts(tables.load_size()), Counts(tables.load_size())} {}

  /// After the forwards of a step were enqueued on `stream`: copies their counts to the host and clears the counters, in stream order.
  /// A dummy step's counts are dropped. Enqueues only. E_STATE if two steps wait to be taken.
  void end_step(bool is_dummy, StreamType stream) {
    if (waiting_ == kBuffers) throw Error(ErrorCode::state, "two steps' counts wait to be taken");
    Counts& buffer = buffers_[static_cast<std::size_t>((first_ + waiting_) % kBuffers)];
    tables_.take_load_async(buffer.counts.data(), stream);
    buffer.done.record(stream);
    buffer.is_dummy = is_dummy;
    ++waiting_;
  }

  /// The oldest step's counts into load [layers, P]; false if none but the `keep` youngest steps wait, or it was a dummy (load is then
  /// unchanged). Waits for that step on the host. E_TIMEOUT.
  bool take(Table<std::int32_t>& load, int keep = kLag) {
    while (waiting_ > keep) {
      Counts& buffer = buffers_[static_cast<std::size_t>(first_)];
      detail::wait_for(buffer.done, timeout_ms_, "the load counts of a step");
      first_ = (first_ + 1) % kBuffers;
      --waiting_;
      if (buffer.is_dummy) continue;
      std::int32_t const* const counts = buffer.counts.data();
      std::copy(counts, counts + load.flat().size(), load.flat().begin());
      return true;
    }
    return false;
  }

 private:
  static constexpr int kBuffers = 2;
  struct Counts {
    explicit Counts(std::size_t counts_) : counts(counts_) {}
    HostArray<std::int32_t, Space> counts;  // [layers, P]
    Fence<Space> done;
    bool is_dummy = false;
  };

  MapTables<Space>& tables_;
  std::int64_t timeout_ms_;
  std::array<Counts, kBuffers> buffers_;
  int first_ = 0;    // the oldest step that waits
  int waiting_ = 0;  // steps
};

}  // namespace moe::eplb
