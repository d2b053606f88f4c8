// SPDX-License-Identifier: Apache-2.0
// backends/window/host/pplx.hpp: Pplx over a window of host memory. docs/semantics/exchange.md §9.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "moe/backends/pplx.hpp"
#include "moe/backends/window/host/batch.hpp"
#include "moe/backends/window/host/rounds.hpp"

namespace moe::backends::detail {

using moe::detail::DispatchState;

template <class Window>
  requires std::same_as<typename Window::Space, space::host>
struct PplxParams<Window> {
  int dp_size = 1;  ///< consecutive ranks that hold the same tokens and all receive their results; must divide the number of ranks
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

/// Any scheme; the number of ranks must divide the number of experts.
template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::host>
class PplxExchange<Window, Config, Quant, Partial> {
 public:
  using Space = space::host;
  using Comm = typename Window::Comm;
  using Act = typename Config::Act;
  using Tokens = BatchedTokensOf<Config, Quant>;
  using Params = PplxParams<Window>;
  using Routed = RoutedTokens<Act, Config::hidden>;
  using Output = Rows<Act, Config::hidden>;

  /// Collective. max_tokens: T_max, most rows of one prepare() on any rank. E_CONFIG if this rank's arguments are wrong, E_UNSUPPORTED
  /// unless the number of ranks divides that of experts, E_ARG for the router weight on the input with top-k other than 1, E_CAPACITY if
  /// memory does not suffice (then the peers get E_PEER); E_MISMATCH on all ranks, naming the field, if ranks disagree.
  PplxExchange(Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement, Quant const& quant,
               Params const& params, Arena<Space>& arena)
      : quant_(quant),
        hidden_(shape.hidden()),
        topk_(shape.topk()),
        max_tokens_(max_tokens),
        ranks_(comm.size()),
        rank_(comm.rank()),
        num_physical_(placement.num_physical()),
        num_local_(placement.ep_size() == comm.size() ? placement.num_local(comm.rank()) : 0),
        dp_size_(params.dp_size),
        on_input_(shape.weight_on_input()),
        message_(hidden_, 1),
        refused_(moe::error_of([&] { take_memory(placement, arena); })),
        group_(comm, moe::detail::make_contract<Config, Quant, Partial>("pplx", shape, max_tokens, placement, {.dp_size = params.dp_size}),
               refused_, arena, params.manager, offsets_.user_bytes(), params.window),
        rounds_(group_.window(), rounds_at_, group_.tag()) {}

  /// The most rows of one expert's batch: T_max for each data-parallel group.
  std::int64_t max_rows() const { return max_tokens_ * (ranks_ / dp_size_); }

  /// Collective: send() and receive(). E_STATE without finalize() after the last prepare().
  Tokens prepare(Routed const& in, HostStream) {
    order_.expect_idle();
    send(in);
    Tokens const tokens = receive();
    order_.set_dispatched();
    return tokens;
  }
  /// [L, C, H]: the experts write every valid row.
  Blocks<Partial> expert_output() { return record_.output(); }
  /// Collective: send_outputs() and receive_outputs(). E_STATE without prepare(); E_ARG if `out` has another shape: the round stays open.
  void finalize(Output out, HostStream) {
    order_.expect_dispatched("finalize");
    try {
      combine_send([&] { moe::detail::check_output(out, record_.rows, hidden_); });
    } catch (Error const&) {
      if (rounds_.abandoned()) {
        order_.set_idle();
      }
      throw;
    }
    receive_outputs(out);
    order_.set_idle();
  }
  /// prepare() and finalize() in halves, by the names that every exchange with halves has.
  void prepare_send(Routed const& in, HostStream) {
    order_.expect_idle();
    send(in);
    order_.set_dispatched();
  }
  Tokens prepare_receive(HostStream) {
    order_.expect_dispatched("prepare_receive");
    try {
      return receive();
    } catch (Error const&) {
      order_.set_idle();
      throw;
    }
  }
  void finalize_send(HostStream) {
    order_.expect_dispatched("finalize_send");
    try {
      combine_send([] {});
    } catch (Error const&) {
      if (rounds_.abandoned()) order_.set_idle();
      throw;
    }
  }
  void finalize_receive(Output out, HostStream) {
    order_.expect_dispatched("finalize_receive");
    receive_outputs(out);
    order_.set_idle();
  }

