// SPDX-License-Identifier: Apache-2.0
// backends/window/host/two_sided.hpp: TwoSided over a window of host memory. docs/semantics/exchange.md §11.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/backends/two_sided.hpp"
#include "moe/backends/window/host/standard.hpp"

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::host>
struct TwoSidedParams<Window> {
  /// The most rows that a rank can receive in one round; 0: the worst case, R T_max. A smaller value saves memory; a round that needs more
  /// is E_CAPACITY on all ranks before any row moves. The same on all ranks.
  std::int64_t max_recv_rows = 0;
  int queue_depth = 8;                             ///< entries of each queue, a power of two; the same on all ranks
  std::int64_t queue_entry_bytes = 256 * 1024;     ///< a multiple of 64, at least one record; the same on all ranks
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

/// A single rank uses no queue. Any scheme, any placement.
template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::host>
class TwoSidedExchange<Window, Config, Quant, Partial>
    : public moe::detail::HostStandardExchange<TwoSided<Window>, moe::detail::RowTransport::queues, Config, Quant, Partial> {
 public:
  using moe::detail::HostStandardExchange<TwoSided<Window>, moe::detail::RowTransport::queues, Config, Quant,
                                          Partial>::HostStandardExchange;
};

}  // namespace moe::backends::detail
