// SPDX-License-Identifier: Apache-2.0
// backends/one_sided.hpp: ranks push rows into every rank's workspace and pull the outputs from there. docs/semantics/exchange.md §10. The
// policy only; the exchanges are in window/host/one_sided.hpp and window/device/one_sided.cuh.
#pragma once

#include "moe/backends/common/window_policy.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::rules {
MOE_INCLUDED(OneSidedOnHost, "the exchange of one_sided over a window of the host", "moe/backends/window/host/one_sided.hpp");
MOE_INCLUDED(OneSidedOnDevice, "the exchange of one_sided over a window of the device", "moe/backends/window/device/one_sided.cuh");
}  // namespace moe::rules

namespace moe::backends {

namespace detail {
/// The exchange over one kind of window, and its run-time options. Specialised per memory space.
template <class Window, class Config, class Quant, class Partial>
class OneSidedExchange : public moe::detail::NotIncludedIn<typename Window::Space, rules::OneSidedOnHost, rules::OneSidedOnDevice> {};
template <class Window>
struct OneSidedParams;
}  // namespace detail

/// Standard format over a window of peer memory. Every source has its own part of every rank's workspace; unused rows have no expert.
/// Outputs are added in the order in which a token's choices first name their ranks. Rows move without waiting for any count, and without
/// host synchronisation: the device exchange can be captured in a CUDA graph.
template <class WindowT>
struct OneSided : detail::WindowPolicy<WindowT> {
  static constexpr char const* kName = "one_sided";
  static constexpr BackendFacts kFacts{.name = kName, .sequence_parallel = true, .translates_ids = true};
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  using Params = detail::OneSidedParams<WindowT>;

  template <class Config, class Quant, class Partial>
  using Exchange = detail::OneSidedExchange<WindowT, Config, Quant, Partial>;
};

}  // namespace moe::backends
