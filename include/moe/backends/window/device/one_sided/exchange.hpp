// SPDX-License-Identifier: Apache-2.0
// backends/window/device/one_sided/exchange.hpp: OneSided between GPUs: the layout of its window and the exchange that a layer owns. Host
// C++ only; launch.cuh launches its kernels. docs/semantics/exchange.md §10.
#pragma once

#include "moe/backends/one_sided.hpp"
#include "moe/backends/window/device/common/peer_exchange.hpp"

namespace moe::detail {

/// Byte offsets in the window of the one-sided exchange. Two of each region: two dispatches may be without their combine.
struct OneSidedLayout {
  std::size_t sent = 0;               ///< own: round words of dispatch
  std::size_t combined = 0;           ///< own: round words of combine
  std::size_t arrived = 0;            ///< own: u32 blocks that have sent their rows
  std::size_t ready = 0;              ///< u32 [rank]: that rank's outputs of the round can be read
  std::size_t send_counters[2] = {};  ///< own: u32 [R] rows sent to each rank; zero between dispatches
  std::size_t counts[2] = {};         ///< u64 [rank]: rows from that rank, with the round
  std::size_t rows[2] = {};           ///< [R][runtime maximum] rows of row_bytes()
  std::size_t scales[2] = {};         ///< float [R][runtime maximum][scale_stride()]
  std::size_t ids[2] = {};            ///< i32 [R][runtime maximum][k] local ids or -1
  std::size_t weights[2] = {};        ///< float [R][runtime maximum][k]
  std::size_t outputs[2] = {};        ///< bf16 [R][runtime maximum][H]: weighted and summed over this rank's experts
  std::size_t send_index[2] = {};     ///< own: i32 [T][k] row in its rank's part of the first choice that names the rank; else -1
  std::size_t bytes = 0;

  OneSidedLayout() = default;
  explicit OneSidedLayout(PeerShape const& s) {
    DeviceWindowOffsets offsets;
    sent = offsets.take_rounds();
    combined = offsets.take_rounds();
    arrived = offsets.take(4, 1);
    ready = offsets.take(4, s.ranks);
    std::int64_t const n = s.rows();
    for (int p = 0; p < 2; ++p) {
      send_counters[p] = offsets.take(4, s.ranks);
      counts[p] = offsets.take(8, s.ranks);
      ids[p] = offsets.take(4, n * s.topk);
      weights[p] = offsets.take(4, n * s.topk);
      send_index[p] = offsets.take(4, std::int64_t{s.max_tokens} * s.topk);
      rows[p] = offsets.take(1, n * s.row_bytes());
      scales[p] = offsets.take(4, s.fp8 ? n * s.scale_stride() : 0);
      outputs[p] = offsets.take(2, n * s.hidden);
    }
    bytes = offsets.bytes();
  }
};

/// The kernels of one rank over one part of a window. Defined in launch.cuh.
class OneSidedCalls : public PeerCalls<OneSidedLayout> {
 public:
  /// E_CONFIG, E_UNSUPPORTED for the shape, or if the kernels' blocks cannot all be resident at once.
  OneSidedCalls(comm::WindowView const& window, PeerShape const& shape, PeerOptions const& options = {});
  static std::size_t window_bytes(PeerShape const& shape) { return OneSidedLayout(shape).bytes; }

  /// Bit r: rank r takes part. Choices of the other ranks are dropped; nothing is sent to those ranks, and no wait includes them. E_ARG
  /// unless this rank's bit is set.
  void set_active_ranks(std::uint64_t mask);
  /// Every rank's part of the workspace has `runtime_max` rows in this call, at least in.tokens and at most max_tokens; ranks that disagree
  /// get E_MISMATCH. `refused`, 1 + ErrorCode: only tells the peers that this rank cannot take part; `in` must be empty.
  void dispatch(ExchangeTokens const& in, int runtime_max, int parity, cudaStream_t stream, std::uint32_t refused = 0) const;
  /// Reads the rows in outputs(parity) of the ranks that each token was sent to, and sums them in choice order. `refused`: tells the peers
  /// that this rank has no outputs; `in` must be empty.
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int runtime_max, int parity, cudaStream_t stream,
               std::uint32_t refused = 0) const;
  /// Rounds float32 rows [R * runtime_max][H] into outputs(parity), before combine().
  void round(float const* y, int runtime_max, int parity, cudaStream_t stream) const;
  /// Tells every rank that this rank gives up: their waits end with E_PEER.
  void abandon(cudaStream_t stream) const;

  __nv_bfloat16* outputs(int parity) const { return own<__nv_bfloat16>(at_.outputs[parity]); }

