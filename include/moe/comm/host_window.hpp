// SPDX-License-Identifier: Apache-2.0
// comm/host_window.hpp: the host half of a window: flags, waits with a deadline, abort, barrier, between processes.
// docs/semantics/exchange.md §3. The device half is symmetric_memory.cuh; offsets, words and the failure record are common to both
// (symmetric_memory.hpp).
#pragma once

#include <sched.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "moe/comm/process.hpp"
#include "moe/comm/symmetric_memory.hpp"
#include "moe/core/space.hpp"

namespace moe::comm {

/// Words in the control part of a host window, behind those of WindowControl.
struct HostWindowControl {
  static constexpr std::size_t process = 1088;     ///< own: u64 process id
  static constexpr std::size_t start_time = 1096;  ///< own: u64 when that process started, in ticks; 0: unknown
};

/// One rank's view of a window; every rank of the node maps all parts. Holds no memory: a derived class maps the parts, zeroes this rank's
/// part and calls attach(). Not thread-safe. A wait throws TransportError: E_TIMEOUT past the deadline, naming the peer, or a rank whose
/// process has ended, the round and the value found instead; E_PEER when another rank has aborted or the peer's process has ended. The
/// abort words tell every other rank. After a failure the window is unusable: every later call is E_STATE.
class HostWindow {
 public:
  using Space = space::host;

  HostWindow(HostWindow const&) = delete;
  HostWindow& operator=(HostWindow const&) = delete;

  int rank() const { return view_.rank; }
  int size() const { return view_.size; }
  /// Bytes of each rank's part, the control part included.
  std::int64_t bytes() const { return static_cast<std::int64_t>(bytes_); }
  /// The same offset in the peer's part, as mapped here. Offsets below kWindowControlBytes belong to the window.
  void* peer(int r, std::int64_t offset) const { return view_.peer[r] + offset; }
  template <class T>
  T* at(int r, std::size_t offset) const {
    return reinterpret_cast<T*>(view_.peer[r] + offset);
  }
  template <class T>
  T* own(std::size_t offset) const {
    return at<T>(rank(), offset);
  }
  WindowView const& view() const { return view_; }
  FailureRecord const& failure() const { return failure_; }
  bool failed() const { return failure_.code != 0; }
  /// Before an operation: E_STATE if an earlier wait has failed, E_PEER if another rank has aborted since.
  void expect_sound(char const* what, ExchangePhase phase, std::uint32_t round) {
    if (failed()) {
      throw Error(ErrorCode::state, text("window: ", what, " after a failure; the group must be rebuilt"));
    }
    if (std::uint32_t const word = aborted(); word != 0) {
      fail(ErrorCode::peer, phase, static_cast<int>(word >> 8U) - 1, round, round);
    }
  }
  /// Deadline of each wait from now on, in milliseconds; 0 waits for ever.
  void set_timeout_ms(std::int64_t timeout_ms) { view_.timeout_ns = static_cast<std::uint64_t>(timeout_ms) * 1'000'000U; }
  /// Nanoseconds that this rank has spent waiting for words of rank r.
  std::uint64_t waited_ns(int r) const { return waited_[static_cast<std::size_t>(r)]; }
  std::vector<std::uint64_t> waited_ns() const { return {waited_.begin(), waited_.begin() + size()}; }

  /// From now on a rank that misses the deadline, or whose process has ended, is masked instead of ending the group: waits for it return at
  /// once, and no words are stored for it.
  void enable_masks() { masks_ = true; }
  bool masked(int r) const { return masked_[static_cast<std::size_t>(r)]; }
  /// E_STATE without enable_masks(), E_ARG for this rank.
  void mask(int r) {
    if (!masks_) {
      throw Error(ErrorCode::state, "mask: the window was built without masks");
    }
    if (r < 0 || r >= size() || r == rank()) {
      throw Error(ErrorCode::argument, text("mask: rank ", r, " is not a peer of rank ", rank()));
    }
    masked_[static_cast<std::size_t>(r)] = true;
  }
  void clear_masks() { masked_ = {}; }
  std::vector<bool> query_mask() const { return std::vector<bool>(masked_.begin(), masked_.begin() + size()); }

  /// Stores a word in rank r's part. A rank that waits for the word then sees everything that this thread wrote before it.
  template <class Word>
  void publish(int r, std::size_t offset, Word word) const {
    if (masked(r)) {
      return;
    }
    std::atomic_ref<Word>(*at<Word>(r, offset)).store(word, std::memory_order_release);
  }
  /// Acquires a word of rank r's part.
  template <class Word>
  Word load(int r, std::size_t offset) const {
    return std::atomic_ref<Word>(*at<Word>(r, offset)).load(std::memory_order_acquire);
  }
  /// Waits until rank `peer` has set this rank's 32-bit word at `offset` to `round`. False: the peer is masked.
  bool wait_round(std::size_t offset, std::uint32_t round, ExchangePhase phase, int peer) {
    return wait([&] { return load<std::uint32_t>(rank(), offset); }, round, phase, peer);
  }
  /// Waits until rank `peer` has written this rank's count word at `offset` for `round`. Returns the word, or 0 if the peer is masked.
  std::uint64_t wait_count(std::size_t offset, std::uint32_t round, ExchangePhase phase, int peer) {
    std::uint64_t word = 0;
    bool const came = wait(
        [&] {
          word = load<std::uint64_t>(rank(), offset);
          return word_round(word);
        },
        round, phase, peer);
    return came ? word : 0;
  }
  /// Waits until ready() is true. `peer` writes the words that ready() reads.
  template <class Ready>
  void wait_until(Ready&& ready, std::uint32_t round, ExchangePhase phase, int peer) {
    wait([&] { return ready() ? round : round - 1; }, round, phase, peer);
  }
  /// Barrier: no rank returns before every rank has called it.
  void barrier() {
    auto* const own_round = own<std::uint32_t>(WindowControl::barrier_round);
    std::uint32_t const round = *own_round + 1;
    expect_sound("barrier", ExchangePhase::barrier, round);
    *own_round = round;
    for (int r = 0; r < size(); ++r) {
      publish(r, WindowControl::barrier + 4 * static_cast<std::size_t>(rank()), round);
    }
    for (int r = 0; r < size(); ++r) {
      wait_round(WindowControl::barrier + 4 * static_cast<std::size_t>(r), round, ExchangePhase::barrier, r);
    }
  }
  /// Ends the group: fills the failure record, tells every peer, throws.
  [[noreturn]] void fail(ErrorCode code, ExchangePhase phase, int peer, std::uint32_t round, std::uint32_t observed,
                         std::uint32_t value = 0) {
    failure_ = {1U + static_cast<std::uint32_t>(code), static_cast<std::uint32_t>(phase), rank(), peer, round, observed, value, 0, 0};
    std::uint32_t const word = failure_.code | (static_cast<std::uint32_t>(peer + 1) << 8U);
    for (int r = 0; r < size(); ++r) {
      std::atomic_ref<std::uint32_t>(*at<std::uint32_t>(r, WindowControl::abort_word)).store(word, std::memory_order_relaxed);
    }
    throw_if_failed(failure_);
    throw Error(ErrorCode::internal, "window: a failure without a code");
  }

