// SPDX-License-Identifier: Apache-2.0
// modular_kernel.hpp: one MoE layer as five compile-time choices. Knows the concepts and the rules, names no policy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "moe/core/buffer.hpp"
#include "moe/core/check.hpp"
#include "moe/core/concepts.hpp"
#include "moe/core/config_defaults.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/parallel/layer_fingerprint.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/routing/expert_mapping.hpp"
#include "moe/routing/route.hpp"
#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/row_router.hpp"
#include "moe/routing/zero_experts.hpp"

namespace moe {

/// The stages of forward(), in order.
enum class Phase : std::uint8_t { route, dispatch, experts, combine };

/// A probe that measures nothing. A real one has begin(Phase) and end(Phase) and is called on the host around each stage.
struct NoProbe {
  void begin(Phase) {}
  void end(Phase) {}
};

/// What a layer holds on this rank besides its weights, in bytes.
struct LayerMemory {
  std::size_t arena = 0;   ///< in the layer's own arena
  std::size_t window = 0;  ///< this rank's part of the window that the exchange maps; layers of one shape may share it (WindowManager)
};

/// What may differ from call to call besides the arrays.
struct ForwardOptions {
  std::int64_t num_valid_rows = -1;         ///< rows at or past it are padding and give zero rows; -1: all rows are valid
  std::int64_t const* token_ids = nullptr;  ///< [M], for hash routing, in the layer's space
  Rows<float> shared_weights = {};          ///< [M, S] out: weights of jointly normalised shared experts; or no rows
  /// CUDA space: [1] rows that are there, at most M, in device memory, so that a captured graph follows it. Output rows past it are
  /// not written or zero, their routing says nothing. For backends whose exchange takes it (no_expert_parallel), else E_UNSUPPORTED.
  std::int32_t const* num_rows = nullptr;
};

namespace detail {

template <class Backend>
concept RowsStay = requires { requires Backend::kRowsStay; };
template <class Kernel>
concept QuantizesOnTheWay = requires { typename Kernel::RowsAsTheyAre; };

/// The quantisation of the rows that the backend hands over: Quant's, or none where the rows stay on their rank and the experts quantise
/// them on the way.
template <class Quant, class Backend, class Kernel>
struct HandedOver {
  using type = Quant;
};
template <class Quant, RowsStay Backend, QuantizesOnTheWay Kernel>
struct HandedOver<Quant, Backend, Kernel> {
  using type = typename Kernel::RowsAsTheyAre;
};

template <class Config, class Router, class Quant, class Backend, class Experts>
class Layer {
 public:
  using Space = typename Experts::Space;
  using Comm = typename Backend::Comm;
  using Act = typename Config::Act;
  using Kernel = typename Experts::template Kernel<Config, Quant, Backend::kFormat>;
  using RowQuant = typename HandedOver<Quant, Backend, Kernel>::type;
  using Exchange = typename Backend::template Exchange<Config, RowQuant, typename Kernel::Output>;
  using Weights = WeightsOf<Config, Quant>;
  using Hidden = Rows<Act const, Config::hidden>;
  using Output = Rows<Act, Config::hidden>;
  using RouterType = Router;

  struct Params {
    /// Dimensions that Config leaves dynamic.
    LayerShape shape = default_shape<Config>();
    std::int64_t max_tokens_per_rank = 0;  ///< T_max: rows that one forward() may bring on any rank
    ExpertPlacement placement;             ///< which rank owns which physical expert; for one rank ExpertPlacement(E, 1)
    /// Unset, router and activation have what Config states (core/config_defaults.hpp), so that a preset's constants hold.
    typename Router::Params router = default_router_params<Config, typename Router::Params>();
    Quant quantization{};
    typename Config::Activation activation = default_activation<Config>();
    typename Backend::Params backend{};
    typename Experts::Params experts{};
    /// Load balancing: the router's logical ids become physical ones before they are dispatched. The tables lie in the layer's space and
    /// may be rewritten between calls (eplb::MapTables). Unset: physical ids are the logical ones.
    routing::ExpertMapping mapping{};
    routing::LoadRecorder load{};  ///< counts the slots that each physical expert gets; with a mapping only
    /// Told once, at the end of construction, what the layer is and takes, in one line. Unset: silent.
    std::function<void(std::string const&)> log{};
  };

