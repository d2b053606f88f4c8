// SPDX-License-Identifier: Apache-2.0
// backends/window/host/rounds.hpp: the sequence of operations of a host exchange over a window. docs/semantics/exchange.md §3, the
// two-parity scheme.
//
// Operations (dispatches and combines) of a buffer set are numbered; number i is its round. Each begins with a header word from every rank
// to every rank, with or without tokens: the round, the call and layer as this rank sees them (12 bits), and its number of rows or the
// reason why it cannot take part. There are two headers, by parity of the round: a rank that writes the header of round i + 2 has read the
// headers of round i + 1, which its peers wrote after they had read those of round i.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "moe/backends/common/exchange_rounds.hpp"
#include "moe/comm/symmetric_memory.hpp"
#include "moe/comm/window_manager.hpp"

namespace moe::detail {

/// Allocates offsets of a window, each a multiple of 64 bytes.
class WindowOffsets {
 public:
  std::size_t take(std::int64_t bytes) {
    std::size_t const at = end_;
    end_ += (static_cast<std::size_t>(bytes) + 63) / 64 * 64;
    return at;
  }
  /// Bytes allocated behind the control part.
  std::int64_t user_bytes() const { return static_cast<std::int64_t>(end_ - comm::kWindowControlBytes); }

 private:
  std::size_t end_ = comm::kWindowControlBytes;
};

/// What ranks do together in one operation. Ranks in different calls get E_MISMATCH.
enum class WindowCall : std::uint32_t { dispatch, combine, cached_dispatch };

/// The operations of one buffer set. All state that outlives a call lies in the window, because exchanges of several layers may share it.
template <class Window>
class WindowRounds {
 public:
  /// Most rows that a header can carry.
  static constexpr std::int64_t kMaxRows = static_cast<std::int64_t>(comm::kCountMask) - 64;
  /// Bytes of the window that the buffer set takes at its offset.
  static std::int64_t bytes(int ranks) { return kOwnBytes + 2 * kLine * ranks; }

  /// `tag`: 12 bits that all ranks of the layer have in common.
  WindowRounds(Window& window, std::size_t offset, std::uint32_t tag) : window_(&window), offset_(offset), tag_(tag) {}

  /// Sends the header of the next operation; if check() threw, waits for the peers' headers and throws that error. E_STATE, without
  /// communication, if the last operation has not been received. Returns the round.
  template <class Check>
  std::uint32_t send(WindowCall call, std::int64_t rows, Check&& check) {
    window_->expect_sound(phase(call), wait_phase(call), round());
    if (own(kPending) != 0) {
      throw Error(ErrorCode::state, text(phase(call), ": the last send of this buffer set has not been received"));
    }
    std::optional<Error> const refused = error_of(check);
    send_header(call, refused ? kRefused + static_cast<std::uint32_t>(refused->code()) : static_cast<std::uint32_t>(rows));
    if (refused) {
      receive_headers(call);
      throw Error(*refused);
    }
    return round();
  }
  /// Waits for the headers of the last operation sent. E_STATE without one. E_MISMATCH if a rank takes part in another call or layer;
  /// E_CAPACITY or E_PEER if a rank has refused or abandoned it. All ranks come to the same verdict. TransportError of the window.
  void receive(WindowCall call) {
    window_->expect_sound(phase(call), wait_phase(call), round());
    if (own(kPending) == 0) {
      throw Error(ErrorCode::state, text(phase(call), ": receive without send"));
    }
    receive_headers(call);
    for (int r = 0; r < window_->size(); ++r) {
      std::uint32_t const seen = comm::word_tag(headers_[static_cast<std::size_t>(r)]);
      if (seen != tag(call)) {
        throw TransportError(ErrorCode::mismatch, window_->rank(), r, phase(call), round(),
                             text("rank ", r, " takes part in another call or layer: header tag ", seen, ", expected ", tag(call)));
      }
    }
    for (int r = 0; r < window_->size(); ++r) {
      std::uint32_t const value = comm::word_count(headers_[static_cast<std::size_t>(r)]);
      if (value == kAbandoned) {
        throw TransportError(ErrorCode::peer, window_->rank(), r, phase(call), round(), text("rank ", r, " abandoned the call"));
      }
      if (value >= kRefused) {
        auto const code = static_cast<ErrorCode>(value - kRefused);
        throw TransportError(code == ErrorCode::capacity ? code : ErrorCode::peer, window_->rank(), r, phase(call), round(),
                             text("rank ", r, " refused its arguments with ", name(code)));
      }
    }
  }
  /// Joins the next operation only to report that this rank cannot take part. Never throws.
  void abandon(WindowCall call) noexcept {
    try {
      if (!window_->failed() && own(kPending) == 0) {
        send_header(call, kAbandoned);
        receive_headers(call);
      }
    } catch (Error const&) {  // the window reports its failure again on the next call
    }
  }
  /// Whether some rank abandoned the last operation received.
  bool abandoned() const {
    for (int r = 0; r < window_->size(); ++r) {
      if (comm::word_count(headers_[static_cast<std::size_t>(r)]) == kAbandoned) {
        return true;
      }
    }
    return false;
  }
  /// The number of rows of rank r, after receive().
  std::int64_t rows(int r) const { return comm::word_count(headers_[static_cast<std::size_t>(r)]); }