 protected:
  HostWindow() = default;
  ~HostWindow() = default;

  /// `parts`: base of every rank's part as mapped here; this rank's part is zero.
  void attach(char* const* parts, int rank, int size, std::size_t bytes, std::int64_t timeout_ms) {
    for (int r = 0; r < size; ++r) {
      view_.peer[r] = parts[r];
    }
    view_.rank = rank;
    view_.size = size;
    view_.failure = &failure_;
    bytes_ = bytes;
    set_timeout_ms(timeout_ms);
    auto const id = static_cast<std::uint64_t>(getpid());
    *own<std::uint64_t>(HostWindowControl::process) = id;
    *own<std::uint64_t>(HostWindowControl::start_time) = detail::process_start(id);
  }
  /// After all ranks have attached: notes which peers' processes this process can see.
  void meet() {
    for (int r = 0; r < size(); ++r) {
      auto const start = *at<std::uint64_t>(r, HostWindowControl::start_time);
      visible_[static_cast<std::size_t>(r)] = start != 0 && detail::process_start(process(r)) == start;
    }
  }
  /// True if the process of rank r is known to have ended; not where nothing can be read, because no descriptors are left, for example.
  bool ended(int r) const {
    return visible_[static_cast<std::size_t>(r)] &&
           detail::process_start(process(r)) != *at<std::uint64_t>(r, HostWindowControl::start_time) &&
           detail::process_start(process(rank())) != 0;
  }

  /// The first rank whose process is known to have ended, or -1.
  int ended_rank() const {
    for (int r = 0; r < size(); ++r) {
      if (r != rank() && ended(r)) {
        return r;
      }
    }
    return -1;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kSpins = 64;     // polls before the wait yields its core, which ranks may share
  static constexpr int kYields = 2000;  // polls that only yield; after them the wait sleeps between polls
  static constexpr unsigned kSleepMicroseconds = 50;

  static void back_off(std::int64_t polls) {
    if (polls > kYields) {
      usleep(kSleepMicroseconds);
    } else if (polls > kSpins) {
      sched_yield();
    }
  }
  std::uint32_t aborted() const {
    return std::atomic_ref<std::uint32_t>(*own<std::uint32_t>(WindowControl::abort_word)).load(std::memory_order_relaxed);
  }
  std::uint64_t process(int r) const { return *at<std::uint64_t>(r, HostWindowControl::process); }

  // False: the peer is masked.
  template <class Observe>
  bool wait(Observe&& observe, std::uint32_t round, ExchangePhase phase, int peer) {
    if (masked(peer)) {
      return false;
    }
    if (round_reached(observe(), round)) {
      return true;
    }
    auto give_up = [&](ErrorCode code, std::uint32_t seen) {
      if (!masks_ || peer == rank()) {
        int const dead = ended_rank();  // a peer that is missing may itself wait for it
        fail(code, phase, dead >= 0 ? dead : peer, round, seen, dead >= 0 ? kProcessEnded : 0);
      }
      masked_[static_cast<std::size_t>(peer)] = true;
    };
    auto const start = Clock::now();
    for (std::int64_t polls = 0;; ++polls) {
      std::uint32_t const seen = observe();
      if (round_reached(seen, round)) {
        waited_[static_cast<std::size_t>(peer)] += elapsed(start);
        return true;
      }
      if (std::uint32_t const word = aborted(); word != 0) {
        fail(ErrorCode::peer, phase, static_cast<int>(word >> 8U) - 1, round, seen);
      }
      if (view_.timeout_ns != 0 && elapsed(start) > view_.timeout_ns) {
        give_up(ErrorCode::timeout, seen);
        return false;
      }
      if (polls > kYields && polls % 256 == 0 && ended(peer) && !round_reached(observe(), round)) {
        give_up(ErrorCode::peer, seen);
        return false;
      }
      back_off(polls);
    }
  }
  static std::uint64_t elapsed(Clock::time_point start) {
    return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
  }

  WindowView view_;
  FailureRecord failure_{};
  std::size_t bytes_ = 0;
  std::array<std::uint64_t, kMaxWindowRanks> waited_{};
  std::array<bool, kMaxWindowRanks> visible_{};
  std::array<bool, kMaxWindowRanks> masked_{};
  bool masks_ = false;
};

}  // namespace moe::comm
