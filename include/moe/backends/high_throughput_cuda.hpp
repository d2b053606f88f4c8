// SPDX-License-Identifier: Apache-2.0
// backends/high_throughput_cuda.hpp: HighThroughput between GPUs: the exchange that a layer owns. Plain host C++; its kernels are in
// high_throughput.cuh.
#pragma once

#include "moe/backends/high_throughput.hpp"
#include "moe/backends/high_throughput_calls.hpp"
#include "moe/backends/low_latency_cuda.hpp"

namespace moe::backends::detail {

template <class Window>
requires std::same_as<typename Window::Space, space::cuda>
struct HighThroughputParams<Window> {
  int blocks = 16;           ///< thread blocks of dispatch and combine; equal on all ranks
  int capacity = 0;          ///< rows that one rank can receive; 0: ranks * max_tokens_per_rank
  bool programmatic = true;  ///< programmatic dependent launch: the blocks of a kernel are placed while the one before it ends
  typename Window::Params window{};
};

template <class Window, class Config, class Quant, class Partial>
requires std::same_as<typename Window::Space, space::cuda>
class HighThroughputExchange<Window, Config, Quant, Partial> {
 public:
  using Space = space::cuda;
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  using Tokens = StandardTokensOf<Config, Quant>;
  static_assert(std::is_same_v<Act, bf16>, "moe: high_throughput carries bf16 activations. Fix: set Act = bf16 in the layer configuration");
  static_assert(std::is_same_v<Partial, bf16> || std::is_same_v<Partial, float>,
                "moe: high_throughput takes expert outputs in bf16 or float. Fix: choose experts that write one of them");

  /// Collective. E_CAPACITY if the window cannot be had.
  HighThroughputExchange(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                         Quant const&, HighThroughputParams<Window> const& params, Arena<Space>& arena)
      : shape_(checked(comm, shape, max_tokens, placement, params)),
        window_(comm, static_cast<std::int64_t>(moe::detail::HighThroughputCalls::window_bytes(shape_)), params.window),
        calls_(window_.view(), shape_, params.programmatic, {}, scale_rule<Quant>()) {
    if constexpr (std::is_same_v<Partial, float>) {
      partial_ = arena.take<float>(std::int64_t{shape_.rows()} * shape_.hidden);
    }
  }

  /// Most rows that the experts are given.
  std::int64_t max_rows() const { return shape_.rows(); }

  /// Enqueues. Rows by source rank, then by token; num_rows is on the device, ids of the rows past it are kNoExpert. What earlier
  /// calls failed with, E_CAPACITY of an overflow included, is thrown here.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    order_.expect_idle();
    window_.check();
    moe::detail::check_routed_tokens(in, shape_.hidden, shape_.topk, shape_.max_tokens);
    tokens_.tokens = static_cast<int>(in.hidden.extent(0));
    tokens_.x = in.hidden.data_handle();
    tokens_.x_stride = in.hidden.stride(0);
    tokens_.ids = dense_ids(in.topk_ids);
    tokens_.weights = in.topk_weights.data_handle();
    parity_ ^= 1;
    calls_.dispatch(tokens_, parity_, stream);
    order_.set_dispatched();
    auto const& at = calls_.layout();
    auto const n = shape_.rows();
    auto* const records = calls_.template own<std::int32_t>(at.records[parity_]);
    auto const scale_cols = Quant::scale_cols(shape_.hidden);
    return {make_rows(static_cast<Payload const*>(calls_.template own<Payload>(at.rows[parity_])), n, Quant::payload_cols(shape_.hidden)),
            make_rows(static_cast<Scale const*>(calls_.template own<Scale>(at.scales[parity_])), n, scale_cols,
                      scale_cols == 0 ? 0 : at.scale_stride),
            make_rows(static_cast<std::int32_t const*>(records), n, shape_.topk, at.record_words),
            make_rows(reinterpret_cast<float const*>(records + shape_.topk), n, shape_.topk, at.record_words),
            calls_.template own<std::int32_t>(at.summary[parity_])};
  }

  /// [rows, H], weighted and summed over this rank's experts. Experts that write bf16 write into the window itself.
  Rows<Partial> expert_output() {
    if constexpr (std::is_same_v<Partial, bf16>) {
      return make_rows(calls_.outputs(parity_), shape_.rows(), shape_.hidden);
    } else {
      return make_rows(partial_, shape_.rows(), shape_.hidden);
    }
  }

  /// Enqueues out[t] = the sum over ranks, ascending, in float32, one rounding; 0 for a token that went nowhere.
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    moe::detail::check_output(out, tokens_.tokens, shape_.hidden);
    if constexpr (std::is_same_v<Partial, float>) {
      calls_.round(partial_, parity_, stream);
    }
    calls_.combine(tokens_, out.data_handle(), out.stride(0), parity_, stream);
    order_.set_idle();
  }

  /// Peers get E_PEER; the group must then be built anew.
  void abandon(cudaStream_t stream) {
    calls_.abandon(stream);
    order_.set_idle();
  }
  /// Throws what the kernels reported since; call after synchronising the stream.
  void check() const { window_.check(); }

 private:
  static moe::detail::HighThroughputShape checked(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens,
                                                  ExpertPlacement const& placement, HighThroughputParams<Window> const& params) {
    expect_even_placement("high_throughput", placement, comm.size());
    moe::detail::HighThroughputShape s;
    s.ranks = comm.size();
    s.max_tokens = static_cast<int>(max_tokens);
    s.hidden = static_cast<int>(shape.hidden());
    s.topk = shape.topk();
    s.num_experts = placement.num_physical();
    s.fp8 = Quant::kQuantizesActivations;
    s.lists = false;
    s.capacity = params.capacity;
    s.blocks = params.blocks;
    s.check();
    return s;
  }

  moe::detail::HighThroughputShape shape_;
  Window window_;
  moe::detail::HighThroughputCalls calls_;
  Partial* partial_ = nullptr;
  moe::detail::ExchangeTokens tokens_;
  int parity_ = 1;
  moe::detail::CallOrder order_;
};

}  // namespace moe::backends::detail
