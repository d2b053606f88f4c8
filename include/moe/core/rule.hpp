// SPDX-License-Identifier: Apache-2.0
// core/rule.hpp: how a rule is written: one sentence for the user, the verdict on one case, the first broken rule of a list.
#pragma once

#include <cstddef>
#include <tuple>

namespace moe {

/// A constant as a type, so that the compiler prints it when a rule is broken.
template <auto V>
struct Value {};
/// What a value must be, if that is one of several or a multiple: printed behind the value.
template <auto... V>
struct OneOf {};
template <int Unit>
struct MultipleOf {};

namespace detail {
/// A concept, because clang++ writes the text of any other false condition before the sentence.
template <class...>
concept NeverHolds = false;
}  // namespace detail

// A macro, because static_assert takes only a literal. It declares the rule's sentence for run time, and the error as a template that is
// instantiated only for a broken rule; its arguments are the values that do not fit.
#define MOE_RULE(Rule, sentence)                                    \
  struct Rule {                                                     \
    static constexpr char const* kName = #Rule;                     \
    static constexpr char const* kSentence = sentence;              \
    template <class... Found>                                       \
    struct Broken {                                                 \
      static_assert(::moe::detail::NeverHolds<Found...>, sentence); \
    };                                                              \
  }

// The rule that a policy has one member. `owner` is "the router", …; `member` is its declaration; `meaning` is one line.
#define MOE_MEMBER(Rule, owner, member, meaning)                                                                    \
  namespace rules {                                                                                                 \
  MOE_RULE(Rule, "moe: " owner " lacks the member '" member "' (" meaning                                           \
                 "), or it has another type. Fix: declare it as the contract says (docs/errors.md#policy-member)"); \
  }                                                                                                                 \
  static_assert(true)

// The rule that the header with a definition is included, for a class that the policy's header only declares.
#define MOE_INCLUDED(Rule, what, header) \
  MOE_RULE(Rule, "moe: " what " is not included. Fix: #include <" header "> before the layer is named (docs/errors.md#missing-include)")

namespace detail {

/// The verdict of a rule on one case. Found: the values that were compared.
template <class Rule, bool Holds, class... Found>
struct Verdict {
  static constexpr bool kHolds = Holds;
  static constexpr char const* kRule = Rule::kName;
  static constexpr char const* kSentence = Rule::kSentence;
  template <bool>  // lazily: naming the error must not instantiate it
  using Error = typename Rule::template Broken<Found...>;
};

template <class List, std::size_t I = 0>
constexpr std::size_t first_broken() {
  if constexpr (I == std::tuple_size_v<List>) {
    return I;
  } else if constexpr (!std::tuple_element_t<I, List>::kHolds) {
    return I;
  } else {
    return first_broken<List, I + 1>();
  }
}

/// Whether every rule of a list of verdicts holds.
template <class List>
inline constexpr bool kAllHold = first_broken<List>() == std::tuple_size_v<List>;

/// Base of the primary template of a class that is only declared. Rule: names the header that defines the class.
template <class Rule>
struct NotIncluded {
  using MissingInclude = Rule;
};

struct NoBrokenRule {
  static constexpr char const* kSentence = nullptr;
  template <bool>
  using Error = NoBrokenRule;
};
template <class List, bool AllHold = kAllHold<List>>
struct FirstBroken {
  using type = std::tuple_element_t<first_broken<List>(), List>;
};
template <class List>
struct FirstBroken<List, true> {
  using type = NoBrokenRule;
};

}  // namespace detail

/// The verdict of the first broken rule of a list, or one without a sentence. Its Error<true> is the rule's static assertion.
template <class List>
using FirstBrokenRule = typename detail::FirstBroken<List>::type;

/// static_assert(sizeof(Met<List>) == 1) in a class over a user's type: the error of the first broken rule.
template <class List>
using Met = typename FirstBrokenRule<List>::template Error<true>;
/// The same of one rule.
template <class Rule, bool Holds, class... Found>
using MetRule = Met<std::tuple<detail::Verdict<Rule, Holds, Found...>>>;

}  // namespace moe
