// SPDX-License-Identifier: Apache-2.0
// backends/window/device/two_sided/exchange.hpp: TwoSided between GPUs: the layout of its window and the exchange that a layer owns. Host
// C++ only; launch.cuh launches its kernels. docs/semantics/exchange.md §11.
#pragma once

#include <algorithm>

#include "moe/backends/two_sided.hpp"
#include "moe/backends/window/device/common/peer_exchange.hpp"

namespace moe::detail {

/// The queues between each two ranks. Equal on all ranks.
struct TwoSidedQueues {
  int depth = 8;                ///< entries of each queue, a power of two
  int entry_bytes = 64 * 1024;  ///< a multiple of 128, at least one record
};

/// Byte offsets in the window of the two-sided exchange. Peers write counts and queues; all other parts are this rank's own. Regions that a
/// later operation may overwrite while an earlier one is still read exist twice.
struct TwoSidedLayout {
  std::size_t planned = 0;             ///< round words of the plan
  std::size_t round_of[2] = {};        ///< own: u32 last plan of each parity
  std::size_t counts[2] = {};          ///< u64 [rank]: rows from that rank, with the round; by parity of the round, not of the call
  std::size_t tail = 0;                ///< u32 [queue][source]: entries written by that rank, never reset
  std::size_t head = 0;                ///< u32 [queue][destination]: entries of my queue there that were read, never reset; it lies at
                                       ///< the sender, which polls it
  std::size_t entries = 0;             ///< [queue][source][depth][entry_bytes]
  std::size_t sent_tail = 0;           ///< own: u32 [queue][destination]
  std::size_t read_head = 0;           ///< own: u32 [queue][source]
  std::size_t send_tokens[2] = {};     ///< own: i32 [R][T] tokens for each rank, in their order
  std::size_t send_positions[2] = {};  ///< own: i32 [T][R] row position of a token in a rank's list, or -1
  std::size_t summary[2] = {};         ///< own: i32 {rows, [R] rows for, [R] rows from, [R] first row from, [R] first row back}
  std::size_t rows[2] = {};            ///< own: [R T] rows of row_bytes(), by source rank, then by token
  std::size_t scales[2] = {};          ///< own: float [R T][scale_stride()]
  std::size_t ids[2] = {};             ///< own: i32 [R T][k] local ids or -1
  std::size_t weights[2] = {};         ///< own: float [R T][k]
  std::size_t outputs[2] = {};         ///< own: bf16 [R T][H]: weighted and summed over this rank's experts
  std::size_t returned = 0;            ///< own: bf16 [T min(k, R)][H] returned outputs, by rank, then by token
  std::size_t bytes = 0;
  int send_blocks = 0;     ///< half of the blocks send, half receive
  int warps = 0;           ///< of one block
  int queues = 0;          ///< between each two ranks
  int record_bytes = 0;    ///< a row in wire format: values, scales, ids, weights
  int record_scales = 0;   ///< offset of the scales in it
  int record_ids = 0;      ///< offset of the ids; the weights follow
  int returned_bytes = 0;  ///< a returned row

  TwoSidedLayout() = default;
  TwoSidedLayout(PeerShape const& s, TwoSidedQueues const& q) {
    constexpr int kShared = 220 * 1024;  // of one block
    auto line = [](int bytes) { return (bytes + 127) / 128 * 128; };
    record_scales = s.row_bytes();
    record_ids = record_scales + (s.fp8 ? (s.groups() + 3) / 4 * 16 : 0);
    record_bytes = line(record_ids + 8 * s.topk);
    returned_bytes = 2 * s.hidden;
    send_blocks = std::max(1, s.blocks / 2);
    warps = std::clamp(kShared / stage_bytes(), 1, 16);
    queues = std::max(1, send_blocks * warps / s.ranks);

    DeviceWindowOffsets offsets;
    std::int64_t const pairs = std::int64_t{queues} * s.ranks;
    planned = offsets.take_rounds();
    for (std::size_t& c : counts) {  // first, so that ranks that disagree on shape or queues still compare words at the same offset
      c = offsets.take(8, s.ranks);
    }
    tail = offsets.take(4, pairs);
    head = offsets.take(4, pairs);
    sent_tail = offsets.take(4, pairs);
    read_head = offsets.take(4, pairs);
    entries = offsets.take(static_cast<std::size_t>(q.entry_bytes), pairs * q.depth);
    std::int64_t const n = s.rows();
    for (int p = 0; p < 2; ++p) {
      round_of[p] = offsets.take(4, 1);
      send_tokens[p] = offsets.take(4, n);
      send_positions[p] = offsets.take(4, n);
      summary[p] = offsets.take(4, 1 + 4 * s.ranks);
      ids[p] = offsets.take(4, n * s.topk);
      weights[p] = offsets.take(4, n * s.topk);
      rows[p] = offsets.take(1, n * s.row_bytes());
      scales[p] = offsets.take(4, s.fp8 ? n * s.scale_stride() : 0);
      outputs[p] = offsets.take(2, n * s.hidden);
    }
    returned = offsets.take(2, std::int64_t{s.max_tokens} * std::min(s.topk, s.ranks) * s.hidden);
    bytes = offsets.bytes();
  }
  /// Shared memory of one warp: a record, or a returned row.
  MOE_HD int stage_bytes() const { return ((record_bytes > returned_bytes ? record_bytes : returned_bytes) + 127) / 128 * 128; }
};

/// The kernels of one rank over one part of a window. Defined in launch.cuh.
class TwoSidedCalls : public PeerCalls<TwoSidedLayout> {
 public:
  /// E_CONFIG, E_UNSUPPORTED for the shape or the queues, or if the kernels' blocks cannot all be resident at once.
  TwoSidedCalls(comm::WindowView const& window, PeerShape const& shape, TwoSidedQueues const& queues, PeerOptions const& options = {});
  static std::size_t window_bytes(PeerShape const& shape, TwoSidedQueues const& queues) { return TwoSidedLayout(shape, queues).bytes; }

