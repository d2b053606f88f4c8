// SPDX-License-Identifier: Apache-2.0
// backends/low_latency_cuda.hpp: LowLatency between GPUs: the exchange that a layer owns. Plain host C++; its kernels are in
// low_latency.cuh.
#pragma once

#include <concepts>
#include <cstring>

#include "moe/backends/exchange_common.hpp"
#include "moe/backends/low_latency.hpp"
#include "moe/backends/low_latency_calls.hpp"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/core/buffer.hpp"

namespace moe::backends::detail {

template <class Window>
requires std::same_as<typename Window::Space, space::cuda>
struct LowLatencyParams<Window> {
  int blocks = 128;          ///< thread blocks of every kernel; equal on all ranks
  bool programmatic = true;  ///< programmatic dependent launch: the blocks of a kernel are placed while the one before it ends
  typename Window::Params window{};
};

/// The rule of a scheme's scales, read off the scheme.
template <class Quant>
moe::detail::ScaleRule scale_rule() {
  moe::detail::ScaleRule rule;
  if constexpr (Quant::kQuantizesActivations) {
    float const three = Quant::Unit::scale(0x40400000U);  // amax 3: its scale is a power of two only if scales are rounded to them
    std::uint32_t bits = 0;
    std::memcpy(&bits, &three, sizeof(bits));
    rule.pow2 = (bits & 0x7fffffU) == 0;
    rule.amax_floor = Quant::Unit::scale(0) > 1e-8F ? 1e-4F : 1e-10F;
  }
  return rule;
}
/// E_UNSUPPORTED unless rank = id / L holds with one L.
inline void expect_even_placement(char const* backend, ExpertPlacement const& placement, int ranks) {
  if (placement.ep_size() != ranks) {
    throw Error(ErrorCode::config, text("placement: ep_size is ", placement.ep_size(), ", the window has ", ranks, " ranks"));
  }
  int const local = placement.num_physical() / ranks;
  for (int p = 0; p < placement.num_physical(); ++p) {
    if (local * ranks != placement.num_physical() || placement.owner(p) != p / local || placement.local(p) != p % local) {
      throw Error(ErrorCode::unsupported,
                  text(backend, ": physical expert ", p, " of ", placement.num_physical(), " is not rank id / L's, L = ", local,
                       ". Use a linear placement whose experts divide by the ranks"));
    }
  }
}
inline std::int32_t const* dense_ids(Rows<std::int32_t const> const& ids) {
  if (ids.extent(0) > 1 && ids.stride(0) != ids.extent(1)) {
    throw Error(ErrorCode::argument, text("topk_ids: row stride ", ids.stride(0), ", expected ", ids.extent(1)));
  }
  return ids.data_handle();
}

template <class Window, class Config, class Quant, class Partial>
requires std::same_as<typename Window::Space, space::cuda>
class LowLatencyExchange<Window, Config, Quant, Partial> {
 public:
  using Space = space::cuda;
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  using Tokens = BatchedTokensOf<Config, Quant>;
  static_assert(std::is_same_v<Act, bf16>, "moe: low_latency carries bf16 activations. Fix: set Act = bf16 in the layer configuration");
  static_assert(std::is_same_v<Partial, bf16> || std::is_same_v<Partial, float>,
                "moe: low_latency takes expert outputs in bf16 or float. Fix: choose experts that write one of them");

  /// Collective. Two windows' worth of batches for `max_tokens` rows a rank; E_CAPACITY if they do not fit.
  LowLatencyExchange(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                     Quant const&, LowLatencyParams<Window> const& params, Arena<Space>& arena)
      : shape_(checked(comm, shape, max_tokens, placement, params)),
        window_(comm, static_cast<std::int64_t>(moe::detail::LowLatencyCalls::window_bytes(shape_)), params.window),
        calls_(window_.view(), shape_, params.programmatic, scale_rule<Quant>()),
        weights_are_one_(shape.weight_on_input()) {
    if (weights_are_one_) {
      throw Error(ErrorCode::unsupported, "low_latency: the router weight on the input is not supported. Use a standard backend");
    }
    num_tokens_ = arena.take<std::int32_t>(shape_.local_experts());
    if constexpr (std::is_same_v<Partial, float>) {
      partial_ = arena.take<float>(std::int64_t{shape_.local_experts()} * shape_.capacity() * shape_.hidden);
    }
  }

  /// Rows of one expert's batch, at most.
  std::int64_t max_rows() const { return shape_.capacity(); }

