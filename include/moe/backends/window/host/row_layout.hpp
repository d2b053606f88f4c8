// SPDX-License-Identifier: Apache-2.0
// backends/window/host/row_layout.hpp: which row of which rank each token of a standard dispatch gets, and how ranks agree on it.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "moe/backends/common/handle_table.hpp"
#include "moe/backends/window/host/rounds.hpp"

namespace moe::detail {

/// A rank that a token is sent to, and the token's row among those for that rank.
struct RowDestination {
  std::int32_t rank;
  std::int32_t row;
};

/// The layout of one dispatch on this rank.
struct RowLayout : DispatchRecord {
  std::int64_t rows = 0;                     ///< tokens of this rank
  std::int64_t total = 0;                    ///< rows received, including empty ones
  std::int64_t stride = 0;                   ///< workspace: rows of each source's part
  std::int32_t* num_destinations = nullptr;  ///< [T_max]
  RowDestination* destinations = nullptr;    ///< [T_max, max_destinations]
  std::int64_t* matrix = nullptr;            ///< [R, R] rows from each rank to each rank
};

/// Rows of rank `to` lie by source rank, then by token: the sources without gaps (packed), or, with `Workspace`, each source at a multiple
/// of the most rows that any rank brings.
template <class Window, bool Workspace>
class RowLayouts {
 public:
  /// max_rows: most rows of one rank.
  RowLayouts(int ranks, int rank, std::int64_t topk, std::int64_t max_tokens, std::int64_t max_rows)
      : ranks_(ranks),
        rank_(rank),
        topk_(topk),
        max_tokens_(max_tokens),
        max_destinations_(std::min<std::int64_t>(topk, ranks)),
        max_rows_(max_rows) {}

  void take(ExpertPlacement const& placement, WindowOffsets& offsets, Arena<space::host>& arena) {
    num_physical_ = placement.num_physical();
    owner_ = arena.template take<std::int32_t>(num_physical_);
    local_ = arena.template take<std::int32_t>(num_physical_);
    std::copy_n(placement.owners().data(), num_physical_, owner_);
    std::copy_n(placement.locals().data(), num_physical_, local_);
    counts_ = {offsets.take(8 * std::int64_t{ranks_} * ranks_), offsets.take(8 * std::int64_t{ranks_} * ranks_)};
  }
  void take(RowLayout& r, Arena<space::host>& arena) const {
    r.num_destinations = arena.template take<std::int32_t>(max_tokens_);
    r.destinations = arena.template take<RowDestination>(max_tokens_ * max_destinations_);
    r.matrix = arena.template take_filled<std::int64_t>(std::int64_t{ranks_} * ranks_, 0);
  }

  int num_physical() const { return num_physical_; }
  /// The most destinations of one token.
  std::int64_t max_destinations() const { return max_destinations_; }
  RowDestination const* destinations(RowLayout const& r, std::int64_t t) const { return r.destinations + t * max_destinations_; }
  /// The number of rows that this rank sends to each rank. [R]
  std::int64_t* outgoing(RowLayout const& r) const { return r.matrix + rank_ * ranks_; }
  /// The local id of an expert on rank `to`; kNoExpert if it is on another rank or the id names none.
  std::int32_t local_id(std::int32_t id, int to) const { return is_expert(id) && owner_[id] == to ? local_[id] : kNoExpert; }
  /// The first row of rank `from` on rank `to`.
  std::int64_t start(RowLayout const& r, int from, int to) const {
    std::int64_t first = Workspace ? from * r.stride : 0;
    for (int s = 0; s < from && !Workspace; ++s) {
      first += r.matrix[s * ranks_ + to];
    }
    return first;
  }

