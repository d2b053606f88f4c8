// SPDX-License-Identifier: Apache-2.0
// backends/window/host/low_latency.hpp: LowLatency over a window of host memory: rows go straight to the peer that owns the expert, no
// barrier. docs/semantics/exchange.md §8.
//
// Dispatch, send half: every token's row is quantised once and stored into recv[parity][expert][me] at the expert's rank; then the row
// counts of every (expert, rank), including zeros, are published with the round. Receive half: rows are packed by source rank, then by
// token. Combine, send half: every output row goes to returned[parity][entry] of its source, then the round is published to every rank.
// Receive half: out[t] = Σ_j w_j returned[entry of j], in j order.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <optional>
#include <vector>

#include "moe/backends/window/host/batch.hpp"
#include "moe/backends/window/host/low_latency_messages.hpp"
#include "moe/backends/window/host/low_latency_params.hpp"
#include "moe/backends/window/host/low_latency_returns.hpp"
#include "moe/backends/window/host/rounds.hpp"

namespace moe::backends::detail {

using moe::detail::DispatchState;
using moe::detail::Handle;
using moe::detail::WindowCall;

/// Any scheme, any placement.
template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::host>
class LowLatencyExchange<Window, Config, Quant, Partial, ActivationFormat::batched> {
 public:
  using Space = space::host;
  using Comm = typename Window::Comm;
  using Act = typename Config::Act;
  using Tokens = BatchedTokensOf<Config, Quant>;
  using Params = LowLatencyParams<Window>;
  using Routed = RoutedTokens<Act, Config::hidden>;
  using Output = Rows<Act, Config::hidden>;

  /// Collective. max_tokens: T_max, most rows of one prepare() on any rank. E_CONFIG if this rank's arguments are wrong, E_ARG for the
  /// router weight on the input with top-k other than 1, E_CAPACITY if memory does not suffice (then the peers get E_PEER);
  /// E_MISMATCH on all ranks, naming the field, if ranks disagree; E_UNSUPPORTED if ranks share no memory.
  LowLatencyExchange(Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement, Quant const& quant,
                     Params const& params, Arena<Space>& arena)
      : params_(params),
        hidden_(shape.hidden()),
        topk_(shape.topk()),
        max_tokens_(max_tokens),
        ranks_(comm.size()),
        rank_(comm.rank()),
        max_local_(placement.max_num_local()),
        num_local_(placement.ep_size() == comm.size() ? placement.num_local(comm.rank()) : 0),
        max_destinations_(std::min<std::int64_t>(topk_, comm.size())),
        on_input_(shape.weight_on_input()),
        messages_({hidden_, topk_, max_tokens, ranks_, rank_, num_local_, max_local_, on_input_, params.deduplicate,
                   params.deduplicate ? max_destinations_ : topk_},
                  quant),
        refused_(moe::error_of([&] { take_memory(placement, arena); })),
        group_(comm,
               moe::detail::make_contract<Config, Quant, Partial>(contract_name<Window>(params).c_str(), shape, max_tokens, placement,
                                                                  {.num_buffer_sets = params.num_buffer_sets}),
               refused_, arena, params.manager, offsets_.user_bytes(), params.window) {
    for (std::size_t s = 0; s < buffer_sets_.size(); ++s) {
      auto const buffer_set = static_cast<int>(s);
      buffer_sets_[s].rounds.emplace(group_.window(), buffer_sets_[s].at.rounds, group_.tag());
      handles_.set_counter(buffer_set, buffer_sets_[s].rounds->dispatches());
      for (std::size_t i = 0; i < 2 && params.zero_copy; ++i) {
        handles_.records(buffer_set)[i].set_output(window().template own<Partial>(buffer_sets_[s].at.outputs[i]));
      }
    }
    if (params.masks) {
      window().enable_masks();
    }
  }

