// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/exchange.hpp: LowLatency between GPUs: the exchange that a layer owns. Host C++ only; its kernels are
// in low_latency.cuh.
#pragma once

#include <array>
#include <concepts>
#include <cstring>
#include <optional>
#include <vector>

#include "moe/backends/low_latency.hpp"
#include "moe/backends/window/device/common/handle_exchange.hpp"
#include "moe/backends/window/device/common/window.hpp"
#include "moe/backends/window/device/low_latency/calls.hpp"

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::cuda>
struct LowLatencyParams<Window> {
  int blocks = 128;          ///< thread blocks of every kernel; equal on all ranks
  bool programmatic = true;  ///< programmatic dependent launch: blocks launch while the kernel before ends
  /// One row travels for each (token, rank) and the experts gather it by index (BatchedTokens::gather); their outputs are weighted and
  /// summed before they return: a third fewer bytes, one more rounding to bf16. The same on all ranks.
  bool deduplicate = false;
  CombineFormat combine = CombineFormat::plain;  ///< the format in which outputs travel; the same on all ranks
  /// Experts write where their peers read. Unset: where possible (outputs in bf16 that travel plain, one row for each (token, expert), or
  /// rank major). true: if not possible, E_ARG with another CombineFormat, else E_UNSUPPORTED. false: outputs are copied.
  std::optional<bool> zero_copy = std::nullopt;
  /// A rank that misses the deadline is masked instead of ending the group: the others neither wait for it nor send to it, and leave out
  /// its experts' terms. Costs two small kernels. Not with deduplicate. The same on all ranks.
  bool masks = false;
  bool statistics = false;           ///< collects waited_ns() and expert_totals()
  bool fenced = true;                ///< combine's ready flag is a release; see comm::detail::announce for what false relies on
  int num_buffer_sets = 1;           ///< dispatches whose receive half may be outstanding at once; the same on all ranks
  typename Window::Params window{};  ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

/// The same options; `deduplicate` is ignored.
template <class Window>
  requires std::same_as<typename Window::Space, space::cuda>
struct LowLatencyRankMajorParams<Window> {
  using type = LowLatencyParams<Window>;
};

template <class Partial>
struct LowLatencyRecord : moe::detail::DispatchRecord {
  moe::detail::ExchangeTokens tokens;
  std::int32_t* num_tokens = nullptr;  ///< [L]
  Partial* output = nullptr;           ///< unless the experts write into the window
  std::int32_t* ids = nullptr;         ///< rank major: [R T, k]
  float* weights = nullptr;
};

template <class Window, class Config, class Quant, class Partial, ActivationFormat Format>
  requires std::same_as<typename Window::Space, space::cuda>
class LowLatencyExchange<Window, Config, Quant, Partial, Format>
    : public HandleExchange<LowLatencyExchange<Window, Config, Quant, Partial, Format>, LowLatencyRecord<Partial>> {
  using Record = LowLatencyRecord<Partial>;
  using Base = HandleExchange<LowLatencyExchange, Record>;
  friend Base;

 public:
  using Space = space::cuda;
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  static constexpr bool kRankMajor = Format == ActivationFormat::standard;
  using Tokens = std::conditional_t<kRankMajor, StandardTokensOf<Config, Quant>, BatchedTokensOf<Config, Quant>>;
  using Outputs = std::conditional_t<kRankMajor, Rows<Partial>, Blocks<Partial>>;
  using Params = LowLatencyParams<Window>;
  using Routed = RoutedTokens<Act, Config::hidden>;
  using typename Base::Handle;
  static_assert(window_exchange_returns_element<Space, Partial>);

  /// Collective. Allocates batches for both parities, of `max_tokens` rows per rank and buffer set; E_CAPACITY if they do not fit. Any
  /// placement.
  LowLatencyExchange(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                     Quant const&, Params const& params, Arena<Space>& arena)
      : Base(checked(params).num_buffer_sets),
        params_(params),
        shape_(make_shape(comm, shape, max_tokens, placement, params)),
        num_local_(placement.num_local(comm.rank())),
        window_(comm, params.manager, arguments(shape_, params), params.window),
        place_(placement, arena) {
    shape_.layer = window_.number();
    auto view = window_->view();
    view.statistics = params.statistics;
    moe::detail::ExchangeOptions options{.programmatic = params.programmatic,
                                         .scales = scale_rule<Quant>(),
                                         .fenced = params.fenced,
                                         .expert_place = place_.data(),
                                         .num_ids = placement.num_physical(),
                                         .weight_on_input = !kRankMajor && shape.weight_on_input()};
    if (params.statistics) {
      totals_ = arena.template take_filled<std::int64_t>(shape_.local_experts(), 0);
      options.expert_totals = totals_;
    }
    buffer_sets_.reserve(static_cast<std::size_t>(params.num_buffer_sets));
    for (int s = 0; s < params.num_buffer_sets; ++s) {
      buffer_sets_.emplace_back(view, shape_, options, fixed_kernels());
      options.begin = buffer_sets_.back().end();
      handles_.set_counter(s, &window_.use().dispatches[static_cast<std::size_t>(s)]);
      for (Record& r : handles_.records(s)) {
        take_memory(r, arena);
      }
    }
  }

  /// The most rows of one expert's batch; rank major: the most rows.
  std::int64_t max_rows() const { return shape_.capacity(); }

  /// Enqueues. Batched: rows lie packed in each block, by source rank and then by token. Throws the failure that ended the group, if any;
  /// an error in this rank's arguments, which check() reports to the peers, leaves the group usable.
  Tokens prepare(Routed const& in, cudaStream_t stream) {
    order_.expect_idle();
    last_ = begin(in, stream, 0, Half::both);
    order_.set_dispatched();
    return tokens(last_, stream);
  }
  /// Whether experts may run beside the transfer of the rows that prepare_arriving() enqueues: the configuration asks for it.
  static constexpr bool kArrives = kOverlapsDispatch<Config> && !kRankMajor;
  /// prepare() that may end before the rows have come: a row is complete when the counts of its expert in arrivals() are. With `masks` or
  /// `deduplicate`, or over 32 ranks, it is prepare().
  Tokens prepare_arriving(Routed const& in, cudaStream_t stream)
    requires kArrives
  {
    order_.expect_idle();
    last_ = begin(in, stream, 0, Half::both_arriving);
    order_.set_dispatched();
    return tokens(last_, stream);
  }
  comm::Arrivals arrivals() const
    requires kArrives
  {
    return calls(last_).arrivals(last_.parity());
  }
  /// Outputs of the last prepare(). Batched [L, C, H], rank major [R T, H].
  Outputs expert_output() { return expert_output(last_); }
  /// Enqueues out[t] = the weighted sum of the token's expert outputs, in choice order (deduplicated or rank major: the sum over ranks), in
  /// float32, one rounding.
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    combine(last_, out, stream);
    order_.set_idle();
  }

