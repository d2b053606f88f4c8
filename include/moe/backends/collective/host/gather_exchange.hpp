// SPDX-License-Identifier: Apache-2.0
// backends/collective/host/gather_exchange.hpp: exchanges in which every rank sees every token: gather all rows, compute this rank's
// experts, sum over ranks. For the host space; the device exchange is in ../device/gather_exchange.hpp.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "moe/backends/common/exchange_rounds.hpp"
#include "moe/backends/common/wire_row.hpp"
#include "moe/core/contract/communicator.hpp"

namespace moe::rules {
MOE_INCLUDED(GatherExchangeOnDevice, "the exchange of naive and allgather_reduce_scatter in the CUDA space",
             "moe/backends/collective/device/gather_exchange.cuh");
}  // namespace moe::rules

namespace moe::backends::detail {

/// Params of the policies whose exchange is GatherExchange.
struct GatherParams {
  Sizes sizes = Sizes::automatic;  ///< device only; the same on all ranks
  /// The rank of the placement whose experts this rank has, where the placement's ranks are not the communicator's: the output is then a
  /// part, and the caller sums over the other ranks.
  std::optional<int> expert_rank{};
};

}  // namespace moe::backends::detail

namespace moe::detail {

/// Where each rank's rows lie among the rows of all, counted in a row's bytes or elements. Host arrays of size entries.
struct RankSlices {
  std::int64_t const* counts;
  std::int64_t const* offsets;
  std::int64_t total;
};

/// Backend gives kName and the two collectives:
///   gather(comm, records, RankSlices in bytes, stream)              own records are in place → all records
///   combine(comm, partial, RankSlices in floats, scratch) → float*  [M, H] own rows of the sum over ranks; may overwrite `partial`. Host
///   kReducesEverywhere                                              on the device: sum with all_reduce, else send each rank its rows
/// Specialised per memory space.
template <class Backend, class Config, class Quant, class Partial, class Space = typename Backend::Space>
class GatherExchange : public NotIncluded<rules::GatherExchangeOnDevice> {};

template <class Backend, class Config, class Quant, class Partial>
class GatherExchange<Backend, Config, Quant, Partial, space::host> {
 public:
  using Space = space::host;
  using Comm = typename Backend::Comm;
  using Act = typename Config::Act;
  using Tokens = StandardTokensOf<Config, Quant>;

  /// Collective. max_tokens: T_max, most rows of one prepare() on any rank. E_CONFIG if this rank's arguments are wrong, E_CAPACITY if
  /// memory does not suffice (then the peers get E_PEER); E_MISMATCH on all ranks, naming the field, if ranks disagree.
  GatherExchange(Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement, Quant const& quant,
                 typename Backend::Params const& params, Arena<Space>& arena)
      : quant_(quant),
        hidden_(shape.hidden()),
        topk_(shape.topk()),
        max_tokens_(max_tokens),
        num_physical_(placement.num_physical()),
        wire_(hidden_, topk_),
        refused_(error_of([&] { take_memory(comm, placement, params.expert_rank, arena); })),
        rounds_(comm, make_contract<Config, Quant, Partial>(Backend::kName, shape, max_tokens, placement), 0, refused_, arena) {}

  /// The most rows that the experts can get: T_max of every rank.
  std::int64_t max_rows() const { return max_tokens_ * rounds_.size(); }

