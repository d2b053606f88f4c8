// SPDX-License-Identifier: Apache-2.0
// core/contract/policy.hpp: members that several kinds of policy share.
#pragma once

#include <concepts>
#include <type_traits>

#include "moe/core/rule.hpp"
#include "moe/core/space.hpp"

namespace moe {

/// Has a name that the command line and the registry use.
template <class P>
concept Named = requires {
  { P::kName } -> std::convertible_to<char const*>;
};
MOE_MEMBER(PolicyHasName, "the policy", "static constexpr char const* kName", "its name in lists and messages");

/// Lives in one memory space.
template <class P>
concept HasSpace = std::same_as<typename P::Space, space::host> || std::same_as<typename P::Space, space::cuda>;
MOE_MEMBER(PolicyHasSpace, "the policy", "using Space", "moe::space::host or moe::space::cuda");

/// What the user gives at construction; default constructible if a layer's parameters may omit it.
template <class P>
concept HasParams = requires { typename P::Params; };
MOE_MEMBER(PolicyHasParams, "the policy", "struct Params", "what the user gives at construction");

namespace detail {
/// NotIncluded with OnHost or OnDevice as its rule, by Space.
template <class Space, class OnHost, class OnDevice>
using NotIncludedIn = NotIncluded<std::conditional_t<std::same_as<Space, space::host>, OnHost, OnDevice>>;

/// T::Space; the host where the contract, which is checked later or beside it, is not met.
template <class T>
struct SpaceOf {
  using type = space::host;
};
template <HasSpace T>
struct SpaceOf<T> {
  using type = typename T::Space;
};

/// Whether a class is defined, not only declared.
template <class T>
concept IsDefined = requires { sizeof(T); };
}  // namespace detail

}  // namespace moe