  /// Collective over `comm`. Takes all memory that the layer will ever use. `weights` are borrowed and must outlive the layer. Throws
  /// E_CONFIG, E_ARG, E_UNSUPPORTED, E_STATE for this rank's own arguments; the other ranks then get E_PEER. E_MISMATCH, on all ranks,
  /// naming the first choice that differs between them.
  Layer(Comm& comm, Weights const& weights, Params const& p)
      : shape_(build(comm, [&] { return Shape<Config>(layer_shape(p.shape)); })),
        router_(build(comm, [&] { return Router(p.router); })),
        mapping_(p.mapping),
        load_(p.load),
        max_tokens_(agreed_max_tokens(comm, weights, p)),
        exchange_(comm, shape_, max_tokens_, p.placement, row_quantization(p.quantization), p.backend, arena_),
        kernel_(
            build(comm, [&] { return Kernel(shape_, weights, exchange_.max_rows(), p.quantization, p.activation, p.experts, arena_); })) {
    build(comm, [&] { take_memory(); });
    agree_on_construction(comm);
    if (p.log) {
      p.log(text("moe: ", Router::kName, ", ", Quant::kName, ", ", Backend::kName, ", ", Experts::kName, " on rank ", comm.rank(), " of ",
                 comm.size(), ": ", memory().arena, " bytes in the arena, ", memory().window, " in the window"));
    }
  }
  Layer(Layer const&) = delete;
  Layer& operator=(Layer const&) = delete;

  /// Collective. hidden [M, H], logits [M, num_logits] (float, bf16 or f16) → output [M, H]; M may differ between ranks and be 0.
  /// Enqueues on `stream` and returns (host space: returns when done). No allocation. Throws before any work if an argument is
  /// wrong (E_ARG, E_CAPACITY); the other ranks then get E_PEER.
  template <class L, class Probe = NoProbe>
  void forward(Hidden hidden, Rows<L const> logits, Output output, ForwardOptions const& options = {}, Stream<Space> stream = {},
               Probe&& probe = {}) {
    try {
      validate(hidden, logits.extent(0), logits.extent(1), output);
      if (options.num_rows != nullptr && !kTakesRowCount) {
        throw Error(ErrorCode::unsupported, text("num_rows: ", Backend::kName, " takes its row count from the host"));
      }
      rows_ = hidden.extent(0);
      probe.begin(Phase::route);
      route(logits, options, stream);
      probe.end(Phase::route);
    } catch (...) {  // a caller's own routing function may throw anything
      exchange_.abandon(stream);
      throw;
    }

    probe.begin(Phase::dispatch);
    auto const tokens = exchange_.prepare(
        RoutedTokens<Act, Config::hidden>{hidden, dispatched_ids(), topk_weights(), options.num_rows, kSkipsForeignIds}, stream);
    probe.end(Phase::dispatch);

    probe.begin(Phase::experts);
    try {
      kernel_.apply(tokens, expert_output(output), stream);
    } catch (...) {
      exchange_.abandon(stream);  // the other ranks wait in finalize()
      throw;
    }
    probe.end(Phase::experts);

    probe.begin(Phase::combine);
    exchange_.finalize(output, stream);
    probe.end(Phase::combine);
  }

  /// To be called where the bytes of the weights were replaced in place (load balancing), before the next forward() or graph replay:
  /// experts that keep a form of their own of the weights make it anew, in stream order.
  void weights_changed(Stream<Space> stream = {}) {
    if constexpr (requires(Kernel& kernel) { kernel.weights_changed(stream); }) kernel_.weights_changed(stream);
  }

