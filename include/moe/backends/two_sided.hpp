// SPDX-License-Identifier: Apache-2.0
// backends/two_sided.hpp: bounded queues between every two ranks. docs/semantics/exchange.md §11. The policy only; the exchanges
// are in window/host/two_sided.hpp and window/device/two_sided.cuh.
#pragma once

#include "moe/backends/common/window_policy.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::rules {
MOE_INCLUDED(TwoSidedOnHost, "the exchange of two_sided over a window of the host", "moe/backends/window/host/two_sided.hpp");
MOE_INCLUDED(TwoSidedOnDevice, "the exchange of two_sided over a window of the device", "moe/backends/window/device/two_sided.cuh");
}  // namespace moe::rules

namespace moe::backends {

namespace detail {
/// The exchange over one kind of window, and its run-time options. Specialised per memory space.
template <class Window, class Config, class Quant, class Partial>
class TwoSidedExchange : public moe::detail::NotIncludedIn<typename Window::Space, rules::TwoSidedOnHost, rules::TwoSidedOnDevice> {};
template <class Window>
struct TwoSidedParams;
}  // namespace detail

/// Standard format over a window of fixed size: ranks exchange counts, then move rows through queues, and outputs back. Rows by source
/// rank, then by token. The experts apply the weights, outputs are added in rank order. The device exchange can be captured in a CUDA
/// graph.
template <class WindowT>
struct TwoSided : detail::WindowPolicy<WindowT> {
  static constexpr char const* kName = "two_sided";
  static constexpr BackendFacts kFacts{.name = kName, .translates_ids = true};
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  using Params = detail::TwoSidedParams<WindowT>;

  template <class Config, class Quant, class Partial>
  using Exchange = detail::TwoSidedExchange<WindowT, Config, Quant, Partial>;
};

}  // namespace moe::backends