  /// Enqueues. Rows lie packed in each block, by source rank and then by token. What earlier calls failed with is thrown here.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    begin(in);
    calls_.dispatch(tokens_, num_tokens_, parity_, stream);
    return received();
  }
  /// The halves of prepare(): the first enqueues the sending and occupies the GPU no longer, so that other work fits in between; the second
  /// enqueues the waiting. E_STATE if the second is called without the first.
  void prepare_send(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    begin(in);
    calls_.dispatch(tokens_, num_tokens_, parity_, stream, true, false);
    sent_ = true;
  }
  Tokens prepare_receive(cudaStream_t stream) {
    if (!sent_) {
      throw Error(ErrorCode::state, "prepare_receive: called without prepare_send");
    }
    sent_ = false;
    calls_.dispatch(tokens_, num_tokens_, parity_, stream, false, true);
    return received();
  }

  /// [L, C, H]. Experts that write bf16 write into the window itself: combine then copies nothing.
  Blocks<Partial> expert_output() {
    Partial* const data = [&] {
      if constexpr (std::is_same_v<Partial, bf16>) {
        return calls_.outputs(parity_);
      } else {
        return partial_;
      }
    }();
    return make_blocks(data, shape_.local_experts(), shape_.capacity(), shape_.hidden);
  }

  /// Enqueues out[t] = the weighted sum of the token's expert outputs, in choice order, in float32, one rounding.
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    if (sent_) {
      throw Error(ErrorCode::state, "finalize: called between prepare_send and prepare_receive");
    }
    moe::detail::check_output(out, tokens_.tokens, shape_.hidden);
    if constexpr (std::is_same_v<Partial, float>) {
      calls_.round(partial_, num_tokens_, parity_, stream);
    }
    calls_.combine(tokens_, out.data_handle(), out.stride(0), parity_, stream);
    order_.set_idle();
  }

  /// Peers get E_PEER; the group must then be built anew.
  void abandon(cudaStream_t stream) {
    calls_.abandon(stream);
    order_.set_idle();
    sent_ = false;
  }
  /// Throws what the kernels reported since; call after synchronising the stream.
  void check() const { window_.check(); }

 private:
  void begin(RoutedTokens<Act, Config::hidden> const& in) {
    order_.expect_idle();
    window_.check();
    moe::detail::check_routed_tokens(in, shape_.hidden, shape_.topk, shape_.max_tokens);
    tokens_.tokens = static_cast<int>(in.hidden.extent(0));
    tokens_.x = in.hidden.data_handle();
    tokens_.x_stride = in.hidden.stride(0);
    tokens_.ids = dense_ids(in.topk_ids);
    tokens_.weights = in.topk_weights.data_handle();
    parity_ ^= 1;
    order_.set_dispatched();
  }
  Tokens received() const {
    auto const L = shape_.local_experts();
    auto const C = shape_.capacity();
    auto const& at = calls_.layout();
    return {
        make_blocks(static_cast<Payload const*>(calls_.template own<Payload>(at.rows[parity_])), L, C, Quant::payload_cols(shape_.hidden)),
        make_blocks(static_cast<Scale const*>(calls_.template own<Scale>(at.scales[parity_])), L, C, Quant::scale_cols(shape_.hidden)),
        make_vector(static_cast<std::int32_t const*>(num_tokens_), L)};
  }
  static moe::detail::LowLatencyShape checked(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens,
                                              ExpertPlacement const& placement, LowLatencyParams<Window> const& params) {
    expect_even_placement("low_latency", placement, comm.size());
    moe::detail::LowLatencyShape s;
    s.ranks = comm.size();
    s.max_tokens = static_cast<int>(max_tokens);
    s.hidden = static_cast<int>(shape.hidden());
    s.topk = shape.topk();
    s.num_experts = placement.num_physical();
    s.fp8 = Quant::kQuantizesActivations;
    s.blocks = params.blocks;
    s.check();
    return s;
  }

  moe::detail::LowLatencyShape shape_;
  Window window_;
  moe::detail::LowLatencyCalls calls_;
  bool weights_are_one_;
  std::int32_t* num_tokens_ = nullptr;
  Partial* partial_ = nullptr;
  moe::detail::ExchangeTokens tokens_;
  int parity_ = 1;
  bool sent_ = false;
  moe::detail::CallOrder order_;
};

}  // namespace moe::backends::detail
