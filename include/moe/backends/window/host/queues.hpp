// SPDX-License-Identifier: Apache-2.0
// backends/window/host/queues.hpp: a queue for each (source, destination) in the destination's part of a host window.
// docs/semantics/exchange.md §11.
#pragma once

#include <cstddef>
#include <cstdint>

#include "moe/backends/window/host/rounds.hpp"

namespace moe::detail {

/// Queues of `depth` entries of whole records. The sender writes entries and then the tail, the receiver reads them and then writes the
/// head; both counters increase without reset and wrap.
template <class Window>
class WindowQueues {
 public:
  /// E_CONFIG unless depth is a power of two, so that counters can wrap, and an entry holds at least one record.
  WindowQueues(WindowOffsets& offsets, int ranks, int depth, std::int64_t entry_bytes, std::int64_t record_bytes)
      : ranks_(ranks), depth_(static_cast<std::uint32_t>(depth)), entry_bytes_(entry_bytes) {
    if (depth < 1 || (depth & (depth - 1)) != 0) {
      throw Error(ErrorCode::config, text("queue_depth: ", depth, " must be a power of two"));
    }
    if (entry_bytes < record_bytes || entry_bytes % 64 != 0) {
      throw Error(ErrorCode::config,
                  text("queue_entry_bytes: ", entry_bytes, " must be a multiple of 64 of at least one record, ", record_bytes, " bytes"));
    }
    tail_ = offsets.take(kLine * ranks);
    head_ = offsets.take(kLine * ranks);
    entries_ = offsets.take(entry_bytes * depth * ranks);
  }
  WindowQueues() = default;

  /// Collective. write(r, i, p) writes record i for rank r to p; read(r, i, p) reads record i from rank r at p. to[r], from[r]: numbers of
  /// records; this rank is skipped. Waits only while it can neither send nor receive. TransportError of the window.
  template <class Write, class Read>
  void exchange(Window& w, std::int64_t record_bytes, std::int64_t const* to, std::int64_t const* from, std::int64_t* sent,
                std::int64_t* received, std::uint32_t round, comm::ExchangePhase phase, Write&& write, Read&& read) const {
    std::int64_t const per_entry = entry_bytes_ / record_bytes;
    for (int r = 0; r < ranks_; ++r) {
      sent[r] = r == w.rank() ? to[r] : 0;
      received[r] = r == w.rank() ? from[r] : 0;
    }
    auto progress = [&] {
      bool any = false;
      for (int r = 0; r < ranks_; ++r) {
        any = (sent[r] < to[r] && send_entry(w, r, per_entry, record_bytes, to[r], sent[r], write)) || any;
        any = (received[r] < from[r] && receive_entry(w, r, per_entry, record_bytes, from[r], received[r], read)) || any;
      }
      return any;
    };
    for (int r = 0; r < ranks_;) {
      if (received[r] < from[r] || sent[r] < to[r]) {
        w.wait_until(progress, round, phase, r);
      } else {
        ++r;
      }
    }
  }

 private:
  static constexpr std::int64_t kLine = 64;

  std::size_t word(std::size_t at, int source) const { return at + static_cast<std::size_t>(kLine * source); }
  std::byte* entry(Window& w, int at, int source, std::uint32_t n) const {
    return w.template at<std::byte>(at, entries_ + static_cast<std::size_t>((std::int64_t{source} * depth_ + n % depth_) * entry_bytes_));
  }
  template <class Write>
  bool send_entry(Window& w, int to, std::int64_t per_entry, std::int64_t record_bytes, std::int64_t total, std::int64_t& sent,
                  Write&& write) const {
    std::uint32_t const tail = *w.template at<std::uint32_t>(to, word(tail_, w.rank()));  // only this rank writes it
    if (tail - w.template load<std::uint32_t>(to, word(head_, w.rank())) >= depth_) {
      return false;
    }
    std::byte* const p = entry(w, to, w.rank(), tail);
    for (std::int64_t i = 0; i < per_entry && sent < total; ++i) {
      write(to, sent++, p + i * record_bytes);
    }
    w.publish(to, word(tail_, w.rank()), tail + 1);
    return true;
  }
  template <class Read>
  bool receive_entry(Window& w, int from, std::int64_t per_entry, std::int64_t record_bytes, std::int64_t total, std::int64_t& received,
                     Read&& read) const {
    std::uint32_t const head = *w.template own<std::uint32_t>(word(head_, from));
    if (w.template load<std::uint32_t>(w.rank(), word(tail_, from)) == head) {
      return false;
    }
    std::byte const* const p = entry(w, w.rank(), from, head);
    for (std::int64_t i = 0; i < per_entry && received < total; ++i) {
      read(from, received++, p + i * record_bytes);
    }
    w.publish(w.rank(), word(head_, from), head + 1);
    return true;
  }

  int ranks_ = 0;
  std::uint32_t depth_ = 1;
  std::int64_t entry_bytes_ = 0;
  std::size_t tail_ = 0;     // u32 [source]
  std::size_t head_ = 0;     // u32 [source]
  std::size_t entries_ = 0;  // [source][depth] entries
};

}  // namespace moe::detail