  /// The most rows of one expert's batch.
  std::int64_t max_rows() const { return max_tokens_ * ranks_; }
  /// Collective: send() and receive(). E_STATE without finalize() after the last prepare().
  Tokens prepare(Routed const& in, HostStream) {
    order_.expect_idle();
    Handle const handle = send(in);
    Tokens const tokens = receive(handle);
    last_ = handle;
    order_.set_dispatched();
    return tokens;
  }
  /// [L, C, H] of the last prepare(): the experts write every valid row.
  Blocks<Partial> expert_output() { return handles_.record(last_).output(); }
  /// Collective: send_outputs() and receive_outputs(). E_STATE without prepare(); E_ARG if `out` has another shape: the round stays open.
  void finalize(Output out, HostStream) {
    order_.expect_dispatched("finalize");
    try {
      combine_send(last_, [&] { moe::detail::check_output(out, handles_.record(last_).rows, hidden_); });
      receive_outputs(last_, out);
    } catch (Error const&) {
      if (end_if_abandoned(last_)) {
        order_.set_idle();
      }
      throw;
    }
    order_.set_idle();
  }
  /// prepare() and finalize() in halves, for callers with one batch in progress. The send halves wait for no peer.
  void prepare_send(Routed const& in, HostStream) {
    order_.expect_idle();
    last_ = send(in);
    order_.set_dispatched();
  }
  Tokens prepare_receive(HostStream) {
    order_.expect_dispatched("prepare_receive");
    try {
      return receive(last_);
    } catch (Error const&) {
      order_.set_idle();
      throw;
    }
  }
  void finalize_send(HostStream) {
    order_.expect_dispatched("finalize_send");
    send_outputs(last_);
  }
  void finalize_receive(Output out, HostStream) {
    order_.expect_dispatched("finalize_receive");
    try {
      receive_outputs(last_, out);
    } catch (Error const&) {
      if (end_if_abandoned(last_)) order_.set_idle();
      throw;
    }
    order_.set_idle();
  }
  /// Collective. Call it instead of prepare() or finalize(): this rank gives up the round, its peers get E_PEER. With handles it gives up
  /// the oldest dispatch that has not ended, after receiving what its buffer set has sent: peers get E_PEER from that combine, newer
  /// dispatches go on. If outputs were sent and not received, only this rank's results are lost; peers get all outputs. Never throws.
  void abandon(HostStream) {
    std::optional<Handle> const oldest = order_.dispatched() ? last_ : handles_.oldest();
    oldest ? give_up(*oldest) : buffer_sets_[0].rounds->abandon(WindowCall::dispatch);
    order_.set_idle();
  }

  /// The send half of a dispatch: waits for no peer. E_STATE if the buffer set's last send was not received, E_ARG for the buffer set;
  /// E_ARG, E_CAPACITY for this rank's arguments, which receive() reports to the peers.
  Handle send(Routed const& in, int buffer_set = 0) {
    BufferSet& s = buffer_set_at(buffer_set);
    s.rounds->send(WindowCall::dispatch, in.hidden.extent(0), [&] {
      moe::detail::check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_);
      moe::detail::check_ids(in.topk_ids, messages_.num_physical());
    });
    Handle const handle = handles_.open(buffer_set, DispatchState::sent);
    Record& r = handles_.record(handle);
    r.round = s.rounds->round();
    r.rows = in.hidden.extent(0);
    r.take_weights(in.topk_weights, on_input_);
    messages_.send(s, r, in);
    return handle;
  }
  /// The receive half: waits for every rank. The batches are valid until two further dispatches of the buffer set have begun. E_STATE for a
  /// handle that was received or is stale; E_CAPACITY, E_PEER, E_MISMATCH for errors of other ranks; TransportError of the window.
  Tokens receive(Handle handle) {
    BufferSet& s = buffer_set_at(handle.buffer_set);
    bool const early = handles_.record(handle).state == DispatchState::received_early;
    Record& r = handles_.expect(handle, early ? DispatchState::received_early : DispatchState::sent, "receive");
    r.state = early ? DispatchState::received : DispatchState::idle;
    if (early) {
      return r.tokens();
    }
    s.rounds->receive(WindowCall::dispatch);
    messages_.receive(s, r);
    r.state = DispatchState::received;
    return r.tokens();
  }
  /// [L, C, H] of a dispatch.
  Blocks<Partial> expert_output(Handle handle) { return handles_.record(handle).output(); }
  /// The send half of a combine: waits for no peer. E_STATE for a handle that was not received or is stale, or if the buffer set's last
  /// send was not received.
  void send_outputs(Handle handle) {
    combine_send(handle, [] {});
  }
  /// The receive half: out[M, H] = Σ_j w_j y_j in float32 in j order, one rounding. Errors as receive(); E_ARG if `out` has another shape.
  void receive_outputs(Handle handle, Output out) {
    BufferSet& s = buffer_set_at(handle.buffer_set);
    Record& r = handles_.expect(handle, DispatchState::combining, "receive_outputs");
    moe::detail::check_output(out, r.rows, hidden_);
    r.state = DispatchState::received;
    try {
      s.rounds->receive(WindowCall::combine);
    } catch (Error const&) {
      end_if_abandoned(handle);
      throw;
    }
    for (int from = 0; from < ranks_; ++from) {
      window().wait_round(s.at.returned_flag + 64 * static_cast<std::size_t>(from), r.round, comm::ExchangePhase::combine_rows, from);
    }
    std::int64_t const terms = params_.deduplicate ? max_destinations_ : topk_;
    for (std::int64_t t = 0; t < r.rows; ++t) {
      returns_.sum(
          terms, [&](std::int64_t j) { return returned_at(s, r, t * topk_ + j); },
          [&](std::int64_t j, std::int32_t row) { return output_at(s, r, t * topk_ + j, row); },
          [&](std::int64_t j) { return params_.deduplicate ? 1.0F : r.weights[t * topk_ + j]; }, row_ptr(out, t));
    }
    r.state = DispatchState::idle;
  }

