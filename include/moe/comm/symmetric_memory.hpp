// SPDX-License-Identifier: Apache-2.0
// comm/symmetric_memory.hpp: common parts of all device windows: peer pointers, round words, deadlines and the failure record.
// docs/semantics/exchange.md §3.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "moe/comm/deadline.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::comm {

/// The maximum number of ranks that one window maps.
inline constexpr int kMaxWindowRanks = 64;
/// Bytes at the start of every window that belong to the window itself; user data follows.
inline constexpr std::size_t kWindowControlBytes = 4096;
/// Default deadline of every wait on a peer, in nanoseconds. 0: wait for ever.
inline constexpr std::uint64_t kDefaultTimeoutNs = std::uint64_t{kDefaultTimeoutMs} * 1'000'000;

/// Which wait failed.
enum class ExchangePhase : std::uint32_t { barrier, dispatch_counts, dispatch_rows, combine_rows };
constexpr std::string_view name(ExchangePhase p) {
  constexpr std::array<std::string_view, 4> names{"barrier", "dispatch counts", "dispatch rows", "combine"};
  return names[static_cast<std::size_t>(p)];
}

/// FailureRecord::value, set on the host: `peer` is known to have died, and another rank, which may wait for it, has been missing.
inline constexpr std::uint32_t kProcessEnded = 1;

/// Written once, by the first device thread of a rank that fails, into host memory that the device maps; `code` is written last.
struct FailureRecord {
  std::uint32_t code;  ///< 0: none; else 1 + ErrorCode
  std::uint32_t phase;
  std::int32_t rank;
  std::int32_t peer;       ///< the rank that did not arrive, or whose word disagrees
  std::uint32_t round;     ///< the round that was waited for
  std::uint32_t observed;  ///< the value that the word had
  std::uint32_t value;     ///< E_CAPACITY: rows needed; a refusal: 1 + ErrorCode of the rank that refused; else 0 or kProcessEnded
  std::uint32_t bound;     ///< E_CAPACITY: rows that fit
  /// All ranks have seen the same failure and have finished the round: the group stays usable once the record is cleared.
  std::uint32_t recoverable;
};

/// Byte offsets in the control part of a window. Words are 32 bits.
struct WindowControl {
  static constexpr std::size_t abort_word = 0;  ///< written by peers: 1 + ErrorCode in bits 0-7, 1 + missing rank above
  static constexpr std::size_t claimed = 64;    ///< own: the failure record is free (0), taken (1), or taken by a recoverable failure (2)
  static constexpr std::size_t barrier_round = 128;  ///< own: last barrier round
  static constexpr std::size_t barrier = 256;        ///< [rank] written by that rank
  static constexpr std::size_t refused = 512;        ///< [round % 2][kMaxWindowRanks] written by that rank: refusal_word(); 0 once seen
  static constexpr std::size_t waited = 2048;        ///< own: u64 [rank] nanoseconds that the first block has waited for that rank
  static constexpr std::size_t masked = 2560;        ///< own: [rank] 1: dead, neither waited for nor sent to
  static constexpr std::size_t rejoin = 2816;        ///< [rank] written by that rank: its round
};
/// Tells peers that this rank cannot take part in the operation of `round`: 1 + ErrorCode above 24 bits of round.
MOE_HD constexpr std::uint32_t refusal_word(std::uint32_t round, std::uint32_t code) { return (code << 24) | (round & 0xffffffU); }
/// Where rank `rank` writes its refusal. Two words: it may refuse the next operation before a rank that needs none of its data has read
/// this one.
MOE_HD constexpr std::size_t refusal_offset(std::uint32_t round, int rank) {
  return WindowControl::refused + 4 * (static_cast<std::size_t>(round & 1U) * kMaxWindowRanks + static_cast<std::size_t>(rank));
}
/// An error code as encoded in refusals.
constexpr std::uint32_t refusal_code(ErrorCode code) { return 1U + static_cast<std::uint32_t>(code); }

/// A window as kernels see it. Passed by value as a __grid_constant__ parameter.
struct WindowView {
  char* peer[kMaxWindowRanks] = {};  ///< base of each rank's part as mapped here; peer[rank] is this rank's part
  int rank = 0;
  int size = 1;
  FailureRecord* failure = nullptr;  ///< device address of the host record
  std::uint64_t timeout_ns = kDefaultTimeoutNs;
  bool statistics = false;  ///< the first block of each kernel adds up its waiting time per rank
};

