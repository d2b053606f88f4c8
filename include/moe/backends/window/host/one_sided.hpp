// SPDX-License-Identifier: Apache-2.0
// backends/window/host/one_sided.hpp: OneSided over a window of host memory. docs/semantics/exchange.md §10.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/backends/one_sided.hpp"
#include "moe/backends/window/host/standard.hpp"

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::host>
struct OneSidedParams<Window> {
  std::int64_t max_recv_rows = 0;                  ///< 0: the workspace has the worst case, R T_max rows
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

/// Rank r's rows begin at r times the most rows that any rank brings in the round. Any scheme, any placement.
template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::host>
class OneSidedExchange<Window, Config, Quant, Partial>
    : public moe::detail::HostStandardExchange<OneSided<Window>, moe::detail::RowTransport::workspace, Config, Quant, Partial> {
 public:
  using moe::detail::HostStandardExchange<OneSided<Window>, moe::detail::RowTransport::workspace, Config, Quant,
                                          Partial>::HostStandardExchange;
};

}  // namespace moe::backends::detail
