// SPDX-License-Identifier: Apache-2.0
// backends/common/handle_table.hpp: which dispatches of an exchange are in progress, and which calls a handle to one of them allows.
//
// A buffer set numbers its dispatches 1, 2, …: the generation, equal on all ranks. Its two dispatch records alternate, so a handle is live
// until two more dispatches of its buffer set have begun. The dispatch counter lies outside the table, because exchanges of several layers
// may share a window: in the window (host) or in comm::WindowUse (device).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "moe/core/error.hpp"

namespace moe::detail {

/// Names a dispatch.
struct Handle {
  int buffer_set = 0;
  std::uint32_t generation = 0;  ///< dispatches of the buffer set so far, including this one
  /// Which half of the buffer set the dispatch uses.
  int parity() const { return static_cast<int>(generation & 1U); }
};

/// What a dispatch waits for.
enum class DispatchState : std::uint8_t {
  idle,            ///< nothing: it has ended, or never began
  sent,            ///< its receive half
  received_early,  ///< abandon() of an older dispatch has done its receive half; the caller's receive call is still to come
  received,        ///< its combine
  combining,       ///< the receive half of its combine
};

/// The state of one dispatch. The dispatch records of an exchange derive from it.
struct DispatchRecord {
  DispatchState state = DispatchState::idle;
  std::uint32_t generation = 0;
  std::uint64_t number = 0;  ///< number of the dispatch among those of all buffer sets of this exchange
};

/// The dispatch records of one exchange, `Record` derived from DispatchRecord. Not thread-safe.
template <class Record>
class HandleTable {
 public:
  /// A dispatch that this rank refused. An empty combine must follow, so that the peers' round ends.
  struct Refusal {
    Handle handle;
    std::uint32_t code;
  };

  explicit HandleTable(int num_buffer_sets = 1) : buffer_sets_(static_cast<std::size_t>(num_buffer_sets)) {}

  int num_buffer_sets() const { return static_cast<int>(buffer_sets_.size()); }
  /// Call it first: sets the buffer set's dispatch counter, which must outlive the table.
  void set_counter(int buffer_set, std::uint32_t* dispatches) { at(buffer_set).dispatches = dispatches; }
  /// E_ARG unless the buffer set exists.
  void expect_buffer_set(int buffer_set) const {
    if (buffer_set < 0 || buffer_set >= num_buffer_sets()) {
      throw Error(ErrorCode::argument, text("buffer_set: ", buffer_set, " is out of range [0, ", num_buffer_sets(), ")"));
    }
  }

  /// The dispatch record that a handle has or had. E_ARG if the buffer set does not exist.
  Record& record(Handle handle) {
    expect_buffer_set(handle.buffer_set);
    return at(handle.buffer_set).records[handle.generation & 1U];
  }
  std::array<Record, 2>& records(int buffer_set) { return at(buffer_set).records; }
  /// The handle of the next dispatch: the counter + 1.
  Handle next(int buffer_set) const {
    expect_buffer_set(buffer_set);
    return {buffer_set, *at(buffer_set).dispatches + 1};
  }
  /// Begins next(buffer_set) in the dispatch record of the dispatch before the last. The caller then increments the counter: at once if it
  /// is local to this rank (device), after all ranks have read the same headers if it lies in the window (host).
  Handle open(int buffer_set, DispatchState state) {
    Handle const handle = next(buffer_set);
    DispatchRecord& r = record(handle);
    r.state = state;
    r.generation = handle.generation;
    r.number = ++dispatches_;
    return handle;
  }
  /// open(), and increments the counter.
  Handle open_counted(int buffer_set, DispatchState state) {
    Handle const handle = open(buffer_set, state);
    *at(buffer_set).dispatches = handle.generation;
    return handle;
  }

  /// Whether fewer than two further dispatches of the buffer set have begun.
  bool live(Handle handle) const { return age(handle) <= 1; }
  /// E_STATE if two further dispatches of the buffer set have begun: their results have overwritten this one's. E_ARG for the buffer set.
  Record& expect_live(Handle handle, char const* what) {
    Record& r = record(handle);
    if (!live(handle)) {
      throw Error(ErrorCode::state,
                  text(what, ": the handle is stale, ", age(handle), " dispatches of its buffer set have followed, at most 1"));
    }
    return r;
  }
  /// expect_live(), and E_STATE unless the dispatch is in `state`.
  Record& expect(Handle handle, DispatchState state, char const* what) {
    Record& r = expect_live(handle, what);
    if (r.generation != handle.generation || r.state != state) {
      throw Error(ErrorCode::state, text(what, ": called out of order for this handle"));
    }
    return r;
  }
  /// The oldest live dispatch of all buffer sets that has not ended.
  std::optional<Handle> oldest() const {
    std::optional<Handle> oldest;
    std::uint64_t number = 0;
    for (int s = 0; s < num_buffer_sets(); ++s) {
      for (Record const& r : at(s).records) {
        if (r.state != DispatchState::idle && live({s, r.generation}) && (!oldest || r.number < number)) {
          oldest = Handle{s, r.generation};
          number = r.number;
        }
      }
    }
    return oldest;
  }
  /// Whether a dispatch of the buffer set waits for its receive half.
  bool sent(int buffer_set) const {
    auto const& records = at(buffer_set).records;
    return records[0].state == DispatchState::sent || records[1].state == DispatchState::sent;
  }

  /// This rank refused the dispatch `handle`, opened as idle: remembers that its combine must follow. One at a time per buffer set.
  void refuse(Handle handle, std::uint32_t code) { at(handle.buffer_set).refusal = Refusal{handle, code}; }
  /// The refused dispatch whose combine can be enqueued now; returned once. All ranks first combine the dispatch before it, so call this
  /// after refuse() and after each combine of the buffer set.
  std::optional<Refusal> take_refusal(int buffer_set) {
    std::optional<Refusal>& refusal = at(buffer_set).refusal;
    if (!refusal || at(buffer_set).records[(refusal->handle.generation + 1) & 1U].state != DispatchState::idle) {
      return std::nullopt;
    }
    Refusal const due = *refusal;
    refusal.reset();
    return due;
  }

  /// Resets to the state before the first dispatch: no handle is live, no refused combine is pending. The caller resets the counters.
  void reset() {
    for (BufferSet& s : buffer_sets_) {
      for (Record& r : s.records) {
        static_cast<DispatchRecord&>(r) = {};
      }
      s.refusal.reset();
    }
  }

 private:
  struct BufferSet {
    std::array<Record, 2> records;
    std::uint32_t* dispatches = nullptr;
    std::optional<Refusal> refusal;
  };
  BufferSet& at(int buffer_set) { return buffer_sets_[static_cast<std::size_t>(buffer_set)]; }
  BufferSet const& at(int buffer_set) const { return buffer_sets_[static_cast<std::size_t>(buffer_set)]; }
  /// How many further dispatches have begun; -1: this one is not counted yet.
  std::int32_t age(Handle handle) const { return static_cast<std::int32_t>(*at(handle.buffer_set).dispatches - handle.generation); }

  std::vector<BufferSet> buffer_sets_;
  std::uint64_t dispatches_ = 0;
};

}  // namespace moe::detail
