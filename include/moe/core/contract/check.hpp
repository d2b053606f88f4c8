// SPDX-License-Identifier: Apache-2.0
// core/contract/check.hpp: the composition rules. Each is one named predicate over the five policies with one sentence for the user; the
// same predicates stop a wrong composition at compile time and explain it in `moe list compositions`. Policies that lack a member of
// their contract are reported first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "moe/core/array.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/core/contract/monolithic.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/types.hpp"

namespace moe {

namespace rules {
MOE_RULE(SameSpace,
         "moe: backend and experts live in different memory spaces. "
         "Fix: choose both from the host space or both from the cuda space (docs/errors.md#same-space)");
MOE_RULE(ActivationFormatMatches,
         "moe: the backend delivers an activation format that the experts cannot read. "
         "Fix: pair a standard backend with standard experts, a batched one with batched experts (docs/errors.md#activation-format)");
MOE_RULE(BackendCarriesQuantization,
         "moe: the backend cannot carry this quantisation's payload. "
         "Fix: choose a quantisation whose rows the backend carries, or none (docs/errors.md#backend-quantization)");
MOE_RULE(ExpertsSupportQuantization,
         "moe: the experts kernel has no path for this quantisation. "
         "Fix: choose experts that support it; reference experts support every scheme (docs/errors.md#experts-quantization)");
MOE_RULE(
    BackendCarriesElement,
    "moe: the backend cannot carry rows of this element type. "
    "Fix: set Act of the layer configuration to bf16, or choose a backend that carries every element (docs/errors.md#backend-element)");
MOE_RULE(ExpertsSupportActivation,
         "moe: the experts kernel has no path for this activation. "
         "Fix: choose experts that support it; reference experts support every activation (docs/errors.md#experts-activation)");
MOE_RULE(ExpertsNormaliseOutput,
         "moe: the model normalises each expert's output before the weighted sum, and the experts kernel sums without a norm. "
         "Fix: choose experts that declare kNormalisesOutput, as the reference experts do (docs/errors.md#expert-norm)");
MOE_RULE(ExpertsSupportElement,
         "moe: the experts kernel has no path for this element type of activations and weights. "
         "Fix: set Act and Weight of the layer configuration to types that the experts list (docs/errors.md#experts-element)");
MOE_RULE(ReducedExactlyOnce,
         "moe: the weighted sum over the top-k would be done twice or never. "
         "Fix: experts that leave it to the backend need a backend that reduces, and the other way round (docs/errors.md#reduced-once)");
MOE_RULE(WeightOnInputNeedsTopKOne,
         "moe: the router weight is applied on the input, which a batched backend can do only with topk = 1. "
         "Fix: set topk = 1 or use a standard backend (docs/errors.md#weight-on-input)");
MOE_RULE(RowsAligned,
         "moe: a row of hidden states is not a multiple of 16 bytes, which exchanges and grouped GEMMs need. "
         "Fix: pad hidden (docs/errors.md#rows-aligned)");
MOE_RULE(QuantizationFitsShape,
         "moe: hidden or intermediate is not a multiple of the quantisation's group. "
         "Fix: pad the dimension or choose another scheme (docs/errors.md#quantization-shape)");
MOE_RULE(ExpertsFitShape,
         "moe: hidden or intermediate is not a multiple of the experts kernel's tile. "
         "Fix: pad the dimension or choose other experts (docs/errors.md#experts-shape)");
MOE_RULE(SharedMemoryFits,
         "moe: the experts kernel's tile needs more shared memory than a thread block can have. "
         "Fix: fewer stages or a smaller tile (docs/errors.md#shared-memory)");
MOE_RULE(ExpertsAreBatchInvariant,
         "moe: the layer must be batch-invariant, and the experts kernel sums in an order that depends on the number of rows. "
         "Fix: choose experts that declare kBatchInvariant, or drop batch_invariant (docs/errors.md#batch-invariant)");
MOE_RULE(BackendIsBatchInvariant,
         "moe: the layer must be batch-invariant, and the backend sums over ranks in an order that depends on the number of rows. "
         "Fix: choose a backend that sums in rank order, or drop batch_invariant (docs/errors.md#batch-invariant)");
MOE_RULE(TopKInBounds,
         "moe: topk must be at least 1, at most num_experts and at most 32. "
         "Fix: correct the layer configuration (docs/errors.md#topk)");
MOE_RULE(PoliciesInOrder,
         "moe: a type stands where another policy belongs. "
         "Fix: the order is ModularKernel<Config, Router, Quantization, Backend, Experts> (docs/errors.md#policy-order)");
}  // namespace rules

namespace detail {

/// True if a dimension is left to run time or is a multiple of `factor`.
constexpr bool fits(int dimension, int factor) { return dimension == dynamic || dimension % factor == 0; }

constexpr bool topk_in_bounds(int topk, int num_experts) {
  if (topk == dynamic) {
    return true;
  }
  return topk >= 1 && topk <= kMaxTopK && (num_experts == dynamic || topk <= num_experts);
}
constexpr bool weight_on_input_fits(bool on_input, ActivationFormat format, int topk) {
  return !on_input || format == ActivationFormat::standard || topk == dynamic || topk == 1;
}
/// Elements of a row in the 16 bytes that are moved at a time.
constexpr int row_multiple(std::size_t element_bytes) { return kAlignment / static_cast<int>(element_bytes); }
constexpr bool rows_aligned(SpaceKind space, int hidden, std::size_t element_bytes) {
  return space == SpaceKind::host || fits(hidden, row_multiple(element_bytes));
}

template <class Config, int Hidden, int Intermediate>
struct Sized : Config {
  static constexpr int hidden = Hidden, intermediate = Intermediate;
};
/// Which dimensions experts, or a quantisation, take.
template <class Experts, class Config, class Quant>
struct ExpertsTake {
  template <int Hidden, int Intermediate>
  static constexpr bool fits() {
    return Experts::template fits_shape<Sized<Config, Hidden, Intermediate>, Quant>();
  }
};
template <class Quant>
struct QuantizationTakes {
  template <int Hidden, int Intermediate>
  static constexpr bool fits() {
    return Quant::supports(Hidden, Intermediate);
  }
};

/// The multiples that are tried: 1, 2, 3, 4, 6, 8, 12, 16, ….
constexpr int next_unit(int factor) { return factor == 1 ? 2 : (factor & (factor - 1)) == 0 ? factor / 2 * 3 : factor / 3 * 4; }
inline constexpr int kLargestUnit = 4096;
/// The least factor that is taken as one dimension while the other is left to run time: what is taken are its multiples.
template <class Takes, int Unit = 1>
constexpr int hidden_multiple() {
  if constexpr (Unit >= kLargestUnit || Takes::template fits<Unit, dynamic>()) {
    return Unit;
  } else {
    return hidden_multiple<Takes, next_unit(Unit)>();
  }
}
template <class Takes, int Unit = 1>
constexpr int intermediate_multiple() {
  if constexpr (Unit >= kLargestUnit || Takes::template fits<dynamic, Unit>()) {
    return Unit;
  } else {
    return intermediate_multiple<Takes, next_unit(Unit)>();
  }
}

/// The verdict of a rule on both dimensions of Config. It prints each of them and what that must be a multiple of. Only the error of a
/// broken rule, Error<true>, computes these multiples; the search begins with 1.
template <class Rule, bool Holds, class Policy, class Config, class Takes>
struct ShapeVerdict : Verdict<Rule, Holds> {
  template <bool IsBroken>
  using Error = typename Rule::template Broken<Policy, Value<Config::hidden>, MultipleOf<hidden_multiple<Takes, int{IsBroken}>()>,
                                               Value<Config::intermediate>, MultipleOf<intermediate_multiple<Takes, int{IsBroken}>()>>;
};

/// The rules that backend and experts decide with the types of Config, not its dimensions.
template <class Config, class Backend, class Experts>
struct ExchangeVerdicts {
  using Act = typename Config::Act;
  static constexpr ActivationFormat kFormat = Backend::kFormat;

