// SPDX-License-Identifier: Apache-2.0
// backends/no_expert_parallel.hpp: one rank holds all experts; nothing moves. The policy; its exchanges are in
// collective/host/no_expert_parallel.hpp, included here, and collective/device/no_expert_parallel.cuh.
#pragma once

#include <optional>

#include "moe/backends/collective/host/no_expert_parallel.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::backends {

/// Standard format, no communication, any quantisation, any top-k.
template <class SpaceT = space::host>
struct NoExpertParallel {
  static constexpr char const* kName = "no_expert_parallel";
  static constexpr BackendFacts kFacts{.name = kName, .translates_ids = true, .transport = Transport::local};
  using Space = SpaceT;
  using Comm = comm::Self<Space>;
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  static constexpr bool kRowsStay = true;  ///< experts that quantise rows themselves may read the caller's rows
  struct Params {
    /// The rank of the placement whose experts this rank has, where the placement has more than one: the output is then this rank's part,
    /// and the caller sums over the ranks.
    std::optional<int> expert_rank{};
  };

  template <class Quant>
  static constexpr bool carries() {
    return true;
  }
  template <class Config, class Quant, class Partial>
  using Exchange = detail::LocalExchange<Space, Config, Quant, Partial>;
};

}  // namespace moe::backends
