// SPDX-License-Identifier: Apache-2.0
// backends/window/host/standard.hpp: the standard-format exchanges over a window of host memory: a row for each (token, rank) and its
// weighted sum back. HighThroughput, OneSided and TwoSided differ in where rows lie and in how they get there.
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
#include "moe/core/concepts.hpp"

namespace moe::detail {

/// Where rows lie on arrival, and how they travel.
enum class RowTransport : std::uint8_t {
  packed,     ///< by source rank, then by token, stored there by the sender; the source reads outputs back
  workspace,  ///< [source][most rows of any rank], rest empty; sums in choice order
  queues,     ///< packed, through bounded queues both ways
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
        num_physical_(placement.num_physical()),
        num_local_(placement.ep_size() == comm.size() ? placement.num_local(comm.rank()) : 0),
        max_destinations_(std::min<std::int64_t>(topk_, comm.size())),
        max_rows_(params.max_recv_rows == 0 ? max_tokens * comm.size() : params.max_recv_rows),
        wire_(hidden_, topk_),
        refused_(error_of([&] { take_memory(placement, params, arena); })),
        group_(comm, make_contract<Config, Quant, Partial>(Backend::kName, shape, max_tokens, placement, contract_sizes(params)), refused_,
               arena, params.manager, offsets_.user_bytes(), params.window),
        rounds_(group_.window(), rounds_at_, group_.tag()) {}

  /// Most rows that the experts are given.
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
  /// Collective. out[M, H] = the sum over the ranks that had a token, float32, one rounding; zeros for a token that went nowhere.
  /// E_STATE without prepare(); E_ARG if `out` has another shape, E_PEER to the others: the round stays open.
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
  /// Collective. Instead of prepare() or finalize(): this rank gives up the round, its peers get E_PEER. With handles, if a dispatch has no
  /// combine yet, instead of the combine of the oldest such: it is over on all ranks, a newer one goes on. Never throws.
  void abandon(HostStream) {
    Record* const given_up = order_.dispatched() ? &record(last_) : oldest_dispatched();
    rounds_.abandon(given_up != nullptr ? WindowCall::combine : WindowCall::dispatch);
    if (given_up != nullptr) {
      given_up->state = State::idle;
    }
    order_.set_idle();
  }

  /// Collective. prepare() for callers with two batches under way: at most two dispatches may be without their combine. With `like`, the
  /// same routing again as that dispatch, which must be one of the last two: places and counts are taken from it. E_STATE if it is
  /// stale, E_ARG if it had another number of rows.
  WindowTicket dispatch(Routed const& in, std::optional<WindowTicket> like = std::nullopt) {
    WindowCall const call = like ? WindowCall::cached_dispatch : WindowCall::dispatch;
    if (like) {
      rounds_.expect_live(like->generation, "prepare");
    }
    Record& r = records_[rounds_.generation() & 1U];
    Record const* const from = like ? &record(*like) : nullptr;
    rounds_.send(call, in.hidden.extent(0), [&] {
      check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_);
      check_ids(in.topk_ids, num_physical_);
      if (from == nullptr) {
        std::fill_n(r.matrix + rank_ * ranks_, ranks_, 0);
        find_destinations(r, in.topk_ids);
      } else if (from->rows != in.hidden.extent(0)) {
        throw Error(ErrorCode::argument, text("cached layout: ", in.hidden.extent(0), " rows, the layout is of ", from->rows));
      }
    });
    WindowTicket const ticket{0, rounds_.generation()};
    r.generation = ticket.generation;
    r.rows = in.hidden.extent(0);
    r.state = State::idle;
    if (from == nullptr) {
      send_counts(r);
      rounds_.receive(call);
      receive_counts(r);
    } else {
      rounds_.receive(call);
      if (from != &r) {
        copy_layout(*from, r);
      }
    }
    move_rows(r, in);
    r.state = State::dispatched;
    return ticket;
  }
  /// What a dispatch received.
  Tokens tokens(WindowTicket ticket) { return wire_.tokens(received(record(ticket)), record(ticket).total); }
  Rows<Partial> expert_output(WindowTicket ticket) { return make_rows(output(record(ticket)), record(ticket).total, hidden_); }
  /// Collective. finalize() of one dispatch. E_STATE for a handle that is stale, was combined or was abandoned by a rank.
  void combine(WindowTicket ticket, Output out) {
    rounds_.expect_live(ticket.generation, "finalize");
    Record& r = record(ticket);
    if (r.generation != ticket.generation || r.state != State::dispatched) {
      throw Error(ErrorCode::state, "finalize: called out of order for this handle");
    }
    try {
      rounds_.send(WindowCall::combine, 0, [&] { check_output(out, r.rows, hidden_); });
      rounds_.receive(WindowCall::combine);
    } catch (Error const&) {
      r.state = rounds_.abandoned() ? State::idle : r.state;
      throw;
    }
    if constexpr (Transport == RowTransport::queues) {
      return_rows(r);
    }
    for (std::int64_t t = 0; t < r.rows; ++t) {
      Destination const* const first = r.destinations + t * max_destinations_;
      sum_rows(
          r.num_destinations[t], [&](std::int64_t d) { return returned_row(r, first[d]); }, [](std::int64_t) { return 1.0F; }, hidden_,
          row_ptr(out, t));
    }
    r.state = State::idle;
  }

