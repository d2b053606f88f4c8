// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/all_to_all_v.hpp: AllToAllV between GPUs over comm::Nccl (or comm::Self): the exchange that a layer owns. Host
// C++ only; its kernels are in all_to_all_v.cuh.
#pragma once

#include "moe/backends/all_to_all_v.hpp"
#include "moe/backends/collective/device/rounds.hpp"

namespace moe::backends::detail {

template <class Comm, class Config, class Quant, class Partial>
class AllToAllVExchange<Comm, Config, Quant, Partial, space::cuda> {
 public:
  using Space = space::cuda;
  using Act = typename Config::Act;
  using Tokens = StandardTokensOf<Config, Quant>;
  using Params = typename AllToAllV<Comm>::Params;
  using Wire = WireRow<Config, Quant>;

  /// Collective. As on the host.
  AllToAllVExchange(Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement, Quant const& quant,
                    Params const& params, Arena<Space>& arena)
      : quant_(quant),
        hidden_(shape.hidden()),
        topk_(shape.topk()),
        max_tokens_(max_tokens),
        num_physical_(placement.num_physical()),
        max_rows_(params.max_recv_rows == 0 ? max_tokens * comm.size() : params.max_recv_rows),
        wire_(hidden_, topk_),
        fixed_(moe::detail::has_fixed_sizes(params.sizes, comm.size() * max_tokens * wire_.bytes(), params.max_recv_rows == 0)),
        refused_(moe::error_of([&] { take_memory(comm, placement, params, arena); })),
        rounds_(comm,
                moe::detail::make_contract<Config, Quant, Partial>(fixed_ ? "all_to_all_v, fixed" : AllToAllV<Comm>::kName, shape,
                                                                   max_tokens, placement, {.max_recv_rows = max_rows_}),
                fixed_ ? moe::detail::RoundLayout::fixed : moe::detail::RoundLayout::by_counts, max_rows_, refused_, arena) {}

  /// The most rows that the experts can get.
  std::int64_t max_rows() const { return max_rows_; }
  /// Whether forward() can be captured in a graph: no count reaches the host.
  bool capturable() const { return fixed_; }