  /// Collective. Call it instead of prepare() or finalize(), or of one half: this rank gives up the round, its peers get E_PEER; after
  /// send() they get it from their combine. Once this rank has sent its outputs the peers have all they need, and only its own results are
  /// lost. Never throws.
  void abandon(HostStream) {
    if (record_.state == DispatchState::idle) {
      rounds_.abandon(moe::detail::WindowCall::dispatch);
    }
    try {
      if (record_.state == DispatchState::sent) {
        receive();
      }
      if (record_.state == DispatchState::combining) {
        wait_outputs([](std::int64_t) {});
      }
    } catch (Error const&) {  // the peers got the same error, or the window reports its failure again on the next call
    }
    if (record_.state == DispatchState::received) {
      rounds_.abandon(moe::detail::WindowCall::combine);
    }
    record_.state = DispatchState::idle;
    order_.set_idle();
  }

  /// The send half of a dispatch: waits for no peer. Ids of -1 are dropped. E_STATE if the last send was not received; E_ARG, E_CAPACITY.
  void send(Routed const& in) {
    rounds_.send(moe::detail::WindowCall::dispatch, in.hidden.extent(0), [&] {
      moe::detail::check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_);
      moe::detail::check_ids(in.topk_ids, num_physical_);
    });
    record_.rows = in.hidden.extent(0);
    record_.state = DispatchState::sent;
    std::fill_n(counts_, num_physical_, 0);
    for (std::int64_t t = 0; t < record_.rows; ++t) {
      send_token(in, t);
    }
    for (int p = 0; p < num_physical_; ++p) {
      window().publish(owner_[p], count_at(rounds_.parity(), local_[p], rank_), rounds_.word(counts_[p] + 1));
    }
  }
  /// The receive half. E_STATE without send(); E_MISMATCH if ranks of a data-parallel group brought different numbers of rows; E_CAPACITY,
  /// E_PEER for errors of other ranks; TransportError of the window.
  Tokens receive() {
    record_.state = record_.state == DispatchState::sent ? DispatchState::idle : record_.state;
    rounds_.receive(moe::detail::WindowCall::dispatch);
    for (int r = 0; r < ranks_; ++r) {
      int const first = r - r % dp_size_;
      if (rounds_.rows(r) != rounds_.rows(first)) {
        throw TransportError(ErrorCode::mismatch, rank_, r, "dispatch", rounds_.round(),
                             text("rank ", r, " brings ", rounds_.rows(r), " rows, rank ", first, " of its group ", rounds_.rows(first)));
      }
    }
    std::fill_n(record_.counts, num_local_, 0);
    for (int from = 0; from < ranks_; ++from) {
      for (std::int32_t e = 0; e < num_local_; ++e) {
        std::int64_t const count = std::int64_t{comm::word_count(window().wait_count(count_at(rounds_.parity(), e, from), rounds_.round(),
                                                                                     comm::ExchangePhase::dispatch_rows, from))} -
                                   1;
        for (std::int64_t i = 0; i < count; ++i) {
          auto const* const message = window().template own<std::byte const>(message_at(rounds_.parity(), e, from, i));
          std::int64_t const row = record_.append(e);
          message_.unpack(message, record_.payload_row(row), record_.scale_row(row));
          record_.origins[row] = {from, message_.words(message)[0]};
        }
      }
    }
    record_.state = DispatchState::received;
    return record_.tokens();
  }
  /// The send half of a combine. Waits for the peers' headers: no row moves unless all ranks take part.
  void send_outputs() {
    combine_send([] {});
  }
  /// The receive half: out[M, H] = Σ_j w_j y_j in float32 in j order, one rounding. E_ARG if `out` has another shape.
  void receive_outputs(Output out) {
    if (record_.state != DispatchState::combining) {
      throw Error(ErrorCode::state, "receive_outputs: called without send_outputs");
    }
    moe::detail::check_output(out, record_.rows, hidden_);
    auto const* const returned = window().template own<Partial>(returned_[static_cast<std::size_t>(rounds_.parity())]);
    wait_outputs([&](std::int64_t t) {
      moe::detail::sum_rows(
          topk_,
          [&](std::int64_t j) {
            std::int32_t const entry = record_.entries[t * topk_ + j];
            return entry < 0 ? nullptr : returned + entry * hidden_;
          },
          [&](std::int64_t j) { return record_.weights[t * topk_ + j]; }, hidden_, row_ptr(out, t));
    });
    record_.state = DispatchState::idle;
  }