  using SameSpace = Verdict<rules::SameSpace, std::is_same_v<typename Backend::Space, typename Experts::Space>, typename Backend::Space,
                            typename Experts::Space>;
  using Format = Verdict<rules::ActivationFormatMatches, Experts::reads(kFormat), Value<kFormat>, Experts>;
  using ExpertsElement = Verdict<rules::ExpertsSupportElement, Experts::template supports_element<Act, typename Config::Weight>(), Experts,
                                 Act, typename Config::Weight>;
  using BackendElement = Verdict<rules::BackendCarriesElement, facts::carries_element<Backend, Act>(), Backend, Act>;
  using ExpertsActivation = Verdict<rules::ExpertsSupportActivation, Experts::template supports_activation<typename Config::Activation>(),
                                    Experts, typename Config::Activation>;
  using ExpertsNorm = Verdict<rules::ExpertsNormaliseOutput,
                              kExpertNorm<Config> != ExpertNorm::always || facts::normalises_output<Experts>(), Experts, Config>;
  using ReducedOnce = Verdict<rules::ReducedExactlyOnce, Backend::kReduction == Experts::reduction(kFormat), Value<Backend::kReduction>,
                              Value<Experts::reduction(kFormat)>>;
  using all = std::tuple<SameSpace, Format, ExpertsElement, BackendElement, ExpertsActivation, ExpertsNorm, ReducedOnce>;
};

/// The rules that quantisation and experts decide with the dimensions of Config.
template <class Config, class Quant, class Experts>
struct SchemeVerdicts {
  static constexpr int kShared = facts::shared_memory_bytes<Experts, Config, Quant>();
  static constexpr int kSharedLimit = facts::shared_memory_limit<Experts>();