  /// Rows that this rank received from rank `source` in the last prepare().
  std::int64_t rows_from(int source) const { return records_[last_.generation & 1U].matrix[source * ranks_ + rank_]; }
  /// Slots with work for each local expert in the last prepare(), each rounded up to a multiple of `alignment`. [L] into `counts`.
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
  WindowTicket last() const { return last_; }
  Window& window() { return group_.window(); }
  /// Collective, between rounds: continues as if `round` operations had been done.
  void preset_round(std::uint32_t round) {
    rounds_.preset(round);
    for (int from = 0; from < ranks_; ++from) {
      *window().template own<std::uint32_t>(arrived_ + 64 * static_cast<std::size_t>(from)) = round;
      for (int parity = 0; parity < 2; ++parity) {
        for (int to = 0; to < ranks_; ++to) {
          *window().template own<std::uint64_t>(count_at(parity, from, to)) = comm::count_word(round, 0, 0);
        }
      }
    }
    window().barrier();
  }

 private:
  /// A rank that a token goes to, and its row among those that go there.
  struct Destination {
    std::int32_t rank;
    std::int32_t row;
  };
  enum class State : std::uint8_t { idle, dispatched };
  /// One dispatch on this rank. Two, used in turn.
  struct Record {
    State state = State::idle;
    std::uint32_t generation = 0;
    std::int64_t rows = 0;                     // own tokens
    std::int64_t total = 0;                    // rows received, empty ones included
    std::int64_t stride = 0;                   // workspace: rows of each source's part
    std::int32_t* num_destinations = nullptr;  // [T_max]
    Destination* destinations = nullptr;       // [T_max, max_destinations_]
    std::int64_t* matrix = nullptr;            // [R, R] rows from each rank to each rank
    std::size_t rows_at = 0;                   // received records in the window
    std::size_t output_at = 0;                 // [max_rows_, H] in the window
    std::byte* rows_buffer = nullptr;          // queues: both in private memory
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
    owner_ = arena.template take<std::int32_t>(num_physical_);
    local_ = arena.template take<std::int32_t>(num_physical_);
    std::copy_n(placement.owners().data(), num_physical_, owner_);
    std::copy_n(placement.locals().data(), num_physical_, local_);
    for (std::int64_t** p : {&first_, &sent_, &got_}) {
      *p = arena.template take_filled<std::int64_t>(ranks_, 0);
    }
    staging_ = arena.template take<std::byte>(wire_.bytes());
    rounds_at_ = offsets_.take(WindowRounds<Window>::bytes(ranks_));
    arrived_ = offsets_.take(64 * ranks_);
    counts_ = {offsets_.take(8 * std::int64_t{ranks_} * ranks_), offsets_.take(8 * std::int64_t{ranks_} * ranks_)};
    std::int64_t const output_bytes = hidden_ * static_cast<std::int64_t>(sizeof(Partial));
    for (Record& r : records_) {
      r.num_destinations = arena.template take<std::int32_t>(max_tokens_);
      r.destinations = arena.template take<Destination>(max_tokens_ * max_destinations_);
      r.matrix = arena.template take_filled<std::int64_t>(std::int64_t{ranks_} * ranks_, 0);
      if constexpr (kQueues) {
        r.rows_buffer = arena.template take<std::byte>(max_rows_ * wire_.bytes());
        r.output_buffer = arena.template take<Partial>(max_rows_ * hidden_);
      } else {
        r.rows_at = offsets_.take(max_rows_ * wire_.bytes());
        r.output_at = offsets_.take(max_rows_ * output_bytes);
      }
    }
    if constexpr (kQueues) {
      returned_ = arena.template take<Partial>(max_tokens_ * max_destinations_ * hidden_);
      places_ = arena.template take<std::int32_t>(max_tokens_ * max_destinations_);
      queues_ = WindowQueues<Window>(offsets_, ranks_, params.queue_depth, params.queue_entry_bytes, std::max(wire_.bytes(), output_bytes));
    }
  }

