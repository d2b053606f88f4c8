// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/gather_exchange.hpp: Naive and AllGatherReduceScatter between GPUs over comm::Nccl: the exchange that a layer
// owns. Host C++ only; its kernels are in gather_exchange.cuh.
#pragma once

#include "moe/backends/allgather_reduce_scatter.hpp"
#include "moe/backends/collective/device/rounds.hpp"
#include "moe/backends/naive.hpp"

namespace moe::detail {

template <class Backend, class Config, class Quant, class Partial>
class GatherExchange<Backend, Config, Quant, Partial, space::cuda> {
 public:
  using Space = space::cuda;
  using Comm = typename Backend::Comm;
  using Act = typename Config::Act;
  using Tokens = StandardTokensOf<Config, Quant>;
  using Wire = WireRow<Config, Quant>;

  /// Collective. As on the host.
  GatherExchange(Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement, Quant const& quant,
                 typename Backend::Params const& params, Arena<Space>& arena)
      : quant_(quant),
        hidden_(shape.hidden()),
        topk_(shape.topk()),
        max_tokens_(max_tokens),
        num_physical_(placement.num_physical()),
        wire_(hidden_, topk_),
        fixed_(has_fixed_sizes(params.sizes, comm.size() * max_tokens * wire_.bytes(), true)),
        refused_(error_of([&] { take_memory(comm, placement, params.expert_rank, arena); })),
        rounds_(comm,
                make_contract<Config, Quant, Partial>((std::string(Backend::kName) + (fixed_ ? ", fixed" : "")).c_str(), shape, max_tokens,
                                                      placement),
                fixed_ ? RoundLayout::fixed : RoundLayout::by_rows, max_tokens * comm.size(), refused_, arena) {}

  /// The most rows that the experts can get: T_max of every rank.
  std::int64_t max_rows() const { return max_tokens_ * rounds_.size(); }
  /// Whether forward() can be captured in a graph: no count reaches the host.
  bool capturable() const { return fixed_; }

  /// Collective. The rows of all ranks, in rank order, with local ids. Exact sizes: waits on the host for the counts and throws this
  /// round's errors, as on the host. Fixed sizes: [R T_max] rows, those past each rank's count without ids; throws only for this rank's
  /// arguments; other errors give NaN and are thrown by check().
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    auto const refused = rounds_.begin_dispatch(stream, [&] { check_routed_tokens(in, hidden_, static_cast<int>(topk_), max_tokens_); });
    own_rows_ = refused ? 0 : in.hidden.extent(0);
    dispatch_headers(rounds_.opening(RoundCall::dispatch, own_rows_, refused), stream);
    launch_pack(in, stream);
    if (!fixed_) {
      rounds_.wait();
    }
    if (refused && !fixed_) {
      throw Error(*refused);
    }
    lay_out();
    Backend::gather(rounds_.comm(), records_, slices(wire_.bytes()), stream);
    launch_map(stream);
    if (refused) {
      join_combine(rounds_.opening(RoundCall::combine, 0, refused), stream);
      throw Error(*refused);
    }
    rounds_.opened();
    return wire_.tokens(records_, total_);
  }

  /// [rows of the last prepare(), H]: the experts write every row.
  Rows<Partial> expert_output() { return make_rows(partial_, total_, hidden_); }