  /// Routing of the last forward(): [M, k + fused shared], logical ids, in the layer's memory.
  Rows<std::int32_t> topk_ids() { return make_rows(ids_, rows_, router_.num_slots()); }
  Rows<float> topk_weights() { return make_rows(weights_, rows_, router_.num_slots()); }
  Shape<Config> const& shape() const { return shape_; }
  Router const& router() const { return router_; }
  Exchange& exchange() { return exchange_; }
  Kernel& kernel() { return kernel_; }
  LayerMemory memory() const {
    LayerMemory m{arena_.bytes(), 0};
    if constexpr (requires { exchange_.window().bytes(); }) m.window = static_cast<std::size_t>(exchange_.window().bytes());
    return m;
  }
  /// Bytes that the layer holds on this rank besides its weights: memory(), summed.
  std::size_t bytes() const { return memory().arena + memory().window; }
  /// What routing has counted since construction: rows without a finite logit (all NaN or -inf). These go to the first k experts with
  /// weight 1/k, or nowhere if the router's `degenerate` says drop. A NaN beside finite logits only leaves its expert out. CUDA space:
  /// reads device memory, so synchronise the stream first, and do not call while it is captured.
  routing::RouteCounters counters() const {
    routing::RouteCounters counted = counters_;
    if constexpr (Space::kKind == SpaceKind::cuda) Memory<Space>::copy_to_host(&counted, device_counters_, sizeof counted);
    return counted;
  }

 private:
  static constexpr bool kTakesRowCount = requires { requires Exchange::kTakesRowCount; };
  static constexpr bool kSkipsForeignIds = requires { requires Kernel::kSkipsForeignIds; };