  /// prepare() in halves, for callers with one batch in progress.
  void prepare_send(Routed const& in, cudaStream_t stream) {
    order_.expect_idle();
    last_ = begin(in, stream, 0, Half::send);
    order_.set_dispatched();
  }
  Tokens prepare_receive(cudaStream_t stream) {
    order_.expect_dispatched("prepare_receive");
    return receive(last_, stream);
  }

  /// The send half of a dispatch: waits for no rows (without masks: waits for the counts of lower ranks), so that other work can run before
  /// the receive half. Ids and weights must stay valid until combine(). E_STATE if the buffer set's last send was not received; E_ARG
  /// for the buffer set.
  Handle send(Routed const& in, cudaStream_t stream, int buffer_set = 0) { return begin(in, stream, buffer_set, Half::send); }
  /// The receive half. The batches are valid until two further dispatches of the buffer set have begun. E_STATE for a handle that was
  /// received or is stale.
  Tokens receive(Handle handle, cudaStream_t stream) {
    Record& r = expect(handle, DispatchState::sent, "receive");
    calls(handle).dispatch(r.tokens, r.num_tokens, handle.parity(), stream, false, true);
    r.state = DispatchState::received;
    return tokens(handle, stream);
  }
  Outputs expert_output(Handle handle) {
    Record& r = handles_.record(handle);
    Partial* data = r.output;
    if constexpr (std::is_same_v<Partial, bf16>) {
      data = writes_window() ? calls(handle).outputs(handle.parity()) : data;
    }
    if constexpr (kRankMajor) {
      return make_rows(data, shape_.capacity(), shape_.hidden);
    } else {
      return make_blocks(data, num_local_, shape_.capacity(), shape_.hidden);
    }
  }
  /// finalize() of one dispatch. E_STATE for a handle that was not received or is stale; E_ARG for `out`.
  void combine(Handle handle, Rows<Act, Config::hidden> out, cudaStream_t stream) {
    Record& r = expect(handle, DispatchState::received, "finalize");
    expect_device_output(out, r.tokens.tokens, shape_.hidden);
    auto const& on = calls(handle);
    int const parity = handle.parity();
    if (!writes_window()) {
      if constexpr (kRankMajor) {
        on.code(r.output, all_rows_, parity, stream, 1);
      } else if (params_.deduplicate) {
        on.reduce(r.output, parity, 4 * params_.blocks, stream);
      } else {
        on.code(r.output, r.num_tokens, parity, stream);
      }
    }
    on.combine(r.tokens, out.data_handle(), out.stride(0), parity, stream);
    r.state = DispatchState::idle;
    finish_refusal(handle.buffer_set, stream);
  }

