// SPDX-License-Identifier: Apache-2.0
// backends/window/host/standard.hpp: the standard-format exchanges over a window of host memory: a row for each (token, rank), and its
// weighted sum returned. HighThroughput, OneSided and TwoSided differ in where rows lie and in how they travel.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "moe/backends/common/wire_row.hpp"
#include "moe/backends/window/host/batch.hpp"
#include "moe/backends/window/host/queues.hpp"
#include "moe/backends/window/host/rounds.hpp"
#include "moe/backends/window/host/row_layout.hpp"
#include "moe/core/contract/concepts.hpp"

namespace moe::detail {

/// Where rows lie on arrival, and how they travel.
enum class RowTransport : std::uint8_t {
  packed,     ///< by source rank, then by token; the sender stores rows there and reads the outputs back
  workspace,  ///< [source][most rows of any rank], unused rows without expert; sums in choice order
  queues,     ///< packed, through bounded queues in both directions
};

/// Backend gives kName and Params{max_recv_rows, window, manager[, queue_depth, queue_entry_bytes]}.
template <class Backend, RowTransport Transport, class Config, class Quant, class Partial>
class HostStandardExchange {
 public:
  using Space = space::host;
  using Window = typename Backend::Window;
  using Comm = typename Window::Comm;
  using Act = typename Config::Act;
  using Tokens = StandardTokensOf<Config, Quant>;
  using Params = typename Backend::Params;
  using Routed = RoutedTokens<Act, Config::hidden>;
  using Output = Rows<Act, Config::hidden>;

  /// Collective. max_tokens: T_max, most rows of one prepare() on any rank. E_CONFIG if this rank's arguments are wrong, E_CAPACITY if
  /// memory does not suffice (then the peers get E_PEER); E_MISMATCH on all ranks, naming the field, if ranks disagree; E_UNSUPPORTED
  /// if ranks share no memory.
  HostStandardExchange(Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                       Quant const& quant, Params const& params, Arena<Space>& arena)
      : quant_(quant),
        hidden_(shape.hidden()),
        topk_(shape.topk()),
        max_tokens_(max_tokens),
        ranks_(comm.size()),
        rank_(comm.rank()),
        num_local_(placement.ep_size() == comm.size() ? placement.num_local(comm.rank()) : 0),
        max_rows_(params.max_recv_rows == 0 ? max_tokens * comm.size() : params.max_recv_rows),
        layouts_(ranks_, rank_, topk_, max_tokens_, max_rows_),
        wire_(hidden_, topk_),
        refused_(error_of([&] { take_memory(placement, params, arena); })),
        group_(comm, make_contract<Config, Quant, Partial>(Backend::kName, shape, max_tokens, placement, contract_sizes(params)), refused_,
               arena, params.manager, offsets_.user_bytes(), params.window),
        rounds_(group_.window(), rounds_at_, group_.tag()) {
    handles_.set_counter(0, rounds_.dispatches());
  }

  /// The most rows that the experts can get.
  std::int64_t max_rows() const { return max_rows_; }

  /// Collective. Rows for this rank's experts, with local ids, in the window; valid until the experts are done and finalize() is called.
  /// E_STATE without finalize() after the last prepare(); E_ARG, E_CAPACITY for this rank's arguments; E_CAPACITY, E_PEER, E_MISMATCH for
  /// those of others, and E_CAPACITY on all ranks, before any row moves, if one would receive more than max_recv_rows. TransportError of
  /// the window.
  Tokens prepare(Routed const& in, HostStream) {
    order_.expect_idle();
    last_ = dispatch(in);
    order_.set_dispatched();
    return tokens(last_);
  }
  /// [rows of the last prepare(), H]: the experts write every row, weighted and summed over this rank's experts.
  Rows<Partial> expert_output() { return expert_output(last_); }
  /// Collective. out[M, H] = the sum over the ranks that had a token, float32, one rounding; zeros for a token with no destination. E_STATE
  /// without prepare(); E_ARG if `out` has another shape, E_PEER to the others: the round stays open.
  void finalize(Output out, HostStream) {
    order_.expect_dispatched("finalize");
    try {
      combine(last_, out);
    } catch (Error const&) {
      if (rounds_.abandoned()) {
        order_.set_idle();
      }
      throw;
    }
    order_.set_idle();
  }
  /// Collective. Call it instead of prepare() or finalize(): this rank gives up the round, its peers get E_PEER. With handles, call it
  /// instead of the combine of the oldest dispatch that has none yet: that dispatch ends on all ranks, a newer one goes on. Never throws.
  void abandon(HostStream) {
    std::optional<Handle> const given_up = order_.dispatched() ? last_ : handles_.oldest();
    rounds_.abandon(given_up ? WindowCall::combine : WindowCall::dispatch);
    if (given_up) {
      handles_.record(*given_up).state = DispatchState::idle;
    }
    order_.set_idle();
  }