  Record& record(WindowTicket ticket) { return records_[ticket.generation & 1U]; }
  Record* oldest_dispatched() {
    Record* oldest = nullptr;
    for (Record& r : records_) {
      if (r.state == State::dispatched && rounds_.live(r.generation) &&
          (oldest == nullptr || !comm::round_reached(r.generation, oldest->generation))) {
        oldest = &r;
      }
    }
    return oldest;
  }
  bool is_expert(std::int32_t id) const { return id >= 0 && id < num_physical_; }
  std::byte* received(Record& r) { return kQueues ? r.rows_buffer : window().template own<std::byte>(r.rows_at); }
  Partial* output(Record& r) { return kQueues ? r.output_buffer : window().template own<Partial>(r.output_at); }
  std::size_t count_at(int parity, int from, int to) const {
    return counts_[static_cast<std::size_t>(parity)] + 8 * static_cast<std::size_t>(from * ranks_ + to);
  }
  /// The first row of rank `from` on rank `to`.
  std::int64_t start(Record const& r, int from, int to) const {
    std::int64_t first = kWorkspace ? from * r.stride : 0;
    for (int s = 0; s < from && !kWorkspace; ++s) {
      first += r.matrix[s * ranks_ + to];
    }
    return first;
  }

  // The ranks of each token, each once: ascending, or in choice order. Counts are this rank's row of the matrix.
  void find_destinations(Record& r, Rows<std::int32_t const> ids) {
    for (std::int64_t t = 0; t < ids.extent(0); ++t) {
      Destination* const first = r.destinations + t * max_destinations_;
      Destination* last = first;
      for (std::int64_t j = 0; j < topk_; ++j) {
        if (!is_expert(ids(t, j))) {
          continue;
        }
        std::int32_t const to = owner_[ids(t, j)];
        if (std::any_of(first, last, [&](Destination const& d) { return d.rank == to; })) {
          continue;
        }
        Destination* at = last++;
        for (; !kWorkspace && at != first && (at - 1)->rank > to; --at) {
          *at = *(at - 1);
        }
        at->rank = to;
      }
      r.num_destinations[t] = static_cast<std::int32_t>(last - first);
      for (Destination* d = first; d != last; ++d) {
        d->row = static_cast<std::int32_t>(r.matrix[rank_ * ranks_ + d->rank]++);
      }
    }
  }
  void send_counts(Record const& r) {
    for (int i = 1; i <= ranks_; ++i) {
      int const peer = (rank_ + i) % ranks_;
      for (int to = 0; to < ranks_; ++to) {
        window().publish(peer, count_at(rounds_.parity(), rank_, to), rounds_.word(r.matrix[rank_ * ranks_ + to]));
      }
    }
  }
  // The whole matrix, the same on all ranks, and so the same verdict on capacity.
  void receive_counts(Record& r) {
    for (int from = 0; from < ranks_; ++from) {
      for (int to = 0; to < ranks_; ++to) {
        r.matrix[from * ranks_ + to] = comm::word_count(
            window().wait_count(count_at(rounds_.parity(), from, to), rounds_.round(), comm::ExchangePhase::dispatch_counts, from));
      }
    }
    r.stride = 0;
    for (int from = 0; from < ranks_; ++from) {
      r.stride = std::max(r.stride, rounds_.rows(from));
    }
    for (int to = 0; to < ranks_; ++to) {
      std::int64_t rows = kWorkspace ? r.stride * ranks_ : 0;
      for (int from = 0; from < ranks_ && !kWorkspace; ++from) {
        rows += r.matrix[from * ranks_ + to];
      }
      if (rows > max_rows_) {
        throw TransportError(ErrorCode::capacity, rank_, to, "dispatch", rounds_.round(),
                             text("rank ", to, " would receive ", rows, " rows, more than max_recv_rows ", max_rows_));
      }
      r.total = to == rank_ ? rows : r.total;
    }
  }
  void copy_layout(Record const& from, Record& to) {
    to.total = from.total;
    to.stride = from.stride;
    std::copy_n(from.matrix, std::int64_t{ranks_} * ranks_, to.matrix);
    std::copy_n(from.num_destinations, from.rows, to.num_destinations);
    std::copy_n(from.destinations, from.rows * max_destinations_, to.destinations);
  }