  /// Throws the error that the kernels have reported since the last call; call after synchronising the stream. What does not end the group
  /// (another rank refused its arguments or abandoned the call) is thrown once.
  void check() const { check_window(*window_); }

  /// Nanoseconds that this rank has waited for each rank. [R] on the host. Synchronises the device.
  std::vector<std::uint64_t> waited_ns() const { return read_control<std::uint64_t>(*window_, comm::WindowControl::waited); }
  /// With masks: ranks that this rank considers dead; the engine decides the membership of the group. Synchronises the device.
  std::vector<bool> query_mask() const {
    auto const words = read_control<std::uint32_t>(*window_, comm::WindowControl::masked);
    return {words.begin(), words.end()};
  }
  /// Masks a rank on this rank only, in stream order. E_STATE without Params::masks; E_ARG for this rank.
  void mask_rank(int rank, cudaStream_t stream) {
    expect_masks();
    if (rank < 0 || rank >= shape_.ranks || rank == window_->rank()) {
      throw Error(ErrorCode::argument, text("mask: rank ", rank, " is not a peer of rank ", window_->rank()));
    }
    auto* const word = static_cast<char*>(window_->peer(window_->rank(), comm::WindowControl::masked)) + 4 * rank;
    check_cuda(cudaMemsetAsync(word, 1, 1, stream), "cudaMemsetAsync");
  }
  /// Collective over all ranks, also the masked ones, between rounds: clears all masks. Enqueues.
  void clear_mask(cudaStream_t stream) {
    expect_masks();
    for (std::size_t i = 0; i < buffer_sets_.size(); ++i) {
      buffer_sets_[i].rejoin(stream);
      window_.use().dispatches[i] = 0;
    }
    handles_.reset();
    order_.set_idle();
  }
  /// With statistics: rows that each local expert has received so far. [L] on the host. Synchronises the device.
  std::vector<std::int64_t> expert_totals() const {
    std::vector<std::int64_t> host(totals_ == nullptr ? 0 : static_cast<std::size_t>(num_local_));
    if (!host.empty()) {
      Memory<Space>::copy_to_host(host.data(), totals_, 8 * host.size());
    }
    return host;
  }
  Window& window() const { return *window_; }

