// SPDX-License-Identifier: Apache-2.0
// backends/collective/host/no_expert_parallel.hpp: the exchange of NoExpertParallel in the host space: prepare() quantises, finalize()
// rounds. The device exchange is in ../device/no_expert_parallel.hpp.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "moe/backends/common/exchange_common.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/buffer.hpp"

namespace moe::rules {
MOE_INCLUDED(NoExpertParallelOnDevice, "the exchange of no_expert_parallel in the CUDA space",
             "moe/backends/collective/device/no_expert_parallel.cuh");
}  // namespace moe::rules

namespace moe::backends {

template <class SpaceT>
struct NoExpertParallel;

namespace detail {

/// The exchange of one space. Specialised per memory space.
template <class Space, class Config, class Quant, class Partial>
class LocalExchange : public moe::detail::NotIncluded<rules::NoExpertParallelOnDevice> {};

template <std::same_as<space::host> SpaceT, class Config, class Quant, class Partial>
class LocalExchange<SpaceT, Config, Quant, Partial> {
 public:
  using Space = SpaceT;
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  using Tokens = StandardTokensOf<Config, Quant>;

  /// max_tokens: T_max, most rows of one prepare(). E_CONFIG if the placement is of more than one rank or T_max is negative.
  LocalExchange(comm::Self<Space>&, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                Quant const& quant, typename NoExpertParallel<Space>::Params const& params, Arena<Space>& arena)
      : quant_(quant), hidden_(shape.hidden()), topk_(shape.topk()), max_tokens_(max_tokens), num_physical_(placement.num_physical()) {
    if (!params.expert_rank && placement.ep_size() != 1) {
      throw Error(ErrorCode::config, text("placement: ep_size is ", placement.ep_size(), ", no_expert_parallel has 1 rank"));
    }
    if (max_tokens < 0) {
      throw Error(ErrorCode::config, text("max_tokens_per_rank: ", max_tokens, " must be at least 0"));
    }
    if (params.expert_rank) {
      std::vector<std::int32_t> const map = placement.expert_map(*params.expert_rank);
      expert_map_ = arena.template take<std::int32_t>(num_physical_);
      std::copy(map.begin(), map.end(), expert_map_);
    }
    ids_ = arena.template take<std::int32_t>(max_tokens * topk_);
    partial_ = arena.template take<Partial>(max_tokens * hidden_);
    if (!moe::detail::stores_rows_unchanged<Quant, Act>(hidden_)) {
      payload_ = arena.template take<Payload>(max_tokens * Quant::payload_cols(hidden_));
      scales_ = arena.template take<Scale>(max_tokens * Quant::scale_cols(hidden_));
    }
  }

  /// The most rows that the experts can get.
  std::int64_t max_rows() const { return max_tokens_; }

  /// Quantised rows with local ids. Unquantised rows are the caller's memory, which must stay valid until the experts are done. E_STATE
  /// without finalize() after the last prepare(); E_ARG, E_CAPACITY.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, HostStream) {
    order_.expect_idle();
    moe::detail::check_routed_tokens(in, hidden_, topk_, max_tokens_);
    moe::detail::check_ids(in.topk_ids, num_physical_);
    rows_ = in.hidden.extent(0);
    for (std::int64_t t = 0; t < rows_; ++t) {
      for (std::int64_t j = 0; j < topk_; ++j) {
        std::int32_t const id = in.topk_ids(t, j);
        bool const exists = id >= 0 && id < num_physical_;
        ids_[t * topk_ + j] = !exists ? kNoExpert : expert_map_ == nullptr ? id : expert_map_[id];
      }
    }
    order_.set_dispatched();
    auto const ids = make_rows(static_cast<std::int32_t const*>(ids_), rows_, topk_);
    if constexpr (std::is_same_v<Payload, Act>) {
      if (moe::detail::stores_rows_unchanged<Quant, Act>(hidden_)) {
        auto const rows = make_strided_rows(in.hidden.data_handle(), rows_, hidden_, in.hidden.stride(0));
        return {rows, make_rows(static_cast<Scale const*>(nullptr), rows_, 0), ids, in.topk_weights};
      }
    }
    std::int64_t const cols = Quant::payload_cols(hidden_);
    std::int64_t const scale_cols = Quant::scale_cols(hidden_);
    for (std::int64_t t = 0; t < rows_; ++t) {
      quant_.template quantize_row<Act>(row_ptr(in.hidden, t), hidden_, payload_ + t * cols, scales_ + t * scale_cols);
    }
    return {make_rows(static_cast<Payload const*>(payload_), rows_, cols), make_rows(static_cast<Scale const*>(scales_), rows_, scale_cols),
            ids, in.topk_weights};
  }

  /// [rows of the last prepare(), H]: the experts write every row.
  Rows<Partial> expert_output() { return make_rows(partial_, rows_, hidden_); }

  /// out[M, H] = expert_output(), one rounding. E_STATE without prepare(); E_ARG if `out` has another shape.
  void finalize(Rows<Act, Config::hidden> out, HostStream) {
    order_.expect_dispatched("finalize");
    moe::detail::check_output(out, rows_, hidden_);
    for (std::int64_t t = 0; t < rows_; ++t) {
      moe::detail::convert_row(partial_ + t * hidden_, hidden_, row_ptr(out, t));
    }
    order_.set_idle();
  }

  /// Gives up a round; the next call must be prepare().
  void abandon(HostStream) { order_.set_idle(); }

 private:
  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int num_physical_;
  std::int32_t* expert_map_ = nullptr;  // [P]; null: physical ids are local ids
  std::int32_t* ids_ = nullptr;
  Partial* partial_ = nullptr;
  Payload* payload_ = nullptr;
  Scale* scales_ = nullptr;
  std::int64_t rows_ = 0;
  moe::detail::CallOrder order_;
};

}  // namespace detail
}  // namespace moe::backends
