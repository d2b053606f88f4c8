// SPDX-License-Identifier: Apache-2.0
// comm/abortable.hpp: communicators of a library that one thread calls and that any thread may abort.
#pragma once

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace moe::comm::detail {

/// N communicators, the first of which decides whether a call may begin. `abort(comm)` ends what a communicator has under way and frees it.
///
/// One thread at a time makes calls and holds a Call during each. Any thread may call begin_abort() and failed(), during a call too. After
/// begin_abort() no Call is live, so no call begins, and a communicator is freed once the calls inside have returned: they ask failed()
/// wherever they wait. A call that has not returned after `patience` waits inside the library for what only abort() ends, so abort() comes
/// anyway. The mutex is never held while the library is called.
template <class Comm, std::size_t N>
class Abortable {
 public:
  using Abort = void (*)(Comm);
  static constexpr std::chrono::milliseconds kPatience{1000};

  explicit Abortable(Abort abort, std::chrono::milliseconds patience = kPatience) : abort_(abort), patience_(patience) {}
  Abortable(Abortable const&) = delete;
  Abortable& operator=(Abortable const&) = delete;
  ~Abortable() { this->abort(); }

  /// Keeps the communicators alive for one call. Calls of one thread may be nested.
  class Call {
   public:
    explicit Call(Abortable& owner) : owner_(owner) {
      std::scoped_lock const lock(owner.mutex_);
      comms_ = owner.comms_;
      owner.calls_ += live() ? 1 : 0;
    }
    Call(Call const&) = delete;
    Call& operator=(Call const&) = delete;
    ~Call() {
      if (!live()) return;
      std::scoped_lock const lock(owner_.mutex_);
      if (--owner_.calls_ == 0) owner_.left_.notify_all();
    }
    /// False after begin_abort(): then no communicator may be used.
    bool live() const { return comms_[0] != Comm{}; }
    Comm operator[](std::size_t i) const { return comms_[i]; }

   private:
    Abortable& owner_;
    std::array<Comm, N> comms_{};
  };

  /// Takes over a new communicator. If begin_abort() has come before, the communicator is aborted too.
  void add(std::size_t i, Comm comm) noexcept {
    {
      std::scoped_lock const lock(mutex_);
      if (!aborted_) {
        comms_[i] = comm;
        return;
      }
      if (ends(comm)) return;
    }
    abort_(comm);
  }
  /// From any thread: whether begin_abort() has come.
  bool failed() const {
    std::scoped_lock const lock(mutex_);
    return aborted_;
  }
  /// From any thread; waits for nothing, except that it aborts the communicators itself if no thread can be started. Each communicator is
  /// aborted by a thread of its own, since freeing one may wait for the other's work.
  void begin_abort() noexcept {
    std::array<Comm, N> left{};
    {
      std::scoped_lock const lock(mutex_);
      aborted_ = true;
      for (std::size_t i = N; i-- > 0;) {
        if (!ends(comms_[i])) left[i] = comms_[i];
        comms_[i] = Comm{};
      }
    }
    for (Comm comm : left) {
      if (comm != Comm{}) abort_(comm);
    }
  }
  /// begin_abort(), and waits until all is freed. Not during a call.
  void abort() noexcept {
    begin_abort();
    std::vector<std::jthread> endings;
    {
      std::scoped_lock const lock(mutex_);
      std::swap(endings, endings_);
    }
  }

 private:
  /// Under the mutex: starts the thread that aborts the communicator. False if no thread is available.
  bool ends(Comm comm) noexcept {
    if (comm == Comm{}) return true;
    try {
      endings_.emplace_back([this, comm] {
        wait_for_calls();
        abort_(comm);
      });
      return true;
    } catch (std::exception const&) {
      return false;
    }
  }
  void wait_for_calls() {
    std::unique_lock lock(mutex_);
    left_.wait_for(lock, patience_, [this] { return calls_ == 0; });
  }

  Abort abort_;
  std::chrono::milliseconds patience_;
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable left_;
  std::array<Comm, N> comms_{};
  int calls_ = 0;  // those that were live when they began
  bool aborted_ = false;
  std::vector<std::jthread> endings_;
};

}  // namespace moe::comm::detail
