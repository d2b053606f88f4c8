// SPDX-License-Identifier: Apache-2.0
// layer/layer.hpp: the layer of a legal composition. Members that do work are defined out of class, in construction.hpp and forward.hpp,
// and are not inline: if a model library declares the layer `extern template`, a program compiles none of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>

#include "moe/core/buffer.hpp"
#include "moe/core/config_defaults.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/core/line_sink.hpp"
#include "moe/layer/arguments.hpp"
#include "moe/layer/contract.hpp"
#include "moe/layer/half_batch.hpp"
#include "moe/layer/options.hpp"
#include "moe/layer/weight_move.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/routing/caller_routing.hpp"
#include "moe/routing/expert_mapping.hpp"
#include "moe/routing/row/route_args.hpp"

namespace moe::detail {

/// C: a legal Composition.
template <class C>
class Layer {
 public:
  using Config = typename C::Config;
  using RouterType = typename C::Router;
  using Quant = typename C::Quant;
  using Backend = typename C::Backend;
  using Experts = typename C::Experts;
  using Space = typename Experts::Space;
  using Comm = typename Backend::Comm;
  using Act = typename Config::Act;
  using Kernel = typename Parts<C>::Kernel;
  using RowQuant = typename Parts<C>::RowQuant;  ///< quantisation of the rows that the backend passes to the experts
  using Exchange = typename Parts<C>::Exchange;
  using Weights = WeightsOf<Config, Quant>;
  using Half = HalfBatch<C>;
  using Hidden = Rows<Act const, Config::hidden>;
  using Output = Rows<Act, Config::hidden>;

  /// The experts route inside (core/contract/monolithic.hpp).
  static constexpr bool kMonolithic = facts::routes_inside<Experts>();

  static constexpr std::int64_t kMissing = -1;
  struct Params {
    /// Dimensions that Config leaves dynamic.
    LayerShape shape = default_shape<Config>();
    /// T_max: the most rows of one forward() on any rank. Required.
    std::int64_t max_tokens_per_rank = kMissing;
    /// Which rank owns which physical expert; for one rank ExpertPlacement(E, 1). Required.
    RequiredPlacement<Layer> placement;
    /// Unset: router and activation take what Config states (core/config_defaults.hpp), so that a preset's constants hold.
    typename RouterType::Params router = default_router_params<Config, typename RouterType::Params>();
    Quant quantization{};
    typename Config::Activation activation = default_activation<Config>();
    typename Backend::Params backend{};
    typename Experts::Params experts{};
    /// Load balancing: the router's logical ids become physical ones before they are dispatched. The tables lie in the layer's space and
    /// may be rewritten between calls (eplb::MapTables). Unset: physical ids are the logical ones.
    routing::ExpertMapping mapping{};
    /// Fused shared experts on several ranks: which of them have the same rows as this one. Unset: none. A runner on a grid sets it.
    SameRows same_rows{};
    routing::LoadRecorder load{};  ///< counts the slots that each physical expert gets; with a mapping only
    /// Called once, at the end of construction, with one line about the layer and its memory. Unset: silent.
    LineSink log{};
  };

  /// Collective over `comm`. Allocates all memory that the layer ever uses. `weights` are borrowed and must outlive the layer. Throws
  /// E_CONFIG, E_ARG, E_UNSUPPORTED, E_STATE for this rank's own arguments; the other ranks then get E_PEER. E_MISMATCH, on all ranks,
  /// naming the first choice that differs between them.
  Layer(Comm& comm, Weights const& weights, Params const& p);
  /// Other arguments, or these in another order: one error, which says what is wrong. Compilers print this line and its comment.
  template <class CommArg, class WeightsArg>
    requires(!kConstructs<Comm, Weights, CommArg, WeightsArg>)
  Layer(CommArg&&, WeightsArg&&, Params const& p)  // Fix: if no constructor takes the braces, Layer::Params const p{...}; names the field
      : Layer(refused_argument<ConstructorArguments<Comm, Weights, CommArg, WeightsArg>, Comm>(), refused_argument<NoArguments, Weights>(),
              p) {}
  ~Layer();
  Layer(Layer&&) = delete;  // immovable: kernels, graphs and peers hold its addresses. Fix: keep it in std::optional or std::unique_ptr
  Layer& operator=(Layer&&) = delete;

