// SPDX-License-Identifier: Apache-2.0
// backends/low_latency.hpp: rows quantised and stored straight into the owning peer's expert batch, for decode. docs/semantics/exchange.md
// §8. The policy only; the exchange over device windows is in window/device/low_latency.cuh, that of the host in
// window/host/low_latency.hpp.
#pragma once

#include "moe/backends/common/window_policy.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::rules {
MOE_INCLUDED(LowLatencyOnHost, "the exchange of low_latency over a window of the host", "moe/backends/window/host/low_latency.hpp");
MOE_INCLUDED(LowLatencyOnDevice, "the exchange of low_latency over a window of the device", "moe/backends/window/device/low_latency.cuh");
}  // namespace moe::rules

namespace moe::backends {

namespace detail {
/// The exchange over one kind of window, and its run-time options. Specialised per memory space.
template <class Window, class Config, class Quant, class Partial, ActivationFormat Format>
class LowLatencyExchange : public moe::detail::NotIncludedIn<typename Window::Space, rules::LowLatencyOnHost, rules::LowLatencyOnDevice> {};
template <class Window>
struct LowLatencyParams;
template <class Window>
struct LowLatencyRankMajorParams {
  struct type {};
};
}  // namespace detail

/// Batched format over a window of peer memory: a row for each (token, expert), packed by source rank, then by token. No host
/// synchronisation: the device exchange can be captured in a CUDA graph.
template <class WindowT>
struct LowLatency : detail::WindowPolicy<WindowT> {
  static constexpr char const* kName = "low_latency";
  static constexpr BackendFacts kFacts{
      .name = kName, .sequence_parallel = true, .batched = true, .asynchronous = true, .translates_ids = true};
  static constexpr ActivationFormat kFormat = ActivationFormat::batched;
  static constexpr TopKReduction kReduction = TopKReduction::backend;
  using Params = detail::LowLatencyParams<WindowT>;

  template <class Config, class Quant, class Partial>
  using Exchange = detail::LowLatencyExchange<WindowT, Config, Quant, Partial, kFormat>;
};

/// The same exchange in the rank-major layout of docs/semantics/exchange.md §12: a row for each (token, rank) at [source rank][token], with
/// ids and weights, for experts that apply weights and sum. Missing rows have no expert. The host packs each source's rows; each source's
/// part begins at a multiple of the most rows that any rank brings.
template <class WindowT>
struct LowLatencyRankMajor : detail::WindowPolicy<WindowT> {
  static constexpr char const* kName = "low_latency_rank_major";
  static constexpr BackendFacts kFacts{.name = kName, .sequence_parallel = true, .asynchronous = true, .translates_ids = true};
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  using Params = typename detail::LowLatencyRankMajorParams<WindowT>::type;

  template <class Config, class Quant, class Partial>
  using Exchange = detail::LowLatencyExchange<WindowT, Config, Quant, Partial, kFormat>;
};

}  // namespace moe::backends