  using ExpertsQuantization = Verdict<rules::ExpertsSupportQuantization, Experts::template supports_quantization<Quant>(), Experts, Quant>;
  using QuantizationShape = ShapeVerdict<rules::QuantizationFitsShape, Quant::supports(Config::hidden, Config::intermediate), Quant, Config,
                                         QuantizationTakes<Quant>>;
  using ExpertsShape = ShapeVerdict<rules::ExpertsFitShape, Experts::template fits_shape<Config, Quant>(), Experts, Config,
                                    ExpertsTake<Experts, Config, Quant>>;
  using SharedMemory = Verdict<rules::SharedMemoryFits, kShared <= kSharedLimit, Value<kShared>, Value<kSharedLimit>>;
  using all = std::tuple<ExpertsQuantization, QuantizationShape, ExpertsShape, SharedMemory>;
};

template <class Quant, class Backend>
using CarriesVerdict = Verdict<rules::BackendCarriesQuantization, Backend::template carries<Quant>(), Backend, Quant>;

/// All rules over one composition, in the order in which they are reported.
template <class Config, class Router, class Quant, class Backend, class Experts>
struct Verdicts {
  using Act = typename Config::Act;
  using Exchange = ExchangeVerdicts<Config, Backend, Experts>;
  using Scheme = SchemeVerdicts<Config, Quant, Experts>;