  /// The counter of the buffer set's dispatches that all ranks have joined, equal on all ranks.
  std::uint32_t* dispatches() const { return &own(kDispatches); }

  std::uint32_t round() const { return own(kRound); }
  int parity() const { return static_cast<int>(round() & 1U); }
  Window& window() const { return *window_; }
  /// A count with the round of the current operation.
  std::uint64_t word(std::int64_t count) const { return comm::count_word(round(), tag_, static_cast<std::uint32_t>(count)); }

  /// The latest operation, and the most dispatches, of any rank's buffer set. Unmasked ranks continue from there. Read it between two
  /// barriers.
  std::array<std::uint32_t, 2> latest() const {
    std::array<std::uint32_t, 2> most{own(kRound), own(kDispatches)};
    for (int r = 0; r < window_->size(); ++r) {
      auto const* const theirs = window_->template at<std::uint32_t>(r, offset_);
      most[0] = comm::round_reached(theirs[kRound], most[0]) ? theirs[kRound] : most[0];
      most[1] = comm::round_reached(theirs[kDispatches], most[1]) ? theirs[kDispatches] : most[1];
    }
    return most;
  }
  /// Continues as if no operation were in progress and the given numbers of operations and dispatches had been done.
  void restart(std::uint32_t dispatches) {
    own(kPending) = 0;
    own(kDispatches) = dispatches;
  }

  /// Collective, for tests and for rebuilt groups: continues as if `round` operations had been done.
  void preset(std::uint32_t round) {
    own(kRound) = round;
    for (int parity = 0; parity < 2; ++parity) {
      for (int r = 0; r < window_->size(); ++r) {
        *window_->template own<std::uint64_t>(header(parity, r)) = comm::count_word(round, 0, 0);
      }
    }
  }

  /// "dispatch" or "combine".
  static char const* phase(WindowCall call) { return call == WindowCall::combine ? "combine" : "dispatch"; }

 private:
  static constexpr std::int64_t kLine = 64;
  static constexpr std::int64_t kOwnBytes = 64;
  static constexpr std::uint32_t kRefused = comm::kCountMask - 63;  // + ErrorCode
  static constexpr std::uint32_t kAbandoned = comm::kCountMask;
  enum Own : std::size_t { kRound, kPending, kDispatches };