  /// Collective. Enqueues out[M, H] = Σ over ranks of their expert_output() rows of this rank's tokens in float32, one rounding. E_STATE
  /// without prepare(); E_ARG if `out` has another shape (the peers get E_PEER). Errors of other ranks give NaN and are thrown by the next
  /// prepare() (exact sizes) or by check().
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    auto const refused = rounds_.begin_combine([&] { check_output(out, own_rows_, hidden_); });
    join_combine(rounds_.opening(RoundCall::combine, 0, refused), stream);
    if (refused) {
      throw Error(*refused);
    }
    launch_sum(out, stream);
  }

  /// Collective. Call it instead of prepare() or finalize(): this rank gives up the round, its peers get E_PEER. Never throws.
  void abandon(cudaStream_t stream) noexcept {
    try {
      own_rows_ = rounds_.dispatched() ? own_rows_ : 0;
      if (!rounds_.dispatched()) {
        dispatch_headers(rounds_.abandoning(RoundCall::dispatch), stream);
        if (fixed_) {
          lay_out();
          Backend::gather(rounds_.comm(), records_, slices(wire_.bytes()), stream);
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
  static constexpr bool kWidens = Backend::kReducesEverywhere && !std::is_same_v<Partial, float>;

  void take_memory(Comm& comm, ExpertPlacement const& placement, std::optional<int> expert_rank, Arena<Space>& arena) {
    int const ranks = comm.size();
    rows_.assign(static_cast<std::size_t>(ranks), 0);
    first_ = counts_ = offsets_ = rows_;
    check_exchange(placement, expert_rank ? placement.ep_size() : ranks, max_tokens_, 0);
    std::int64_t const max_rows = std::max<std::int64_t>(max_tokens_ * ranks, 1);
    std::vector<std::int32_t> const map = placement.expert_map(expert_rank.value_or(comm.rank()));
    expert_map_ = arena.template take<std::int32_t>(num_physical_);
    Memory<Space>::copy_from_host(expert_map_, map.data(), map.size() * sizeof(std::int32_t));
    // Rows that have not arrived have ids of -1: if a transfer is cut off, the experts must not use an invalid id.
    records_ = arena.template take_filled<std::byte>(max_rows * wire_.bytes(), 0xff);
    partial_ = arena.template take<Partial>(max_rows * hidden_);
    if constexpr (kWidens) {
      widened_ = arena.template take<float>(max_rows * hidden_);
    } else if constexpr (!Backend::kReducesEverywhere) {
      returned_ = arena.template take<Partial>(max_rows * hidden_);
    }
  }

  void lay_out() {
    total_ = 0;
    for (int r = 0; r < rounds_.size(); ++r) {
      auto const i = static_cast<std::size_t>(r);
      rows_[i] = fixed_ ? max_tokens_ : rounds_.rows(r);
      first_[i] = total_;
      total_ += rows_[i];
    }
  }
  RankSlices slices(std::int64_t per_row) {
    for (std::size_t r = 0; r < rows_.size(); ++r) {
      counts_[r] = rows_[r] * per_row;
      offsets_[r] = first_[r] * per_row;
    }
    return {counts_.data(), offsets_.data(), total_ * per_row};
  }
  void dispatch_headers(RoundOpening const& opening, cudaStream_t stream) {
    rounds_.open(opening, stream);
    rounds_.exchange(stream, [](auto&) {});
    rounds_.check_headers(RoundCall::dispatch, opening.status == 0, stream);
    rounds_.mark(stream);
  }
  void join_combine(RoundOpening const& opening, cudaStream_t stream) {
    rounds_.open(opening, stream);
    rounds_.exchange(stream, [&](auto& group) {
      if constexpr (!Backend::kReducesEverywhere) {
        // Every rank gets the rows of its own tokens from all others, rank by rank, rows_[me] rows apart.
        std::int64_t const row = hidden_ * static_cast<std::int64_t>(sizeof(Partial));
        auto const me = static_cast<std::size_t>(rounds_.rank());
        for (std::size_t i = 1; i < rows_.size(); ++i) {
          std::size_t const to = (me + i) % rows_.size();
          std::size_t const from = (me + rows_.size() - i) % rows_.size();
          group.send(partial_ + first_[to] * hidden_, rows_[to] * row, static_cast<int>(to), stream);
          group.receive(returned_ + static_cast<std::int64_t>(from) * rows_[me] * hidden_, rows_[me] * row, static_cast<int>(from), stream);
        }
      }
    });
    if constexpr (Backend::kReducesEverywhere) {
      if (total_ > 0) {
        float* const sums = widened(stream);
        rounds_.comm().all_reduce(sums, total_ * hidden_, sums, stream);
      }
    }
    rounds_.check_headers(RoundCall::combine, opening.status == 0, stream);
    rounds_.closed(stream);
  }
  /// The experts' rows as float32 on the device.
  float* widened(cudaStream_t stream) {
    if constexpr (kWidens) {
      launch_widen(stream);
      return widened_;
    } else {
      return reinterpret_cast<float*>(partial_);
    }
  }

  // Defined in gather_exchange.cuh.
  void launch_pack(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream);
  void launch_map(cudaStream_t stream);
  void launch_widen(cudaStream_t stream);
  void launch_sum(Rows<Act, Config::hidden> out, cudaStream_t stream);

  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int num_physical_;
  Wire wire_;
  bool fixed_;
  std::vector<std::int64_t> rows_;     // [R] that move in the round
  std::vector<std::int64_t> first_;    // [R] first row of each rank
  std::vector<std::int64_t> counts_;   // [R] for the collective in progress
  std::vector<std::int64_t> offsets_;  // [R]
  std::int32_t* expert_map_ = nullptr;
  std::byte* records_ = nullptr;  // [R T_max] records
  Partial* partial_ = nullptr;    // [R T_max, H]
  Partial* returned_ = nullptr;   // [R, M, H]: this rank's tokens, one row from every rank; unless kReducesEverywhere
  float* widened_ = nullptr;      // [R T_max, H], if the experts' output type is not the reduced type
  std::int64_t own_rows_ = 0;
  std::int64_t total_ = 0;
  std::optional<Error> refused_;
  DeviceRounds<Comm> rounds_;
};

}  // namespace moe::detail
