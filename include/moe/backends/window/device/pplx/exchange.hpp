// SPDX-License-Identifier: Apache-2.0
// backends/window/device/pplx/exchange.hpp: Pplx between GPUs: the layout of its window and the exchange that a layer owns. Host C++ only;
// launch.cuh launches its kernels. docs/semantics/exchange.md §9.
#pragma once

#include "moe/backends/common/open_half.hpp"
#include "moe/backends/pplx.hpp"
#include "moe/backends/window/device/common/peer_exchange.hpp"

namespace moe::detail {

/// Options besides the common shape.
struct PplxGroup {
  int dp_size = 1;            ///< consecutive ranks that hold the same tokens and all receive their results
  bool weight_first = false;  ///< rows are multiplied by their router weight before they are sent, the sum has weight one; top-1 only
};

/// Byte offsets in the window of the pplx exchange. Two of each region: two dispatches may be without their combine. Counts instead use
/// rings of four, by round: a rank that gets no rows back does not wait in its combine, so with two dispatches in progress it may send the
/// third after the round whose counts a peer still waits to read.
struct PplxLayout {
  static constexpr std::uint32_t kCountRounds = 4;
  std::size_t sent = 0;              ///< own: round words of dispatch sends
  std::size_t received = 0;          ///< own: round words of dispatch receives
  std::size_t arrived = 0;           ///< own: u32 blocks that have sent their rows
  std::size_t counts = 0;            ///< u64 [round % 4][rank][L + 1]: rows from that rank for each expert, then its tokens, with the round
  std::size_t counts_bytes = 0;      ///< of one round
  std::size_t round_of[2] = {};      ///< own: u32 last dispatch of each parity
  std::size_t incomplete[2] = {};    ///< own: u32 last dispatch in which a rank of this one's group did not send its share
  std::size_t counters[2] = {};      ///< own: u32 [E] rows sent to each expert; zero between dispatches
  std::size_t rows[2] = {};          ///< [rank][L][S] rows of row_bytes(), as that rank stored them
  std::size_t scales[2] = {};        ///< float [rank][L][S][scale_stride()]
  std::size_t source_slots[2] = {};  ///< i32 [rank][L][S]: token * k + choice
  std::size_t returned[2] = {};      ///< bf16 [T][k][H]: the expert output of each choice
  std::size_t back[2] = {};          ///< u32 [T][k]: round in which that row was returned
  std::size_t batch[2] = {};         ///< own: [L][C] rows, packed by source rank
  std::size_t batch_scales[2] = {};  ///< own: float [L][C][groups()]
  std::size_t origins[2] = {};       ///< own: i32 [L][C]: source rank * T * k + token * k + choice
  std::size_t num_tokens[2] = {};    ///< own: i32 [L]
  std::size_t outputs[2] = {};       ///< own: bf16 [L][C][H]
  std::size_t bytes = 0;
  int per_source = 0;  ///< S: most tokens that one rank of a group sends
  int capacity = 0;    ///< C: rows of one expert's batch, T for each group

  PplxLayout() = default;
  PplxLayout(PeerShape const& s, PplxGroup const& group) {
    per_source = (s.max_tokens + group.dp_size - 1) / group.dp_size;
    capacity = per_source * s.ranks;
    DeviceWindowOffsets take;
    sent = take.take_rounds();
    received = take.take_rounds();
    arrived = take.take(4, 1);
    counts_bytes = sizeof(std::uint64_t) * static_cast<std::size_t>(s.ranks * (s.local_experts() + 1));
    counts = take.take(counts_bytes, kCountRounds);
    std::int64_t const n = std::int64_t{s.ranks} * s.local_experts() * per_source;
    std::int64_t const slots = std::int64_t{s.max_tokens} * s.topk;
    for (int p = 0; p < 2; ++p) {
      round_of[p] = take.take(4, 1);
      incomplete[p] = take.take(4, 1);
      counters[p] = take.take(4, s.num_experts);
      source_slots[p] = take.take(4, n);
      back[p] = take.take(4, slots);
      origins[p] = take.take(4, n);
      num_tokens[p] = take.take(4, s.local_experts());
      rows[p] = take.take(1, n * s.row_bytes());
      scales[p] = take.take(4, s.fp8 ? n * s.scale_stride() : 0);
      returned[p] = take.take(2, slots * s.hidden);
      batch[p] = take.take(1, n * s.row_bytes());
      batch_scales[p] = take.take(4, s.fp8 ? n * s.groups() : 0);
      outputs[p] = take.take(2, n * s.hidden);
    }
    bytes = take.bytes();
  }
  MOE_HD std::size_t counts_of(std::uint32_t round) const { return counts + round % kCountRounds * counts_bytes; }
};

/// The kernels of one rank over one part of a window. Defined in launch.cuh.
class PplxCalls : public PeerCalls<PplxLayout> {
 public:
  /// E_CONFIG, E_UNSUPPORTED for the shape or the group, or if the kernels' blocks cannot all be resident at once.
  PplxCalls(comm::WindowView const& window, PeerShape const& shape, PplxGroup const& group, PeerOptions const& options = {});
  static std::size_t window_bytes(PeerShape const& shape, PplxGroup const& group) { return PplxLayout(shape, group).bytes; }

