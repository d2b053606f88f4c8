// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/run_over_nccl.hpp: the definition of run_over_nccl, and what it shares with run_over_nccl_window: the
// communicators of the ranks that the layer connects and of the TP group, then the backend by its name.
#pragma once

#include "examples/moe/cuda/run_device_block.hpp"
#include "moe/backends/collective/device/all_to_all_v.hpp"
#include "moe/backends/collective/device/gather_exchange.hpp"
#include "moe/comm/nccl.hpp"

namespace moe_tool {

/// The job with the backend of that name in the list. Collective. E_UNSUPPORTED on a GPU older than its kernels in this program; E_CONFIG
/// with the rule's sentence for a composition that the rules forbid.
template <class Quant, class Experts, class Backends>
JobResult run_with_nccl(Job const& job, Backends backends, int oldest) {
  choose_device(job);
  together(*job.comm, [&] {
    if (int const sm = moe::device_architecture(); sm < oldest) {
      throw moe::Error(moe::ErrorCode::unsupported,
                       moe::text("--backend ", job.options.backend, ": the device is sm_", sm, ", sm_", oldest, " or newer is needed"));
    }
  });
  std::optional<moe::comm::Nccl> comm;
  together(*job.comm, [&] { comm.emplace(moe::comm::Nccl::over_communicator(job.layer_group(), {.timeout_ms = job.options.timeout_ms})); });
  TpGroup tp(job);
  JobResult result;
  moe::registry::with_policy(backends, "backend", job.options.backend, [&](auto backend) {
    using Backend = typename decltype(backend)::type;
    using Rules = moe::registry::CompositionOf<moe::registry::LayerFor<Backend, Experts>, Quant, Backend, Experts>;
    if constexpr (Rules::kLegal) {
      result = run_device_block<Quant, Backend, Experts>(job, *comm, tp);
    } else {
      throw moe::Error(moe::ErrorCode::config, Rules::reason());
    }
  });
  return result;
}

template <class Quant, class Experts>
JobResult run_over_nccl(Job const& job) {
  return run_with_nccl<Quant, Experts>(job, moe::registry::backends_over_comm<moe::comm::Nccl>, 80);
}

}  // namespace moe_tool