  using type = std::tuple<
      typename Exchange::SameSpace, typename Exchange::Format,
      Verdict<rules::MonolithicTransport, !facts::routes_inside<Experts>() || !facts::follows_routing<Backend>(), Experts, Backend>,
      Verdict<rules::MonolithicRouter, facts::supports_router<Experts, Router>(), Experts, Router>,
      Verdict<rules::TopKInBounds, topk_in_bounds(Config::topk, Config::num_experts), Value<Config::topk>, Value<Config::num_experts>,
              Value<kMaxTopK>>,
      typename Exchange::ExpertsElement, typename Exchange::BackendElement, typename Exchange::ExpertsActivation,
      typename Exchange::ExpertsNorm, typename Scheme::ExpertsQuantization, CarriesVerdict<Quant, Backend>, typename Exchange::ReducedOnce,
      Verdict<rules::WeightOnInputNeedsTopKOne, weight_on_input_fits(Router::kWeightOnInput, Backend::kFormat, Config::topk), Router,
              Value<Config::topk>, Value<1>>,
      Verdict<rules::RowsAligned, rows_aligned(Experts::Space::kKind, Config::hidden, sizeof(Act)), Value<Config::hidden>,
              MultipleOf<row_multiple(sizeof(Act))>, Act>,
      typename Scheme::QuantizationShape, typename Scheme::ExpertsShape,
      Verdict<rules::ExpertsAreBatchInvariant, !kBatchInvariant<Config> || facts::experts_are_batch_invariant<Experts>(), Experts>,
      Verdict<rules::BackendIsBatchInvariant, !kBatchInvariant<Config> || facts::backend_is_batch_invariant<Backend>(), Backend>,
      typename Scheme::SharedMemory>;
};

/// Whether a type meets no contract at all. Then the first member that it lacks says more than its position.
template <class T>
inline constexpr bool kNoPolicy = !LayerConfig<T> && !moe::Router<T> && !Quantization<T> && !PrepareAndFinalize<T> && !moe::Experts<T>;
template <class C, class R, class Q, class B, class E>
inline constexpr bool kInOrder =
    (LayerConfig<C> || kNoPolicy<C>) && (moe::Router<R> || kNoPolicy<R>) && (Quantization<Q> || kNoPolicy<Q>) &&
    (PrepareAndFinalize<B> || kNoPolicy<B>) && (moe::Experts<E> || kNoPolicy<E>);
template <class C, class R, class Q, class B, class E>
using OrderVerdict = Verdict<rules::PoliciesInOrder, kInOrder<C, R, Q, B, E>, C, R, Q, B, E>;

template <class Config>
struct ActivationOf {
  using type = ActivationContract<typename Config::Activation>;
};
/// The members that depend on what the policies are composed with.
template <class Config, class Quant, class Backend, class Experts>
struct MembersFor {
  using type = decltype(std::tuple_cat(std::declval<BackendContractFor<Backend, Quant>>(),
                                       std::declval<ExpertsContractFor<Experts, Config, Quant>>()));
};

/// The verdict of the first broken rule of several lists. A list is instantiated only if all rules of the earlier lists hold.
template <class... Lists>
struct FirstBrokenOf {
  using type = NoBrokenRule;
};
template <class List, class... Later>
struct FirstBrokenOf<List, Later...> {
  using Here = FirstBrokenRule<typename List::type>;
  using type = typename std::conditional_t<std::is_same_v<Here, NoBrokenRule>, FirstBrokenOf<Later...>, std::type_identity<Here>>::type;
};

}  // namespace detail

/// Whether five policies compose, decided by their contracts and the rules alone; instantiates none of the policies' classes.
template <class ConfigT, class RouterT, class QuantT, class BackendT, class ExpertsT>
struct Composition {
  using Config = ConfigT;
  using Router = RouterT;
  using Quant = QuantT;
  using Backend = BackendT;
  using Experts = ExpertsT;
  using FirstBroken = typename detail::FirstBrokenOf<
      std::type_identity<std::tuple<detail::OrderVerdict<Config, Router, Quant, Backend, Experts>>>,
      std::type_identity<detail::ConfigContract<Config>>, detail::ActivationOf<Config>, std::type_identity<detail::RouterContract<Router>>,
      std::type_identity<detail::QuantizationContract<Quant>>, detail::BackendNeeds<Backend>,
      std::type_identity<detail::BackendContract<Backend>>, std::type_identity<detail::ExpertsContract<Experts>>,
      detail::MembersFor<Config, Quant, Backend, Experts>, detail::Verdicts<Config, Router, Quant, Backend, Experts>>::type;
  static constexpr bool kLegal = std::is_same_v<FirstBroken, detail::NoBrokenRule>;
  /// The broken rule's static assertion when instantiated; an empty struct if none is broken.
  using Error = typename FirstBroken::template Error<true>;

  /// The sentence of the first broken rule, or null.
  static constexpr char const* reason() { return FirstBroken::kSentence; }
};

/// Five policies that compose. Instantiated with others, it is one error: the sentence of the first broken rule. Instantiates none of the
/// policies' classes, so it checks compositions of either space in a file for g++ (cmake/MoeConfigCheck.cmake).
template <class Config, class Router, class Quant, class Backend, class Experts>
struct CheckedComposition : private Composition<Config, Router, Quant, Backend, Experts>::Error {};

}  // namespace moe
