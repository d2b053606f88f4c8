// SPDX-License-Identifier: Apache-2.0
// layer/arguments.hpp: the rules for a layer's arguments: the arrays of forward(), the parameters of its construction.
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <utility>

#include "moe/core/array.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/core/overlap.hpp"
#include "moe/core/rule.hpp"
#include "moe/core/types.hpp"
#include "moe/layer/options.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/routing/caller_routing.hpp"

namespace moe {

namespace rules {
MOE_RULE(HiddenElementFits,
         "moe: forward(): hidden_states has another element type than the layer's Act. "
         "Fix: convert the rows, or set Act of the layer configuration (docs/errors.md#forward-arguments)");
MOE_RULE(HiddenRankFits,
         "moe: forward(): hidden_states must have two dimensions, [M, hidden]. "
         "Fix: pass moe::make_rows<hidden>(pointer, M, hidden) (docs/errors.md#forward-arguments)");
MOE_RULE(HiddenIsRows,
         "moe: forward(): hidden_states is not a view of rows of the layer's hidden width. "
         "Fix: pass moe::make_rows<hidden>(pointer, M, hidden) (docs/errors.md#forward-arguments)");
MOE_RULE(LogitsElementFits,
         "moe: forward(): router_logits must be float, bf16 or f16. "
         "Fix: convert the logits (docs/errors.md#forward-arguments)");
MOE_RULE(LogitsRankFits,
         "moe: forward(): router_logits must have two dimensions, [M, num_logits]. "
         "Fix: pass moe::make_rows(pointer, M, num_logits) (docs/errors.md#forward-arguments)");
MOE_RULE(LogitsAreRows,
         "moe: forward(): router_logits is not a view of rows. "
         "Fix: pass moe::make_rows(pointer, M, num_logits) (docs/errors.md#forward-arguments)");
MOE_RULE(OutputIsWritable,
         "moe: forward(): output is a view of const elements, and forward() writes it. "
         "Fix: make the view from a pointer to non-const elements (docs/errors.md#forward-arguments)");
MOE_RULE(OutputElementFits,
         "moe: forward(): output has another element type than the layer's Act. "
         "Fix: give it rows of Act, or set Act of the layer configuration (docs/errors.md#forward-arguments)");
MOE_RULE(OutputRankFits,
         "moe: forward(): output must have two dimensions, [M, hidden]. "
         "Fix: pass moe::make_rows<hidden>(pointer, M, hidden) (docs/errors.md#forward-arguments)");
MOE_RULE(OutputIsRows,
         "moe: forward(): output is not a view of rows of the layer's hidden width. "
         "Fix: pass moe::make_rows<hidden>(pointer, M, hidden) (docs/errors.md#forward-arguments)");
MOE_RULE(RouterSelects,
         "moe: forward(): the layer's router chooses no experts. "
         "Fix: call forward_routed() with topk_ids and topk_weights, or compose the layer with a router (docs/errors.md#external-router)");
MOE_RULE(IdsElementFits,
         "moe: forward_routed(): topk_ids must be int32 or int64. "
         "Fix: convert the ids to one of them (docs/errors.md#forward-arguments)");
MOE_RULE(IdsAreRows,
         "moe: forward_routed(): topk_ids is not a view of rows. "
         "Fix: pass moe::make_rows(pointer, M, topk) (docs/errors.md#forward-arguments)");
MOE_RULE(WeightsElementFits,
         "moe: forward_routed(): topk_weights must be float. "
         "Fix: convert the weights (docs/errors.md#forward-arguments)");
MOE_RULE(WeightsAreRows,
         "moe: forward_routed(): topk_weights is not a view of rows. "
         "Fix: pass moe::make_rows(pointer, M, topk) (docs/errors.md#forward-arguments)");
MOE_RULE(PlacementIsGiven,
         "moe: .placement is missing in the layer's parameters. "
         "Fix: .placement = moe::ExpertPlacement(num_experts, ranks) (docs/errors.md#placement)");
MOE_RULE(
    ConstructedFromComm,
    "moe: the constructor of a layer or runner takes (comm, weights, params), and the first argument is not a communicator of its backend. "
    "Fix: pass a variable of Backend::Comm, then weights.view() (docs/errors.md#constructor-arguments)");
MOE_RULE(
    ConstructedFromWeights,
    "moe: the constructor of a layer or runner takes (comm, weights, params), and the second argument is not a weight view of its types. "
    "Fix: pass view() of a WeightStore<Config, Quantization, Space> (docs/errors.md#constructor-arguments)");
}  // namespace rules

namespace detail {

/// Element (void if it is not a view) and rank (0) of an argument.
template <class View>
struct ViewOf {
  using Element = void;
  static constexpr std::size_t kRank = 0;
};
template <class View>
  requires requires {
    typename View::element_type;
    View::rank();
  }
struct ViewOf<View> {
  using Element = typename View::element_type;
  static constexpr std::size_t kRank = View::rank();
};

template <class View, class Wanted>
inline constexpr bool kElementFits =
    std::is_void_v<typename ViewOf<View>::Element> || std::same_as<std::remove_cv_t<typename ViewOf<View>::Element>, Wanted>;
template <class View>
inline constexpr bool kRankFits = ViewOf<View>::kRank == 0 || ViewOf<View>::kRank == 2;
template <class Element>
inline constexpr bool kIsLogit = std::same_as<Element, float> || std::same_as<Element, bf16> || std::same_as<Element, f16>;

template <class View>
using RankOf = Value<static_cast<int>(ViewOf<View>::kRank)>;

/// The verdicts on the rows in and out of a call. A: the layer's Act.
template <class Hidden, class A, class HiddenArg>
using HiddenArgument = std::tuple<Verdict<rules::HiddenElementFits, kElementFits<HiddenArg, A>, typename ViewOf<HiddenArg>::Element, A>,
                                  Verdict<rules::HiddenRankFits, kRankFits<HiddenArg>, RankOf<HiddenArg>, Value<2>>,
                                  Verdict<rules::HiddenIsRows, std::is_convertible_v<HiddenArg const&, Hidden>, HiddenArg, Hidden>>;
template <class Output, class A, class OutputArg>
using OutputArgument = std::tuple<
    Verdict<rules::OutputElementFits, kElementFits<OutputArg, A>, typename ViewOf<OutputArg>::Element, A>,
    Verdict<rules::OutputIsWritable, !std::is_const_v<typename ViewOf<OutputArg>::Element>, typename ViewOf<OutputArg>::Element, A>,
    Verdict<rules::OutputRankFits, kRankFits<OutputArg>, RankOf<OutputArg>, Value<2>>,
    Verdict<rules::OutputIsRows, std::is_convertible_v<OutputArg const&, Output>, OutputArg, Output>>;

template <class Router, class LogitsArg>
struct LogitsArgument {
  using Logit = std::remove_cv_t<typename ViewOf<LogitsArg>::Element>;
  using type =
      std::tuple<Verdict<rules::RouterSelects, facts::selects<Router>(), Router>,
                 Verdict<rules::LogitsElementFits, std::is_void_v<Logit> || kIsLogit<Logit>, Logit, float>,
                 Verdict<rules::LogitsRankFits, kRankFits<LogitsArg>, RankOf<LogitsArg>, Value<2>>,
                 Verdict<rules::LogitsAreRows,
                         std::is_convertible_v<LogitsArg const&, Rows<std::conditional_t<std::is_void_v<Logit>, float, Logit> const>>,
                         LogitsArg, Rows<float const>>>;
};
template <class IdsArg, class WeightsArg>
using RoutingArguments =
    std::tuple<Verdict<rules::IdsElementFits, kElementFits<IdsArg, std::int32_t> || kElementFits<IdsArg, std::int64_t>,
                       typename ViewOf<IdsArg>::Element, std::int32_t>,
               Verdict<rules::IdsAreRows, std::is_convertible_v<IdsArg const&, routing::GivenIds>, IdsArg, Rows<std::int32_t const>>,
               Verdict<rules::WeightsElementFits, kElementFits<WeightsArg, float>, typename ViewOf<WeightsArg>::Element, float>,
               Verdict<rules::WeightsAreRows, std::is_convertible_v<WeightsArg const&, Rows<float const>>, WeightsArg, Rows<float const>>>;

/// The first broken rule of several lists of verdicts.
template <class... Lists>
using FirstBrokenArgument = FirstBrokenRule<decltype(std::tuple_cat(std::declval<Lists>()...))>;

/// Bytes of rows that check_rows() has accepted.
template <class View>
ByteRows bytes_of_rows(View const& v) {
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(typename View::element_type));
  return {reinterpret_cast<std::uintptr_t>(v.data_handle()), v.extent(0), v.stride(0) * kBytes, v.extent(1) * kBytes};
}
/// E_ARG if output [M, H] shares memory with hidden_states [M, H] and is not the same rows: rows are read before they are written only
/// where they are the same ones.
template <class Hidden, class Output>
void check_apart_or_same(Hidden const& hidden, Output const& output) {
  ByteRows const read = bytes_of_rows(hidden), written = bytes_of_rows(output);
  if (read.begin == written.begin && (read.rows <= 1 || read.stride == written.stride)) return;
  if (!overlap(read, written)) return;
  throw Error(ErrorCode::argument, text("output: it begins ", static_cast<std::int64_t>(written.begin - read.begin),
                                        " bytes from hidden_states, with rows ", written.stride, " bytes apart where those are ",
                                        read.stride, ", and overlaps them. Fix: other memory, or exactly the rows of hidden_states"));
}
/// E_ARG if the output has a byte of the array of that name, which the call reads.
inline void check_apart(char const* what, ByteRows const& read, ByteRows const& output) {
  if (overlap(read, output)) throw Error(ErrorCode::argument, overlap_text(what));
}
/// The same for the routing of a call, [M, ...], and for the arrays of its options.
template <class L>
void check_routing_apart(Rows<L const> const& logits, ByteRows const& output) {
  check_apart("router_logits", bytes_of_rows(logits), output);
}
inline void check_routing_apart(routing::GivenRouting const& given, ByteRows const& output) {
  std::int64_t const bytes = given.ids.element_bytes();
  check_apart("topk_ids",
              {reinterpret_cast<std::uintptr_t>(given.ids.data_handle()), given.ids.extent(0), given.ids.stride(0) * bytes,
               given.ids.extent(1) * bytes},
              output);
  check_apart("topk_weights", bytes_of_rows(given.weights), output);
}
inline void check_options_apart(ForwardOptions const& options, std::int64_t rows, ByteRows const& output) {
  auto const check = [&](char const* what, auto const* data, std::int64_t count) {
    constexpr auto kBytes = static_cast<std::int64_t>(sizeof *data);
    if (data != nullptr) check_apart(what, {reinterpret_cast<std::uintptr_t>(data), 1, 0, count * kBytes}, output);
  };
  check("token_ids", options.token_ids, rows);
  check("num_rows", options.num_rows, 1);
}

/// Whether a layer can be constructed from arguments of these deduced types.
template <class Comm, class Weights, class CommArg, class WeightsArg>
inline constexpr bool kConstructs = std::is_convertible_v<CommArg, Comm&> && std::is_convertible_v<WeightsArg, Weights const&>;
template <class Comm, class Weights, class CommArg, class WeightsArg>
using ConstructorArguments =
    std::tuple<Verdict<rules::ConstructedFromComm, std::is_convertible_v<CommArg, Comm&>, CommArg, Comm>,
               Verdict<rules::ConstructedFromWeights, std::is_convertible_v<WeightsArg, Weights const&>, WeightsArg, Weights>>;
using NoArguments = std::tuple<>;

/// Stands for an argument of a constructor that no program can call: the error is the first broken rule of the list.
template <class List, class T>
T& refused_argument() {
  [[maybe_unused]] typename FirstBrokenRule<List>::template Error<true> const error;
  __builtin_unreachable();
}

/// The error is the rule's sentence.
template <class Layer>
ExpertPlacement missing_placement() {
  [[maybe_unused]] typename rules::PlacementIsGiven::template Broken<Layer> const error;
  return {1, 1};
}

/// The placement of a layer's parameters, which has no default. The field has no initialiser of its own, so that compilers name the line of
/// the program that leaves it out.
template <class Layer>
struct RequiredPlacement : ExpertPlacement {
  using ExpertPlacement::ExpertPlacement;
  RequiredPlacement(ExpertPlacement placement) : ExpertPlacement(std::move(placement)) {}
  RequiredPlacement() : ExpertPlacement(missing_placement<Layer>()) {}
};

}  // namespace detail
}  // namespace moe
