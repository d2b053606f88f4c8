// SPDX-License-Identifier: Apache-2.0
// backends/two_sided.hpp: bounded queues between every two ranks. Spec 04 §11.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/backends/window_standard.hpp"

namespace moe::backends {

/// Standard format over a host window of fixed size: ranks exchange counts, then rows through queues, and back. The experts apply the
/// weights, outputs are added in rank order. With one rank no queue is used.
template <SymmetricMemory WindowT>
requires std::same_as<typename WindowT::Space, space::host>
struct TwoSided {
  static constexpr char const* kName = "two_sided";
  using Window = WindowT;
  using Comm = typename Window::Comm;
  using Space = typename Window::Space;
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  struct Params {
    /// Rows that a rank can receive in one round; 0: the worst case, R T_max. Less saves memory, and a round that needs more is
    /// E_CAPACITY on all ranks before any row moves. The same on all ranks.
    std::int64_t max_recv_rows = 0;
    int queue_depth = 8;                             ///< entries of each queue, a power of two; the same on all ranks
    std::int64_t queue_entry_bytes = 256 * 1024;     ///< a multiple of 64, at least one record; the same on all ranks
    typename Window::Params window{};                ///< of the exchange's own window
    comm::WindowManager<Window>* manager = nullptr;  ///< owns the window, which layers of one shape then share; null: the exchange does
  };

  template <class Quant>
  static constexpr bool carries() {
    return true;
  }
  template <class Config, class Quant, class Partial>
  using Exchange = moe::detail::HostStandardExchange<TwoSided<Window>, moe::detail::RowTransport::queues, Config, Quant, Partial>;
};

}  // namespace moe::backends