  /// The ranks of each token, without repeats: ascending, or in choice order (workspace). Counts are this rank's row of the matrix.
  void find_destinations(RowLayout& r, Rows<std::int32_t const> ids) const {
    std::fill_n(outgoing(r), ranks_, 0);
    for (std::int64_t t = 0; t < ids.extent(0); ++t) {
      RowDestination* const first = r.destinations + t * max_destinations_;
      RowDestination* last = first;
      for (std::int64_t j = 0; j < topk_; ++j) {
        if (!is_expert(ids(t, j))) {
          continue;
        }
        std::int32_t const to = owner_[ids(t, j)];
        if (std::any_of(first, last, [&](RowDestination const& d) { return d.rank == to; })) {
          continue;
        }
        RowDestination* at = last++;
        for (; !Workspace && at != first && (at - 1)->rank > to; --at) {
          *at = *(at - 1);
        }
        at->rank = to;
      }
      r.num_destinations[t] = static_cast<std::int32_t>(last - first);
      for (RowDestination* d = first; d != last; ++d) {
        d->row = static_cast<std::int32_t>(outgoing(r)[d->rank]++);
      }
    }
  }
  void send_counts(RowLayout const& r, WindowRounds<Window> const& rounds) const {
    for (int i = 1; i <= ranks_; ++i) {
      int const peer = (rank_ + i) % ranks_;
      for (int to = 0; to < ranks_; ++to) {
        rounds.window().publish(peer, count_at(rounds.parity(), rank_, to), rounds.word(outgoing(r)[to]));
      }
    }
  }
  /// Receives the whole matrix. It is the same on all ranks, and so is the verdict on capacity: E_CAPACITY naming the rank.
  void receive_counts(RowLayout& r, WindowRounds<Window> const& rounds) const {
    for (int from = 0; from < ranks_; ++from) {
      for (int to = 0; to < ranks_; ++to) {
        r.matrix[from * ranks_ + to] = comm::word_count(
            rounds.window().wait_count(count_at(rounds.parity(), from, to), rounds.round(), comm::ExchangePhase::dispatch_counts, from));
      }
    }
    r.stride = 0;
    for (int from = 0; from < ranks_; ++from) {
      r.stride = std::max(r.stride, rounds.rows(from));
    }
    for (int to = 0; to < ranks_; ++to) {
      std::int64_t rows = Workspace ? r.stride * ranks_ : 0;
      for (int from = 0; from < ranks_ && !Workspace; ++from) {
        rows += r.matrix[from * ranks_ + to];
      }
      if (rows > max_rows_) {
        throw TransportError(ErrorCode::capacity, rank_, to, "dispatch", rounds.round(),
                             text("rank ", to, " would receive ", rows, " rows, more than max_recv_rows ", max_rows_));
      }
      r.total = to == rank_ ? rows : r.total;
    }
  }
  /// Copies the layout of `from` to `to`, a dispatch with the same number of tokens on this rank.
  void copy(RowLayout const& from, RowLayout& to) const {
    to.total = from.total;
    to.stride = from.stride;
    std::copy_n(from.matrix, std::int64_t{ranks_} * ranks_, to.matrix);
    std::copy_n(from.num_destinations, from.rows, to.num_destinations);
    std::copy_n(from.destinations, from.rows * max_destinations_, to.destinations);
  }
  /// For tests: continues as if `round` operations had been done.
  void preset(Window& window, std::uint32_t round) const {
    for (int from = 0; from < ranks_; ++from) {
      for (int parity = 0; parity < 2; ++parity) {
        for (int to = 0; to < ranks_; ++to) {
          *window.template own<std::uint64_t>(count_at(parity, from, to)) = comm::count_word(round, 0, 0);
        }
      }
    }
  }

 private:
  bool is_expert(std::int32_t id) const { return id >= 0 && id < num_physical_; }
  std::size_t count_at(int parity, int from, int to) const {
    return counts_[static_cast<std::size_t>(parity)] + 8 * static_cast<std::size_t>(from * ranks_ + to);
  }

  int ranks_;
  int rank_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  std::int64_t max_destinations_;
  std::int64_t max_rows_;
  int num_physical_ = 0;
  std::int32_t* owner_ = nullptr;        // [P]
  std::int32_t* local_ = nullptr;        // [P]
  std::array<std::size_t, 2> counts_{};  // u64 [R][R]
};

}  // namespace moe::detail
