// SPDX-License-Identifier: Apache-2.0
// backends/high_throughput.hpp: one row per (token, rank), for prefill. docs/semantics/exchange.md §7. What the policy promises; the
// exchange over device windows is in window/device/high_throughput.cuh, that of the host in window/host/high_throughput.hpp.
#pragma once

#include "moe/backends/common/window_policy.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::rules {
MOE_INCLUDED(HighThroughputOnHost, "the exchange of high_throughput over a window of the host",
             "moe/backends/window/host/high_throughput.hpp");
MOE_INCLUDED(HighThroughputOnDevice, "the exchange of high_throughput over a window of the device",
             "moe/backends/window/device/high_throughput.cuh");
}  // namespace moe::rules

namespace moe::backends {

namespace detail {
/// The exchange over one kind of window, and its run-time options. Specialised per memory space.
template <class Window, class Config, class Quant, class Partial>
class HighThroughputExchange
    : public moe::detail::NotIncludedIn<typename Window::Space, rules::HighThroughputOnHost, rules::HighThroughputOnDevice> {};
template <class Window>
struct HighThroughputParams;
}  // namespace detail

/// Standard format over a window of peer memory, fixed capacity, rows by source rank and then by token. No host synchronisation: the device
/// exchange can be captured in a CUDA graph.
template <class WindowT>
struct HighThroughput : detail::WindowPolicy<WindowT> {
  static constexpr char const* kName = "high_throughput";
  static constexpr BackendFacts kFacts{.name = kName, .sequence_parallel = true, .asynchronous = true, .translates_ids = true};
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  using Params = detail::HighThroughputParams<WindowT>;

  template <class Config, class Quant, class Partial>
  using Exchange = detail::HighThroughputExchange<WindowT, Config, Quant, Partial>;
};

}  // namespace moe::backends