  /// Collective. prepare() for callers with two batches in progress: at most two dispatches may be without their combine. With `like`, the
  /// same routing as that dispatch, which must be one of the last two: row positions and counts are copied from it. E_STATE if it is stale,
  /// E_ARG if it had another number of rows.
  Handle dispatch(Routed const& in, std::optional<Handle> like = std::nullopt) {
    WindowCall const call = like ? WindowCall::cached_dispatch : WindowCall::dispatch;
    Record const* const from = like ? &handles_.expect_live(*like, "prepare") : nullptr;
    Record& r = handles_.record(handles_.next(0));
    rounds_.send(call, in.hidden.extent(0), [&] {
      check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_);
      check_ids(in.topk_ids, layouts_.num_physical());
      if (from == nullptr) {
        layouts_.find_destinations(r, in.topk_ids);
      } else if (from->rows != in.hidden.extent(0)) {
        throw Error(ErrorCode::argument, text("cached layout: ", in.hidden.extent(0), " rows, the layout is of ", from->rows));
      }
    });
    Handle const handle = handles_.open(0, DispatchState::idle);
    r.rows = in.hidden.extent(0);
    if (from == nullptr) {
      layouts_.send_counts(r, rounds_);
      rounds_.receive(call);
      layouts_.receive_counts(r, rounds_);
    } else {
      rounds_.receive(call);
      if (from != &r) {
        layouts_.copy(*from, r);
      }
    }
    move_rows(r, in);
    r.state = DispatchState::received;
    return handle;
  }
  /// The rows that a dispatch received.
  Tokens tokens(Handle handle) { return wire_.tokens(received(handles_.record(handle)), handles_.record(handle).total); }
  Rows<Partial> expert_output(Handle handle) { return make_rows(output(handles_.record(handle)), handles_.record(handle).total, hidden_); }
  /// Collective. finalize() of one dispatch. E_STATE for a handle that is stale, was combined or was abandoned by a rank.
  void combine(Handle handle, Output out) {
    Record& r = handles_.expect(handle, DispatchState::received, "finalize");
    try {
      rounds_.send(WindowCall::combine, 0, [&] { check_output(out, r.rows, hidden_); });
      rounds_.receive(WindowCall::combine);
    } catch (Error const&) {
      r.state = rounds_.abandoned() ? DispatchState::idle : r.state;
      throw;
    }
    if constexpr (Transport == RowTransport::queues) {
      return_rows(r);
    }
    for (std::int64_t t = 0; t < r.rows; ++t) {
      RowDestination const* const first = layouts_.destinations(r, t);
      sum_rows(
          r.num_destinations[t], [&](std::int64_t d) { return returned_row(r, first[d]); }, [](std::int64_t) { return 1.0F; }, hidden_,
          row_ptr(out, t));
    }
    r.state = DispatchState::idle;
  }

  /// Rows that this rank received from rank `source` in the last prepare().
  std::int64_t rows_from(int source) { return handles_.record(last_).matrix[source * ranks_ + rank_]; }
  /// The number of slots for each local expert in the last prepare(), each rounded up to a multiple of `alignment`. [L] into `counts`.
  void expert_counts(std::int32_t alignment, std::int32_t* counts) {
    Tokens const t = tokens(last_);
    std::fill_n(counts, num_local_, 0);
    for (std::int64_t i = 0; i < t.rows.extent(0); ++i) {
      for (std::int64_t j = 0; j < topk_; ++j) {
        if (t.topk_ids(i, j) != kNoExpert) {
          ++counts[t.topk_ids(i, j)];
        }
      }
    }
    std::for_each(counts, counts + num_local_, [&](std::int32_t& n) { n = (n + alignment - 1) / alignment * alignment; });
  }
  Handle last() const { return last_; }
  Window& window() const { return group_.window(); }
  /// Collective, between rounds: continues as if `round` operations had been done.
  void preset_round(std::uint32_t round) {
    rounds_.preset(round);
    for (int from = 0; from < ranks_; ++from) {
      *window().template own<std::uint32_t>(arrived_ + 64 * static_cast<std::size_t>(from)) = round;
    }
    layouts_.preset(window(), round);
    window().barrier();
  }

 private:
  /// One dispatch on this rank.
  struct Record : RowLayout {
    std::size_t rows_at = 0;           // received records in the window
    std::size_t output_at = 0;         // [max_rows_, H] in the window
    std::byte* rows_buffer = nullptr;  // queues: rows and outputs in private memory
    Partial* output_buffer = nullptr;
  };
  static constexpr bool kQueues = Transport == RowTransport::queues;
  static constexpr bool kWorkspace = Transport == RowTransport::workspace;

