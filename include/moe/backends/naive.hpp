// SPDX-License-Identifier: Apache-2.0
// backends/naive.hpp: every rank broadcasts its tokens, and the outputs of all tokens are summed everywhere. The reference backend.
#pragma once

#include <cstddef>

#include "moe/backends/collective/host/gather_exchange.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::backends {

/// Standard format over any communicator. Memory: R T_max rows in, R T_max rows out, on every rank. On the device NCCL chooses the order of
/// the sum over ranks.
template <class CommT>
struct Naive {
  static constexpr char const* kName = "naive";
  static constexpr BackendFacts kFacts{.name = kName, .translates_ids = true, .transport = Transport::gather};
  using Comm = CommT;
  using Needs = NeedsCommunicator<Comm>;
  using Space = typename moe::detail::SpaceOf<Comm>::type;
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  static constexpr bool kBatchInvariant = Space::kKind == SpaceKind::host;
  using Params = detail::GatherParams;

  template <class Quant>
  static constexpr bool carries() {
    return true;
  }
  template <class Config, class Quant, class Partial>
  using Exchange = moe::detail::GatherExchange<Naive, Config, Quant, Partial>;

  // ---- hooks that GatherExchange calls
  static constexpr bool kReducesEverywhere = true;
  static void gather(Comm& comm, std::byte* records, moe::detail::RankSlices const& s, Stream<Space> stream) {
    for (int r = 0; r < comm.size(); ++r) {
      if (s.counts[r] > 0) {
        comm.broadcast(records + s.offsets[r], s.counts[r], r, stream);
      }
    }
  }
  static float const* combine(Comm& comm, float* partial, moe::detail::RankSlices const& s, float*) {
    if (s.total > 0) {
      comm.all_reduce(partial, s.total, partial, {});
    }
    return partial + s.offsets[comm.rank()];
  }
};

}  // namespace moe::backends