  Window& window() const { return group_.window(); }
  /// Collective, between rounds: continues as if `round` operations had been done.
  void preset_round(std::uint32_t round) {
    rounds_.preset(round);
    for (int from = 0; from < ranks_; ++from) {
      for (std::int32_t e = 0; e < num_local_; ++e) {
        for (int parity = 0; parity < 2; ++parity) {
          *window().template own<std::uint64_t>(count_at(parity, e, from)) = comm::count_word(round, 0, 0);
        }
      }
    }
    window().barrier();
  }

 private:
  using Record = moe::detail::BatchRecord<Config, Quant, Partial>;

  void take_memory(ExpertPlacement const& placement, Arena<Space>& arena) {
    moe::detail::check_exchange(placement, ranks_, max_tokens_, 0);
    if (!placement.is_even()) {
      throw Error(ErrorCode::unsupported, text("pplx: ", num_physical_, " experts do not divide by ", ranks_, " ranks"));
    }
    if (dp_size_ < 1 || ranks_ % dp_size_ != 0) {
      throw Error(ErrorCode::config, text("dp_size: ", dp_size_, " does not divide ", ranks_, " ranks"));
    }
    moe::detail::check_batched<Window>(on_input_, max_tokens_, topk_);
    owner_ = arena.template take<std::int32_t>(num_physical_);
    local_ = arena.template take<std::int32_t>(num_physical_);
    std::copy_n(placement.owners().data(), num_physical_, owner_);
    std::copy_n(placement.locals().data(), num_physical_, local_);
    counts_ = arena.template take<std::int32_t>(num_physical_);
    staging_ = arena.template take<std::byte>(message_.bytes());
    scaled_ = arena.template take<Act>(on_input_ ? hidden_ : 0);
    rounds_at_ = offsets_.take(moe::detail::WindowRounds<Window>::bytes(ranks_));
    for (std::size_t parity = 0; parity < 2; ++parity) {
      count_words_[parity] = offsets_.take(std::int64_t{8} * num_local_ * ranks_);
      arrived_[parity] = offsets_.take(4 * max_tokens_);
      received_[parity] = offsets_.take(std::int64_t{ranks_} * num_local_ * max_tokens_ * message_.bytes());
      returned_[parity] = offsets_.take(max_tokens_ * topk_ * hidden_ * static_cast<std::int64_t>(sizeof(Partial)));
    }
    record_.take(hidden_, topk_, max_tokens_, num_local_, max_rows(), max_tokens_, arena);
  }
  std::size_t count_at(int parity, std::int32_t expert, int from) const {
    return count_words_[static_cast<std::size_t>(parity)] + 8 * static_cast<std::size_t>(from * num_local_ + expert);
  }
  std::size_t message_at(int parity, std::int32_t expert, int from, std::int64_t i) const {
    return received_[static_cast<std::size_t>(parity)] +
           static_cast<std::size_t>(((std::int64_t{from} * num_local_ + expert) * max_tokens_ + i) * message_.bytes());
  }