 private:
  using Base::expect;
  using Base::finish_refusal;
  using Base::handles_;
  using Base::last_;
  using Base::order_;
  using Base::refuse;
  using typename Base::DispatchState;

  static Params checked(Params const& p) {
    if (p.num_buffer_sets < 1 || p.num_buffer_sets > comm::WindowUse::kMaxBufferSets) {
      throw Error(ErrorCode::config,
                  text("num_buffer_sets: ", p.num_buffer_sets, " is out of range [1, ", comm::WindowUse::kMaxBufferSets, "]"));
    }
    if (p.zero_copy == true && p.combine != CombineFormat::plain) {
      throw Error(ErrorCode::argument, text("zero_copy: outputs that travel as ", name(p.combine), " must be coded first"));
    }
    if (p.zero_copy == true && ((p.deduplicate && !kRankMajor) || !std::is_same_v<Partial, bf16>)) {
      throw Error(ErrorCode::unsupported, "zero_copy: needs outputs in bf16 and one row for each (token, expert)");
    }
    return p;
  }
  static moe::detail::LowLatencyShape make_shape(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens,
                                                 ExpertPlacement const& placement, Params const& params) {
    moe::detail::LowLatencyShape s;
    set_sizes<Quant>(s, comm.size(), shape, max_tokens, placement, params.blocks);
    s.per_rank = kRankMajor || params.deduplicate;
    s.masks = params.masks;
    s.combine = params.combine;
    s.arriving = kArrives && !s.masks && !s.per_rank && s.ranks <= moe::detail::kMostArrivingRanks;
    s.check();
    return s;
  }
  static moe::detail::LowLatencyFixed const* fixed_kernels() {
    if constexpr (moe::kFixedKernels<Config> && !kRankMajor) {
      return &moe::detail::low_latency_fixed<moe::FixedKernelsOf<Config>, Quant::kQuantizesActivations>();
    } else {
      return nullptr;
    }
  }
  static comm::WindowArguments arguments(moe::detail::LowLatencyShape const& s, Params const& params) {
    std::size_t end = comm::kWindowControlBytes;
    for (int i = 0; i < params.num_buffer_sets; ++i) {
      end = moe::detail::LowLatencyCalls::window_bytes(s, end);
    }
    return {kRankMajor ? "low_latency_rank_major" : "low_latency",
            {s.ranks, s.max_tokens, s.hidden, s.topk, s.num_experts, s.fp8, s.per_rank, s.blocks, s.masks, static_cast<int>(s.combine),
             params.num_buffer_sets, s.arriving},
            static_cast<std::int64_t>(end - comm::kWindowControlBytes)};
  }
  bool writes_window() const {
    return std::is_same_v<Partial, bf16> && params_.combine == CombineFormat::plain && (kRankMajor || !params_.deduplicate) &&
           params_.zero_copy.value_or(true);
  }
  void take_memory(Record& r, Arena<Space>& arena) {
    std::int64_t const rows = shape_.capacity();
    r.num_tokens = arena.template take_filled<std::int32_t>(shape_.local_experts(), 0);
    if (!writes_window()) {
      r.output = arena.template take<Partial>((kRankMajor ? 1 : num_local_) * rows * shape_.hidden);
    }
    if constexpr (kRankMajor) {
      r.ids = arena.template take<std::int32_t>(rows * shape_.topk);
      r.weights = arena.template take<float>(rows * shape_.topk);
      if (all_rows_ == nullptr) {
        std::int32_t const n = shape_.capacity();
        all_rows_ = arena.template take<std::int32_t>(1);
        Memory<Space>::copy_from_host(all_rows_, &n, sizeof n);
      }
    }
  }
  moe::detail::LowLatencyCalls const& calls(Handle handle) const { return buffer_sets_[static_cast<std::size_t>(handle.buffer_set)]; }
  void expect_masks() const {
    if (!params_.masks) {
      throw Error(ErrorCode::state, "mask: the exchange was built without masks");
    }
  }

