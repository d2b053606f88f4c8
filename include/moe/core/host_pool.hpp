// SPDX-License-Identifier: Apache-2.0
// core/host_pool.hpp: loops over all cores of the host; the caller never waits for a thread that has not started to help. <thread>, <mutex>
// and <chrono> would cost every program a tenth of the time that <moe/moe.hpp> takes.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <system_error>

namespace moe {

/// Threads that a loop uses by default: OMP_NUM_THREADS if it is set, else the cores that this process may run on.
inline int host_threads() {
  static int const threads = [] {
    char const* const set = std::getenv("OMP_NUM_THREADS");
    if (long const wanted = set != nullptr ? std::strtol(set, nullptr, 10) : 0; wanted > 0) {
      return static_cast<int>(std::min<long>(wanted, 1024));
    }
    cpu_set_t cores;
    return std::max(1, sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1);
  }();
  return threads;
}

/// The threads of this process that help with loops. An OpenMP region ends only when all of its threads have reached its end, and they spin
/// by default: on a busy machine a region waits for a thread that has no core, even if no work is left. Here the caller takes tasks itself,
/// and at the end waits only for tasks that were started. Loops run in the caller alone in a forked child, which has no helpers, and while
/// another thread uses the helpers. Never destroyed: helpers end with the process.
///
/// To wake a sleeping thread costs as much as a small loop. A helper therefore polls for up to kSpin before it sleeps, if the pause before
/// the last loop was that short: loops of one forward, and forwards in a row, find it awake. It yields its core while it polls. A loop
/// wakes only as many sleeping helpers as it has tasks for.
class HostPool {
 public:
  static HostPool& instance() {
    static auto* const pool = new HostPool;
    return *pool;
  }
  /// Starts helpers until there are `threads` threads, the caller included. for_each() then allocates nothing.
  void ensure(int threads) {
    while (in_use_.exchange(true, std::memory_order_acquire)) {
      in_use_.wait(true, std::memory_order_relaxed);
    }
    int failed = 0;
    while (helpers_ + 1 < std::min(threads, kMaxThreads) && (failed = start_helper()) == 0) {
      ++helpers_;
    }
    release();
    if (failed != 0) {
      throw std::system_error(failed, std::generic_category());
    }
  }
  /// f(i, worker) for i in [0, n), each once, on at most `threads` threads; 0 <= worker < threads, and concurrent calls have different
  /// workers. A thread takes `grain` indices at a time, in ascending order. f must not throw.
  template <class F>
  void for_each(std::int64_t n, std::int64_t grain, int threads, F const& f) {
    std::int64_t const tasks = (n + grain - 1) / grain;
    if (tasks <= 1 || threads <= 1 || helping() || in_use_.exchange(true, std::memory_order_acquire)) {
      for (std::int64_t i = 0; i < n; ++i) {
        f(i, 0);
      }
      return;
    }
    Body<F> const body{f, n, grain};
    run(tasks, threads, &Body<F>::call, &body);
    release();
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
  static constexpr std::int64_t kSpin = 100'000;  // in nanoseconds; a wake-up takes about half of it
  // state_: bit 31: helpers may enter; bits 16 to 30: how many more may; bits 0 to 15: helpers inside.
  static constexpr std::uint32_t kOpen = 1U << 31U;
  static constexpr std::uint32_t kSeat = 1U << 16U;
  static constexpr std::uint32_t kInside = kSeat - 1;
  static bool& helping() {
    static thread_local bool in_a_loop = false;
    return in_a_loop;
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  /// Of a monotonic clock, in nanoseconds.
  static std::int64_t now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
  }
  /// Polls until done() holds or kSpin has passed; whether done() held.
  template <class Done>
  static bool spin(Done const& done) {
    constexpr int kPolls = 32;  // between two looks at the clock
    for (std::int64_t const end = now() + kSpin; now() < end; sched_yield()) {
      for (int polls = 0; polls < kPolls; ++polls) {
        if (done()) {
          return true;
        }
        pause();
      }
    }
    return done();
  }

  /// 0, or the errno value of pthread_create.
  int start_helper() {
    pthread_t helper{};
    auto const start = [](void* pool) -> void* { static_cast<HostPool*>(pool)->help(); };
    int const failed = pthread_create(&helper, nullptr, start, this);
    return failed != 0 ? failed : pthread_detach(helper);
  }
  void release() {
    in_use_.store(false, std::memory_order_release);
    in_use_.notify_one();
  }

  void run(std::int64_t tasks, int threads, Call call, void const* body) {
    call_ = call;
    body_ = body;
    tasks_ = tasks;
    auto const seats = static_cast<int>(std::min<std::int64_t>({threads - 1, tasks - 1, helpers_}));
    next_.store(0, std::memory_order_relaxed);
    state_.store(kOpen | static_cast<std::uint32_t>(seats) * kSeat, std::memory_order_release);
    loop_.fetch_add(1);  // in one order with polling_: a helper that is not counted below sees the new loop before it sleeps
    for (int sleeping = seats - polling_.load(); sleeping > 0; --sleeping) {
      loop_.notify_one();
    }

    helping() = true;
    work(0);
    helping() = false;

    // Helpers that have not entered by now stay out.
    std::uint32_t inside = state_.fetch_and(~kOpen, std::memory_order_acq_rel) & kInside;
    if (inside != 0 && !spin([&] { return (state_.load(std::memory_order_acquire) & kInside) == 0; })) {
      for (std::uint32_t state = 0; ((state = state_.load(std::memory_order_acquire)) & kInside) != 0;) {
        state_.wait(state, std::memory_order_acquire);
      }
    }
  }
  void work(int worker) {
    for (std::int64_t task = 0; (task = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) {
      call_(body_, task, worker);
    }
  }
  [[noreturn]] void help() {
    helping() = true;
    std::uint32_t seen = 0;
    for (bool soon = false;;) {  // soon: the pause before the last loop was short
      std::int64_t const idle = now();
      if (soon) {
        polling_.fetch_add(1);
        spin([&] { return loop_.load(std::memory_order_acquire) != seen; });
        polling_.fetch_sub(1);
      }
      loop_.wait(seen);
      seen = loop_.load(std::memory_order_acquire);
      soon = now() - idle <= kSpin;

      std::uint32_t state = state_.load(std::memory_order_relaxed);
      bool inside = false;
      while ((state & kOpen) != 0 && state % kOpen >= kSeat && !inside) {
        inside = state_.compare_exchange_weak(state, state - kSeat + 1, std::memory_order_acq_rel);
      }
      if (!inside) {
        continue;
      }
      work(static_cast<int>(state % kOpen / kSeat));
      if ((state_.fetch_sub(1, std::memory_order_acq_rel) & kInside) == 1) {
        state_.notify_one();
      }
    }
  }

  std::atomic<bool> in_use_{false};  // by the caller of a loop
  int helpers_ = 0;
  alignas(64) std::atomic<std::uint32_t> loop_{0};  // number of the current loop
  std::atomic<int> polling_{0};                     // helpers that wait for a loop awake
  alignas(64) std::atomic<std::uint32_t> state_{0};
  alignas(64) std::atomic<std::int64_t> next_{0};
  // The current loop; written before state_ opens, read by the helpers inside.
  Call call_ = nullptr;
  void const* body_ = nullptr;
  std::int64_t tasks_ = 0;
};

}  // namespace moe