  void send_token(Routed const& in, std::int64_t t) {
    bool const mine = t % dp_size_ == rank_ % dp_size_;
    bool packed = false;
    for (std::int64_t j = 0; j < topk_; ++j) {
      std::int32_t const id = in.topk_ids(t, j);
      std::int32_t& entry = record_.entries[t * topk_ + j];
      entry = -1;
      record_.weights[t * topk_ + j] = on_input_ ? 1.0F : in.topk_weights(t, j);
      if (id < 0 || id >= num_physical_) {
        continue;
      }
      for (std::int64_t i = 0; i < j && entry < 0; ++i) {
        entry = in.topk_ids(t, i) == id ? record_.entries[t * topk_ + i] : -1;  // sent already: its output is added once per choice
      }
      if (entry >= 0) {
        continue;
      }
      entry = static_cast<std::int32_t>(t * topk_ + j);
      record_.record_rows[entry] = owner_[id];
      if (!mine) {
        continue;
      }
      if (!packed) {
        pack(in, t);
        packed = true;
      }
      message_.words(staging_)[0] = entry;
      std::copy_n(staging_, message_.bytes(),
                  window().template at<std::byte>(owner_[id], message_at(rounds_.parity(), local_[id], rank_, counts_[id]++)));
    }
  }
  void pack(Routed const& in, std::int64_t t) {
    message_.pack(quant_, on_input_ ? moe::detail::weighted_row(in, t, scaled_) : row_ptr(in.hidden, t), staging_);
  }
  template <class Check>
  void combine_send(Check&& check) {
    if (record_.state != DispatchState::received) {
      throw Error(ErrorCode::state, "finalize: called without prepare");
    }
    try {
      rounds_.send(moe::detail::WindowCall::combine, 0, check);
      rounds_.receive(moe::detail::WindowCall::combine);
    } catch (Error const&) {
      record_.state = rounds_.abandoned() ? DispatchState::idle : record_.state;
      throw;
    }
    record_.state = DispatchState::combining;
    auto const parity = static_cast<std::size_t>(rounds_.parity());
    for (std::int64_t e = 0; e < num_local_; ++e) {
      for (std::int64_t row = e * max_rows(); row < e * max_rows() + record_.counts[e]; ++row) {
        auto const origin = record_.origins[row];
        int const first = origin.rank - origin.rank % dp_size_;
        for (int to = first; to < first + dp_size_; ++to) {
          std::copy_n(record_.output_row(row), hidden_, window().template at<Partial>(to, returned_[parity]) + origin.entry * hidden_);
          std::size_t const counter = arrived_[parity] + 4 * static_cast<std::size_t>(origin.entry / topk_);
          std::atomic_ref<std::uint32_t>(*window().template at<std::uint32_t>(to, counter)).fetch_add(1, std::memory_order_release);
        }
      }
    }
  }
  // Calls done(t) for each token in order, once all its rows have returned.
  template <class Done>
  void wait_outputs(Done&& done) {
    for (std::int64_t t = 0; t < record_.rows; ++t) {
      wait_token(t, arrived_[static_cast<std::size_t>(rounds_.parity())] + 4 * static_cast<std::size_t>(t));
      done(t);
    }
  }
  // Waits until all rows of token t have returned, and resets its counter for the round after the next.
  void wait_token(std::int64_t t, std::size_t counter) {
    std::uint32_t wanted = 0;
    int owner = rank_;  // a rank that must return a row; the counter does not show which rank has not
    for (std::int64_t j = 0; j < topk_; ++j) {
      if (record_.entries[t * topk_ + j] == t * topk_ + j) {
        ++wanted;
        owner = owner == rank_ ? record_.record_rows[t * topk_ + j] : owner;
      }
    }
    window().wait_until([&] { return window().template load<std::uint32_t>(rank_, counter) == wanted; }, rounds_.round(),
                        comm::ExchangePhase::combine_rows, owner);
    *window().template own<std::uint32_t>(counter) = 0;
  }

  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int ranks_;
  int rank_;
  int num_physical_;
  int num_local_;
  int dp_size_;
  bool on_input_;
  moe::detail::BatchMessage<Config, Quant> message_;
  moe::detail::WindowOffsets offsets_;
  Record record_;
  std::size_t rounds_at_ = 0;
  std::array<std::size_t, 2> count_words_{};  // u64 [rank][L]
  std::array<std::size_t, 2> received_{};     // messages [rank][L][T_max]
  std::array<std::size_t, 2> arrived_{};      // u32 [T_max] rows of a token that have returned
  std::array<std::size_t, 2> returned_{};     // Partial [T_max k][H]
  std::int32_t* owner_ = nullptr;             // [P]
  std::int32_t* local_ = nullptr;             // [P]
  std::int32_t* counts_ = nullptr;            // [P] rows sent to each expert
  std::byte* staging_ = nullptr;              // one message
  Act* scaled_ = nullptr;                     // [H]
  std::optional<Error> refused_;
  moe::detail::WindowGroup<Window> group_;
  moe::detail::WindowRounds<Window> rounds_;
  moe::detail::CallOrder order_;
};

}  // namespace moe::backends::detail
