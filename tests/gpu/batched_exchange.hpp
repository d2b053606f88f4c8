// SPDX-License-Identifier: Apache-2.0
// tests/gpu/batched_exchange.hpp: a simple backend for the batched format on one rank: packs rows by expert, for experts that read batches.
// Rows past a count, and rows of `out` that are not written, hold NaN.
#pragma once

#include "moe/backends/collective/device/no_expert_parallel.hpp"

namespace moe_test {

/// Gathers: each token's row is stored once, and each expert has a list of rows.
template <class Config, class Quant, class Partial, bool Gathers = false>
class BatchedExchange {
 public:
  using Space = moe::space::cuda;
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Tokens = moe::BatchedTokensOf<Config, Quant>;
  struct Params {};

  BatchedExchange(moe::comm::Self<Space>&, moe::Shape<Config> const& shape, std::int64_t max_tokens, moe::ExpertPlacement const& placement,
                  Quant const& quant, Params const&, moe::Arena<Space>& arena)
      : quant_(quant),
        hidden_(static_cast<int>(shape.hidden())),
        topk_(shape.topk()),
        experts_(placement.num_physical()),
        capacity_(max_tokens),
        batches_(arena.take<Payload>(experts_ * capacity_ * Quant::payload_cols(hidden_))),
        scales_(arena.take<typename Quant::Scale>(experts_ * capacity_ * Quant::scale_cols(hidden_))),
        counts_(arena.take<std::int32_t>(experts_)),
        positions_(arena.take<std::int32_t>(max_tokens * topk_)),
        gather_(Gathers ? arena.take<std::int32_t>(experts_ * capacity_) : nullptr),
        partial_(arena.take<Partial>(experts_ * capacity_ * hidden_)) {}

  std::int64_t max_rows() const { return capacity_; }

  Tokens prepare(moe::RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    rows_ = static_cast<int>(in.hidden.extent(0));
    ids_ = in.topk_ids.data_handle();
    weights_ = in.topk_weights.data_handle();
    auto const poison = [&](void* at, std::int64_t bytes) {
      if (bytes > 0) moe::check_cuda(cudaMemsetAsync(at, 0xFF, static_cast<std::size_t>(bytes), stream), "cudaMemsetAsync");
    };
    poison(batches_, experts_ * capacity_ * Quant::payload_cols(hidden_) * static_cast<std::int64_t>(sizeof(Payload)));
    poison(scales_, experts_ * capacity_ * Quant::scale_cols(hidden_) * static_cast<std::int64_t>(sizeof(typename Quant::Scale)));
    poison(partial_, experts_ * capacity_ * hidden_ * static_cast<std::int64_t>(sizeof(Partial)));
    launch_pack(in.hidden.data_handle(), stream);
    if constexpr (Gathers) {
      return {moe::make_blocks(static_cast<Payload const*>(batches_), 1, rows_, Quant::payload_cols(hidden_)),
              moe::make_blocks(static_cast<typename Quant::Scale const*>(scales_), 1, rows_, Quant::scale_cols(hidden_)),
              moe::make_vector(static_cast<std::int32_t const*>(counts_), experts_),
              moe::make_rows(static_cast<std::int32_t const*>(gather_), experts_, capacity_)};
    }
    return {moe::make_blocks(static_cast<Payload const*>(batches_), experts_, capacity_, Quant::payload_cols(hidden_)),
            moe::make_blocks(static_cast<typename Quant::Scale const*>(scales_), experts_, capacity_, Quant::scale_cols(hidden_)),
            moe::make_vector(static_cast<std::int32_t const*>(counts_), experts_)};
  }
  moe::Blocks<Partial> expert_output() { return moe::make_blocks(partial_, experts_, capacity_, hidden_); }
  void finalize(moe::Rows<Act, Config::hidden> out, cudaStream_t stream) {
    if (rows_ == 0) return;
    launch_reduce(out.data_handle(), stream);
  }
  void abandon(cudaStream_t) {}

 private:
  // Defined in batched_exchange.cuh.
  void launch_pack(Act const* x, cudaStream_t stream);
  void launch_reduce(Act* out, cudaStream_t stream);

  Quant quant_;
  int hidden_;
  int topk_;
  int experts_;
  std::int64_t capacity_;
  Payload* batches_;
  typename Quant::Scale* scales_;
  std::int32_t* counts_;
  std::int32_t* positions_;
  std::int32_t* gather_;
  Partial* partial_;
  int rows_ = 0;
  std::int32_t const* ids_ = nullptr;
  float const* weights_ = nullptr;
};

template <bool Gathers>
struct LocalBatchesOf {
  static constexpr char const* kName = "local_batches";
  using Space = moe::space::cuda;
  using Comm = moe::comm::Self<Space>;
  static constexpr moe::ActivationFormat kFormat = moe::ActivationFormat::batched;
  static constexpr moe::TopKReduction kReduction = moe::TopKReduction::backend;
  struct Params {};
  template <class Quant>
  static constexpr bool carries() {
    return true;
  }
  template <class Config, class Quant, class Partial>
  struct Exchange : BatchedExchange<Config, Quant, Partial, Gathers> {
    Exchange(Comm& comm, moe::Shape<Config> const& shape, std::int64_t max_tokens, moe::ExpertPlacement const& placement,
             Quant const& quant, LocalBatchesOf::Params const&, moe::Arena<Space>& arena)
        : BatchedExchange<Config, Quant, Partial, Gathers>(comm, shape, max_tokens, placement, quant, {}, arena) {}
  };
};
using LocalBatches = LocalBatchesOf<false>;
using GatheredBatches = LocalBatchesOf<true>;

}  // namespace moe_test