  /// Collective. hidden [M, H], logits [M, num_logits] (float, bf16 or f16) → output [M, H]; M may differ between ranks and be 0. output
  /// may be hidden, the same rows; it may not overlap hidden otherwise, nor logits and the arrays of `options` (E_ARG), nor weights.
  /// Enqueues on `stream` and returns (host space: returns when done). No allocation. Throws before any work if an argument is wrong
  /// (E_ARG, E_CAPACITY) or while its weights are replaced (E_STATE); the other ranks then get E_PEER. Views of another element, rank or
  /// width do not compile. Zero experts are not added: a Runner does that, or the caller (routing/zero_experts.hpp).
  template <class HiddenArg, class LogitsArg, class OutputArg, class Probe = NoProbe>
  void forward(HiddenArg const& hidden, LogitsArg const& logits, OutputArg const& output, ForwardOptions const& options = {},
               Stream<Space> stream = {}, Probe&& probe = {}) {
    using Broken = FirstBrokenArgument<HiddenArgument<Hidden, Act, HiddenArg>, typename LogitsArgument<RouterType, LogitsArg>::type,
                                       OutputArgument<Output, Act, OutputArg>>;
    if constexpr (std::is_same_v<Broken, NoBrokenRule>) {
      run<std::remove_cv_t<typename LogitsArg::element_type>>(hidden, logits, output, options, stream, probe);
    } else {
      [[maybe_unused]] typename Broken::template Error<true> const error;
    }
  }

  /// As forward(), with routing that the caller did. topk_ids [M, k] int32 or int64: logical experts, kNoExpert (-1) for none, each
  /// expert at most once in a row; topk_weights [M, k] float, read where there is an expert. Mapping, replicas, load and zero experts as in
  /// forward(). Host space: E_ARG names the first invalid slot, and nothing was done. CUDA space: kernels check the slots; an invalid one
  /// counts as no expert, counters() counts it, and check() throws its E_ARG. E_ARG if `options` has token_ids or shared_weights.
  template <class HiddenArg, class IdsArg, class WeightsArg, class OutputArg, class Probe = NoProbe>
  void forward_routed(HiddenArg const& hidden, IdsArg const& topk_ids, WeightsArg const& topk_weights, OutputArg const& output,
                      ForwardOptions const& options = {}, Stream<Space> stream = {}, Probe&& probe = {}) {
    using Broken = FirstBrokenArgument<std::tuple<Verdict<rules::MonolithicTakesNoRouting, !kMonolithic, Experts>>,
                                       HiddenArgument<Hidden, Act, HiddenArg>, RoutingArguments<IdsArg, WeightsArg>,
                                       OutputArgument<Output, Act, OutputArg>>;
    if constexpr (std::is_same_v<Broken, NoBrokenRule>) {
      run_routed(hidden, topk_ids, topk_weights, output, options, stream, probe);
    } else {
      [[maybe_unused]] typename Broken::template Error<true> const error;
    }
  }

  /// Collective. Instead of a forward() that this rank cannot make: its peers get E_PEER. Never throws.
  void abandon(Stream<Space> stream = {}) { exchange_.abandon(stream); }
  /// Call this after the bytes of the weights were replaced in place (load balancing), before the next forward() or graph replay: experts
  /// with their own copy of the weights rebuild it, in stream order.
  void weights_changed(Stream<Space> stream = {});
  /// Load balancing: while its weights are being moved, forward() is E_STATE, and its peers get E_PEER.
  WeightMove& weight_move() { return weight_move_; }
  WeightMove const& weight_move() const { return weight_move_; }
  /// Waits for the stream, within the backend's deadline even if a peer has died, and throws any error. Host space: the calls have waited.
  void wait(Stream<Space> stream = {});
  /// Throws the errors of calls that the stream has finished: of backends that enqueue, where others throw from the call, and of the
  /// caller's routing in the CUDA space.
  void check();

  /// The first stage of forward(), for a caller that sends the batch in two halves (runner/dual_batch.hpp): validates and routes. An error
  /// is not told to the other ranks. Routing: logits [M, num_logits], or routing::GivenRouting.
  template <class Routing, class Probe>
  void begin(Hidden hidden, Routing const& routing, Output output, ForwardOptions const& options, Stream<Space> stream, Probe& probe);
  /// The other stages, of rows [first, first + rows) of the batch of begin(), over an exchange and a kernel that may be the layer's.
  Half half(Exchange& exchange, Kernel& kernel, Hidden hidden, Output output, std::int64_t first, std::int64_t rows,
            ForwardOptions const& options) const;
  /// The scheme of the exchange's rows for the scheme of the weights.
  static RowQuant row_quantization(Quant const& quant);
  /// The experts that an exchange of this layer knows: those of Params::placement, and on several ranks a copy of each fused shared one on
  /// every rank.
  ExpertPlacement all_experts(ExpertPlacement const& routed) const;