 private:
  std::uint64_t active_;
};

}  // namespace moe::detail

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::cuda>
struct OneSidedParams<Window> {
  int blocks = 64;                                 ///< thread blocks of every kernel; equal on all ranks
  bool programmatic = true;                        ///< programmatic dependent launch: blocks launch while the kernel before ends
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::cuda>
class OneSidedExchange<Window, Config, Quant, Partial>
    : public PeerExchange<OneSidedExchange<Window, Config, Quant, Partial>, Window, Config, Quant, Partial, moe::detail::OneSidedCalls> {
  using Base = PeerExchange<OneSidedExchange, Window, Config, Quant, Partial, moe::detail::OneSidedCalls>;
  friend Base;

 public:
  using typename Base::Act;
  using typename Base::Space;
  using Tokens = StandardTokensOf<Config, Quant>;

  /// Collective. Any placement. E_CAPACITY if the window cannot be allocated.
  OneSidedExchange(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                   Quant const&, OneSidedParams<Window> const& params, Arena<Space>& arena)
      : OneSidedExchange(comm, peer_shape<Quant>("one_sided", comm.size(), shape, max_tokens, placement, params.blocks), placement, params,
                         arena) {}

  /// The most rows that the experts can get.
  std::int64_t max_rows() const { return shape_.rows(); }
  /// From the next prepare() on no rank brings more rows than `rows`, so that the experts get fewer rows. The same on all ranks, else
  /// E_MISMATCH. Initially max_tokens_per_rank. E_ARG outside [1, max_tokens_per_rank], E_STATE between prepare and finalize.
  void set_runtime_max(std::int64_t rows) {
    order_.expect_idle();
    if (rows < 1 || rows > shape_.max_tokens) {
      throw Error(ErrorCode::argument, text("runtime_max: ", rows, " is out of range [1, ", shape_.max_tokens, "]"));
    }
    runtime_max_ = static_cast<int>(rows);
  }
  /// Bit r: rank r takes part. E_ARG unless this rank's bit is set, E_STATE between prepare and finalize.
  void set_active_ranks(std::uint64_t mask) {
    order_.expect_idle();
    calls_.set_active_ranks(mask);
  }

  /// Enqueues. Rows of source r begin at r times the runtime maximum; unused rows have no expert. Throws the failure that ended the group,
  /// if any; an error in this rank's arguments, which check() reports to the peers, leaves the group usable.
  Tokens prepare(RoutedTokens<Act, Config::hidden> const& in, cudaStream_t stream) {
    order_.expect_idle();
    tokens_ = this->accept(in, runtime_max_, stream);
    parity_ = order_.next_parity();
    calls_.dispatch(tokens_, runtime_max_, parity_, stream);
    order_.set_dispatched();
    auto const& at = calls_.layout();
    return {this->payload(at.rows[parity_], rows()), this->scales(at.scales[parity_], rows()),
            this->template choices<std::int32_t>(at.ids[parity_], rows()), this->template choices<float>(at.weights[parity_], rows())};
  }

  /// [rows, H], weighted and summed over this rank's experts. Experts that write bf16 write directly into the window.
  Rows<Partial> expert_output() { return make_rows(this->outputs(), rows(), shape_.hidden); }

  /// Enqueues out[t] = the sum over the token's ranks, in the order in which its choices name them, in float32, one rounding; 0 for a token
  /// with no destination.
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    expect_device_output(out, tokens_.tokens, shape_.hidden);
    if constexpr (std::is_same_v<Partial, float>) {
      calls_.round(partial_, runtime_max_, parity_, stream);
    }
    calls_.combine(tokens_, out.data_handle(), out.stride(0), runtime_max_, parity_, stream);
    order_.set_idle();
  }

 private:
  using Base::calls_;
  using Base::order_;
  using Base::parity_;
  using Base::partial_;
  using Base::shape_;
  using Base::tokens_;

  OneSidedExchange(typename Window::Comm& comm, moe::detail::PeerShape const& shape, ExpertPlacement const& placement,
                   OneSidedParams<Window> const& params, Arena<Space>& arena)
      : Base(comm, shape, peer_window(shape, {}, moe::detail::OneSidedCalls::window_bytes(shape)), params, placement, arena,
             [](auto const&... of) { return moe::detail::OneSidedCalls(of...); }),
        runtime_max_(shape.max_tokens) {
    this->take_outputs(arena, shape.rows());
  }
  std::int64_t rows() const { return std::int64_t{shape_.ranks} * runtime_max_; }
  void dispatch_nothing(int parity, std::uint32_t code, cudaStream_t stream) { calls_.dispatch({}, runtime_max_, parity, stream, code); }
  void combine_nothing(int parity, std::uint32_t code, cudaStream_t stream) {
    calls_.combine({}, nullptr, 0, runtime_max_, parity, stream, code);
  }

  int runtime_max_;
};

}  // namespace moe::backends::detail