  ContractSizes contract_sizes(Params const& params) const {
    ContractSizes sizes{.max_recv_rows = max_rows_};
    if constexpr (kQueues) {
      sizes.queue_depth = params.queue_depth;
      sizes.queue_entry_bytes = params.queue_entry_bytes;
    }
    return sizes;
  }
  void take_memory(ExpertPlacement const& placement, Params const& params, Arena<Space>& arena) {
    check_exchange(placement, ranks_, max_tokens_, params.max_recv_rows);
    if (max_tokens_ > WindowRounds<Window>::kMaxRows) {
      throw Error(ErrorCode::capacity,
                  text("max_tokens_per_rank: ", max_tokens_, " exceeds the count word's ", WindowRounds<Window>::kMaxRows));
    }
    if (kWorkspace && params.max_recv_rows != 0) {
      throw Error(ErrorCode::argument, text("max_recv_rows: ", params.max_recv_rows, ", but the workspace is of the worst case"));
    }
    for (std::int64_t** p : {&first_, &sent_, &got_}) {
      *p = arena.template take_filled<std::int64_t>(ranks_, 0);
    }
    staging_ = arena.template take<std::byte>(wire_.bytes());
    rounds_at_ = offsets_.take(WindowRounds<Window>::bytes(ranks_));
    arrived_ = offsets_.take(64 * ranks_);
    layouts_.take(placement, offsets_, arena);
    std::int64_t const output_bytes = hidden_ * static_cast<std::int64_t>(sizeof(Partial));
    for (Record& r : handles_.records(0)) {
      layouts_.take(r, arena);
      if constexpr (kQueues) {
        r.rows_buffer = arena.template take<std::byte>(max_rows_ * wire_.bytes());
        r.output_buffer = arena.template take<Partial>(max_rows_ * hidden_);
      } else {
        r.rows_at = offsets_.take(max_rows_ * wire_.bytes());
        r.output_at = offsets_.take(max_rows_ * output_bytes);
      }
    }
    if constexpr (kQueues) {
      returned_ = arena.template take<Partial>(max_tokens_ * layouts_.max_destinations() * hidden_);
      tokens_by_rank_ = arena.template take<std::int32_t>(max_tokens_ * layouts_.max_destinations());
      queues_ = WindowQueues<Window>(offsets_, ranks_, params.queue_depth, params.queue_entry_bytes, std::max(wire_.bytes(), output_bytes));
    }
  }

  std::byte* received(Record& r) { return kQueues ? r.rows_buffer : window().template own<std::byte>(r.rows_at); }
  Partial* output(Record& r) { return kQueues ? r.output_buffer : window().template own<Partial>(r.output_at); }

  // Writes token t's record into the staging memory, with the ids of rank `to`.
  void write_record(Routed const& in, std::int64_t t, int to, std::byte* record) {
    std::copy_n(staging_, wire_.bytes(), record);
    std::int32_t* const ids = wire_.ids(record);
    for (std::int64_t j = 0; j < topk_; ++j) {
      ids[j] = layouts_.local_id(in.topk_ids(t, j), to);
    }
  }
  void move_rows(Record& r, Routed const& in) {
    if constexpr (kQueues) {
      queue_rows(r, in);
    } else {
      store_rows(r, in);
    }
  }
  void store_rows(Record& r, Routed const& in) {
    for (int to = 0; to < ranks_; ++to) {
      first_[to] = layouts_.start(r, rank_, to);
    }
    for (std::int64_t t = 0; t < r.rows; ++t) {
      for (std::int32_t d = 0; d < r.num_destinations[t]; ++d) {
        RowDestination const to = layouts_.destinations(r, t)[d];
        if (d == 0) {
          wire_.pack(quant_, in, t, staging_);
        }
        write_record(in, t, to.rank, window().template at<std::byte>(to.rank, r.rows_at) + (first_[to.rank] + to.row) * wire_.bytes());
      }
    }
    for (int i = 1; i <= ranks_; ++i) {
      window().publish((rank_ + i) % ranks_, arrived_ + 64 * static_cast<std::size_t>(rank_), rounds_.round());
    }
    for (int from = 0; from < ranks_; ++from) {
      window().wait_round(arrived_ + 64 * static_cast<std::size_t>(from), rounds_.round(), comm::ExchangePhase::dispatch_rows, from);
    }
    for (int from = 0; from < ranks_ && kWorkspace; ++from) {
      for (std::int64_t row = r.matrix[from * ranks_ + rank_]; row < r.stride; ++row) {
        std::byte* const record = received(r) + (from * r.stride + row) * wire_.bytes();
        std::memset(record, 0, static_cast<std::size_t>(wire_.bytes()));  // experts that read all rows read zeros
        std::fill_n(wire_.ids(record), topk_, kNoExpert);
      }
    }
  }

