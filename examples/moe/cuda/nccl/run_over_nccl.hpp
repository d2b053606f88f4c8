// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/run_over_nccl.hpp: the definition of run_over_nccl: the communicator of all ranks, then the backend by its name.
#pragma once

#include "examples/moe/cuda/run_device.hpp"
#include "moe/backends/collective/all_to_all_v_cuda.hpp"
#include "moe/backends/collective/gather_exchange_cuda.hpp"
#include "moe/comm/nccl.hpp"

namespace moe_tool {

template <class Quant, class Experts>
JobResult run_over_nccl(Job const& job) {
  using moe::comm::Nccl;
  namespace backends = moe::backends;
  constexpr auto known = boost::hana::tuple_t<backends::AllToAllV<Nccl>, backends::AllGatherReduceScatter<Nccl>, backends::Naive<Nccl>>;
  std::optional<Nccl> comm;
  together(job, [&] { comm.emplace(Nccl::over_communicator(*job.comm, {.timeout_ms = job.options.timeout_ms})); });
  JobResult result;
  moe::registry::with_policy(known, "backend", job.options.backend,
                             [&](auto backend) { result = run_block<Quant, typename decltype(backend)::type, Experts>(job, *comm); });
  return result;
}

}  // namespace moe_tool
