// SPDX-License-Identifier: Apache-2.0
// core/host_pool.hpp: loops over all cores of the host; the caller never waits for a thread that has not started to help.
#pragma once

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <thread>

namespace moe {

/// Threads that a loop uses by default: OMP_NUM_THREADS if it is set, else the cores that this process may run on.
inline int host_threads() {
  static int const threads = [] {
    if (char const* const set = std::getenv("OMP_NUM_THREADS"); set != nullptr && std::atoi(set) > 0) {
      return std::atoi(set);
    }
    cpu_set_t cores;
    return std::max(1, sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1);
  }();
  return threads;
}

/// The threads of this process that help with loops. An OpenMP region ends only when all of its threads have reached its end, and they spin
/// by default: on a busy machine a region waits for a thread that has no core, even if no work is left. Here the caller takes tasks itself,
/// and at the end waits only for tasks that were started. Helpers sleep between loops. Loops run in the caller alone in a forked child,
/// which has no helpers, and while another thread uses the helpers. Never destroyed: helpers end with the process.
class HostPool {
 public:
  static HostPool& instance() {
    static auto* const pool = new HostPool;
    return *pool;
  }
  /// Starts helpers until there are `threads` threads, the caller included. for_each() then allocates nothing.
  void ensure(int threads) {
    std::lock_guard const lock(use_);
    for (; helpers_ + 1 < std::min(threads, kMaxThreads); ++helpers_) {
      std::thread([this, id = helpers_ + 1] { help(id); }).detach();
    }
  }
  /// f(i, worker) for i in [0, n), each once, on at most `threads` threads; 0 <= worker < threads, and concurrent calls have different
  /// workers. A thread takes `grain` indices at a time, in ascending order. f must not throw.
  template <class F>
  void for_each(std::int64_t n, std::int64_t grain, int threads, F const& f) {
    std::int64_t const tasks = (n + grain - 1) / grain;
    std::unique_lock lock(use_, std::defer_lock);
    if (tasks <= 1 || threads <= 1 || helping() || !lock.try_lock()) {
      for (std::int64_t i = 0; i < n; ++i) {
        f(i, 0);
      }
      return;
    }
    Body<F> const body{f, n, grain};
    run(tasks, threads, &Body<F>::call, &body);
  }

 private:
  using Call = void (*)(void const* body, std::int64_t task, int worker);
  template <class F>
  struct Body {
    F const& f;
    std::int64_t n;
    std::int64_t grain;
    static void call(void const* body, std::int64_t task, int worker) {
      auto const& b = *static_cast<Body const*>(body);
      for (std::int64_t i = task * b.grain; i < std::min(b.n, (task + 1) * b.grain); ++i) {
        b.f(i, worker);
      }
    }
  };
  static constexpr int kMaxThreads = 256;
  static constexpr int kSpins = 2000;                // polls before a thread sleeps: some microseconds
  static constexpr std::uint32_t kOpen = 1U << 31U;  // bit of state_: helpers may enter; lower bits: helpers inside
  static bool& helping() {
    static thread_local bool in_a_loop = false;
    return in_a_loop;
  }

  void run(std::int64_t tasks, int threads, Call call, void const* body) {
    call_ = call;
    body_ = body;
    tasks_ = tasks;
    limit_ = static_cast<int>(std::min<std::int64_t>(threads, tasks)) - 1;
    next_.store(0, std::memory_order_relaxed);
    state_.store(kOpen, std::memory_order_release);
    loop_.fetch_add(1, std::memory_order_release);
    loop_.notify_all();

    helping() = true;
    work(0);
    helping() = false;

    // Helpers that have not entered by now stay out.
    std::uint32_t inside = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    for (int polls = 0; inside != 0; inside = state_.load(std::memory_order_acquire)) {
      if (++polls > kSpins) {
        state_.wait(inside, std::memory_order_acquire);
      }
    }
  }
  void work(int worker) {
    for (std::int64_t task = 0; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) {
      call_(body_, task, worker);
    }
  }
  [[noreturn]] void help(int id) {
    helping() = true;
    for (std::uint32_t seen = 0;;) {
      for (int polls = 0; polls < kSpins && loop_.load(std::memory_order_relaxed) == seen; ++polls) {
      }
      loop_.wait(seen, std::memory_order_acquire);
      seen = loop_.load(std::memory_order_acquire);
      std::uint32_t state = state_.load(std::memory_order_relaxed);
      bool inside = false;
      while ((state & kOpen) != 0 && !inside) {
        inside = state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel);
      }
      if (!inside) {
        continue;
      }
      if (id <= limit_) {
        work(id);
      }
      if (state_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        state_.notify_one();
      }
    }
  }

  std::mutex use_;  // held by the caller of a loop
  int helpers_ = 0;
  std::atomic<std::uint32_t> loop_{0};
  std::atomic<std::uint32_t> state_{0};
  std::atomic<std::int64_t> next_{0};
  // The current loop; written before state_ opens, read by the helpers inside.
  Call call_ = nullptr;
  void const* body_ = nullptr;
  std::int64_t tasks_ = 0;
  int limit_ = 0;
};

}  // namespace moe
