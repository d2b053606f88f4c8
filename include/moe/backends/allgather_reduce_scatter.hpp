// SPDX-License-Identifier: Apache-2.0
// backends/allgather_reduce_scatter.hpp: all-gather the quantised rows with their routing, reduce-scatter the outputs.
#pragma once

#include <cstddef>

#include "moe/backends/collective/host/gather_exchange.hpp"
#include "moe/core/contract/concepts.hpp"
#include "moe/parallel/backend_facts.hpp"

namespace moe::backends {

/// Standard format over any communicator; ranks may bring different numbers of rows. Memory: R T_max rows in, R T_max rows out. On the
/// device the reduce-scatter exchanges rows in the experts' output type and sums them in float32 in rank order: as many bytes as NCCL's,
/// half of them if the experts write bf16, and reproducible to the bit.
template <class CommT>
struct AllGatherReduceScatter {
  static constexpr char const* kName = "allgather_reduce_scatter";
  static constexpr BackendFacts kFacts = kDefaultBackend;
  using Comm = CommT;
  using Needs = NeedsCommunicator<Comm>;
  using Space = typename moe::detail::SpaceOf<Comm>::type;
  static constexpr ActivationFormat kFormat = ActivationFormat::standard;
  static constexpr TopKReduction kReduction = TopKReduction::experts;
  using Params = detail::GatherParams;

  template <class Quant>
  static constexpr bool carries() {
    return true;
  }
  template <class Config, class Quant, class Partial>
  using Exchange = moe::detail::GatherExchange<AllGatherReduceScatter, Config, Quant, Partial>;

  // ---- hooks that GatherExchange calls
  static constexpr bool kReducesEverywhere = false;
  static void gather(Comm& comm, std::byte* records, moe::detail::RankSlices const& s, Stream<Space> stream) {
    comm.all_gather_v(records + s.offsets[comm.rank()], s.counts[comm.rank()], records, s.counts, s.offsets, stream);
  }
  static float const* combine(Comm& comm, float* partial, moe::detail::RankSlices const& s, float* own) {
    comm.reduce_scatter_v(partial, s.counts, s.offsets, own, {});
    return own;
  }
};

}  // namespace moe::backends
