// SPDX-License-Identifier: Apache-2.0
// backends/common/exchange_rounds.hpp: how ranks agree before rows move, so that a wrong call is an error on all ranks and never hangs.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "moe/backends/common/exchange_common.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/communicator.hpp"

namespace moe::detail {

/// What all ranks of an exchange must have in common, exchanged once at construction.
struct ExchangeContract {
  static constexpr std::size_t kNameLength = 32;
  static constexpr std::array<char const*, 13> kFields{"hidden",          "topk",        "num_physical_experts", "max_tokens_per_rank",
                                                       "payload bytes",   "scale bytes", "output bytes",         "max_recv_rows",
                                                       "num_buffer_sets", "dp_size",     "queue_depth",          "queue_entry_bytes",
                                                       "placement"};
  char backend[kNameLength] = {};       // NOLINT(modernize-avoid-c-arrays): bytes that travel
  char quantization[kNameLength] = {};  // NOLINT(modernize-avoid-c-arrays)
  std::array<std::int64_t, kFields.size()> values{};
  std::int64_t tag = 0;     ///< distinguishes the exchanges of one process; all ranks use rank 0's
  std::int64_t status = 0;  ///< 0, or 1 + the code of the error that failed this rank's construction
};

/// Fields of some exchanges only; 0 in the others.
struct ContractSizes {
  std::int64_t max_recv_rows = 0;
  std::int64_t num_buffer_sets = 0;
  std::int64_t dp_size = 0;
  std::int64_t queue_depth = 0;
  std::int64_t queue_entry_bytes = 0;
};

/// 64-bit FNV-1a over the placement: the owner of each expert, and the experts of each rank.
inline std::int64_t placement_hash(ExpertPlacement const& placement) {
  std::uint64_t hash = 14695981039346656037ULL;
  auto add = [&](std::int32_t v) { hash = (hash ^ static_cast<std::uint32_t>(v)) * 1099511628211ULL; };
  add(placement.ep_size());
  for (int p = 0; p < placement.num_physical(); ++p) {
    add(placement.owner(p));
    add(placement.local(p));
    add(placement.logical(p));
  }
  return static_cast<std::int64_t>(hash);
}

/// The contract of an exchange of Config and Quant whose experts write Partial.
template <class Config, class Quant, class Partial>
ExchangeContract make_contract(char const* backend, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                               ContractSizes const& sizes = {}) {
  using Payload = typename Quant::template Payload<typename Config::Act>;
  ExchangeContract contract;
  std::strncpy(contract.backend, backend, ExchangeContract::kNameLength - 1);
  std::strncpy(contract.quantization, Quant::kName, ExchangeContract::kNameLength - 1);
  contract.values = {shape.hidden(),
                     shape.topk(),
                     placement.num_physical(),
                     max_tokens,
                     Quant::payload_cols(shape.hidden()) * static_cast<std::int64_t>(sizeof(Payload)),
                     Quant::scale_cols(shape.hidden()) * static_cast<std::int64_t>(sizeof(typename Quant::Scale)),
                     shape.hidden() * static_cast<std::int64_t>(sizeof(Partial)),
                     sizes.max_recv_rows,
                     sizes.num_buffer_sets,
                     sizes.dp_size,
                     sizes.queue_depth,
                     sizes.queue_entry_bytes,
                     placement_hash(placement)};
  return contract;
}

/// Compares the contracts of all ranks on rank `rank`: E_MISMATCH naming the first field that differs; E_PEER if another rank refused.
inline void compare_contracts(int rank, std::vector<ExchangeContract> const& all) {
  auto differ = [&](char const* field, std::size_t r, auto const& a, auto const& b) {
    if (a != b) {
      throw TransportError(ErrorCode::mismatch, rank, static_cast<int>(r), "construction", 0,
                           text(field, ": rank 0 has ", a, ", rank ", r, " has ", b));
    }
  };
  constexpr std::size_t kPlacement = ExchangeContract::kFields.size() - 1;  // a hash: it shows that placements differ, not where
  for (std::size_t r = 1; r < all.size(); ++r) {
    differ("backend", r, std::string_view(all[0].backend), std::string_view(all[r].backend));
    differ("quantization", r, std::string_view(all[0].quantization), std::string_view(all[r].quantization));
    for (std::size_t f = 0; f < kPlacement; ++f) {
      differ(ExchangeContract::kFields[f], r, all[0].values[f], all[r].values[f]);
    }
    if (all[r].values[kPlacement] != all[0].values[kPlacement]) {
      throw TransportError(ErrorCode::mismatch, rank, static_cast<int>(r), "construction", 0,
                           text("placement: rank 0 and rank ", r, " give experts to other ranks; a layer names the first such expert"));
    }
  }
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].status != 0) {
      throw TransportError(ErrorCode::peer, rank, static_cast<int>(r), "construction", 0,
                           text("rank ", r, " refused its arguments with ", name(static_cast<ErrorCode>(all[r].status - 1))));
    }
  }
}

