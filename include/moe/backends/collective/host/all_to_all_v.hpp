// SPDX-License-Identifier: Apache-2.0
// backends/collective/host/all_to_all_v.hpp: the exchange of AllToAllV in the host space: rows packed for each rank, one sum for each
// token. The device exchange is in ../device/all_to_all_v.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "moe/backends/common/exchange_rounds.hpp"
#include "moe/backends/common/open_half.hpp"
#include "moe/backends/common/wire_row.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/contract/concepts.hpp"

namespace moe::rules {
MOE_INCLUDED(AllToAllVOnDevice, "the exchange of all_to_all_v in the CUDA space", "moe/backends/collective/device/all_to_all_v.cuh");
}  // namespace moe::rules

namespace moe::backends {

template <class CommT>
struct AllToAllV;

namespace detail {

/// The exchange over one communicator. Specialised per memory space.
template <class Comm, class Config, class Quant, class Partial, class Space = typename moe::detail::SpaceOf<Comm>::type>
class AllToAllVExchange : public moe::detail::NotIncluded<rules::AllToAllVOnDevice> {};

using moe::detail::ExchangeRounds;
using moe::detail::WireRow;

/// Rows under way over a communicator that can start an all_to_all_v without waiting for it; else nothing.
template <class Comm>
struct TransferOf {
  static constexpr bool kStarts = false;
  struct type {
    explicit type(Comm const&) {}
  };
};
template <class Comm>
  requires(facts::starts_transfers<Comm>())
struct TransferOf<Comm> {
  static constexpr bool kStarts = true;
  using type = typename Comm::Transfer;
};

template <class Comm, class Config, class Quant, class Partial>
class AllToAllVExchange<Comm, Config, Quant, Partial, space::host> {
 public:
  using Space = space::host;
  using Act = typename Config::Act;
  using Tokens = StandardTokensOf<Config, Quant>;
  using Params = typename AllToAllV<Comm>::Params;

  /// Collective. max_tokens: T_max, most rows of one prepare() on any rank. E_CONFIG if this rank's arguments are wrong, E_CAPACITY if
  /// memory does not suffice (then the peers get E_PEER); E_MISMATCH on all ranks, naming the field, if ranks disagree.
  AllToAllVExchange(Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement, Quant const& quant,
                    Params const& params, Arena<Space>& arena)
      : quant_(quant),
        hidden_(shape.hidden()),
        topk_(shape.topk()),
        max_tokens_(max_tokens),
        num_physical_(placement.num_physical()),
        max_destinations_(std::min<std::int64_t>(topk_, comm.size())),
        max_rows_(params.max_recv_rows == 0 ? max_tokens * comm.size() : params.max_recv_rows),
        wire_(hidden_, topk_),
        refused_(moe::error_of([&] { take_memory(comm, placement, params, arena); })),
        rounds_(comm,
                moe::detail::make_contract<Config, Quant, Partial>(AllToAllV<Comm>::kName, shape, max_tokens, placement,
                                                                   {.max_recv_rows = max_rows_}),
                comm.size(), refused_, arena) {}

  /// The most rows that the experts can get.
  std::int64_t max_rows() const { return max_rows_; }

  /// Collective. One row for each token that has an expert here, by source rank, then by token, with local ids. E_STATE without
  /// finalize() after the last prepare(); E_ARG, E_CAPACITY for this rank's arguments; E_CAPACITY, E_PEER, E_MISMATCH for those of
  /// others, and E_CAPACITY on all ranks if one would receive more than max_recv_rows.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, HostStream) {
    begin_dispatch(in);
    move_rows(wire_.bytes(), sent_, received_, out_rows_, out_first_, in_rows_, in_first_);
    rounds_.opened();
    return wire_.tokens(received_, total_);
  }
  /// prepare() in halves: the first exchanges the counts and starts to send the rows, the second waits for them. E_STATE out of order.
  void prepare_send(RoutedTokens<Act, Config::hidden> const& in, HostStream) {
    begin_dispatch(in);
    start_rows(Half::dispatch, wire_.bytes(), sent_, received_, out_rows_, out_first_, in_rows_, in_first_);
    rounds_.opened();
  }
  Tokens prepare_receive(HostStream) {
    half_.expect(Half::dispatch, "prepare_receive: called without prepare_send");
    finish_rows();
    return wire_.tokens(received_, total_);
  }