  // Token t's record in the staging place, with the ids of rank `to`.
  void write_record(Routed const& in, std::int64_t t, int to, std::byte* record) {
    std::copy_n(staging_, wire_.bytes(), record);
    std::int32_t* const ids = wire_.ids(record);
    for (std::int64_t j = 0; j < topk_; ++j) {
      std::int32_t const id = in.topk_ids(t, j);
      ids[j] = is_expert(id) && owner_[id] == to ? local_[id] : kNoExpert;
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
      first_[to] = start(r, rank_, to);
    }
    for (std::int64_t t = 0; t < r.rows; ++t) {
      for (std::int32_t d = 0; d < r.num_destinations[t]; ++d) {
        Destination const to = r.destinations[t * max_destinations_ + d];
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
        std::memset(record, 0, static_cast<std::size_t>(wire_.bytes()));  // experts that read all rows find numbers
        std::fill_n(wire_.ids(record), topk_, kNoExpert);
      }
    }
  }

  // Queues: places_ holds the tokens for each rank, by rank; first_[r] is where rank r's begin.
  void list_tokens(Record const& r) {
    std::int64_t end = 0;
    for (int to = 0; to < ranks_; ++to) {
      first_[to] = end;
      end += r.matrix[rank_ * ranks_ + to];
    }
    for (std::int64_t t = 0; t < r.rows; ++t) {
      for (std::int32_t d = 0; d < r.num_destinations[t]; ++d) {
        Destination const to = r.destinations[t * max_destinations_ + d];
        places_[first_[to.rank] + to.row] = static_cast<std::int32_t>(t);
      }
    }
  }
  void queue_rows(Record& r, Routed const& in) {
    list_tokens(r);
    auto write = [&](int to, std::int64_t i, std::byte* record) {
      std::int64_t const t = places_[first_[to] + i];
      wire_.pack(quant_, in, t, staging_);
      write_record(in, t, to, record);
    };
    auto place = [&](int from, std::int64_t i) { return r.rows_buffer + (start(r, from, rank_) + i) * wire_.bytes(); };
    for (std::int64_t i = 0; i < r.matrix[rank_ * ranks_ + rank_]; ++i) {
      write(rank_, i, place(rank_, i));
    }
    queues_.exchange(window(), wire_.bytes(), r.matrix + rank_ * ranks_, incoming(r), sent_, got_, rounds_.round(),
                     comm::ExchangePhase::dispatch_rows, write,
                     [&](int from, std::int64_t i, std::byte const* record) { std::copy_n(record, wire_.bytes(), place(from, i)); });
  }
  void return_rows(Record& r) {
    list_tokens(r);
    std::int64_t const bytes = hidden_ * static_cast<std::int64_t>(sizeof(Partial));
    std::int64_t const* const to = incoming(r);
    queues_.exchange(
        window(), bytes, to, r.matrix + rank_ * ranks_, sent_, got_, rounds_.round(), comm::ExchangePhase::combine_rows,
        [&](int rank, std::int64_t i, std::byte* record) {
          std::memcpy(record, r.output_buffer + (start(r, rank, rank_) + i) * hidden_, static_cast<std::size_t>(bytes));
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
  Partial const* returned_row(Record& r, Destination d) {
    if constexpr (kQueues) {
      return d.rank == rank_ ? r.output_buffer + (start(r, rank_, rank_) + d.row) * hidden_
                             : returned_ + (first_[d.rank] + d.row) * hidden_;
    } else {
      return window().template at<Partial>(d.rank, r.output_at) + (start(r, rank_, d.rank) + d.row) * hidden_;
    }
  }

  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int ranks_;
  int rank_;
  int num_physical_;
  int num_local_;
  std::int64_t max_destinations_;  // of one token
  std::int64_t max_rows_;
  WireRow<Config, Quant> wire_;
  WindowOffsets offsets_;
  std::size_t rounds_at_ = 0;
  std::size_t arrived_ = 0;              // u32 [rank], 64 bytes apart: that rank's rows of the round are there
  std::array<std::size_t, 2> counts_{};  // u64 [R][R]
  WindowQueues<Window> queues_;
  std::array<Record, 2> records_;
  std::int32_t* owner_ = nullptr;   // [P]
  std::int32_t* local_ = nullptr;   // [P]
  std::int64_t* first_ = nullptr;   // [R] scratch
  std::int64_t* sent_ = nullptr;    // [R] scratch
  std::int64_t* got_ = nullptr;     // [R] scratch
  std::byte* staging_ = nullptr;    // one record
  Partial* returned_ = nullptr;     // queues: rows that came back, by rank
  std::int32_t* places_ = nullptr;  // queues: tokens by rank
  std::array<std::int64_t, comm::kMaxWindowRanks> incoming_{};
  std::optional<Error> refused_;
  WindowGroup<Window> group_;
  WindowRounds<Window> rounds_;
  CallOrder order_;
  WindowTicket last_;
};

}  // namespace moe::detail