  /// Sends the rows, then packs the received ones into batches; on request only one half.
  void dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream, bool send = true, bool receive = true) const {
    dispatch(in, parity, stream, send, receive, 0);
  }
  /// Both halves, without tokens: tells the peers that this rank cannot take part. `code`: 1 + ErrorCode.
  void refuse_dispatch(int parity, cudaStream_t stream, std::uint32_t code) const { dispatch({}, parity, stream, true, true, code); }
  /// Sends the outputs back, then sums each token as soon as its rows have arrived; on request only one half.
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream, bool send = true,
               bool receive = true) const;
  /// Tells the peers that this rank has no outputs. Ranks without rows here do not wait for it, and see the refusal in the next combine.
  void refuse_combine(int parity, cudaStream_t stream, std::uint32_t code) const;
  /// Rounds float32 expert outputs [L][C][H] into outputs(parity), before combine().
  void round(float const* y, int parity, cudaStream_t stream) const;
  /// Tells every rank that this rank gives up: their waits end with E_PEER.
  void abandon(cudaStream_t stream) const;

  __nv_bfloat16* outputs(int parity) const { return own<__nv_bfloat16>(at_.outputs[parity]); }
  PplxGroup const& group() const { return group_; }

 private:
  void dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream, bool send, bool receive, std::uint32_t refused) const;
  comm::HeaderTag tag() const { return shape_.tag().add(static_cast<std::uint64_t>(group_.dp_size)).add(group_.weight_first); }
  PplxGroup group_;
};

}  // namespace moe::detail

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::cuda>
struct PplxParams<Window> {
  int dp_size = 1;           ///< consecutive ranks that hold the same tokens and all receive their results; must divide the number of ranks
  int blocks = 64;           ///< thread blocks of every kernel; equal on all ranks
  bool programmatic = true;  ///< programmatic dependent launch: blocks launch while the kernel before ends
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::cuda>
class PplxExchange<Window, Config, Quant, Partial>
    : public PeerExchange<PplxExchange<Window, Config, Quant, Partial>, Window, Config, Quant, Partial, moe::detail::PplxCalls> {
  using Base = PeerExchange<PplxExchange, Window, Config, Quant, Partial, moe::detail::PplxCalls>;
  friend Base;

 public:
  using typename Base::Act;
  using typename Base::Space;
  using Tokens = BatchedTokensOf<Config, Quant>;

  /// Collective. E_UNSUPPORTED unless the number of ranks divides the number of experts, for any placement; E_ARG for the router weight on
  /// the input with top-k other than 1, E_CAPACITY if the window cannot be allocated.
  PplxExchange(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
               Quant const&, PplxParams<Window> const& params, Arena<Space>& arena)
      : PplxExchange(comm, peer_shape<Quant>("pplx", comm.size(), shape, max_tokens, even(placement), params.blocks),
                     moe::detail::PplxGroup{params.dp_size, shape.weight_on_input()}, placement, params, arena) {}

  /// The most rows of one expert's batch.
  std::int64_t max_rows() const { return calls_.layout().capacity; }

  /// Enqueues both halves. Rows lie packed in each block, by source rank. Throws the failure that ended the group, if any; an error in this
  /// rank's arguments, which check() reports to the peers, leaves the group usable.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    begin(in, stream);
    calls_.dispatch(tokens_, parity_, stream);
    return received();
  }
  /// The halves of prepare(): the first enqueues only the sending, so that other work can use the GPU before the second enqueues the
  /// waiting. E_STATE if the second is called without the first.
  void prepare_send(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    begin(in, stream);
    calls_.dispatch(tokens_, parity_, stream, true, false);
    half_.set(Half::dispatch);
  }
  Tokens prepare_receive(cudaStream_t stream) {
    half_.expect(Half::dispatch, "prepare_receive: called without prepare_send");
    half_.set(Half::none);
    calls_.dispatch(tokens_, parity_, stream, false, true);
    return received();
  }

  /// [L, C, H].
  Blocks<Partial> expert_output() { return make_blocks(this->outputs(), shape_.local_experts(), max_rows(), shape_.hidden); }

