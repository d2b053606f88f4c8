// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/exchange.hpp: HighThroughput between GPUs: the exchange that a layer owns. Host C++ only; its
// kernels are in high_throughput.cuh.
#pragma once

#include <array>
#include <concepts>
#include <optional>

#include "moe/backends/high_throughput.hpp"
#include "moe/backends/window/device/common/handle_exchange.hpp"
#include "moe/backends/window/device/common/window.hpp"
#include "moe/backends/window/device/high_throughput/calls.hpp"

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::cuda>
struct HighThroughputParams<Window> {
  int blocks = 16;   ///< thread blocks of dispatch and combine; equal on all ranks
  int capacity = 0;  ///< rows that one rank can receive; 0: ranks * max_tokens_per_rank. A smaller value saves memory: see prepare()
  bool programmatic = true;  ///< programmatic dependent launch: blocks launch while the kernel before ends
  int expert_alignment = 0;  ///< above 0: expert_major() lists rows by expert, each expert's part a multiple of it. The same on all ranks
  bool statistics = false;   ///< collects waited_ns()
  int column_blocks = 4;     ///< with overlap_combine: blocks of columns, of at least 256, that experts complete one by one; 1 to 8, the
                             ///< same on all ranks
  bool fenced = true;        ///< combine's ready flag is a release; see comm::detail::announce for what false relies on
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

/// The rows of a dispatch sorted by expert (docs/semantics/exchange.md §12, expert-major): device memory.
struct ExpertMajor {
  std::int32_t const* rows = nullptr;         ///< [list] row of the dispatch; -1 in the gaps that the alignment leaves
  std::int32_t const* num_entries = nullptr;  ///< [1] entries of `rows`
  std::int32_t const* counts = nullptr;       ///< [L] rows of each expert
  std::int32_t const* first = nullptr;        ///< [L] first entry of each expert
  std::int64_t max_entries = 0;
};

template <class Partial>
struct HighThroughputRecord : moe::detail::DispatchRecord {
  bool reduced = false;
  bool completing = false;  ///< its experts tell which columns are complete
  int routing = 0;          ///< parity of the layout that it uses
  std::uint32_t root = 0;   ///< dispatch that filled it
  moe::detail::ExchangeTokens tokens;
  Partial* output = nullptr;
};

template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::cuda>
class HighThroughputExchange<Window, Config, Quant, Partial>
    : public HandleExchange<HighThroughputExchange<Window, Config, Quant, Partial>, HighThroughputRecord<Partial>> {
  using Record = HighThroughputRecord<Partial>;
  using Base = HandleExchange<HighThroughputExchange, Record>;
  friend Base;

 public:
  using Space = space::cuda;
  using Act = typename Config::Act;
  using Payload = typename Quant::template Payload<Act>;
  using Scale = typename Quant::Scale;
  using Tokens = StandardTokensOf<Config, Quant>;
  using Params = HighThroughputParams<Window>;
  using Routed = RoutedTokens<Act, Config::hidden>;
  using typename Base::Handle;
  static_assert(window_exchange_returns_element<Space, Partial>);

  /// Collective. E_CAPACITY if the window cannot be allocated. Any placement.
  HighThroughputExchange(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens, ExpertPlacement const& placement,
                         Quant const&, Params const& params, Arena<Space>& arena)
      : shape_(make_shape(comm, shape, max_tokens, placement, params)),
        window_(comm, params.manager, arguments(shape_), params.window),
        place_(placement, arena),
        calls_(view(params), numbered(), options(placement, params)) {
    handles_.set_counter(0, &window_.use().dispatches[0]);
    std::int64_t const rows = shape_.rows();
    for (Record& r : handles_.records(0)) {
      if constexpr (std::is_same_v<Partial, float>) {
        r.output = arena.template take<float>(rows * shape_.hidden);
      }
    }
  }

  /// The most rows that the experts can get.
  std::int64_t max_rows() const { return shape_.rows(); }

  /// Enqueues. Rows by source rank, then by token; num_rows is on the device. Throws the failure that ended the group, if any; an error in
  /// this rank's arguments, which check() reports to the peers, leaves the group usable. If some rank would receive more than `capacity`
  /// rows, no row moves on any rank: check() throws E_CAPACITY on all ranks, naming that rank, the outputs are 0, and the next call works.
  Tokens prepare(Routed const& in, cudaStream_t stream) {
    order_.expect_idle();
    last_ = dispatch(in, stream);
    order_.set_dispatched();
    return tokens(last_);
  }
  /// Whether experts may run beside the transfer of the rows that prepare() enqueues: the configuration asks for it.
  static constexpr bool kArrives = kOverlapsDispatch<Config>;
  /// After prepare(), and with nothing enqueued since: the counts of its rows, for experts that start before these have come.
  comm::Arrivals arrivals() const
    requires kArrives
  {
    return calls_.arrivals(last_.parity());
  }
  /// Whether finalize() may run beside the experts: the configuration asks for it, and no kernel stands between the two, as one that rounds
  /// float outputs would.
  static constexpr bool kCompletes = kOverlapsCombine<Config> && std::is_same_v<Partial, bf16>;
  /// After prepare() and before its finalize(), which then reads each block of columns once the experts of all ranks have told it: these
  /// must tell every block once, with their rows in expert_output(), and be the last kernels before finalize(). Ranks choose independently;
  /// without this call finalize() starts when the experts are done.
  comm::Completions completions()
    requires kCompletes
  {
    return completions(last_);
  }
  /// [rows, H] of the last prepare(), weighted and summed over this rank's experts. Experts that write bf16 write directly into the window.
  Rows<Partial> expert_output() { return expert_output(last_); }
  /// Enqueues out[t] = the sum over ranks, ascending, in float32, one rounding; 0 for a token with no destination.
  void finalize(Rows<Act, Config::hidden> out, cudaStream_t stream) {
    order_.expect_dispatched("finalize");
    combine(last_, out, stream);
    order_.set_idle();
  }

  /// prepare() for callers with two batches in progress: at most two dispatches may be without their combine. With `like`, the same routing
  /// as that dispatch: skips layout and counts. Ids and weights must stay valid until combine(). E_STATE if `like` is stale, or if its
  /// layout or one still needed would be overwritten; E_ARG if it had another number of rows.
  Handle dispatch(Routed const& in, cudaStream_t stream, std::optional<Handle> like = std::nullopt) {
    throw_if_group_over(*window_);
    Record const* const from = like ? &expect_layout(*like) : nullptr;
    expect_free_layout(from);
    try {
      moe::detail::check_routed_tokens(in, shape_.hidden, shape_.topk, shape_.max_tokens);
      expect_device_tokens(in);
      if (from != nullptr && from->tokens.tokens != in.hidden.extent(0)) {
        throw Error(ErrorCode::argument, text("cached layout: ", in.hidden.extent(0), " rows, the layout is of ", from->tokens.tokens));
      }
    } catch (Error const& e) {
      refuse(0, comm::refusal_code(e.code()), stream, from != nullptr ? from->routing : -1);
      throw;
    }
    int const routing = from != nullptr ? from->routing : handles_.next(0).parity();
    std::uint32_t const root = from != nullptr ? from->root : handles_.next(0).generation;
    Handle const handle = handles_.open_counted(0, DispatchState::received);
    window_.use().layouts[static_cast<std::size_t>(routing)] = root;
    Record& r = handles_.record(handle);
    r.routing = routing;
    r.root = root;
    r.reduced = false;
    r.completing = false;
    r.tokens = exchange_tokens(in);
    calls_.dispatch(r.tokens, handle.parity(), stream, from != nullptr ? routing : -1);
    return handle;
  }
  /// The rows that a dispatch received.
  Tokens tokens(Handle handle) {
    Record& r = expect(handle, "tokens");
    auto const& at = calls_.layout();
    auto const p = static_cast<std::size_t>(handle.parity());
    std::int64_t const n = shape_.rows();
    auto const scale_cols = Quant::scale_cols(shape_.hidden);
    std::int32_t const* const records = calls_.template own<std::int32_t>(at.records[p]);
    return {make_rows(static_cast<Payload const*>(calls_.template own<Payload>(at.rows[p])), n, Quant::payload_cols(shape_.hidden)),
            make_strided_rows(static_cast<Scale const*>(calls_.template own<Scale>(at.scales[p])), n, scale_cols,
                              scale_cols == 0 ? 0 : at.scale_stride),
            make_strided_rows(records, n, shape_.topk, at.record_words),
            make_strided_rows(reinterpret_cast<float const*>(records + shape_.topk), n, shape_.topk, at.record_words), summary(r)};
  }
  Rows<Partial> expert_output(Handle handle) {
    Record& r = expect(handle, "expert_output");
    if constexpr (std::is_same_v<Partial, bf16>) {
      return make_rows(calls_.outputs(handle.parity()), shape_.rows(), shape_.hidden);
    } else {
      return make_rows(r.output, shape_.rows(), shape_.hidden);
    }
  }
  /// completions() of one dispatch. E_STATE for a handle that is stale or was combined, and after reduce_expert_major().
  comm::Completions completions(Handle handle)
    requires kCompletes
  {
    Record& r = expect(handle, "completions");
    if (r.reduced) {
      throw Error(ErrorCode::state, "completions: called after reduce_expert_major, whose sums are not told");
    }
    r.completing = true;
    return calls_.completions(handle.parity());
  }
  /// finalize() of one dispatch. E_STATE for a handle that is stale or was combined; E_ARG for `out`.
  void combine(Handle handle, Rows<Act, Config::hidden> out, cudaStream_t stream) {
    Record& r = expect(handle, "finalize");
    expect_device_output(out, r.tokens.tokens, shape_.hidden);
    int const parity = handle.parity();
    if constexpr (std::is_same_v<Partial, float>) {
      if (!r.reduced) {
        calls_.round(r.output, parity, stream, r.routing);
      }
    }
    if (r.completing) {
      calls_.combine_completing(r.tokens, out.data_handle(), out.stride(0), parity, stream, r.routing);
    } else {
      calls_.combine(r.tokens, out.data_handle(), out.stride(0), parity, stream, r.routing);
    }
    r.state = DispatchState::idle;
    finish_refusal(0, stream);
  }
  Handle last() const { return last_; }

  /// With expert_alignment: the rows of a dispatch by expert. E_STATE without it.
  ExpertMajor expert_major(Handle handle) {
    if (!shape_.lists) {
      throw Error(ErrorCode::state, "expert_major: the exchange was built without expert_alignment");
    }
    Record& r = expect(handle, "expert_major");
    std::int32_t const* const s = summary(r);
    int const L = shape_.local_experts();
    return {calls_.template own<std::int32_t>(calls_.layout().list[handle.parity()]), s + 1, s + 2, s + 2 + L, shape_.list_size()};
  }
  /// Alternative to writing expert_output(): weights and sums expert-major outputs y [entries][H] into the rows of the dispatch.
  void reduce_expert_major(Handle handle, bf16 const* y, cudaStream_t stream) {
    expert_major(handle);
    Record& r = expect(handle, "reduce_expert_major");
    if (r.completing) {
      throw Error(ErrorCode::state, "reduce_expert_major: called after completions, whose experts write the sums themselves");
    }
    calls_.reduce(y, handle.parity(), 8 * shape_.blocks, stream, r.routing);
    r.reduced = true;
  }

  /// Sets the thread blocks of the following calls; ranks that disagree get E_MISMATCH. E_CONFIG, E_UNSUPPORTED if it is not possible.
  void set_blocks(int blocks) { calls_.set_blocks(blocks); }
  /// Throws the error that the kernels have reported since the last call; call after synchronising the stream. What does not end the group
  /// (an overflow; another rank refused its arguments or abandoned the call) is thrown once.
  void check() const { check_window(*window_); }
  /// Nanoseconds that this rank has waited for each rank. [R] on the host. Synchronises the device. With overlap_combine the combine waits
  /// while this rank's own products run, and that time counts as waiting for the other ranks, too.
  std::vector<std::uint64_t> waited_ns() const { return read_control<std::uint64_t>(*window_, comm::WindowControl::waited); }
  Window& window() const { return *window_; }

 private:
  using Base::finish_refusal;
  using Base::handles_;
  using Base::last_;
  using Base::order_;
  using Base::refuse;
  using typename Base::DispatchState;

  static moe::detail::HighThroughputShape make_shape(typename Window::Comm& comm, Shape<Config> const& shape, std::int64_t max_tokens,
                                                     ExpertPlacement const& placement, Params const& params) {
    moe::detail::HighThroughputShape s;
    set_sizes<Quant>(s, comm.size(), shape, max_tokens, placement, params.blocks);
    s.lists = params.expert_alignment > 0;
    s.alignment = params.expert_alignment > 0 ? params.expert_alignment : 1;
    s.capacity = params.capacity;
    s.arriving = kArrives;
    if constexpr (kCompletes) {
      moe::detail::require_shape("high_throughput", params.column_blocks >= 1, ErrorCode::config, params.column_blocks,
                                 " column blocks, at least 1");
      s.column_blocks = params.column_blocks;
    }
    s.check();
    return s;
  }
  static comm::WindowArguments arguments(moe::detail::HighThroughputShape const& s) {
    return {"high_throughput",
            {s.ranks, s.max_tokens, s.hidden, s.topk, s.num_experts, s.fp8, s.lists, s.alignment, s.rows(), s.blocks, s.arriving,
             s.num_column_blocks()},
            static_cast<std::int64_t>(moe::detail::HighThroughputCalls::window_bytes(s) - comm::kWindowControlBytes)};
  }
  comm::WindowView view(Params const& params) const {
    comm::WindowView v = window_->view();
    v.statistics = params.statistics;
    return v;
  }
  moe::detail::HighThroughputShape const& numbered() {
    shape_.layer = window_.number();
    return shape_;
  }
  moe::detail::ExchangeOptions options(ExpertPlacement const& placement, Params const& params) const {
    return {.programmatic = params.programmatic,
            .scales = scale_rule<Quant>(),
            .fenced = params.fenced,
            .expert_place = place_.data(),
            .num_ids = placement.num_physical()};
  }
  std::int32_t const* summary(Record const& r) const {
    return calls_.template own<std::int32_t>(calls_.layout().summary[static_cast<std::size_t>(r.routing)]);
  }
  Record& expect(Handle handle, char const* what) { return Base::expect(handle, DispatchState::received, what); }
  Record& expect_layout(Handle like) {
    Record& r = handles_.expect_live(like, "prepare");
    if (r.generation != like.generation || window_.use().layouts[static_cast<std::size_t>(r.routing)] != r.root) {
      throw Error(ErrorCode::state, "prepare: the layout of this handle has been overwritten");
    }
    return r;
  }
  // A dispatch with its own layout (`from` null) overwrites the layout that the dispatch before the last filled.
  void expect_free_layout(Record const* from) {
    int const parity = handles_.next(0).parity();
    Record const& other = handles_.records(0)[static_cast<std::size_t>(1 - parity)];
    if (from == nullptr && other.state != DispatchState::idle && other.routing == parity) {
      throw Error(ErrorCode::state, "prepare: a dispatch without its combine still needs the layout that this one would overwrite");
    }
  }
  // `cached`: the layout that the peers reuse, or -1.
  void dispatch_nothing(Handle handle, std::uint32_t code, cudaStream_t stream, int cached = -1) {
    if (cached < 0) {
      window_.use().layouts[static_cast<std::size_t>(handle.parity())] = handle.generation;
    }
    handles_.record(handle).routing = handle.parity();  // of its combine
    calls_.dispatch({}, handle.parity(), stream, cached, code);
  }
  void combine_nothing(Handle handle, std::uint32_t code, cudaStream_t stream) {
    calls_.combine({}, nullptr, 0, handle.parity(), stream, handles_.record(handle).routing, code);
  }

  moe::detail::HighThroughputShape shape_;
  comm::WindowHandle<Window> window_;
  ExpertPlaces place_;
  moe::detail::HighThroughputCalls calls_;
};

}  // namespace moe::backends::detail