  /// Ranks that this rank considers dead. Does not change membership; the engine decides that.
  std::vector<bool> query_mask() { return window().query_mask(); }
  /// Masks a rank on this rank only. E_STATE without Params::masks, E_ARG for this rank.
  void mask_rank(int rank) { window().mask(rank); }
  /// Collective over all ranks, also the masked ones, between rounds: clears all masks.
  void clear_mask() {
    if (!params_.masks) {
      throw Error(ErrorCode::state, "mask: the exchange was built without masks");
    }
    window().clear_masks();
    window().barrier();
    std::array<std::uint32_t, 2> const latest = latest_of(buffer_sets_);
    window().barrier();
    for (BufferSet& s : buffer_sets_) {
      s.rounds->restart(latest[1]);
    }
    handles_.reset();
    order_.set_idle();
    preset_round(latest[0]);
  }
  /// Nanoseconds that this rank has waited for each rank.
  std::vector<std::uint64_t> waited_ns() { return window().waited_ns(); }
  Window& window() const { return group_.window(); }
  /// Collective, between rounds: continues as if `round` operations had been done in every buffer set.
  void preset_round(std::uint32_t round) {
    for (BufferSet& s : buffer_sets_) {
      s.rounds->preset(round);
      for (int from = 0; from < ranks_; ++from) {
        *window().template own<std::uint32_t>(s.at.returned_flag + 64 * static_cast<std::size_t>(from)) = round;
        for (int parity = 0; parity < 2; ++parity) {
          for (int e = 0; e < messages_.count_rows(); ++e) {
            *window().template own<std::uint64_t>(messages_.count_at(s, parity, e, from)) = comm::count_word(round, 0, 0);
          }
        }
      }
    }
    window().barrier();
  }

 private:
  using Record = moe::detail::BatchRecord<Config, Quant, Partial>;
  using BufferSet = LowLatencyBufferSet<Window>;

  void take_memory(ExpertPlacement const& placement, Arena<Space>& arena) {
    moe::detail::check_exchange(placement, ranks_, max_tokens_, 0);
    check_params<Window>(params_);
    moe::detail::check_batched<Window>(on_input_, max_tokens_, topk_);
    messages_.take(placement, arena);
    returns_ = {params_.combine, params_.zero_copy, hidden_, topk_, arena};
    std::int64_t const entries = max_tokens_ * (params_.deduplicate ? max_destinations_ : topk_);
    buffer_sets_.resize(static_cast<std::size_t>(params_.num_buffer_sets));
    handles_ = moe::detail::HandleTable<Record>(params_.num_buffer_sets);
    for (int buffer_set = 0; buffer_set < params_.num_buffer_sets; ++buffer_set) {
      BufferSet& s = buffer_sets_[static_cast<std::size_t>(buffer_set)];
      s.at.rounds = offsets_.take(moe::detail::WindowRounds<Window>::bytes(ranks_));
      s.at.returned_flag = offsets_.take(64 * ranks_);
      for (std::size_t parity = 0; parity < 2; ++parity) {
        s.at.counts[parity] = offsets_.take(messages_.count_bytes());
        s.at.received[parity] = offsets_.take(messages_.received_bytes());
        s.at.returned[parity] = offsets_.take(entries * returns_.bytes());
        if (params_.zero_copy) {
          s.at.outputs[parity] = offsets_.take(max_local_ * max_rows() * hidden_ * static_cast<std::int64_t>(sizeof(Partial)));
        }
      }
      for (Record& r : handles_.records(buffer_set)) {
        r.take(hidden_, topk_, max_tokens_, num_local_, max_rows(), params_.deduplicate ? max_rows() : 0, arena, !params_.zero_copy);
      }
    }
  }

