// SPDX-License-Identifier: Apache-2.0
// comm/symmetric_memory.cuh: the device half of a window: flags, waits with a deadline, abort, barrier. docs/semantics/exchange.md §3.
#pragma once

#include <cuda_runtime.h>

#include "moe/comm/symmetric_memory.hpp"
#include "moe/core/ptx/clock.cuh"
#include "moe/core/ptx/dependent_launch.cuh"
#include "moe/core/ptx/memory.cuh"

namespace moe::comm::detail {

/// Publishes `round`: a peer that sees it also sees everything that this thread, and the threads it met at a block barrier, wrote before.
/// The fence makes the relaxed store a release; a release store would fence a second time.
__device__ inline void publish(std::uint32_t* flag, std::uint32_t round) {
  ptx::fence_system();
  ptx::store_relaxed_system(flag, round);
}
/// publish() without the fence, for data that earlier kernels of this stream wrote to this rank's own memory. The PTX memory model does not
/// guarantee this: a relaxed store is not a release pattern, so a peer's acquire does not synchronise with it, despite stream order on this
/// GPU. It relies on how NVLink works: the stores of a finished kernel are in the L2 of the GPU that owns the memory, and peers read
/// through that L2. Saves the fence (0.1 to 0.4 us per combine, docs/log/exchange.md); off by default.
__device__ inline void announce(std::uint32_t* flag, std::uint32_t round) { ptx::store_relaxed_system(flag, round); }
/// Words and 16-byte vectors in memory that peers read or write.
template <class T>
__device__ inline T load_peer(T const* p) {
  return ptx::load_past_l1(p);
}
template <class T>
__device__ inline void store_peer(T* p, T v) {
  ptx::store_past_l1(p, v);
}

template <class T>
__device__ inline T* at(WindowView const& w, int rank, std::size_t offset) {
  return reinterpret_cast<T*>(w.peer[rank] + offset);
}
template <class T>
__device__ inline T* own(WindowView const& w, std::size_t offset) {
  return reinterpret_cast<T*>(w.peer[w.rank] + offset);
}

/// Takes the rank's failure record if it is free and fills it. True: it was free. A failure that ends the group also replaces a recoverable
/// one that the host has not read yet.
static __device__ __noinline__ bool report(WindowView const& w, ErrorCode code, ExchangePhase phase, int peer, std::uint32_t round,
                                           std::uint32_t observed, std::uint32_t value = 0, std::uint32_t bound = 0,
                                           bool recoverable = false) {
  std::uint32_t* const claimed = own<std::uint32_t>(w, WindowControl::claimed);
  FailureRecord* const f = w.failure;
  if (recoverable) {
    if (atomicCAS(claimed, 0U, 2U) != 0U) {
      return false;
    }
  } else if (std::uint32_t const before = atomicExch(claimed, 1U); before == 1U) {
    return false;
  } else if (before == 2U) {
    for (int i = 0; i < 100000 && ptx::load_relaxed_system(&f->code) == 0; ++i) {  // the thread that took the record is still writing it
    }
    ptx::store_relaxed_system(&f->code, 0U);
    ptx::fence_system();
  }
  f->phase = static_cast<std::uint32_t>(phase);
  f->rank = w.rank;
  f->peer = peer;
  f->round = round;
  f->observed = observed;
  f->value = value;
  f->bound = bound;
  f->recoverable = recoverable ? 1 : 0;
  ptx::fence_system();
  ptx::store_relaxed_system(&f->code, 1U + static_cast<std::uint32_t>(code));
  return true;
}

/// report(), and tells every peer that the group has ended. The caller leaves its protocol afterwards.
static __device__ __noinline__ void fail(WindowView const& w, ErrorCode code, ExchangePhase phase, int peer, std::uint32_t round,
                                         std::uint32_t observed, std::uint32_t value = 0) {
  if (report(w, code, phase, peer, round, observed, value)) {
    std::uint32_t const word = (1U + static_cast<std::uint32_t>(code)) | (static_cast<std::uint32_t>(peer + 1) << 8);
    for (int r = 0; r < w.size; ++r) {
      ptx::store_relaxed_system(at<std::uint32_t>(w, r, WindowControl::abort_word), word);
    }
  }
}

/// A waiting thread calls this from time to time. True: give up (the failure is recorded).
static __device__ __noinline__ bool should_give_up(WindowView const& w, ExchangePhase phase, int peer, std::uint32_t round,
                                                   std::uint32_t observed, std::uint64_t start) {
  std::uint32_t const aborted = ptx::load_relaxed_system(own<std::uint32_t>(w, WindowControl::abort_word));
  if (aborted != 0) {
    fail(w, ErrorCode::peer, phase, static_cast<int>(aborted >> 8) - 1, round, observed);
    return true;
  }
  if (w.timeout_ns != 0 && ptx::now_ns() - start > w.timeout_ns) {
    fail(w, ErrorCode::timeout, phase, peer, round, observed);
    return true;
  }
  return false;
}

/// Adds to the statistics how long this rank has waited for `peer` since `start`.
static __device__ __noinline__ void note_wait(WindowView const& w, int peer, std::uint64_t start) {
  if (peer != w.rank) {
    atomicAdd(own<unsigned long long>(w, WindowControl::waited) + peer, static_cast<unsigned long long>(ptx::now_ns() - start));
  }
}

/// Waits until this rank's word at `p`, written by `peer`, has reached `round`; acquires what the peer released with it. False: failed. Not
/// inlined, like all waits: instruction fetch limits the speed of kernels that run for microseconds.
static __device__ __noinline__ bool wait_round(WindowView const& w, std::uint32_t const* p, std::uint32_t round, ExchangePhase phase,
                                               int peer) {
  std::uint64_t start = 0;
  for (unsigned i = 0;; ++i) {
    std::uint32_t const seen = ptx::load_acquire_system(p);
    if (round_reached(seen, round)) {
      if (w.statistics && i > 0 && blockIdx.x == 0) {
        note_wait(w, peer, start);
      }
      return true;
    }
    if (i == 0) {
      start = ptx::now_ns();  // most words arrive within a few polls: check nothing else before that
    } else if (i % 256 == 0 && should_give_up(w, phase, peer, round, seen, start)) {
      return false;
    }
  }
}

/// The word with which rank `peer` refuses the operation of `round`, for report_refusal(). Load it after waiting for `peer` in that
/// operation; use it later, when the thread is idle, to hide the latency of the load.
__device__ inline std::uint32_t load_refusal(WindowView const& w, int peer, std::uint32_t round) {
  return ptx::load_relaxed_system(own<std::uint32_t>(w, refusal_offset(round, peer)));
}
/// Reports a word that refuses `round`, as a recoverable failure that all other ranks see, and clears it, so that it is reported once and
/// no later round mistakes it for its own.
static __device__ __noinline__ void take_refusal(WindowView const& w, std::uint32_t word, ExchangePhase phase, int peer,
                                                 std::uint32_t round) {
  if ((word & 0xffffffU) == (round & 0xffffffU) && atomicCAS_system(own<std::uint32_t>(w, refusal_offset(round, peer)), word, 0U) == word) {
    std::uint32_t const code = word >> 24;
    ErrorCode const shown = code == 1U + static_cast<std::uint32_t>(ErrorCode::capacity) ? ErrorCode::capacity : ErrorCode::peer;
    report(w, shown, phase, peer, round, 0, code, 0, true);
  }
}
/// `word`: from load_refusal(). Reports it if it refuses `round`; ignores 0 and words of other rounds.
__device__ inline void report_refusal(WindowView const& w, std::uint32_t word, ExchangePhase phase, int peer, std::uint32_t round) {
  if (word != 0) {
    take_refusal(w, word, phase, peer, round);
  }
}
/// load_refusal() and report_refusal() at once, for a thread that is idle anyway.
__device__ inline void check_refusal(WindowView const& w, ExchangePhase phase, int peer, std::uint32_t round) {
  report_refusal(w, load_refusal(w, peer, round), phase, peer, round);
}
/// Waits for the count words of `round` from ranks [first, last) in one column, whose words are `stride` apart, up to eight at a time, and
/// adds the counts. Only the values are used, so nothing is acquired. Ranks that refuse the dispatch (refused_tag) count 0 and are
/// reported. -1: failed.
static __device__ __noinline__ int sum_counts(WindowView const& w, std::uint64_t const* p, int stride, int first, int last,
                                              std::uint32_t round, std::uint32_t tag) {
  std::uint64_t const expected = count_word(round, tag, 0) >> kCountBits;
  std::uint64_t const refused = count_word(round, refused_tag(tag), 0) >> kCountBits;
  int sum = 0;
  for (int s0 = first; s0 < last; s0 += 8) {
    std::uint64_t start = 0;
    for (unsigned i = 0;; ++i) {
      std::uint64_t seen[8];
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        seen[k] = s0 + k < last ? ptx::load_relaxed_system(p + static_cast<std::int64_t>(s0 + k) * stride) : expected << kCountBits;
      }
      bool ready = true;
      int part = 0;
#pragma unroll
      for (int k = 0; k < 8; ++k) {
        ready = ready && (seen[k] >> kCountBits) == expected;
        part += static_cast<int>(word_count(seen[k]));
      }
      if (ready) {
        sum += part;
        break;
      }
      if (i == 0) {
        start = ptx::now_ns();
      } else if (i % 64 == 0) {
        int arrived = 0;
        int counted = 0;
#pragma unroll 1
        for (int k = s0; k < min(s0 + 8, last); ++k) {
          std::uint64_t const word = ptx::load_relaxed_system(p + static_cast<std::int64_t>(k) * stride);
          if ((word >> kCountBits) == expected) {
            ++arrived;
            counted += static_cast<int>(word_count(word));
            continue;
          }
          if ((word >> kCountBits) == refused) {
            ++arrived;
            ptx::fence_system();
            check_refusal(w, ExchangePhase::dispatch_counts, k, round);
            continue;
          }
          if (round_reached(word_round(word), round)) {
            fail(w, ErrorCode::mismatch, ExchangePhase::dispatch_counts, k, round, word_tag(word), tag);
            return -1;
          }
          if (should_give_up(w, ExchangePhase::dispatch_counts, k, round, word_round(word), start)) {
            return -1;
          }
        }
        if (arrived == min(8, last - s0)) {
          sum += counted;
          break;
        }
      }
    }
  }
  return sum;
}