  /// What a dispatch enqueues: its send half, or both halves in one kernel, the second with or without the wait for the rows.
  enum class Half { send, both, both_arriving };
  Handle begin(Routed const& in, cudaStream_t stream, int buffer_set, Half half) {
    handles_.expect_buffer_set(buffer_set);
    throw_if_group_over(*window_);
    if (handles_.sent(buffer_set)) {
      throw Error(ErrorCode::state, "prepare: the last send of this buffer set has not been received");
    }
    try {
      moe::detail::check_routed_tokens(in, shape_.hidden, shape_.topk, shape_.max_tokens);
      expect_device_tokens(in);
    } catch (Error const& e) {
      refuse(buffer_set, comm::refusal_code(e.code()), stream);
      throw;
    }
    Handle const handle = handles_.open_counted(buffer_set, half == Half::send ? DispatchState::sent : DispatchState::received);
    Record& r = handles_.record(handle);
    r.tokens = exchange_tokens(in);
    if (half == Half::both_arriving) {
      calls(handle).dispatch_arriving(r.tokens, r.num_tokens, handle.parity(), stream);
    } else {
      calls(handle).dispatch(r.tokens, r.num_tokens, handle.parity(), stream, true, half == Half::both);
    }
    return handle;
  }
  void dispatch_nothing(Handle handle, std::uint32_t code, cudaStream_t stream) {
    calls(handle).dispatch({}, handles_.record(handle).num_tokens, handle.parity(), stream, true, true, code);
  }
  void combine_nothing(Handle handle, std::uint32_t code, cudaStream_t stream) {
    calls(handle).combine({}, nullptr, 0, handle.parity(), stream, code);
  }
  void receive_rest(Handle handle, cudaStream_t stream) {
    if (handles_.record(handle).state == DispatchState::sent) {
      receive(handle, stream);
    }
  }
  Tokens tokens(Handle handle, cudaStream_t stream) {
    Record& r = handles_.record(handle);
    auto const& on = calls(handle);
    auto const& at = on.layout();
    int const p = handle.parity();
    std::int64_t const C = shape_.capacity();
    auto const* const rows = on.template own<Payload>(at.rows[p]);
    auto const* const scales = on.template own<Scale>(at.scales[p]);
    std::int64_t const cols = Quant::payload_cols(shape_.hidden);
    std::int64_t const scale_cols = Quant::scale_cols(shape_.hidden);
    if constexpr (kRankMajor) {
      on.rank_major(r.ids, r.weights, p, stream);
      return {make_rows(rows, C, cols), make_rows(scales, C, scale_cols),
              make_rows(static_cast<std::int32_t const*>(r.ids), C, shape_.topk),
              make_rows(static_cast<float const*>(r.weights), C, shape_.topk)};
    } else {
      std::int64_t const blocks = params_.deduplicate ? 1 : num_local_;
      Tokens t{make_blocks(rows, blocks, C, cols), make_blocks(scales, blocks, C, scale_cols),
               make_vector(static_cast<std::int32_t const*>(r.num_tokens), num_local_)};
      if (params_.deduplicate || params_.masks) {
        auto const list = params_.deduplicate ? at.sources[p] : at.gather[p];
        t.gather = make_rows(static_cast<std::int32_t const*>(on.template own<std::int32_t>(list)), num_local_, C);
      }
      return t;
    }
  }

  Params params_;
  moe::detail::LowLatencyShape shape_;
  std::int64_t num_local_;
  comm::WindowHandle<Window> window_;
  ExpertPlaces place_;
  std::vector<moe::detail::LowLatencyCalls> buffer_sets_;
  std::int64_t* totals_ = nullptr;    // [L]
  std::int32_t* all_rows_ = nullptr;  // rank major: the number of rows
};

}  // namespace moe::backends::detail