  /// Collective. Rows by source rank, then by token, with local ids. Exact sizes: one row for each token that has an expert here; waits on
  /// the host for the counts and throws this round's errors, as on the host. Fixed sizes: [R T_max] rows, those past each rank's count
  /// without ids; throws only for this rank's arguments; other errors give NaN and are thrown by check().
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    auto const refused =
        rounds_.begin_dispatch(stream, [&] { moe::detail::check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_); });
    own_rows_ = refused ? 0 : in.hidden.extent(0);
    launch_plan(in.topk_ids, rounds_.opening(RoundCall::dispatch, own_rows_, refused), stream);
    if (fixed_) {
      launch_pack(in, stream);
      finish_fixed_dispatch(!refused, stream);
      if (refused) {
        join_combine(rounds_.opening(RoundCall::combine, 0, refused), stream);
        throw Error(*refused);
      }
    } else {
      rounds_.exchange(stream, [](auto&) {});
      rounds_.check_headers(RoundCall::dispatch, !refused, stream);
      rounds_.mark(stream);
      launch_pack(in, stream);  // overlaps with the host's wait
      rounds_.wait();
      if (refused) {
        throw Error(*refused);
      }
      lay_out();
      typename moe::detail::DeviceRounds<Comm>::Group group(rounds_.comm());
      move_rows(group, wire_.bytes(), sent_, received_, out_, in_, stream);
      group.end();
    }
    rounds_.opened();
    return wire_.tokens(received_, total_);
  }

  /// [rows of the last prepare(), H]: the experts write every row.
  Rows<Partial> expert_output() { return make_rows(partial_, total_, hidden_); }

  /// Collective. Enqueues out[M, H] = Σ over the ranks that had a token, float32 in rank order, one rounding; zeros for a token with no
  /// destination. E_STATE without prepare(); E_ARG if `out` has another shape (the peers get E_PEER). Errors of other ranks give NaN and
  /// are thrown by the next prepare() (exact sizes) or by check().
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    auto const refused = rounds_.begin_combine([&] { moe::detail::check_output(out, own_rows_, hidden_); });
    join_combine(rounds_.opening(RoundCall::combine, 0, refused), stream);
    if (refused) {
      throw Error(*refused);
    }
    launch_sum(out, stream);
  }

  /// Collective. Call it instead of prepare() or finalize(): this rank gives up the round, its peers get E_PEER. Never throws.
  void abandon(cudaStream_t stream) noexcept {
    try {
      own_rows_ = 0;
      if (!rounds_.dispatched()) {
        rounds_.open(rounds_.abandoning(RoundCall::dispatch), stream);
        if (fixed_) {
          finish_fixed_dispatch(false, stream);
        } else {
          rounds_.exchange(stream, [](auto&) {});
          rounds_.check_headers(RoundCall::dispatch, false, stream);
        }
      }
      if (fixed_ || rounds_.dispatched()) {
        join_combine(rounds_.abandoning(RoundCall::combine), stream);
      }
    } catch (Error const&) {  // the communicator reports its failure again on the next call
    }
  }
  /// Throws the error of the rounds so far, if any; call after synchronising the stream.
  void check() { rounds_.check(); }
  /// Waits for the stream, at most the communicator's deadline, and throws the error of the rounds so far, if any.
  void wait(cudaStream_t stream) { rounds_.wait_for(stream); }
  /// Whether the group has met a deadline or an error, and its end after one of another group: see DeviceRounds.
  bool over() const { return rounds_.over(); }
  void end() noexcept { rounds_.end(); }

 private:
  using RoundCall = moe::detail::RoundCall;
  /// Rows to or from each rank: their number, and where the first of them lies.
  struct Spans {
    std::vector<std::int64_t> rows;
    std::vector<std::int64_t> first;
  };

  void take_memory(Comm& comm, ExpertPlacement const& placement, Params const& params, Arena<Space>& arena) {
    int const ranks = comm.size();
    moe::detail::check_exchange(placement, ranks, max_tokens_, params.max_recv_rows);
    if (fixed_ && params.max_recv_rows != 0) {
      throw Error(ErrorCode::config,
                  text("max_recv_rows: ", params.max_recv_rows, " with fixed sizes, which need room for the worst case, 0"));
    }
    std::int64_t const max_sent = std::max<std::int64_t>(max_tokens_ * (fixed_ ? ranks : std::min<std::int64_t>(topk_, ranks)), 1);
    if (max_sent > INT32_MAX) {
      throw Error(ErrorCode::config, text("max_tokens_per_rank: ", max_sent, " rows to send exceed ", INT32_MAX));
    }
    for (Spans* s : {&out_, &in_}) {
      s->rows.assign(static_cast<std::size_t>(ranks), fixed_ ? max_tokens_ : 0);
      for (int r = 0; r < ranks; ++r) {
        s->first.push_back(r * max_tokens_);
      }
    }
    total_ = fixed_ ? max_rows_ : 0;
    owner_ = arena.template take<std::int32_t>(num_physical_);
    local_ = arena.template take<std::int32_t>(num_physical_);
    Memory<Space>::copy_from_host(owner_, placement.owners().data(), static_cast<std::size_t>(num_physical_) * sizeof(std::int32_t));
    Memory<Space>::copy_from_host(local_, placement.locals().data(), static_cast<std::size_t>(num_physical_) * sizeof(std::int32_t));
    positions_ = arena.template take<std::int32_t>(max_tokens_ * ranks);
    // Rows that have not arrived have ids of -1: if a transfer is cut off, the experts must not use an invalid id.
    sent_ = arena.template take_filled<std::byte>(max_sent * wire_.bytes(), 0xff);
    received_ = arena.template take_filled<std::byte>(std::max<std::int64_t>(max_rows_, 1) * wire_.bytes(), 0xff);
    partial_ = arena.template take<Partial>(std::max<std::int64_t>(max_rows_, 1) * hidden_);
    returned_ = arena.template take<Partial>(max_sent * hidden_);
  }

  void lay_out() {
    std::int64_t sent = 0;
    total_ = 0;
    int const me = rounds_.rank();
    for (int r = 0; r < rounds_.size(); ++r) {
      auto const i = static_cast<std::size_t>(r);
      out_.rows[i] = rounds_.count(me, r);
      out_.first[i] = sent;
      sent += out_.rows[i];
      in_.rows[i] = rounds_.count(r, me);
      in_.first[i] = total_;
      total_ += in_.rows[i];
    }
  }

  /// Moves rows of `row_bytes` to their ranks; this rank's rows are already in place.
  template <class Group>
  void move_rows(Group& group, std::int64_t row_bytes, void const* from, void* to, Spans const& sent, Spans const& received,
                 cudaStream_t stream) {
    int const ranks = rounds_.size();
    for (int i = 1; i < ranks; ++i) {
      auto const dst = static_cast<std::size_t>((rounds_.rank() + i) % ranks);
      auto const src = static_cast<std::size_t>((rounds_.rank() + ranks - i) % ranks);
      group.send(static_cast<std::byte const*>(from) + sent.first[dst] * row_bytes, sent.rows[dst] * row_bytes, static_cast<int>(dst),
                 stream);
      group.receive(static_cast<std::byte*>(to) + received.first[src] * row_bytes, received.rows[src] * row_bytes, static_cast<int>(src),
                    stream);
    }
  }
  void finish_fixed_dispatch(bool record, cudaStream_t stream) {
    rounds_.exchange(stream, [&](auto& group) { move_rows(group, wire_.bytes(), sent_, received_, out_, in_, stream); });
    rounds_.check_headers(RoundCall::dispatch, record, stream);
    launch_hide(stream);
  }
  void join_combine(moe::detail::RoundOpening const& opening, cudaStream_t stream) {
    rounds_.open(opening, stream);
    rounds_.exchange(stream, [&](auto& group) {
      move_rows(group, hidden_ * static_cast<std::int64_t>(sizeof(Partial)), partial_, returned_, in_, out_, stream);
    });
    rounds_.check_headers(RoundCall::combine, opening.status == 0, stream);
    rounds_.closed(stream);
  }

  // Defined in all_to_all_v.cuh.
  void launch_plan(Rows<std::int32_t const> ids, moe::detail::RoundOpening const& opening, cudaStream_t stream);
  void launch_pack(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream);
  void launch_hide(cudaStream_t stream);
  void launch_sum(Rows<Act, Config::hidden> out, cudaStream_t stream);

  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int num_physical_;
  std::int64_t max_rows_;
  Wire wire_;
  bool fixed_;
  std::int32_t* owner_ = nullptr;      // [P]
  std::int32_t* local_ = nullptr;      // [P]
  std::int32_t* positions_ = nullptr;  // [T_max, R] row of a token among those for a rank, or -1
  std::byte* sent_ = nullptr;          // records by destination, then token
  std::byte* received_ = nullptr;      // [max_rows_] records
  Partial* partial_ = nullptr;         // [max_rows_, H]
  Partial* returned_ = nullptr;        // rows in the order of sent_
  Spans out_;
  Spans in_;
  std::int64_t own_rows_ = 0;
  std::int64_t total_ = 0;
  std::optional<Error> refused_;
  moe::detail::DeviceRounds<Comm> rounds_;
};

}  // namespace moe::backends::detail
