// SPDX-License-Identifier: Apache-2.0
// backends/window/host/high_throughput.hpp: HighThroughput over a window of host memory: senders store rows at their final position and
// read outputs back. docs/semantics/exchange.md §7.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/backends/high_throughput.hpp"
#include "moe/backends/window/host/standard.hpp"

namespace moe::backends::detail {

template <class Window>
  requires std::same_as<typename Window::Space, space::host>
struct HighThroughputParams<Window> {
  /// The most rows that a rank can receive in one round; 0: the worst case, R T_max. A smaller value saves memory; a round that needs more
  /// is E_CAPACITY on all ranks before any row moves. The same on all ranks.
  std::int64_t max_recv_rows = 0;
  typename Window::Params window{};                ///< of the exchange's own window
  comm::WindowManager<Window>* manager = nullptr;  ///< owns the window and shares it among layers of one shape; null: own window
};

/// Every rank tells every rank how many rows it sends to each rank, so each row's position is known: by source rank, then by token. The
/// source reads the outputs back and adds them in rank order. Any scheme, any placement.
template <class Window, class Config, class Quant, class Partial>
  requires std::same_as<typename Window::Space, space::host>
class HighThroughputExchange<Window, Config, Quant, Partial>
    : public moe::detail::HostStandardExchange<HighThroughput<Window>, moe::detail::RowTransport::packed, Config, Quant, Partial> {
 public:
  using moe::detail::HostStandardExchange<HighThroughput<Window>, moe::detail::RowTransport::packed, Config, Quant,
                                          Partial>::HostStandardExchange;
};

}  // namespace moe::backends::detail