  BufferSet& buffer_set_at(int buffer_set) {
    handles_.expect_buffer_set(buffer_set);
    return buffer_sets_[static_cast<std::size_t>(buffer_set)];
  }
  bool end_if_abandoned(Handle handle) {
    bool const over = buffer_set_at(handle.buffer_set).rounds->abandoned();
    handles_.record(handle).state = over ? DispatchState::idle : handles_.record(handle).state;
    return over;
  }
  // Gives up a dispatch, and does what the peers still wait for: receives what was sent, then abandons the combine.
  void give_up(Handle handle) noexcept {
    BufferSet& s = buffer_set_at(handle.buffer_set);
    Record* over = &handles_.record(handle);
    for (Record& sent : handles_.records(handle.buffer_set)) {
      try {
        if (sent.state == DispatchState::sent) {
          receive({handle.buffer_set, sent.generation});
          sent.state = DispatchState::received_early;
        } else if (sent.state == DispatchState::combining) {
          over = &sent;
          sent.state = DispatchState::received;  // and remains so if a peer refuses the combine; all ranks then repeat it
          s.rounds->receive(WindowCall::combine);
          sent.state = DispatchState::idle;
        }
      } catch (Error const&) {  // the peers got the same error, or the window reports its failure again on the next call
        end_if_abandoned({handle.buffer_set, sent.generation});
      }
    }
    if (over->state == DispatchState::received_early || over->state == DispatchState::received) {
      s.rounds->abandon(WindowCall::combine);
    }
    over->state = DispatchState::idle;
  }

  template <class Check>
  void combine_send(Handle handle, Check&& check) {
    BufferSet& s = buffer_set_at(handle.buffer_set);
    Record& r = handles_.expect(handle, DispatchState::received, "finalize");
    s.rounds->send(WindowCall::combine, 0, check);
    r.round = s.rounds->round();
    r.state = DispatchState::combining;
    Window& w = s.rounds->window();
    std::size_t const returned = s.at.returned[static_cast<std::size_t>(s.rounds->parity())];
    auto entry = [&](typename Record::Origin o) { return w.template at<std::byte>(o.rank, returned) + o.entry * returns_.bytes(); };
    for (std::int64_t n = 0; n < r.num_records; ++n) {
      std::int32_t const* const rows = r.record_rows + n * topk_;
      typename Record::Origin const origin = r.record_origins[n];
      if (w.masked(origin.rank)) {
        continue;
      }
      returns_.store_sum(
          topk_, [&](std::int64_t j) { return rows[j] < 0 ? nullptr : r.output_row(rows[j]); },
          [&](std::int64_t j) { return r.record_weights[n * topk_ + j]; }, entry(origin));
    }
    for (std::int64_t e = 0; e < num_local_ && !params_.deduplicate; ++e) {
      for (std::int64_t row = e * max_rows(); row < e * max_rows() + r.counts[e]; ++row) {
        if (!w.masked(r.origins[row].rank)) {
          returns_.store(r.output_row(row), row, entry(r.origins[row]));
        }
      }
    }
    for (int i = 1; i <= ranks_; ++i) {
      w.publish((rank_ + i) % ranks_, s.at.returned_flag + 64 * static_cast<std::size_t>(rank_), r.round);
    }
  }

  /// The returned output for a choice (deduplicated: for a rank), or null if the choice had no expert or its rank is dead.
  std::byte const* returned_at(BufferSet& s, Record& r, std::int64_t choice) {
    std::int32_t const entry = r.entries[choice];
    if (entry < 0 || window().masked(r.ranks[params_.deduplicate ? choice : entry])) {
      return nullptr;
    }
    return window().template own<std::byte>(s.at.returned[static_cast<std::size_t>(s.rounds->parity())]) + entry * returns_.bytes();
  }
  /// Zero copy: that output row, in the part of the rank that computed it.
  Partial const* output_at(BufferSet& s, Record& r, std::int64_t choice, std::int32_t row) {
    std::size_t const which = r.generation & 1U;
    return s.rounds->window().template at<Partial>(r.ranks[r.entries[choice]], s.at.outputs[which]) + row * hidden_;
  }

  Params params_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int ranks_;
  int rank_;
  int max_local_;
  int num_local_;
  std::int64_t max_destinations_;  // of one token, at most
  bool on_input_;
  LowLatencyMessages<Window, Config, Quant, Partial> messages_;
  moe::detail::WindowOffsets offsets_;
  std::vector<BufferSet> buffer_sets_;
  moe::detail::HandleTable<Record> handles_;
  moe::detail::ReturnedOutputs<Partial> returns_;
  std::optional<Error> refused_;
  moe::detail::WindowGroup<Window> group_;
  moe::detail::CallOrder order_;
  Handle last_;  // of the last prepare()
};

}  // namespace moe::backends::detail
