// SPDX-License-Identifier: Apache-2.0
// backends/window/host/low_latency.hpp: LowLatency over a window of host memory: rows straight to the owning peer, no barrier. Spec 04 §8.
//
// Dispatch, send half: every token's row is quantised once and stored into recv[parity][expert][me] of the owner, then the row counts of
// every (expert, rank), zero too, are published with the round. Receive half: rows are packed by source rank, then by token.
// Combine, send half: every output row goes to returned[parity][place] of its source, then the round is published to every rank.
// Receive half: out[t] = Σ_j w_j returned[place of j], in j order.
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstdint>
#include <optional>
#include <vector>

#include "moe/backends/window/host/batch.hpp"
#include "moe/backends/window/host/low_latency_params.hpp"
#include "moe/backends/window/host/low_latency_returns.hpp"
#include "moe/backends/window/host/rounds.hpp"

namespace moe::backends::detail {

using moe::detail::WindowCall;
using moe::detail::WindowTicket;

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
      : quant_(quant),
        params_(params),
        hidden_(shape.hidden()),
        topk_(shape.topk()),
        max_tokens_(max_tokens),
        ranks_(comm.size()),
        rank_(comm.rank()),
        num_physical_(placement.num_physical()),
        max_local_(placement.max_num_local()),
        num_local_(placement.ep_size() == comm.size() ? placement.num_local(comm.rank()) : 0),
        max_destinations_(std::min<std::int64_t>(topk_, comm.size())),
        on_input_(shape.weight_on_input()),
        message_(hidden_, params.deduplicate ? 1 + 2 * topk_ : 1),
        refused_(moe::detail::error_of([&] { take_memory(placement, arena); })),
        group_(comm,
               moe::detail::make_contract<Config, Quant, Partial>(contract_name<Window>(params).c_str(), shape, max_tokens, placement,
                                                                  {.num_slots = params.num_slots}),
               refused_, arena, params.manager, offsets_.user_bytes(), params.window) {
    for (std::size_t s = 0; s < slots_.size(); ++s) {
      slots_[s].rounds.emplace(group_.window(), slots_[s].at.rounds, group_.tag());
      for (std::size_t i = 0; i < 2 && params.zero_copy; ++i) {
        slots_[s].records[i].set_output(window().template own<Partial>(slots_[s].at.outputs[i]));
      }
    }
    if (params.masks) {
      window().enable_masks();
    }
  }

  /// Rows of one expert's batch, at most.
  std::int64_t max_rows() const { return max_tokens_ * ranks_; }
  /// Collective: send() and receive(). E_STATE without finalize() after the last prepare().
  Tokens prepare(Routed const& in, HostStream) {
    order_.expect_idle();
    WindowTicket const ticket = send(in);
    Tokens const tokens = receive(ticket);
    last_ = ticket;
    order_.set_dispatched();
    return tokens;
  }
  /// [L, C, H] of the last prepare(): the experts write every valid row.
  Blocks<Partial> expert_output() { return record(last_).output(); }
  /// Collective: send_outputs() and receive_outputs(). E_STATE without prepare(); E_ARG if `out` has another shape: the round stays open.
  void finalize(Output out, HostStream) {
    order_.expect_dispatched("finalize");
    try {
      combine_send(last_, [&] { moe::detail::check_output(out, record(last_).rows, hidden_); });
      receive_outputs(last_, out);
    } catch (Error const&) {
      if (end_if_abandoned(last_)) {
        order_.set_idle();
      }
      throw;
    }
    order_.set_idle();
  }
  /// Collective. Instead of prepare() or finalize(): this rank gives up the round, its peers get E_PEER. With handles it gives up the
  /// oldest dispatch that is not over, after what its slot has sent and not received: the peers get E_PEER from that combine, newer
  /// dispatches go on. If outputs were sent and not received, only these are lost, and the peers lack nothing. Never throws.
  void abandon(HostStream) {
    std::optional<WindowTicket> const oldest = order_.dispatched() ? last_ : moe::detail::oldest_under_way(slots_);
    oldest ? give_up(*oldest) : slots_[0].rounds->abandon(WindowCall::dispatch);
    order_.set_idle();
  }

