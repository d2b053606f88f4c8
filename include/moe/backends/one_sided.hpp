// SPDX-License-Identifier: Apache-2.0
// backends/one_sided.hpp: a workspace of every rank into which all push, and from which all pull. Spec 04 §10.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/backends/window_standard.hpp"

namespace moe::backends {

/// Standard format over a host window. Rank r's rows begin at r times the most rows that any rank brings in the round; rows that are not
/// used have no expert. Outputs are added in the order in which a token's choices first name their ranks. Any placement.
template <SymmetricMemory WindowT>
requires std::same_as<typename WindowT::Space, space::host>
struct OneSided {
  static constexpr char const* kName = "one_sided";
  using Window = WindowT;
  using Comm = typename Window::Comm;
  using Space = typename Window::Space;
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  struct Params {
    std::int64_t max_recv_rows = 0;                  ///< 0: the workspace is of the worst case, R T_max rows
    typename Window::Params window{};                ///< of the exchange's own window
    comm::WindowManager<Window>* manager = nullptr;  ///< owns the window, which layers of one shape then share; null: the exchange does
  };

  template <class Quant>
  static constexpr bool carries() {
    return true;
  }
  template <class Config, class Quant, class Partial>
  using Exchange = moe::detail::HostStandardExchange<OneSided<Window>, moe::detail::RowTransport::workspace, Config, Quant, Partial>;
};

}  // namespace moe::backends
