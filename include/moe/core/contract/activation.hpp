// SPDX-License-Identifier: Apache-2.0
// core/contract/activation.hpp: what an Activation must have: the function between the two matrix products. Optional members are in
// core/contract/facts.hpp.
#pragma once

#include <concepts>
#include <tuple>

#include "moe/core/contract/policy.hpp"
#include "moe/core/rule.hpp"

namespace moe {

/// A gated activation takes gate and up (2 I columns), any other one value (I columns).
template <class A>
concept ActivationHasGated = requires(A const& a) {
  { a.gated() } -> std::convertible_to<bool>;
};
MOE_MEMBER(ActivationHasGated, "the activation", "bool gated() const", "whether it takes gate and up, or one value");

/// An ungated activation ignores `up`.
template <class A>
concept ActivationApplies = requires(A const& a, float x) {
  { a(x, x) } -> std::convertible_to<float>;
};
MOE_MEMBER(ActivationApplies, "the activation", "float operator()(float gate, float up) const", "the function of one element");

namespace detail {
template <class A>
using ActivationContract =
    std::tuple<Verdict<rules::PolicyHasName, Named<A>, A>, Verdict<rules::ActivationHasGated, ActivationHasGated<A>, A>,
               Verdict<rules::ActivationApplies, ActivationApplies<A>, A>>;
}  // namespace detail

template <class A>
concept Activation = detail::kAllHold<detail::ActivationContract<A>>;

}  // namespace moe