  /// [rows of the last prepare(), H]: the experts write every row.
  Rows<Partial> expert_output() { return make_rows(partial_, total_, hidden_); }

  /// Collective. out[M, H] = Σ over the ranks that had a token, float32 in rank order, one rounding; zeros for a token with no destination.
  /// E_STATE without prepare(); E_ARG if `out` has another shape; E_PEER.
  void finalize(Rows<Act, Config::hidden> out, HostStream) {
    half_.expect(Half::none, "finalize: called between the halves of another call");
    rounds_.close([&] { moe::detail::check_output(out, own_rows_, hidden_); });
    move_rows(output_bytes(), reinterpret_cast<std::byte*>(partial_), reinterpret_cast<std::byte*>(returned_), in_rows_, in_first_,
              out_rows_, out_first_);
    sum_tokens(out);
  }
  /// finalize() in halves, as those of prepare().
  void finalize_send(HostStream) {
    half_.expect(Half::none, "finalize_send: called between the halves of another call");
    rounds_.close([] {});
    start_rows(Half::combine, output_bytes(), reinterpret_cast<std::byte*>(partial_), reinterpret_cast<std::byte*>(returned_), in_rows_,
               in_first_, out_rows_, out_first_);
  }
  void finalize_receive(Rows<Act, Config::hidden> out, HostStream) {
    half_.expect(Half::combine, "finalize_receive: called without finalize_send");
    moe::detail::check_output(out, own_rows_, hidden_);
    finish_rows();
    sum_tokens(out);
  }

  /// Collective. Call it instead of prepare() or finalize(), or of one half: this rank gives up the round, its peers get E_PEER; once its
  /// outputs are under way the peers have all they need, and only its own results are lost. Never throws.
  void abandon(HostStream) {
    Half const half = half_.which();
    try {
      if (half != Half::none) finish_rows();
    } catch (Error const&) {  // the communicator reports its failure again on the next call
    }
    if (half != Half::combine) rounds_.abandon();
  }

 private:
  /// A rank that a token is sent to, and the token's row among those for that rank (later, among all rows sent).
  struct Destination {
    std::int32_t rank;
    std::int32_t row;
  };

  using Half = moe::detail::Half;

  void begin_dispatch(RoutedTokens<Act, Config::hidden> const& in) {
    half_.expect(Half::none, "prepare: called between the halves of another call");
    rounds_.open(in.hidden.extent(0), [&] {
      std::fill_n(rounds_.extra(), rounds_.size(), 0);
      moe::detail::check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_);
      moe::detail::check_ids(in.topk_ids, num_physical_);
      find_destinations(in.topk_ids, rounds_.extra());
    });
    own_rows_ = in.hidden.extent(0);
    check_capacity();
    lay_out();
    pack(in);
  }
  std::int64_t output_bytes() const { return hidden_ * static_cast<std::int64_t>(sizeof(Partial)); }
  void sum_tokens(Rows<Act, Config::hidden> out) const {
    for (std::int64_t t = 0; t < own_rows_; ++t) sum_token(t, row_ptr(out, t));
  }

  void take_memory(Comm& comm, ExpertPlacement const& placement, Params const& params, Arena<Space>& arena) {
    int const ranks = comm.size();
    for (std::int64_t** p : {&out_rows_, &out_first_, &in_rows_, &in_first_, &counts_, &offsets_, &peer_counts_, &peer_offsets_}) {
      *p = arena.template take_filled<std::int64_t>(ranks, 0);
    }
    moe::detail::check_exchange(placement, ranks, max_tokens_, params.max_recv_rows);
    std::int64_t const max_sent = std::max<std::int64_t>(max_tokens_ * max_destinations_, 1);
    if (max_sent > INT32_MAX) {
      throw Error(ErrorCode::config,
                  text("max_tokens_per_rank: ", max_tokens_, " tokens to ", max_destinations_, " ranks each exceed ", INT32_MAX));
    }
    owner_ = arena.template take<std::int32_t>(num_physical_);
    local_ = arena.template take<std::int32_t>(num_physical_);
    std::copy_n(placement.owners().data(), num_physical_, owner_);
    std::copy_n(placement.locals().data(), num_physical_, local_);
    num_destinations_ = arena.template take<std::int32_t>(max_tokens_);
    destinations_ = arena.template take<Destination>(max_sent);
    sent_ = arena.template take<std::byte>(max_sent * wire_.bytes());
    returned_ = arena.template take<Partial>(max_sent * hidden_);
    std::int64_t const max_received = std::max<std::int64_t>(max_rows_, 1);
    received_ = arena.template take<std::byte>(max_received * wire_.bytes());
    partial_ = arena.template take<Partial>(max_received * hidden_);
  }