  /// Collective. The rows of all ranks, in rank order, with local ids. E_STATE without finalize() after the last prepare(); E_ARG,
  /// E_CAPACITY for this rank's arguments; E_CAPACITY, E_PEER, E_MISMATCH for those of others.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, HostStream) {
    rounds_.open(in.hidden.extent(0), [&] {
      check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_);
      check_ids(in.topk_ids, num_physical_);
    });
    total_ = 0;
    for (int r = 0; r < rounds_.size(); ++r) {
      rows_[r] = rounds_.rows(r);
      first_[r] = total_;
      total_ += rows_[r];
    }
    std::byte* own = records_ + first_[rounds_.rank()] * wire_.bytes();
    for (std::int64_t t = 0; t < in.hidden.extent(0); ++t) {
      std::byte* record = own + t * wire_.bytes();
      wire_.pack(quant_, in, t, record);
      std::copy_n(row_ptr(in.topk_ids, t), topk_, wire_.ids(record));
    }
    Backend::gather(rounds_.comm(), records_, slices(wire_.bytes()), {});
    for (std::int64_t t = 0; t < total_; ++t) {
      std::int32_t* ids = wire_.ids(records_ + t * wire_.bytes());
      for (std::int64_t j = 0; j < topk_; ++j) {
        ids[j] = ids[j] >= 0 && ids[j] < num_physical_ ? expert_map_[ids[j]] : kNoExpert;
      }
    }
    rounds_.opened();
    return wire_.tokens(records_, total_);
  }

  /// [rows of the last prepare(), H]: the experts write every row, zeros where a token has no expert here.
  Rows<Partial> expert_output() { return make_rows(partial_, total_, hidden_); }

  /// Collective. out[M, H] = Σ over ranks of their expert_output() rows of this rank's tokens, float32 in rank order, one rounding.
  /// E_STATE without prepare(); E_ARG if `out` has another shape; E_PEER.
  void finalize(Rows<Act, Config::hidden> out, HostStream) {
    std::int64_t const own_rows = rows_[rounds_.rank()];
    rounds_.close([&] { check_output(out, own_rows, hidden_); });
    float* sums = nullptr;
    if constexpr (std::is_same_v<Partial, float>) {
      sums = partial_;
    } else {
      convert_row(partial_, total_ * hidden_, widened_);
      sums = widened_;
    }
    float const* own = Backend::combine(rounds_.comm(), sums, slices(hidden_), combined_);
    for (std::int64_t t = 0; t < own_rows; ++t) {
      convert_row(own + t * hidden_, hidden_, row_ptr(out, t));
    }
  }

  /// Collective. Call it instead of prepare() or finalize(): this rank gives up the round, its peers get E_PEER. Never throws.
  void abandon(HostStream) { rounds_.abandon(); }

 private:
  void take_memory(Comm& comm, ExpertPlacement const& placement, std::optional<int> expert_rank, Arena<Space>& arena) {
    int const ranks = comm.size();
    rows_ = arena.template take_filled<std::int64_t>(ranks, 0);
    first_ = arena.template take_filled<std::int64_t>(ranks, 0);
    counts_ = arena.template take<std::int64_t>(ranks);
    offsets_ = arena.template take<std::int64_t>(ranks);
    check_exchange(placement, expert_rank ? placement.ep_size() : ranks, max_tokens_, 0);
    std::int64_t const max_rows = std::max<std::int64_t>(max_tokens_ * ranks, 1);
    std::vector<std::int32_t> const map = placement.expert_map(expert_rank.value_or(comm.rank()));
    expert_map_ = arena.template take<std::int32_t>(num_physical_);
    std::copy(map.begin(), map.end(), expert_map_);
    records_ = arena.template take<std::byte>(max_rows * wire_.bytes());
    partial_ = arena.template take<Partial>(max_rows * hidden_);
    combined_ = arena.template take<float>(max_tokens_ * hidden_);
    if (!std::is_same_v<Partial, float>) {
      widened_ = arena.template take<float>(max_rows * hidden_);
    }
    facts::reserve_reduction(comm, max_tokens_ * hidden_);
  }

  RankSlices slices(std::int64_t per_row) {
    for (int r = 0; r < rounds_.size(); ++r) {
      counts_[r] = rows_[r] * per_row;
      offsets_[r] = first_[r] * per_row;
    }
    return {counts_, offsets_, total_ * per_row};
  }

  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int num_physical_;
  WireRow<Config, Quant> wire_;
  std::int64_t* rows_ = nullptr;     // [R] of the round
  std::int64_t* first_ = nullptr;    // [R] first row of each rank
  std::int64_t* counts_ = nullptr;   // [R] for the collective in progress
  std::int64_t* offsets_ = nullptr;  // [R]
  std::int32_t* expert_map_ = nullptr;
  std::byte* records_ = nullptr;  // [R T_max] records
  Partial* partial_ = nullptr;    // [R T_max, H]
  float* combined_ = nullptr;     // [T_max, H]
  float* widened_ = nullptr;      // [R T_max, H], unless the experts write float
  std::int64_t total_ = 0;
  std::optional<Error> refused_;
  ExchangeRounds<Comm> rounds_;
};

}  // namespace moe::detail