  std::uint32_t& own(Own word) const { return window_->template own<std::uint32_t>(offset_)[word]; }
  std::size_t header(int parity, int from) const {
    return offset_ + static_cast<std::size_t>(kOwnBytes + kLine * (static_cast<std::int64_t>(parity) * window_->size() + from));
  }
  std::uint32_t tag(WindowCall call) const { return (tag_ + 1365U * static_cast<std::uint32_t>(call)) & 0xfffU; }
  static comm::ExchangePhase wait_phase(WindowCall call) {
    return call == WindowCall::combine ? comm::ExchangePhase::combine_rows : comm::ExchangePhase::dispatch_counts;
  }
  void send_header(WindowCall call, std::uint32_t value) {
    ++own(kRound);
    own(kPending) = 1;
    for (int i = 1; i <= window_->size(); ++i) {
      int const to = (window_->rank() + i) % window_->size();
      window_->publish(to, header(parity(), window_->rank()), comm::count_word(round(), tag(call), value));
    }
  }
  void receive_headers(WindowCall call) {
    for (int r = 0; r < window_->size(); ++r) {
      std::uint64_t const word = window_->wait_count(header(parity(), r), round(), wait_phase(call), r);
      // A masked rank counts as part of the same call, with no rows.
      headers_[static_cast<std::size_t>(r)] = window_->masked(r) ? comm::count_word(round(), tag(call), 0) : word;
    }
    own(kPending) = 0;
    // All ranks read the same headers, so they count alike, even in different calls.
    bool combine = true;
    for (int r = 0; r < window_->size(); ++r) {
      combine = combine && comm::word_tag(headers_[static_cast<std::size_t>(r)]) == tag(WindowCall::combine);
    }
    own(kDispatches) += combine ? 0 : 1;
  }

  Window* window_;
  std::size_t offset_;
  std::uint32_t tag_;
  std::array<std::uint64_t, comm::kMaxWindowRanks> headers_{};
};

/// Arguments that batched exchanges refuse. E_ARG for the router weight on the input with top-k other than 1; E_CAPACITY.
template <class Window>
void check_batched(bool on_input, std::int64_t max_tokens, std::int64_t topk) {
  if (on_input && topk != 1) {
    throw Error(ErrorCode::argument, "apply_router_weight_on_input requires topk == 1");
  }
  if (max_tokens * topk > WindowRounds<Window>::kMaxRows) {
    throw Error(ErrorCode::capacity,
                text("max_tokens_per_rank: ", max_tokens, " tokens x ", topk, " exceed the count word's ", WindowRounds<Window>::kMaxRows));
  }
}

/// The first step of every window exchange: all ranks agree on the contract, then the window is made. Members in construction order.
template <class Window>
class WindowGroup {
 public:
  using Comm = typename Window::Comm;

  /// Collective. `refused`: why this rank cannot take part; thrown after the peers have been told. Errors of ExchangeRounds and of the
  /// window.
  WindowGroup(Comm& comm, ExchangeContract const& contract, std::optional<Error> const& refused, Arena<space::host>& arena,
              comm::WindowManager<Window>* manager, std::int64_t user_bytes, typename Window::Params const& params)
      : tag_(agree(comm, contract, refused, arena)), handle_(comm, manager, arguments(contract, user_bytes), params) {}

  Window& window() const { return *handle_; }
  /// 12 bits that identify the layer.
  std::uint32_t tag() const { return tag_; }

 private:
  static std::uint32_t agree(Comm& comm, ExchangeContract const& contract, std::optional<Error> const& refused, Arena<space::host>& arena) {
    ExchangeRounds<Comm> const agreed(comm, contract, 0, refused, arena);
    comm::HeaderTag hash;
    for (char c : contract.backend) {
      hash.add(static_cast<std::uint64_t>(c));
    }
    for (std::int64_t value : contract.values) {
      hash.add(static_cast<std::uint64_t>(value));
    }
    // Layers of one shape differ in the number of their exchange.
    return (hash.value() + 3U * static_cast<std::uint32_t>(agreed.tag())) & 0xfffU;
  }
  static comm::WindowArguments arguments(ExchangeContract const& contract, std::int64_t user_bytes) {
    comm::WindowArguments a{contract.backend, {contract.values.begin(), contract.values.end()}, user_bytes};
    a.values.pop_back();  // layers of one shape share a window even if their placements differ
    return a;
  }
  std::uint32_t tag_;
  comm::WindowHandle<Window> handle_;
};

}  // namespace moe::detail