/// Statistics, in the first block before its other waits: thread r waits for a count word of rank r and notes the time. A late rank delays
/// the rows of all ranks, because they wait for its counts; only here can the delay be attributed to that rank. Returns whether this block
/// waited; only its first threads did.
__device__ inline bool note_count_waits(WindowView const& w, std::uint64_t const* p, int stride, std::uint32_t round, std::uint32_t tag) {
  if (!w.statistics || blockIdx.x != 0) {
    return false;
  }
  if (int const r = static_cast<int>(threadIdx.x); r < w.size) {
    std::uint64_t const start = ptx::now_ns();
    sum_counts(w, p, stride, r, r + 1, round, tag);
    note_wait(w, r, start);
  }
  return true;
}

/// Called by thread r before it publishes the flag of the operation to rank r. A rank writes itself no word: its host has had the error.
__device__ inline void refuse(WindowView const& w, int r, std::uint32_t round, std::uint32_t code) {
  if (r != w.rank) {
    ptx::store_relaxed_system(at<std::uint32_t>(w, r, refusal_offset(round, w.rank)), refusal_word(round, code));
  }
}

/// With programmatic dependent launch: waits for the previous kernel of the stream, then lets the next kernel launch early, which hides its
/// launch latency. Without it both are no-ops.
__device__ inline void begin_dependent_kernel() {
  ptx::wait_for_dependencies();
  ptx::launch_dependents();
}