/// Checks the arguments of an exchange that a rank can check alone. E_CONFIG.
inline void check_exchange(ExpertPlacement const& placement, int num_ranks, std::int64_t max_tokens, std::int64_t max_recv_rows) {
  if (placement.ep_size() != num_ranks) {
    throw Error(ErrorCode::config, text("placement: ep_size is ", placement.ep_size(), ", the communicator has ", num_ranks, " ranks"));
  }
  if (max_tokens < 0) {
    throw Error(ErrorCode::config, text("max_tokens_per_rank: ", max_tokens, " must be at least 0"));
  }
  if (max_recv_rows < 0) {
    throw Error(ErrorCode::config, text("max_recv_rows: ", max_recv_rows, " must be at least 0"));
  }
}

/// The rounds of one exchange: each has a dispatch (prepare) and a combine (finalize). Both start with a small all-gather of the row count,
/// of whether this rank takes part, and of the values that detect a mismatched call.
template <class Comm>
class ExchangeRounds {
 public:
  static_assert(std::is_same_v<typename Comm::Space, space::host>, "the host exchanges need a communicator of the host space");

  /// Collective. `num_extra`: words that each rank adds to the header of a dispatch. `refused`: why this rank cannot take part; thrown here
  /// after the peers have been told. E_MISMATCH names the first field that differs; E_PEER: another rank refused.
  ExchangeRounds(Comm& comm, ExchangeContract contract, std::int64_t num_extra, std::optional<Error> const& refused,
                 Arena<space::host>& arena)
      : comm_(comm), words_(kFixed + num_extra) {
    headers_ = arena.take<std::int64_t>(words_ * comm.size());
    mine_ = arena.take_filled<std::int64_t>(words_, 0);
    static std::atomic<std::int64_t> exchanges{0};
    contract.tag = ++exchanges;
    contract.status = refused ? status_of(refused->code()) : 0;
    std::vector<ExchangeContract> all(static_cast<std::size_t>(comm.size()));
    set_phase("construction");
    comm.all_gather(&contract, static_cast<std::int64_t>(sizeof contract), all.data(), {});
    if (refused) {
      throw Error(*refused);
    }
    compare_contracts(rank(), all);
    tag_ = all[0].tag;
  }

  int rank() const { return comm_.rank(); }
  int size() const { return comm_.size(); }
  Comm& comm() { return comm_; }
  /// Distinguishes this exchange from all others of the process; the same number on all ranks.
  std::int64_t tag() const { return tag_; }
  /// Rounds so far, including the one in progress.
  std::uint64_t round() const { return static_cast<std::uint64_t>(round_); }

  /// Collective. Starts a round with `rows` rows of this rank. check() throws Error if this rank's arguments are wrong, and may write
  /// extra(). E_STATE, without communication, if the last round is still open; this rank's own error; E_MISMATCH; E_CAPACITY or E_PEER if
  /// another rank has refused. Call opened() once the rows have moved.
  template <class Check>
  void open(std::int64_t rows, Check&& check) {
    order_.expect_idle();
    agree(Call::dispatch, rows, check);
  }
  void opened() { order_.set_dispatched(); }
  /// Collective. Ends the round with its combine. Errors as in open(). A round that a rank abandons has ended for all; a round whose
  /// arguments a rank refuses stays open.
  template <class Check>
  void close(Check&& check) {
    order_.expect_dispatched("finalize");
    agree(Call::combine, 0, check);
    order_.set_idle();
  }
  /// Collective. Joins the peers' current call only to report that this rank cannot take part. They get E_PEER. Never throws.
  void abandon() noexcept {
    Call const call = order_.dispatched() ? Call::combine : Call::dispatch;
    try {
      exchange(call, 0, kAbandoned);
    } catch (Error const&) {  // the communicator reports its failure again on the next call
    }
    order_.set_idle();
  }