  bool is_expert(std::int32_t id) const { return id >= 0 && id < num_physical_; }

  // The ranks of each token, ascending and without repeats; `counts`: how many tokens go to each rank.
  void find_destinations(Rows<std::int32_t const> ids, std::int64_t* counts) {
    for (std::int64_t t = 0; t < ids.extent(0); ++t) {
      Destination* const first = destinations_ + t * max_destinations_;
      Destination* last = first;
      for (std::int64_t j = 0; j < topk_; ++j) {
        if (!is_expert(ids(t, j))) {
          continue;
        }
        std::int32_t const rank = owner_[ids(t, j)];
        Destination* at = last;
        while (at != first && (at - 1)->rank >= rank) {
          --at;
        }
        if (at == last || at->rank != rank) {
          std::copy_backward(at, last, last + 1);
          ++last;
          at->rank = rank;
        }
      }
      num_destinations_[t] = static_cast<std::int32_t>(last - first);
      for (Destination* d = first; d != last; ++d) {
        d->row = static_cast<std::int32_t>(counts[d->rank]++);
      }
    }
  }

  void check_capacity() const {
    for (int to = 0; to < rounds_.size(); ++to) {
      std::int64_t rows = 0;
      for (int from = 0; from < rounds_.size(); ++from) {
        rows += rounds_.extra(from)[to];
      }
      if (rows > max_rows_) {
        throw TransportError(ErrorCode::capacity, rounds_.rank(), to, "dispatch", rounds_.round(),
                             text("rank ", to, " would receive ", rows, " rows, more than max_recv_rows ", max_rows_));
      }
    }
  }

  void lay_out() {
    std::int64_t sent = 0;
    total_ = 0;
    for (int r = 0; r < rounds_.size(); ++r) {
      out_rows_[r] = rounds_.extra(rounds_.rank())[r];
      out_first_[r] = sent;
      sent += out_rows_[r];
      in_rows_[r] = rounds_.extra(r)[rounds_.rank()];
      in_first_[r] = total_;
      total_ += in_rows_[r];
    }
  }

  void pack(RoutedTokens<Act, Config::hidden> const& in) {
    for (std::int64_t t = 0; t < own_rows_; ++t) {
      std::byte const* packed = nullptr;
      for (std::int32_t d = 0; d < num_destinations_[t]; ++d) {
        Destination const to = destinations_[t * max_destinations_ + d];
        std::byte* record = to.rank == rounds_.rank() ? received_ + (in_first_[to.rank] + to.row) * wire_.bytes()
                                                      : sent_ + (out_first_[to.rank] + to.row) * wire_.bytes();
        if (packed == nullptr) {
          wire_.pack(quant_, in, t, record);
          packed = record;
        } else {
          std::copy_n(packed, wire_.bytes(), record);
        }
        std::int32_t* ids = wire_.ids(record);
        for (std::int64_t j = 0; j < topk_; ++j) {
          std::int32_t const id = in.topk_ids(t, j);
          ids[j] = is_expert(id) && owner_[id] == to.rank ? local_[id] : kNoExpert;
        }
      }
    }
  }