/// The same, for a kernel whose parameters fill many lines of constant memory: before the wait, one thread of the block reads a word of
/// each 64-byte line. The later reads, which depend on each other, then hit the cache.
template <class Args>
__device__ inline void begin_dependent_kernel(Args const& a) {
  __shared__ std::uint32_t volatile sum_of_words;  // never read: keeps the compiler from removing the reads
  if (threadIdx.x == blockDim.x - 1) {
    std::uint32_t sum = 0;
#pragma unroll
    for (std::size_t i = 0; i < sizeof(Args) / 4; i += 16) {
      sum += reinterpret_cast<std::uint32_t const*>(&a)[i];
    }
    sum_of_words = sum;
  }
  begin_dependent_kernel();
}

/// Barrier of all ranks, by one block of at least `size` threads: no rank leaves before every rank has entered.
static __global__ void window_barrier(WindowView const __grid_constant__ w) {
  std::uint32_t* const round_word = own<std::uint32_t>(w, WindowControl::barrier_round);
  std::uint32_t const round = *round_word + 1;
  int const r = static_cast<int>(threadIdx.x);
  if (r < w.size) {
    publish(at<std::uint32_t>(w, r, WindowControl::barrier) + w.rank, round);
    wait_round(w, own<std::uint32_t>(w, WindowControl::barrier) + r, round, ExchangePhase::barrier, r);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    *round_word = round;
  }
}

}  // namespace moe::comm::detail