/// A count and its round, in one 64-bit store: the round in the high word; in the low word 12 bits of the header hash (shape, ranks, layer)
/// above 20 bits of count. So the first word from a rank that disagrees already shows the mismatch.
inline constexpr int kCountBits = 20;
inline constexpr std::uint32_t kCountMask = (1U << kCountBits) - 1;
MOE_HD constexpr std::uint64_t count_word(std::uint32_t round, std::uint32_t tag, std::uint32_t count) {
  return (static_cast<std::uint64_t>(round) << 32) | (tag << kCountBits) | (count & kCountMask);
}
MOE_HD constexpr std::uint32_t word_round(std::uint64_t word) { return static_cast<std::uint32_t>(word >> 32); }
MOE_HD constexpr std::uint32_t word_tag(std::uint64_t word) { return static_cast<std::uint32_t>(word) >> kCountBits; }
/// The tag in the count words of a rank that refuses the dispatch. It never equals the expected tag, so waiting ranks check for it only on
/// a mismatch.
MOE_HD constexpr std::uint32_t refused_tag(std::uint32_t tag) { return tag ^ 0xfffU; }
MOE_HD constexpr std::uint32_t word_count(std::uint64_t word) { return static_cast<std::uint32_t>(word) & kCountMask; }
/// Rounds wrap: compare by signed difference.
MOE_HD constexpr bool round_reached(std::uint32_t seen, std::uint32_t wanted) { return static_cast<std::int32_t>(seen - wanted) >= 0; }

/// Folds values that all ranks must agree on into the 12-bit tag of count words (FNV-1a, folded).
class HeaderTag {
 public:
  constexpr HeaderTag& add(std::uint64_t value) {
    for (int i = 0; i < 8; ++i) {
      hash_ = (hash_ ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3ULL;
    }
    return *this;
  }
  constexpr std::uint32_t value() const { return static_cast<std::uint32_t>((hash_ ^ (hash_ >> 24) ^ (hash_ >> 48)) & 0xfff); }

 private:
  std::uint64_t hash_ = 0xcbf29ce484222325ULL;
};

/// Throws the TransportError that a failure record describes; returns if there is none. Call after synchronising the stream; failures that
/// end the group may be polled at any time.
inline void throw_if_failed(FailureRecord const& f) {
  std::uint32_t const raw = *const_cast<std::uint32_t const volatile*>(&f.code);
  if (raw == 0) {
    return;
  }
  auto const code = static_cast<ErrorCode>(raw - 1);
  auto const phase = std::string(name(static_cast<ExchangePhase>(f.phase)));
  std::string message;
  if (f.recoverable != 0 && f.bound == 0) {
    auto const why = static_cast<ErrorCode>(f.value - 1);
    message = why == ErrorCode::peer ? text("rank ", f.peer, " abandoned the call")
                                     : text("rank ", f.peer, " refused its arguments with ", name(why));
    throw TransportError(code, f.rank, f.peer, phase, f.round, message);
  }
  switch (code) {
    case ErrorCode::timeout:
      message = f.value == kProcessEnded ? text("rank ", f.peer, " did not arrive in round ", f.round, ": its process has ended")
                                         : text("rank ", f.peer, " did not arrive: expected round ", f.round, ", observed ", f.observed);
      break;
    case ErrorCode::mismatch:
      message = text("rank ", f.peer, " runs another shape: header tag ", f.observed, ", expected ", f.value);
      break;
    case ErrorCode::capacity: message = text("rank ", f.peer, " would receive ", f.value, " rows, capacity ", f.bound); break;
    case ErrorCode::peer: message = text("the group was aborted: rank ", f.peer, " is missing"); break;
    default: message = text("device failure, value ", f.value); break;
  }
  throw TransportError(code, f.rank, f.peer, phase, f.round, message);
}
/// The same, but only for failures that end the group; throw_if_failed() throws the recoverable ones.
inline void throw_if_over(FailureRecord const& f) {
  if (*const_cast<std::uint32_t const volatile*>(&f.code) != 0 && f.recoverable == 0) {
    throw_if_failed(f);
  }
}

}  // namespace moe::comm
