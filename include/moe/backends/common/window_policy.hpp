// SPDX-License-Identifier: Apache-2.0
// backends/common/window_policy.hpp: the facts that all policies over windows share: their types, and which rows their exchanges support.
#pragma once

#include <type_traits>

#include "moe/backends/common/carries.hpp"
#include "moe/core/contract/concepts.hpp"

namespace moe::backends::detail {

/// A base of policies.
template <class WindowT>
struct WindowPolicy {
  using Window = WindowT;
  using Needs = NeedsWindow<Window>;  ///< of the window, beside what every window has
  using Space = typename moe::detail::SpaceOf<Window>::type;
  using Comm = typename moe::detail::CommOf<Window>::type;

  template <class Quant>
  static constexpr bool carries() {
    return Space::kKind == SpaceKind::host || device_exchange_carries<Quant>();
  }
  /// The element types that the exchange accepts: any on the host, bf16 on the device, which also quantises from bf16.
  template <class Act>
  static constexpr bool carries_element() {
    return Space::kKind == SpaceKind::host || std::is_same_v<Act, bf16>;
  }
  template <class Output>
  static constexpr bool returns_element() {
    return window_exchange_returns_element<Space, Output>;
  }
};

}  // namespace moe::backends::detail