  /// Enqueues out[t] = the weighted sum of the token's expert outputs, in choice order, in float32, one rounding.
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    expect_device_output(out, tokens_.tokens, shape_.hidden);
    begin_finalize(stream);
    calls_.combine(tokens_, out.data_handle(), out.stride(0), parity_, stream);
    order_.set_idle();
  }
  /// The halves of finalize().
  void finalize_send(cudaStream_t stream) {
    begin_finalize(stream);
    calls_.combine(tokens_, nullptr, 0, parity_, stream, true, false);
    half_.set(Half::combine);
  }
  void finalize_receive(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    half_.expect(Half::combine, "finalize_receive: called without finalize_send");
    expect_device_output(out, tokens_.tokens, shape_.hidden);
    calls_.combine(tokens_, out.data_handle(), out.stride(0), parity_, stream, false, true);
    half_.set(Half::none);
    order_.set_idle();
  }

 private:
  using Half = moe::detail::Half;

  using Base::calls_;
  using Base::order_;
  using Base::parity_;
  using Base::partial_;
  using Base::shape_;
  using Base::tokens_;

  PplxExchange(typename Window::Comm& comm, moe::detail::PeerShape const& shape, moe::detail::PplxGroup const& group,
               ExpertPlacement const& placement, PplxParams<Window> const& params, Arena<Space>& arena)
      : Base(comm, checked(shape, group),
             peer_window(shape, {group.dp_size, group.weight_first}, moe::detail::PplxCalls::window_bytes(checked(shape, group), group)),
             params, placement, arena, [&](auto const& view, auto const& numbered, auto const& options) {
               return moe::detail::PplxCalls(view, numbered, group, options);
             }) {
    this->take_outputs(arena, std::int64_t{shape.local_experts()} * max_rows());
  }
  void begin(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    order_.expect_idle();
    tokens_ = this->accept(in, shape_.max_tokens, stream);
    parity_ = order_.next_parity();
    order_.set_dispatched();
  }
  void dispatch_nothing(int parity, std::uint32_t code, cudaStream_t stream) { calls_.refuse_dispatch(parity, stream, code); }
  void combine_nothing(int parity, std::uint32_t code, cudaStream_t stream) {
    if (code == 0) {
      calls_.combine({}, nullptr, 0, parity, stream);
    } else {
      calls_.refuse_combine(parity, stream, code);
    }
  }
  void give_up(std::uint32_t code, cudaStream_t stream) {
    if (half_.which() == Half::dispatch) {
      calls_.dispatch(tokens_, parity_, stream, false, true);
    }
    if (half_.which() != Half::combine) {  // otherwise its outputs were already sent, and the peers have all they need
      combine_nothing(parity_, code, stream);
    }
    half_.set(Half::none);
  }
  static ExpertPlacement even(ExpertPlacement const& placement) {
    if (!placement.is_even()) {
      throw Error(ErrorCode::unsupported,
                  text("pplx: ", placement.num_physical(), " experts do not divide by ", placement.ep_size(),
                       " ranks, which its batches need (docs/semantics/exchange.md §9); one_sided and two_sided take them"));
    }
    return placement;
  }
  void begin_finalize(cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    half_.expect(Half::none, "finalize: called between the halves of another call");
    if constexpr (std::is_same_v<Partial, float>) {
      calls_.round(partial_, parity_, stream);
    }
  }
  Tokens received() const {
    auto const L = shape_.local_experts();
    auto const C = calls_.layout().capacity;
    auto const& at = calls_.layout();
    return {make_blocks(static_cast<typename Base::Payload const*>(calls_.template own<typename Base::Payload>(at.batch[parity_])), L, C,
                        Quant::payload_cols(shape_.hidden)),
            make_blocks(static_cast<typename Base::Scale const*>(calls_.template own<typename Base::Scale>(at.batch_scales[parity_])), L, C,
                        Quant::scale_cols(shape_.hidden)),
            make_vector(static_cast<std::int32_t const*>(calls_.template own<std::int32_t>(at.num_tokens[parity_])), L)};
  }
  /// The shape, after a check that the group fits it.
  static moe::detail::PeerShape checked(moe::detail::PeerShape const& shape, moe::detail::PplxGroup const& group) {
    if (group.dp_size < 1 || shape.ranks % group.dp_size != 0) {
      throw Error(ErrorCode::config, text("dp_size: ", group.dp_size, " does not divide ", shape.ranks, " ranks"));
    }
    if (group.weight_first && shape.topk != 1) {
      throw Error(ErrorCode::argument, text("apply_router_weight_on_input requires topk == 1: topk is ", shape.topk));
    }
    return shape;
  }

  moe::detail::OpenHalf half_;
};

}  // namespace moe::backends::detail