  /// A router whose weight belongs on the input makes the layer put it there, whatever the caller's shape says.
  static LayerShape layer_shape(LayerShape shape) {
    shape.weight_on_input = shape.weight_on_input || Router::kWeightOnInput;
    return shape;
  }
  /// Collective. T_max, once every rank has found its own arguments right.
  std::int64_t agreed_max_tokens(Comm& comm, Weights const& weights, Params const& p) const {
    build(comm, [&] {
      check_router();
      if (p.max_tokens_per_rank > kMostSize) {
        throw Error(ErrorCode::capacity, text("max_tokens_per_rank: ", p.max_tokens_per_rank, " exceeds ", kMostSize));
      }
      check_mapping(p.placement, p.backend);
      check_local_experts(weights, p.placement, comm.rank(), comm.size());
    });
    agree_on_fingerprint(comm, layer_fingerprint<Config, Backend>(shape_, router_, p.quantization, p.activation, p.placement));
    return p.max_tokens_per_rank;
  }
  void take_memory() {
    ids_ = arena_.template take<std::int32_t>(max_tokens_ * router_.num_slots());
    weights_ = arena_.template take<float>(max_tokens_ * router_.num_slots());
    if (Space::kKind == SpaceKind::host || maps()) dispatched_ = arena_.template take<std::int32_t>(max_tokens_ * router_.topk());
    if (Space::kKind == SpaceKind::cuda && maps()) zero_weights_ = arena_.template take<float>(max_tokens_);
    if constexpr (Space::kKind == SpaceKind::cuda) device_counters_ = take_zeroed_counters();
    arena_.seal();
  }
  routing::RouteCounters* take_zeroed_counters() {
    auto* const counters = arena_.template take<routing::RouteCounters>(1);
    Memory<Space>::fill(counters, 0, sizeof *counters);
    return counters;
  }
  static RowQuant row_quantization([[maybe_unused]] Quant const& quant) {
    if constexpr (std::is_same_v<RowQuant, Quant>) {
      return quant;
    } else {
      return {};
    }
  }
  /// Where the experts write. An exchange on one rank may have them write the output itself.
  auto expert_output(Output output) {
    if constexpr (requires { exchange_.expert_output(output); }) {
      return exchange_.expert_output(output);
    } else {
      return exchange_.expert_output();
    }
  }
  void validate(Hidden hidden, std::int64_t logit_rows, std::int64_t logit_cols, Output output) const {
    std::int64_t const m = hidden.extent(0);
    auto expect = [](char const* what, std::int64_t value, std::int64_t wanted) {
      if (value != wanted) {
        throw Error(ErrorCode::argument, text(what, ": ", value, ", expected ", wanted));
      }
    };
    expect("hidden_states: width", hidden.extent(1), shape_.hidden());
    expect("output: width", output.extent(1), shape_.hidden());
    expect("output: rows", output.extent(0), m);
    expect("router_logits: rows", logit_rows, m);
    expect("router_logits: width", logit_cols, router_.num_logits());
    check_layer_rows("hidden_states", hidden);
    check_layer_rows("output", output);
    if (m > max_tokens_) {
      throw Error(ErrorCode::capacity, text("hidden_states: ", m, " rows exceed max_tokens_per_rank ", max_tokens_));
    }
  }
  void check_router() const {
    if (router_.num_slots() != router_.topk()) {
      throw Error(ErrorCode::unsupported, text("fused shared experts: a layer dispatches ", router_.topk(), " columns, the router writes ",
                                               router_.num_slots(), "; run shared experts beside the layer"));
    }
    if (router_.topk() != shape_.topk()) {
      throw Error(ErrorCode::config, text("top_k: the router chooses ", router_.topk(), ", the layer has ", shape_.topk()));
    }
    if (router_.num_experts() != shape_.num_experts()) {
      throw Error(ErrorCode::config, text("num_experts: the router has ", router_.num_experts(), ", the layer ", shape_.num_experts()));
    }
  }
  /// Local ids index the weights. A batched exchange gives a block for each local expert of the placement, and experts read one for each of
  /// the weights. Weights without a matrix are left to the experts; a placement of other ranks to the exchange.
  static void check_local_experts(Weights const& weights, ExpertPlacement const& placement, int rank, int num_ranks) {
    if (weights.w13.rows == 0 || placement.ep_size() != num_ranks) return;
    std::int64_t const held = weights.w13.codes.extent(0);
    int const owned = placement.num_local(rank);
    bool const batched = Backend::kFormat == ActivationFormat::batched;
    if (held < owned || (batched && held > owned)) {
      throw Error(ErrorCode::argument,
                  text("expert weights: ", held, " experts, the placement gives rank ", rank, batched ? " exactly " : " ", owned));
    }
  }
  bool maps() const { return mapping_.logical_to_physical != nullptr || mapping_.replica_count != nullptr; }
  void check_mapping(ExpertPlacement const& placement, typename Backend::Params const& backend) const {
    if (!maps()) {
      for (int slot = 0; slot < placement.num_physical(); ++slot) {
        if (placement.logical(slot) != slot) {
          throw Error(ErrorCode::state,
                      text("EPLB enabled but logical_to_physical is not set: slot ", slot, " holds expert ", placement.logical(slot)));
        }
      }
      if (placement.num_physical() != shape_.num_experts()) {
        throw Error(ErrorCode::config, text("placement: ", placement.num_physical(),
                                            " physical experts, without a mapping expected num_experts ", shape_.num_experts()));
      }
      return;
    }
    routing::validate(mapping_);
    auto expect = [](char const* what, int value, int wanted) {
      if (value != wanted) {
        throw Error(ErrorCode::config, text("mapping: ", what, " is ", value, ", the layer has ", wanted));
      }
    };
    expect("num_experts", mapping_.num_experts, shape_.num_experts());
    expect("num_physical", mapping_.num_physical, placement.num_physical());
    if (kBatchInvariant<Config> && mapping_.num_physical > mapping_.num_experts && sums_by_rank(backend)) {
      throw Error(ErrorCode::config,
                  text("batch_invariant: ", mapping_.num_physical, " physical experts for ", mapping_.num_experts,
                       ": which replica a token goes to, and so which of its outputs one rank adds, depends on its place in "
                       "the batch. Have one replica of each, or a backend that returns every choice's output"));
    }
  }
  /// Whether a token's outputs are added on the ranks of its experts before they come back.
  static bool sums_by_rank([[maybe_unused]] typename Backend::Params const& backend) {
    bool merged = Backend::kReduction != TopKReduction::backend;
    if constexpr (requires { backend.deduplicate; }) merged = merged || backend.deduplicate;
    return merged;
  }
  /// topk_ids() and topk_weights(), and in dispatched_ the ids that leave this rank: physical, and none for a zero expert, which needs
  /// no rank. On the device without a mapping the exchange leaves zero experts out itself.
  template <class L>
  void route(Rows<L const> logits, ForwardOptions const& options, Stream<Space> stream) {
    routing::RouteArgs<L> const args{
        logits,         options.num_valid_rows < 0 ? rows_ : options.num_valid_rows,     options.token_ids,     topk_ids(),
        topk_weights(), Space::kKind == SpaceKind::host ? &counters_ : device_counters_, options.shared_weights};
    if constexpr (Space::kKind == SpaceKind::host) {
      router_.select(args);
      for (std::int64_t i = 0; i < rows_ * router_.topk(); ++i) {
        dispatched_[i] = routing::is_zero_expert(ids_[i], shape_.num_experts()) ? kNoExpert : ids_[i];
      }
      if (maps()) routing::map_experts(&mapping_, load_, router_.topk(), rows_, make_rows(dispatched_, rows_, router_.topk()));
    } else if (!maps()) {
      router_.select(args, stream);
    } else {
      routing::FusedRouting<L> fused{
          .args = args, .mapping = &mapping_, .recorder = load_, .logical_ids = ids_, .zero_expert_weights = zero_weights_};
      fused.args.topk_ids = make_rows(dispatched_, rows_, router_.topk());
      routing::route_fused(static_cast<routing::RowRouter<typename Router::Config> const&>(router_), fused, stream);
    }
  }
  Rows<std::int32_t const> dispatched_ids() const {
    return make_rows(static_cast<std::int32_t const*>(dispatched_ != nullptr ? dispatched_ : ids_), rows_, router_.topk());
  }
  template <class View>
  static void check_layer_rows(char const* what, View const& rows) {
    check_rows(what, rows);
    if constexpr (Space::kKind == SpaceKind::cuda) {
      check_alignment(what, rows.data_handle(), rows.extent(0), rows.stride(0) * static_cast<std::int64_t>(sizeof(Act)));
    }
  }

