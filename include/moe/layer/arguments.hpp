// SPDX-License-Identifier: Apache-2.0
// layer/arguments.hpp: the rules for a layer's arguments: the arrays of forward(), the parameters of its construction.
#pragma once

#include <concepts>
#include <cstddef>
#include <tuple>
#include <type_traits>

#include "moe/core/array.hpp"
#include "moe/core/contract/rule.hpp"
#include "moe/core/types.hpp"
#include "moe/parallel/placement.hpp"

namespace moe {

namespace rules {
MOE_RULE(HiddenElementFits,
         "moe: forward(): hidden_states has another element type than the layer's Act. "
         "Fix: convert the rows, or set Act of the layer configuration (docs/errors.md#forward-arguments)");
MOE_RULE(HiddenRankFits,
         "moe: forward(): hidden_states must have two dimensions, [M, hidden]. "
         "Fix: pass moe::make_rows<hidden>(pointer, M, hidden) (docs/errors.md#forward-arguments)");
MOE_RULE(HiddenIsRows,
         "moe: forward(): hidden_states is no view of rows of the layer's hidden width. "
         "Fix: pass moe::make_rows<hidden>(pointer, M, hidden) (docs/errors.md#forward-arguments)");
MOE_RULE(LogitsElementFits,
         "moe: forward(): router_logits must be float, bf16 or f16. "
         "Fix: convert the logits (docs/errors.md#forward-arguments)");
MOE_RULE(LogitsRankFits,
         "moe: forward(): router_logits must have two dimensions, [M, num_logits]. "
         "Fix: pass moe::make_rows(pointer, M, num_logits) (docs/errors.md#forward-arguments)");
MOE_RULE(LogitsAreRows,
         "moe: forward(): router_logits is no view of rows. "
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
         "moe: forward(): output is no view of rows of the layer's hidden width. "
         "Fix: pass moe::make_rows<hidden>(pointer, M, hidden) (docs/errors.md#forward-arguments)");
MOE_RULE(PlacementIsGiven,
         "moe: .placement is missing in the layer's parameters. "
         "Fix: .placement = moe::ExpertPlacement(num_experts, ranks) (docs/errors.md#placement)");
}  // namespace rules

namespace detail {

/// Element (void if it is no view) and rank (0) of an argument.
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

/// The verdicts on the arrays of one call. A: the layer's Act.
template <class Hidden, class Output, class A, class HiddenArg, class LogitsArg, class OutputArg>
struct ForwardArguments {
  using HiddenElement = typename ViewOf<HiddenArg>::Element;
  using OutputElement = typename ViewOf<OutputArg>::Element;
  using Logit = std::remove_cv_t<typename ViewOf<LogitsArg>::Element>;
  template <class View>
  using Rank = Value<static_cast<int>(ViewOf<View>::kRank)>;

  using type =
      std::tuple<Verdict<rules::HiddenElementFits, kElementFits<HiddenArg, A>, HiddenElement, A>,
                 Verdict<rules::HiddenRankFits, kRankFits<HiddenArg>, Rank<HiddenArg>, Value<2>>,
                 Verdict<rules::HiddenIsRows, std::is_convertible_v<HiddenArg const&, Hidden>, HiddenArg, Hidden>,
                 Verdict<rules::LogitsElementFits, std::is_void_v<Logit> || kIsLogit<Logit>, Logit, float>,
                 Verdict<rules::LogitsRankFits, kRankFits<LogitsArg>, Rank<LogitsArg>, Value<2>>,
                 Verdict<rules::LogitsAreRows,
                         std::is_convertible_v<LogitsArg const&, Rows<std::conditional_t<std::is_void_v<Logit>, float, Logit> const>>,
                         LogitsArg, Rows<float const>>,
                 Verdict<rules::OutputElementFits, kElementFits<OutputArg, A>, OutputElement, A>,
                 Verdict<rules::OutputIsWritable, !std::is_const_v<OutputElement>, OutputElement, A>,
                 Verdict<rules::OutputRankFits, kRankFits<OutputArg>, Rank<OutputArg>, Value<2>>,
                 Verdict<rules::OutputIsRows, std::is_convertible_v<OutputArg const&, Output>, OutputArg, Output>>;
};

/// The default of a parameter that has none: the error is the rule's sentence.
template <class Layer>
ExpertPlacement missing_placement() {
  [[maybe_unused]] typename rules::PlacementIsGiven::template Broken<Layer> const error;
  return {1, 1};
}

}  // namespace detail
}  // namespace moe