  /// Routing of the last forward(): [M, k + fused shared], logical ids, in the layer's memory. Where experts route inside:
  /// [M, num_logits], every expert with its logit.
  Rows<std::int32_t> topk_ids() { return make_rows(ids_, rows_, num_slots_); }
  Rows<float> topk_weights() { return make_rows(weights_, rows_, num_slots_); }
  Shape<Config> const& shape() const { return shape_; }
  RouterType const& router() const { return router_; }
  Exchange& exchange() { return exchange_; }
  Kernel& kernel() { return kernel_; }
  LayerMemory memory() const { return {arena_.bytes(), facts::window_bytes(exchange_)}; }
  /// Bytes that the layer holds on this rank besides its weights: memory(), summed.
  std::size_t bytes() const { return memory().arena + memory().window; }
  /// Counts of routing since construction: rows without a finite logit (all NaN or -inf). Such rows go to the first k experts with weight
  /// 1/k, or to no expert if the router's `degenerate` is drop. In a row with finite logits, a NaN only excludes its expert. Invalid slots
  /// of the caller's routing. CUDA space: reads device memory, so synchronise the stream first, and do not call this during capture.
  routing::RouteCounters counters() const;

 private:
  // ---- construction.hpp
  static Shape<Config> make_shape(LayerShape shape);
  static RouterType make_router(typename RouterType::Params const& params);
  std::int64_t agreed_max_tokens(Comm& comm, Weights const& weights, Params const& p) const;
  void take_memory();
  routing::RouteCounters* take_zeroed_counters();
  void check_router(ExpertPlacement const& placement) const;
  void check_monolithic() const;
  Shape<typename Parts<C>::Config> exchange_shape() const;
  void check_mapping(ExpertPlacement const& placement, typename Backend::Params const& backend) const;
  static void check_expert_norm(ExpertNormWeights const& norm, std::int64_t hidden);
  static void check_local_experts(Weights const& weights, ExpertPlacement const& placement, int rank, int num_ranks);
  void take_shared(Comm const& comm, Params const& p);
  static bool sums_by_rank(typename Backend::Params const& backend);
  bool maps() const { return mapping_.logical_to_physical != nullptr || mapping_.replica_count != nullptr; }

  // ---- forward.hpp
  template <class L, class Probe>
  void run(Hidden hidden, Rows<L const> logits, Output output, ForwardOptions const& options, Stream<Space> stream, Probe& probe);
  template <class Probe>
  void run_routed(Hidden hidden, routing::GivenIds topk_ids, Rows<float const> topk_weights, Output output, ForwardOptions const& options,
                  Stream<Space> stream, Probe& probe);
  template <class Routing, class Probe>
  void execute(Hidden hidden, Routing const& routing, Output output, ForwardOptions const& options, Stream<Space> stream, Probe& probe);
  template <class L>
  void route(Rows<L const> logits, ForwardOptions const& options, Stream<Space> stream);
  void route(routing::GivenRouting const& given, ForwardOptions const& options, Stream<Space> stream);
  void choose_replicas();
  void send_shared();
  void validate(Hidden hidden, Output output) const;
  template <class L>
  void validate_routing(Rows<L const> logits, std::int64_t rows, ForwardOptions const& options) const;
  void validate_routing(routing::GivenRouting const& given, std::int64_t rows, ForwardOptions const& options) const;
  Rows<std::int32_t const> dispatched_ids() const;

  Arena<Space> arena_;
  Shape<Config> shape_;
  RouterType router_;
  std::int64_t num_slots_;
  routing::ExpertMapping mapping_;
  routing::LoadRecorder load_;
  WeightMove weight_move_;
  std::int64_t max_tokens_;
  Exchange exchange_;
  Kernel kernel_;
  std::int32_t* ids_ = nullptr;         // [T_max, k + fused shared], or [T_max, num_logits] if the experts route inside
  float* weights_ = nullptr;            // as ids_
  std::int32_t* dispatched_ = nullptr;  // as ids_; null: ids_ is dispatched
  float* zero_weights_ = nullptr;       // [T_max], the device's zero experts under a mapping
  std::int64_t rows_ = 0;
  routing::SharedCopies shared_;                       // of the fused shared experts, where several ranks have them
  routing::RouteCounters counters_;                    // host space
  routing::RouteCounters* device_counters_ = nullptr;  // [1] CUDA space
  HostVisible<routing::CallerFault, Space> fault_;     // CUDA space
};

}  // namespace moe::detail
