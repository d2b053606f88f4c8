// SPDX-License-Identifier: Apache-2.0
// backends/all_to_all_v.hpp: each token is sent once to each rank that has an expert for it; that rank returns its weighted sum. The
// policy; its exchanges are in collective/host/all_to_all_v.hpp, included here, and collective/device/all_to_all_v.cuh.
#pragma once

#include <cstdint>

#include "moe/backends/collective/host/all_to_all_v.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::backends {

/// Standard format over any communicator and transport. Ranks exchange row counts first, so that each sends only the rows that the other
/// needs. On the device the host need not read the counts (Params::sizes).
template <class CommT>
struct AllToAllV {
  static constexpr char const* kName = "all_to_all_v";
  static constexpr BackendFacts kFacts{.name = kName, .sequence_parallel = true, .asynchronous = true, .translates_ids = true};
  using Comm = CommT;
  using Needs = NeedsCommunicator<Comm>;
  using Space = typename moe::detail::SpaceOf<Comm>::type;
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  struct Params {
    /// The most rows that a rank can receive in one round; 0: the worst case, R T_max. A smaller value saves memory; a round that needs
    /// more is E_CAPACITY on all ranks before any row moves. The same on all ranks.
    std::int64_t max_recv_rows = 0;
    /// Device only; the same on all ranks. Fixed sizes need the worst case of max_recv_rows.
    Sizes sizes = Sizes::automatic;
  };

  template <class Quant>
  static constexpr bool carries() {
    return true;
  }
  template <class Config, class Quant, class Partial>
  using Exchange = detail::AllToAllVExchange<Comm, Config, Quant, Partial>;
};

}  // namespace moe::backends
