// SPDX-License-Identifier: Apache-2.0
// backends/collective/device/no_expert_parallel.hpp: NoExpertParallel in the CUDA space: prepare() quantises on the stream, finalize()
// rounds.
#pragma once

#include <functional>

#include "moe/backends/no_expert_parallel.hpp"
#include "moe/core/cuda_space.hpp"

namespace moe::backends::detail {

template <class Config, class Quant, class Partial>
class LocalExchange<space::cuda, Config, Quant, Partial> {
 public:
  using Space = space::cuda;
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  using Tokens = StandardTokensOf<Config, Quant>;
  static constexpr bool kTakesRowCount = true;

  /// As on the host; `arena` gives device memory.
  LocalExchange(comm::Self<Space>&, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                Quant const& quant, typename NoExpertParallel<Space>::Params const& params, Arena<Space>& arena)
      : quant_(quant), hidden_(shape.hidden()), topk_(shape.topk()), max_tokens_(max_tokens), num_physical_(placement.num_physical()) {
    if (!params.expert_rank && placement.ep_size() != 1) {
      throw Error(ErrorCode::config, text("placement: ep_size is ", placement.ep_size(), ", no_expert_parallel has 1 rank"));
    }
    if (placement.ep_size() != 1) {
      std::vector<std::int32_t> const map = placement.expert_map(*params.expert_rank);
      expert_map_ = arena.take<std::int32_t>(num_physical_);
      Memory<Space>::copy_from_host(expert_map_, map.data(), map.size() * sizeof(std::int32_t));
    }
    ids_ = arena.take<std::int32_t>(max_tokens * topk_);
    partial_ = arena.take<Partial>(max_tokens * hidden_);
    if (!moe::detail::stores_rows_unchanged<Quant, Act>(hidden_)) {
      payload_ = arena.take<Payload>(max_tokens * Quant::payload_cols(hidden_));
      scales_ = arena.take<Scale>(max_tokens * Quant::scale_cols(hidden_));
    }
  }

  std::int64_t max_rows() const { return max_tokens_; }

  /// Enqueues. Unquantised rows are the caller's memory. Ids outside [0, P) become kNoExpert; if the experts skip such ids anyway, the ids
  /// are the caller's memory too.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    order_.expect_idle();
    moe::detail::check_routed_tokens(in, hidden_, topk_, max_tokens_);
    rows_ = in.hidden.extent(0);
    input_ = in.hidden;
    direct_ = nullptr;
    bool const as_they_are = in.experts_skip_foreign_ids && expert_map_ == nullptr;
    if (!as_they_are) launch_localize(in.topk_ids, stream);
    order_.set_dispatched();
    auto const ids = as_they_are ? in.topk_ids : make_rows(static_cast<std::int32_t const*>(ids_), rows_, topk_);
    if constexpr (std::is_same_v<Payload, Act>) {
      if (moe::detail::stores_rows_unchanged<Quant, Act>(hidden_)) {
        return {make_strided_rows(in.hidden.data_handle(), rows_, hidden_, in.hidden.stride(0)),
                make_rows(static_cast<Scale const*>(nullptr), rows_, 0), ids, in.topk_weights, in.num_rows};
      }
    }
    launch_quantize(in.hidden, stream);
    return {make_rows(static_cast<Payload const*>(payload_), rows_, Quant::payload_cols(hidden_)),
            make_rows(static_cast<Scale const*>(scales_), rows_, Quant::scale_cols(hidden_)), ids, in.topk_weights, in.num_rows};
  }

  Rows<Partial> expert_output() { return make_rows(partial_, rows_, hidden_); }
  /// The same, or `out` itself if no rounding is needed: `out` must be packed, of the experts' element type, not overlapping the input.
  Rows<Partial> expert_output(Rows<Act, Config::hidden> out) {
    if constexpr (std::is_same_v<Partial, Act>) {
      std::less_equal<Act const*> const before;
      Act const* const input_end = input_.data_handle() + (rows_ == 0 ? 0 : (rows_ - 1) * input_.stride(0) + hidden_);
      bool const apart = before(input_end, out.data_handle()) || before(out.data_handle() + rows_ * hidden_, input_.data_handle());
      if (apart && out.stride(0) == hidden_ && out.extent(0) == rows_) {
        direct_ = out.data_handle();
        return make_rows(out.data_handle(), rows_, hidden_);
      }
    }
    return expert_output();
  }

  /// Enqueues out = expert_output(), one rounding. E_STATE if the experts wrote another output.
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    moe::detail::check_output(out, rows_, hidden_);
    if (direct_ == nullptr) {
      launch_convert(out, stream);
    } else if (direct_ != out.data_handle()) {
      throw Error(ErrorCode::state, "finalize: the experts wrote to another output");
    }
    order_.set_idle();
  }

  void abandon(cudaStream_t) { order_.set_idle(); }

 private:
  // Defined in no_expert_parallel.cuh.
  void launch_localize(Rows<std::int32_t const> ids, cudaStream_t stream);
  void launch_quantize(Rows<Act const, Config::hidden> hidden, cudaStream_t stream);
  void launch_convert(Rows<Act, Config::hidden> out, cudaStream_t stream);

  Quant quant_;
  std::int64_t hidden_;
  std::int64_t topk_;
  std::int64_t max_tokens_;
  int num_physical_;
  std::int32_t* expert_map_ = nullptr;  // [P] local ids, of a placement with more ranks
  std::int32_t* ids_ = nullptr;
  Partial* partial_ = nullptr;
  Payload* payload_ = nullptr;
  Scale* scales_ = nullptr;
  std::int64_t rows_ = 0;
  Rows<Act const, Config::hidden> input_ = {};
  void const* direct_ = nullptr;  // the output that the experts write themselves
  moe::detail::CallOrder order_;
};

}  // namespace moe::backends::detail
