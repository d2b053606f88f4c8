// SPDX-License-Identifier: Apache-2.0
// backends/pplx.hpp: capacity-bounded exchange by expert; ranks that hold the same tokens share the sending. docs/semantics/exchange.md §9.
// The policy only; the exchanges are in window/host/pplx.hpp and window/device/pplx.cuh.
//
// Dispatch: lane rank % dp_size of a data-parallel group sends every dp_size-th token; rows go to this source's part at the expert's rank,
// then counts tagged with the round. Receive: prefix sums over sources give the batches [L, T_max D, H]. Combine: each row goes to its
// choice's row on every rank of the source's group; a token is summed as soon as all its rows have arrived.
#pragma once

#include "moe/backends/common/window_policy.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::rules {
MOE_INCLUDED(PplxOnHost, "the exchange of pplx over a window of the host", "moe/backends/window/host/pplx.hpp");
MOE_INCLUDED(PplxOnDevice, "the exchange of pplx over a window of the device", "moe/backends/window/device/pplx.cuh");
}  // namespace moe::rules

namespace moe::backends {

namespace detail {
/// The exchange over one kind of window, and its run-time options. Specialised per memory space.
template <class Window, class Config, class Quant, class Partial>
class PplxExchange : public moe::detail::NotIncludedIn<typename Window::Space, rules::PplxOnHost, rules::PplxOnDevice> {};
template <class Window>
struct PplxParams;
}  // namespace detail

/// Batched format over a window of peer memory; finalize applies the top-k weights. E_UNSUPPORTED unless the number of ranks divides the
/// number of experts. Sending and receiving are separate calls. The device exchange can be captured in a CUDA graph.
template <class WindowT>
struct Pplx : detail::WindowPolicy<WindowT> {
  static constexpr char const* kName = "pplx";
  static constexpr BackendFacts kFacts{.name = kName, .batched = true, .asynchronous = true, .translates_ids = true, .sender_split = true};
  static constexpr ActivationFormat kFormat = ActivationFormat::batched;
  static constexpr TopKReduction kReduction = TopKReduction::backend;
  using Params = detail::PplxParams<WindowT>;

  template <class Config, class Quant, class Partial>
  using Exchange = detail::PplxExchange<WindowT, Config, Quant, Partial>;
};

}  // namespace moe::backends