  /// The number of rows of rank r, and its extra words, after open(); close() overwrites them.
  std::int64_t rows(int r) const { return header(r)[kRows]; }
  std::int64_t const* extra(int r) const { return header(r) + kFixed; }
  /// This rank's extra words, to be written in open()'s check.
  std::int64_t* extra() { return mine_ + kFixed; }

 private:
  enum class Call : std::int64_t { dispatch, combine };
  enum Word : std::int64_t { kTag, kRound, kCall, kStatus, kRows, kFixed };
  static constexpr std::int64_t kAbandoned = -1;

  static std::int64_t status_of(ErrorCode code) { return 1 + static_cast<std::int64_t>(code); }
  static ErrorCode code_of(std::int64_t status) { return static_cast<ErrorCode>(status - 1); }
  static char const* phase(Call call) { return call == Call::dispatch ? "dispatch" : "combine"; }
  std::int64_t const* header(int r) const { return headers_ + words_ * r; }

  void set_phase(char const* phase) { facts::set_phase(comm_, phase); }

  void exchange(Call call, std::int64_t rows, std::int64_t status) {
    mine_[kTag] = tag_;
    mine_[kRound] = round_ + (call == Call::dispatch ? 1 : 0);
    mine_[kCall] = static_cast<std::int64_t>(call);
    mine_[kStatus] = status;
    mine_[kRows] = rows;
    set_phase(phase(call));
    comm_.all_gather(mine_, words_ * static_cast<std::int64_t>(sizeof(std::int64_t)), headers_, {});
    // A round counts only if all ranks are in it: ranks in another call have not counted it, and all must agree on the next number.
    bool together = true;
    std::int64_t latest = mine_[kRound];
    for (int r = 0; r < size(); ++r) {
      together = together && header(r)[kTag] == tag_ && header(r)[kCall] == mine_[kCall];
      latest = std::max(latest, header(r)[kRound]);
    }
    round_ = together ? latest : round_;
  }

  template <class Check>
  void agree(Call call, std::int64_t rows, Check&& check) {
    std::optional<Error> const refused = error_of(check);
    exchange(call, refused ? 0 : rows, refused ? status_of(refused->code()) : 0);
    for (int r = 0; r < size(); ++r) {
      if (header(r)[kStatus] == kAbandoned && header(r)[kTag] == tag_) {
        order_.set_idle();
      }
    }
    if (refused) {
      throw Error(*refused);
    }
    for (Word word : {kTag, kCall, kRound}) {
      for (int r = 1; r < size(); ++r) {
        if (header(r)[word] != header(0)[word]) {
          throw TransportError(ErrorCode::mismatch, rank(), r, phase(call), static_cast<std::uint64_t>(mine_[kRound]),
                               text(describe(word), ": rank 0 is in ", describe(word, 0), ", rank ", r, " in ", describe(word, r)));
        }
      }
    }
    for (int r = 0; r < size(); ++r) {
      std::int64_t const status = header(r)[kStatus];
      if (status == kAbandoned) {
        throw TransportError(ErrorCode::peer, rank(), r, phase(call), round(), text("rank ", r, " abandoned the call"));
      }
      if (status != 0) {
        ErrorCode const code = code_of(status);
        throw TransportError(code == ErrorCode::capacity ? code : ErrorCode::peer, rank(), r, phase(call), round(),
                             text("rank ", r, " refused its arguments with ", name(code)));
      }
    }
  }

  static char const* describe(Word word) { return word == kTag ? "layer" : word == kCall ? "call" : "round"; }
  std::string describe(Word word, int r) const {
    std::int64_t const value = header(r)[word];
    if (word == kCall) {
      return value == static_cast<std::int64_t>(Call::dispatch) ? "prepare" : "finalize";
    }
    return text(describe(word), " ", value);
  }

  Comm& comm_;
  std::int64_t words_;               // of one header
  std::int64_t* headers_ = nullptr;  // [size, words_]
  std::int64_t* mine_ = nullptr;     // [words_]
  std::int64_t tag_ = 0;
  std::int64_t round_ = 0;
  CallOrder order_;
};

}  // namespace moe::detail