  // Byte counts and offsets of rows of `row_bytes` that move to their ranks; this rank's rows are already in place.
  void count_bytes(std::int64_t row_bytes, std::int64_t const* from_rows, std::int64_t const* from_first, std::int64_t const* to_rows,
                   std::int64_t const* to_first) {
    for (int r = 0; r < rounds_.size(); ++r) {
      std::int64_t const moved = r == rounds_.rank() ? 0 : row_bytes;
      counts_[r] = from_rows[r] * moved;
      offsets_[r] = from_first[r] * row_bytes;
      peer_counts_[r] = to_rows[r] * moved;
      peer_offsets_[r] = to_first[r] * row_bytes;
    }
  }
  void move_rows(std::int64_t row_bytes, std::byte const* from, std::byte* to, std::int64_t const* from_rows,
                 std::int64_t const* from_first, std::int64_t const* to_rows, std::int64_t const* to_first) {
    count_bytes(row_bytes, from_rows, from_first, to_rows, to_first);
    rounds_.comm().all_to_all_v(from, counts_, offsets_, to, peer_counts_, peer_offsets_, {});
  }
  // The same without waiting, if the communicator can.
  void start_rows(Half half, std::int64_t row_bytes, std::byte const* from, std::byte* to, std::int64_t const* from_rows,
                  std::int64_t const* from_first, std::int64_t const* to_rows, std::int64_t const* to_first) {
    if constexpr (TransferOf<Comm>::kStarts) {
      count_bytes(row_bytes, from_rows, from_first, to_rows, to_first);
      rounds_.comm().start_all_to_all_v(transfer_, from, counts_, offsets_, to, peer_counts_, peer_offsets_);
    } else {
      move_rows(row_bytes, from, to, from_rows, from_first, to_rows, to_first);
    }
    half_.set(half);
  }
  void finish_rows() {
    half_.set(Half::none);
    if constexpr (TransferOf<Comm>::kStarts) rounds_.comm().finish(transfer_);
  }

  void sum_token(std::int64_t t, Act* out) const {
    std::array<float, 512> sum;
    for (std::int64_t begin = 0; begin < hidden_; begin += static_cast<std::int64_t>(sum.size())) {
      std::int64_t const width = std::min(hidden_ - begin, static_cast<std::int64_t>(sum.size()));
      sum.fill(0.0F);
      for (std::int32_t d = 0; d < num_destinations_[t]; ++d) {
        Destination const at = destinations_[t * max_destinations_ + d];
        Partial const* row = at.rank == rounds_.rank() ? partial_ + (in_first_[at.rank] + at.row) * hidden_
                                                       : returned_ + (out_first_[at.rank] + at.row) * hidden_;
        for (std::int64_t i = 0; i < width; ++i) {
          sum[static_cast<std::size_t>(i)] += to_float(row[begin + i]);
        }
      }
      moe::detail::convert_row(sum.data(), width, out + begin);
    }
  }

  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int num_physical_;
  std::int64_t max_destinations_;  // of one token, at most
  std::int64_t max_rows_;
  WireRow<Config, Quant> wire_;
  std::int32_t* owner_ = nullptr;             // [P]
  std::int32_t* local_ = nullptr;             // [P]
  std::int32_t* num_destinations_ = nullptr;  // [T_max]
  Destination* destinations_ = nullptr;       // [T_max, max_destinations_]
  std::byte* sent_ = nullptr;                 // records by destination, then token
  std::byte* received_ = nullptr;             // [max_rows_] records
  Partial* partial_ = nullptr;                // [max_rows_, H]
  Partial* returned_ = nullptr;               // rows in the order of sent_
  std::int64_t* out_rows_ = nullptr;          // [R] rows to each rank
  std::int64_t* out_first_ = nullptr;         // [R] first of those rows in sent_ and returned_
  std::int64_t* in_rows_ = nullptr;           // [R] rows from each rank
  std::int64_t* in_first_ = nullptr;          // [R] first of those rows in received_ and partial_
  std::int64_t* counts_ = nullptr;            // [R] four arrays for the collective in progress, bytes
  std::int64_t* offsets_ = nullptr;
  std::int64_t* peer_counts_ = nullptr;
  std::int64_t* peer_offsets_ = nullptr;
  std::int64_t own_rows_ = 0;
  std::int64_t total_ = 0;
  std::optional<Error> refused_;
  ExchangeRounds<Comm> rounds_;
  typename TransferOf<Comm>::type transfer_{rounds_.comm()};
  moe::detail::OpenHalf half_;  // of the call whose rows are under way
};

}  // namespace detail
}  // namespace moe::backends