  /// The send half of a dispatch: waits for no peer. E_STATE if the slot's last send was not received, E_ARG for the slot; E_ARG,
  /// E_CAPACITY for this rank's arguments, which peers hear of in receive().
  WindowTicket send(Routed const& in, int slot = 0) {
    Slot& s = slot_at(slot);
    s.rounds->send(WindowCall::dispatch, in.hidden.extent(0), [&] {
      moe::detail::check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_);
      moe::detail::check_ids(in.topk_ids, num_physical_);
    });
    WindowTicket const ticket{slot, s.rounds->generation()};
    Record& r = record(ticket);
    r.generation = ticket.generation;
    r.round = s.rounds->round();
    r.number = ++dispatches_;
    r.rows = in.hidden.extent(0);
    r.state = Record::State::sent;
    r.take_weights(in.topk_weights, on_input_);
    std::fill_n(counts_, num_physical_ + ranks_, 0);
    for (std::int64_t t = 0; t < r.rows; ++t) {
      params_.deduplicate ? send_to_ranks(s, r, in, t) : send_to_experts(s, r, in, t);
    }
    for (int p = 0; p < num_physical_ && !params_.deduplicate; ++p) {
      window().publish(owner_[p], count_at(s, s.rounds->parity(), local_[p], rank_), s.rounds->word(counts_[p]));
    }
    for (int to = 0; to < ranks_ && params_.deduplicate; ++to) {
      window().publish(to, count_at(s, s.rounds->parity(), 0, rank_), s.rounds->word(counts_[num_physical_ + to]));
    }
    return ticket;
  }
  /// The receive half: waits for every rank. The batches are valid until two dispatches of the slot have followed. E_STATE for a
  /// ticket that was received or is stale; E_CAPACITY, E_PEER, E_MISMATCH for other ranks' doings; TransportError of the window.
  Tokens receive(WindowTicket ticket) {
    Slot& s = slot_at(ticket.slot);
    bool const early = record(ticket).state == Record::State::early;
    Record& r = expect(ticket, early ? Record::State::early : Record::State::sent, "receive");
    r.state = early ? Record::State::received : Record::State::idle;
    if (early) {
      return r.tokens();
    }
    s.rounds->receive(WindowCall::dispatch);
    std::fill_n(r.counts, num_local_, 0);
    r.num_records = 0;
    for (int from = 0; from < ranks_; ++from) {
      params_.deduplicate ? receive_records(s, r, from) : receive_rows(s, r, from);
    }
    r.state = Record::State::received;
    return r.tokens();
  }
  /// [L, C, H] of a dispatch.
  Blocks<Partial> expert_output(WindowTicket ticket) { return record(ticket).output(); }
  /// The send half of a combine: waits for no peer. E_STATE for a ticket that was not received or is stale, or if the slot's last send
  /// was not received.
  void send_outputs(WindowTicket ticket) {
    combine_send(ticket, [] {});
  }
  /// The receive half: out[M, H] = Σ_j w_j y_j in float32 in j order, one rounding. Errors as receive(); E_ARG if `out` has another shape.
  void receive_outputs(WindowTicket ticket, Output out) {
    Slot& s = slot_at(ticket.slot);
    Record& r = expect(ticket, Record::State::combining, "receive_outputs");
    moe::detail::check_output(out, r.rows, hidden_);
    r.state = Record::State::received;
    try {
      s.rounds->receive(WindowCall::combine);
    } catch (Error const&) {
      end_if_abandoned(ticket);
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
    r.state = Record::State::idle;
  }

  /// Which ranks this one takes for dead. It says nothing of membership, which is the engine's.
  std::vector<bool> query_mask() { return window().query_mask(); }
  /// Masks a rank on this rank only. E_STATE without Params::masks, E_ARG for the own rank.
  void mask_rank(int rank) { window().mask(rank); }
  /// Collective over all ranks, the masked ones too, between rounds: nobody is masked any more.
  void clear_mask() {
    if (!params_.masks) {
      throw Error(ErrorCode::state, "mask: the exchange was built without masks");
    }
    window().clear_masks();
    window().barrier();
    std::array<std::uint32_t, 2> const latest = latest_of(slots_);
    window().barrier();
    for (Slot& s : slots_) {
      s.rounds->restart(latest[1]);
      for (Record& r : s.records) {
        r.state = Record::State::idle;
      }
    }
    order_.set_idle();
    preset_round(latest[0]);
  }
  /// Nanoseconds that this rank has waited for each rank.
  std::vector<std::uint64_t> waited_ns() { return window().waited_ns(); }
  Window& window() { return group_.window(); }
  /// Collective, between rounds: continues as if `round` operations had been done in every slot.
  void preset_round(std::uint32_t round) {
    for (Slot& s : slots_) {
      s.rounds->preset(round);
      for (int from = 0; from < ranks_; ++from) {
        *window().template own<std::uint32_t>(s.at.returned_flag + 64 * static_cast<std::size_t>(from)) = round;
        for (int parity = 0; parity < 2; ++parity) {
          for (int e = 0; e < count_rows(); ++e) {
            *window().template own<std::uint64_t>(count_at(s, parity, e, from)) = comm::count_word(round, 0, 0);
          }
        }
      }
    }
    window().barrier();
  }

 private:
  using Record = moe::detail::BatchRecord<Config, Quant, Partial>;
  struct Slot {
    LowLatencyOffsets at;
    std::optional<moe::detail::WindowRounds<Window>> rounds;
    std::array<Record, 2> records;
  };

  void take_memory(ExpertPlacement const& placement, Arena<Space>& arena) {
    moe::detail::check_exchange(placement, ranks_, max_tokens_, 0);
    check_params<Window>(params_);
    moe::detail::check_batched<Window>(on_input_, max_tokens_, topk_);
    owner_ = arena.template take<std::int32_t>(num_physical_);
    local_ = arena.template take<std::int32_t>(num_physical_);
    std::copy_n(placement.owners().data(), num_physical_, owner_);
    std::copy_n(placement.locals().data(), num_physical_, local_);
    counts_ = arena.template take<std::int32_t>(num_physical_ + ranks_);
    message_buffer_ = arena.template take<std::byte>(message_.bytes());
    scaled_ = arena.template take<Act>(on_input_ ? hidden_ : 0);
    returns_ = {params_.combine, params_.zero_copy, hidden_, topk_, arena};
    std::int64_t const blocks = params_.deduplicate ? ranks_ : max_local_ * ranks_;
    std::int64_t const places = max_tokens_ * (params_.deduplicate ? max_destinations_ : topk_);
    slots_.resize(static_cast<std::size_t>(params_.num_slots));
    for (Slot& s : slots_) {
      s.at.rounds = offsets_.take(moe::detail::WindowRounds<Window>::bytes(ranks_));
      s.at.returned_flag = offsets_.take(64 * ranks_);
      for (std::size_t parity = 0; parity < 2; ++parity) {
        s.at.counts[parity] = offsets_.take(8 * std::int64_t{count_rows()} * ranks_);
        s.at.received[parity] = offsets_.take(blocks * max_tokens_ * message_.bytes());
        s.at.returned[parity] = offsets_.take(places * returns_.bytes());
        if (params_.zero_copy) {
          s.at.outputs[parity] = offsets_.take(max_local_ * max_rows() * hidden_ * static_cast<std::int64_t>(sizeof(Partial)));
        }
      }
      for (Record& r : s.records) {
        r.take(hidden_, topk_, max_tokens_, num_local_, max_rows(), params_.deduplicate ? max_rows() : 0, arena, !params_.zero_copy);
      }
    }
  }

  int count_rows() const { return params_.deduplicate ? 1 : max_local_; }
  std::size_t count_at(Slot const& s, int parity, std::int32_t expert, int from) const {
    return s.at.counts[static_cast<std::size_t>(parity)] +
           8 * (static_cast<std::size_t>(expert) * static_cast<std::size_t>(ranks_) + static_cast<std::size_t>(from));
  }
  std::size_t message_at(Slot const& s, int parity, std::int64_t block, std::int64_t i) const {
    return s.at.received[static_cast<std::size_t>(parity)] + static_cast<std::size_t>((block * max_tokens_ + i) * message_.bytes());
  }
  Slot& slot_at(int slot) {
    if (slot < 0 || slot >= params_.num_slots) {
      throw Error(ErrorCode::argument, text("slot: ", slot, " is out of range [0, ", params_.num_slots, ")"));
    }
    return slots_[static_cast<std::size_t>(slot)];
  }
  Record& record(WindowTicket ticket) { return slot_at(ticket.slot).records[ticket.generation & 1U]; }
  Record& expect(WindowTicket ticket, typename Record::State state, char const* what) {
    slot_at(ticket.slot).rounds->expect_live(ticket.generation, what);
    Record& r = record(ticket);
    if (r.generation != ticket.generation || r.state != state) {
      throw Error(ErrorCode::state, text(what, ": called out of order for this handle"));
    }
    return r;
  }
  bool end_if_abandoned(WindowTicket ticket) {
    bool const over = slot_at(ticket.slot).rounds->abandoned();
    record(ticket).state = over ? Record::State::idle : record(ticket).state;
    return over;
  }
  // What this rank still owes for a dispatch.
  void give_up(WindowTicket ticket) noexcept {
    Slot& s = slot_at(ticket.slot);
    Record* over = &record(ticket);
    for (Record& sent : s.records) {
      try {
        if (sent.state == Record::State::sent) {
          receive({ticket.slot, sent.generation});
          sent.state = Record::State::early;
        } else if (sent.state == Record::State::combining) {
          over = &sent;
          sent.state = Record::State::received;  // and stays it if a peer refuses the combine, which they then repeat
          s.rounds->receive(WindowCall::combine);
          sent.state = Record::State::idle;
        }
      } catch (Error const&) {  // the peers have got the same error, or the window reports its failure to the next call as well
        end_if_abandoned({ticket.slot, sent.generation});
      }
    }
    if (over->state == Record::State::early || over->state == Record::State::received) {
      s.rounds->abandon(WindowCall::combine);
    }
    over->state = Record::State::idle;
  }
  bool is_expert(std::int32_t id) const { return id >= 0 && id < num_physical_; }

  // Row t quantised into the staging message, weighted first if the router weight goes on the input.
  std::byte* pack(Routed const& in, std::int64_t t) {
    message_.pack(quant_, on_input_ ? moe::detail::weighted_row(in, t, scaled_) : row_ptr(in.hidden, t), message_buffer_);
    return message_buffer_;
  }
  void store(Slot& s, int to, std::int64_t block, std::int64_t i) {
    if (Window& w = s.rounds->window(); !w.masked(to)) {
      std::copy_n(message_buffer_, message_.bytes(), w.template at<std::byte>(to, message_at(s, s.rounds->parity(), block, i)));
    }
  }
  void send_to_experts(Slot& s, Record& r, Routed const& in, std::int64_t t) {
    std::byte* message = nullptr;
    for (std::int64_t j = 0; j < topk_; ++j) {
      std::int32_t const id = in.topk_ids(t, j);
      std::int32_t& place = r.places[t * topk_ + j];
      place = -1;
      if (!is_expert(id)) {
        continue;
      }
      for (std::int64_t i = 0; i < j && place < 0; ++i) {
        place = in.topk_ids(t, i) == id ? r.places[t * topk_ + i] : -1;  // sent already: its output is added twice
      }
      if (place >= 0) {
        continue;
      }
      place = static_cast<std::int32_t>(t * topk_ + j);
      r.ranks[place] = owner_[id];
      message = message == nullptr ? pack(in, t) : message;
      message_.words(message)[0] = place;
      store(s, owner_[id], std::int64_t{local_[id]} * ranks_ + rank_, counts_[id]++);
    }
  }
  void send_to_ranks(Slot& s, Record& r, Routed const& in, std::int64_t t) {
    std::byte* message = nullptr;
    std::int64_t destination = 0;
    for (int to = 0; to < ranks_; ++to) {
      bool wanted = false;
      for (std::int64_t j = 0; j < topk_; ++j) {
        wanted = wanted || (is_expert(in.topk_ids(t, j)) && owner_[in.topk_ids(t, j)] == to);
      }
      if (!wanted) {
        continue;
      }
      message = message == nullptr ? pack(in, t) : message;
      std::int32_t* const words = message_.words(message);
      words[0] = static_cast<std::int32_t>(t * max_destinations_ + destination);
      for (std::int64_t j = 0; j < topk_; ++j) {
        std::int32_t const id = in.topk_ids(t, j);
        words[1 + j] = is_expert(id) && owner_[id] == to ? local_[id] : kNoExpert;
        std::copy_n(reinterpret_cast<std::byte const*>(&r.weights[t * topk_ + j]), sizeof(float),
                    reinterpret_cast<std::byte*>(&words[1 + topk_ + j]));
      }
      store(s, to, rank_, counts_[num_physical_ + to]++);
      r.ranks[t * topk_ + destination] = to;
      r.places[t * topk_ + destination++] = words[0];
    }
    for (; destination < max_destinations_; ++destination) {
      r.places[t * topk_ + destination] = -1;
    }
  }

  std::int64_t wait_count(Slot& s, std::int32_t expert, int from) {
    return comm::word_count(s.rounds->window().wait_count(count_at(s, s.rounds->parity(), expert, from), s.rounds->round(),
                                                          comm::ExchangePhase::dispatch_rows, from));
  }
  void receive_rows(Slot& s, Record& r, int from) {
    for (std::int32_t e = 0; e < num_local_; ++e) {
      std::int64_t const count = wait_count(s, e, from);
      for (std::int64_t i = 0; i < count; ++i) {
        auto const* const message =
            window().template own<std::byte const>(message_at(s, s.rounds->parity(), std::int64_t{e} * ranks_ + from, i));
        std::int64_t const row = r.append(e);
        message_.unpack(message, r.payload_row(row), r.scale_row(row));
        r.origins[row] = {from, message_.words(message)[0]};
      }
    }
  }
  void receive_records(Slot& s, Record& r, int from) {
    std::int64_t const count = wait_count(s, 0, from);
    for (std::int64_t i = 0; i < count; ++i) {
      auto const* const message = s.rounds->window().template own<std::byte const>(message_at(s, s.rounds->parity(), from, i));
      std::int32_t const* const words = message_.words(message);
      std::int64_t const n = r.num_records++;
      r.record_origins[n] = {from, words[0]};
      std::int32_t* const rows = r.record_rows + n * topk_;
      std::copy_n(reinterpret_cast<std::byte const*>(words + 1 + topk_), static_cast<std::size_t>(topk_) * sizeof(float),
                  reinterpret_cast<std::byte*>(r.record_weights + n * topk_));
      for (std::int64_t j = 0; j < topk_; ++j) {
        std::int32_t const e = words[1 + j];
        rows[j] = -1;
        for (std::int64_t before = 0; before < j && e != kNoExpert && rows[j] < 0; ++before) {
          rows[j] = words[1 + before] == e ? rows[before] : -1;
        }
        if (e != kNoExpert && rows[j] < 0) {
          rows[j] = static_cast<std::int32_t>(r.append(e));
          message_.unpack(message, r.payload_row(rows[j]), r.scale_row(rows[j]));
        }
      }
    }
  }

  template <class Check>
  void combine_send(WindowTicket ticket, Check&& check) {
    Slot& s = slot_at(ticket.slot);
    Record& r = expect(ticket, Record::State::received, "finalize");
    s.rounds->send(WindowCall::combine, 0, check);
    r.round = s.rounds->round();
    r.state = Record::State::combining;
    Window& w = s.rounds->window();
    std::size_t const returned = s.at.returned[static_cast<std::size_t>(s.rounds->parity())];
    auto place = [&](typename Record::Origin o) { return w.template at<std::byte>(o.rank, returned) + o.place * returns_.bytes(); };
    for (std::int64_t n = 0; n < r.num_records; ++n) {
      std::int32_t const* const rows = r.record_rows + n * topk_;
      typename Record::Origin const origin = r.record_origins[n];
      if (w.masked(origin.rank)) {
        continue;
      }
      returns_.store_sum(
          topk_, [&](std::int64_t j) { return rows[j] < 0 ? nullptr : r.output_row(rows[j]); },
          [&](std::int64_t j) { return r.record_weights[n * topk_ + j]; }, place(origin));
    }
    for (std::int64_t e = 0; e < num_local_ && !params_.deduplicate; ++e) {
      for (std::int64_t row = e * max_rows(); row < e * max_rows() + r.counts[e]; ++row) {
        if (!w.masked(r.origins[row].rank)) {
          returns_.store(r.output_row(row), row, place(r.origins[row]));
        }
      }
    }
    for (int i = 1; i <= ranks_; ++i) {
      w.publish((rank_ + i) % ranks_, s.at.returned_flag + 64 * static_cast<std::size_t>(rank_), r.round);
    }
  }

  /// What came back for a choice (deduplicated: for a rank), or null if it went nowhere or its rank is dead.
  std::byte const* returned_at(Slot& s, Record& r, std::int64_t choice) {
    std::int32_t const place = r.places[choice];
    if (place < 0 || window().masked(r.ranks[params_.deduplicate ? choice : place])) {
      return nullptr;
    }
    return window().template own<std::byte>(s.at.returned[static_cast<std::size_t>(s.rounds->parity())]) + place * returns_.bytes();
  }
  /// Zero copy: that row of the rank that the choice went to.
  Partial const* output_at(Slot& s, Record& r, std::int64_t choice, std::int32_t row) {
    auto const which = static_cast<std::size_t>(&r - s.records.data());
    return s.rounds->window().template at<Partial>(r.ranks[r.places[choice]], s.at.outputs[which]) + row * hidden_;
  }

  Quant quant_;
  Params params_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int ranks_;
  int rank_;
  int num_physical_;
  int max_local_;
  int num_local_;
  std::int64_t max_destinations_;  // of one token
  bool on_input_;
  moe::detail::BatchMessage<Config, Quant> message_;
  moe::detail::WindowOffsets offsets_;
  std::vector<Slot> slots_;
  std::int32_t* owner_ = nullptr;        // [P]
  std::int32_t* local_ = nullptr;        // [P]
  std::int32_t* counts_ = nullptr;       // [P] rows sent to each expert, then [R] to each rank
  std::byte* message_buffer_ = nullptr;  // one message
  Act* scaled_ = nullptr;                // [H]
  moe::detail::ReturnedOutputs<Partial> returns_;
  std::optional<Error> refused_;
  moe::detail::WindowGroup<Window> group_;
  moe::detail::CallOrder order_;
  std::uint64_t dispatches_ = 0;
  WindowTicket last_;
};

}  // namespace moe::backends::detail