  Arena<Space> arena_;
  Shape<Config> shape_;
  Router router_;
  routing::ExpertMapping mapping_;
  routing::LoadRecorder load_;
  std::int64_t max_tokens_;
  Exchange exchange_;
  Kernel kernel_;
  std::int32_t* ids_ = nullptr;         // [T_max, k + fused shared]
  float* weights_ = nullptr;            // as ids_
  std::int32_t* dispatched_ = nullptr;  // [T_max, k]; null: ids_ is dispatched
  float* zero_weights_ = nullptr;       // [T_max], the device's zero experts under a mapping
  std::int64_t rows_ = 0;
  routing::RouteCounters counters_;                    // host space
  routing::RouteCounters* device_counters_ = nullptr;  // [1] CUDA space
};

/// The layer if the rules hold, else the broken rule's error and nothing that could add errors of its own.
template <bool Legal, class Config, class Router, class Quant, class Backend, class Experts>
struct LayerIfLegal {
  using type = Layer<Config, Router, Quant, Backend, Experts>;
};
template <class Config, class Router, class Quant, class Backend, class Experts>
struct LayerIfLegal<false, Config, Router, Quant, Backend, Experts> {
  using type = typename Composition<Config, Router, Quant, Backend, Experts>::Error;
};

}  // namespace detail

/// One MoE layer on one rank of an expert-parallel group: router → prepare → experts → finalize, all by static type. A composition
/// that breaks a rule of core/check.hpp does not compile, and the first error is the rule's sentence.
template <LayerConfig Config, Router RouterPolicy, Quantization QuantizationPolicy, PrepareAndFinalize Backend, Experts ExpertsPolicy>
class ModularKernel : public detail::LayerIfLegal<Composition<Config, RouterPolicy, QuantizationPolicy, Backend, ExpertsPolicy>::kLegal,
                                                  Config, RouterPolicy, QuantizationPolicy, Backend, ExpertsPolicy>::type {
  using Base = typename detail::LayerIfLegal<Composition<Config, RouterPolicy, QuantizationPolicy, Backend, ExpertsPolicy>::kLegal, Config,
                                             RouterPolicy, QuantizationPolicy, Backend, ExpertsPolicy>::type;

 public:
  using Base::Base;
};

}  // namespace moe