  // Queues: tokens_by_rank_ holds the tokens for each rank, by rank; first_[r] is where rank r's tokens begin.
  void list_tokens(Record const& r) {
    std::int64_t end = 0;
    for (int to = 0; to < ranks_; ++to) {
      first_[to] = end;
      end += layouts_.outgoing(r)[to];
    }
    for (std::int64_t t = 0; t < r.rows; ++t) {
      for (std::int32_t d = 0; d < r.num_destinations[t]; ++d) {
        RowDestination const to = layouts_.destinations(r, t)[d];
        tokens_by_rank_[first_[to.rank] + to.row] = static_cast<std::int32_t>(t);
      }
    }
  }
  void queue_rows(Record& r, Routed const& in) {
    list_tokens(r);
    auto write = [&](int to, std::int64_t i, std::byte* record) {
      std::int64_t const t = tokens_by_rank_[first_[to] + i];
      wire_.pack(quant_, in, t, staging_);
      write_record(in, t, to, record);
    };
    auto record_at = [&](int from, std::int64_t i) { return r.rows_buffer + (layouts_.start(r, from, rank_) + i) * wire_.bytes(); };
    for (std::int64_t i = 0; i < layouts_.outgoing(r)[rank_]; ++i) {
      write(rank_, i, record_at(rank_, i));
    }
    queues_.exchange(window(), wire_.bytes(), layouts_.outgoing(r), incoming(r), sent_, got_, rounds_.round(),
                     comm::ExchangePhase::dispatch_rows, write,
                     [&](int from, std::int64_t i, std::byte const* record) { std::copy_n(record, wire_.bytes(), record_at(from, i)); });
  }
  void return_rows(Record& r) {
    list_tokens(r);
    std::int64_t const bytes = hidden_ * static_cast<std::int64_t>(sizeof(Partial));
    std::int64_t const* const to = incoming(r);
    queues_.exchange(
        window(), bytes, to, layouts_.outgoing(r), sent_, got_, rounds_.round(), comm::ExchangePhase::combine_rows,
        [&](int rank, std::int64_t i, std::byte* record) {
          std::memcpy(record, r.output_buffer + (layouts_.start(r, rank, rank_) + i) * hidden_, static_cast<std::size_t>(bytes));
        },
        [&](int rank, std::int64_t i, std::byte const* record) {
          std::memcpy(returned_ + (first_[rank] + i) * hidden_, record, static_cast<std::size_t>(bytes));
        });
  }
  std::int64_t const* incoming(Record const& r) {
    for (int from = 0; from < ranks_; ++from) {
      incoming_[static_cast<std::size_t>(from)] = r.matrix[from * ranks_ + rank_];
    }
    return incoming_.data();
  }
  Partial const* returned_row(Record& r, RowDestination d) {
    if constexpr (kQueues) {
      return d.rank == rank_ ? r.output_buffer + (layouts_.start(r, rank_, rank_) + d.row) * hidden_
                             : returned_ + (first_[d.rank] + d.row) * hidden_;
    } else {
      return window().template at<Partial>(d.rank, r.output_at) + (layouts_.start(r, rank_, d.rank) + d.row) * hidden_;
    }
  }

  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int ranks_;
  int rank_;
  int num_local_;
  std::int64_t max_rows_;
  RowLayouts<Window, kWorkspace> layouts_;
  WireRow<Config, Quant> wire_;
  WindowOffsets offsets_;
  std::size_t rounds_at_ = 0;
  std::size_t arrived_ = 0;  // u32 [rank], 64 bytes apart: that rank's rows of the round have arrived
  WindowQueues<Window> queues_;
  HandleTable<Record> handles_;
  std::int64_t* first_ = nullptr;           // [R] scratch
  std::int64_t* sent_ = nullptr;            // [R] scratch
  std::int64_t* got_ = nullptr;             // [R] scratch
  std::byte* staging_ = nullptr;            // one record
  Partial* returned_ = nullptr;             // queues: returned rows, by rank
  std::int32_t* tokens_by_rank_ = nullptr;  // queues: tokens by rank
  std::array<std::int64_t, comm::kMaxWindowRanks> incoming_{};
  std::optional<Error> refused_;
  WindowGroup<Window> group_;
  WindowRounds<Window> rounds_;
  CallOrder order_;
  Handle last_;  // of the last prepare()
};

}  // namespace moe::detail