  /// Lists and counts, then rows through the queues. `refused`, 1 + ErrorCode: only tells the peers that this rank cannot take part; `in`
  /// must be empty.
  void dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream, std::uint32_t refused = 0) const;
  /// Sends outputs(parity) back through the queues and sums the returned rows in rank order. `refused`: tells the peers that this rank has
  /// no outputs; `in` must be empty. Ranks without rows here do not wait for it, and see the refusal in the next combine.
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream,
               std::uint32_t refused = 0) const;
  /// Rounds float32 rows [rows][H] into outputs(parity), before combine().
  void round(float const* y, int parity, cudaStream_t stream) const;
  /// Tells every rank that this rank gives up: their waits end with E_PEER.
  void abandon(cudaStream_t stream) const;

  __nv_bfloat16* outputs(int parity) const { return own<__nv_bfloat16>(at_.outputs[parity]); }

 private:
  void move(ExchangeTokens const& in, bool back, int parity, cudaStream_t stream) const;
  TwoSidedQueues queues_;
};

}  // namespace moe::detail

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::cuda>
struct TwoSidedParams<Window> {
  int blocks = 32;                                 ///< thread blocks of the kernels that move rows, half of them send; equal on all ranks
  int queue_depth = 8;                             ///< entries of each queue, a power of two; equal on all ranks
  int queue_entry_bytes = 64 * 1024;               ///< a multiple of 128, at least one record; equal on all ranks
  bool programmatic = true;                        ///< programmatic dependent launch: blocks launch while the kernel before ends
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::cuda>
class TwoSidedExchange<Window, Config, Quant, Partial>
    : public PeerExchange<TwoSidedExchange<Window, Config, Quant, Partial>, Window, Config, Quant, Partial, moe::detail::TwoSidedCalls> {
  using Base = PeerExchange<TwoSidedExchange, Window, Config, Quant, Partial, moe::detail::TwoSidedCalls>;
  friend Base;

 public:
  using typename Base::Act;
  using typename Base::Space;
  using Tokens = StandardTokensOf<Config, Quant>;

  /// Collective. Any placement. E_CAPACITY if the window cannot be allocated.
  TwoSidedExchange(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                   Quant const&, TwoSidedParams<Window> const& params, Arena<Space>& arena)
      : TwoSidedExchange(comm, peer_shape<Quant>("two_sided", comm.size(), shape, max_tokens, placement, params.blocks),
                         moe::detail::TwoSidedQueues{params.queue_depth, params.queue_entry_bytes}, placement, params, arena) {}

  /// The most rows that the experts can get.
  std::int64_t max_rows() const { return shape_.rows(); }

  /// Enqueues. Rows by source rank, then by token; num_rows is on the device. Throws the failure that ended the group, if any; an error in
  /// this rank's arguments, which check() reports to the peers, leaves the group usable.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    order_.expect_idle();
    tokens_ = this->accept(in, shape_.max_tokens, stream);
    parity_ = order_.next_parity();
    calls_.dispatch(tokens_, parity_, stream);
    order_.set_dispatched();
    auto const& at = calls_.layout();
    auto const n = shape_.rows();
    return {this->payload(at.rows[parity_], n), this->scales(at.scales[parity_], n),
            this->template choices<std::int32_t>(at.ids[parity_], n), this->template choices<float>(at.weights[parity_], n),
            calls_.template own<std::int32_t>(at.summary[parity_])};
  }

  /// [rows, H], weighted and summed over this rank's experts.
  Rows<Partial> expert_output() { return make_rows(this->outputs(), shape_.rows(), shape_.hidden); }

  /// Enqueues out[t] = the sum over ranks, ascending, in float32, one rounding; 0 for a token with no destination.
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    expect_device_output(out, tokens_.tokens, shape_.hidden);
    if constexpr (std::is_same_v<Partial, float>) {
      calls_.round(partial_, parity_, stream);
    }
    calls_.combine(tokens_, out.data_handle(), out.stride(0), parity_, stream);
    order_.set_idle();
  }

 private:
  using Base::calls_;
  using Base::order_;
  using Base::parity_;
  using Base::partial_;
  using Base::shape_;
  using Base::tokens_;

  TwoSidedExchange(typename Window::Comm& comm, moe::detail::PeerShape const& shape, moe::detail::TwoSidedQueues const& queues,
                   ExpertPlacement const& placement, TwoSidedParams<Window> const& params, Arena<Space>& arena)
      : Base(comm, shape, peer_window(shape, {queues.depth, queues.entry_bytes}, moe::detail::TwoSidedCalls::window_bytes(shape, queues)),
             params, placement, arena, [&](auto const& view, auto const& numbered, auto const& options) {
               return moe::detail::TwoSidedCalls(view, numbered, queues, options);
             }) {
    this->take_outputs(arena, shape.rows());
  }
  void dispatch_nothing(int parity, std::uint32_t code, cudaStream_t stream) { calls_.dispatch({}, parity, stream, code); }
  void combine_nothing(int parity, std::uint32_t code, cudaStream_t stream) { calls_.combine({}, nullptr, 0, parity, stream, code); }
};

}  // namespace moe::backends::detail
