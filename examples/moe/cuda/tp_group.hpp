// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/tp_group.hpp: the ranks of a TP group over NCCL, and what a block's runner is told of them. A program without NCCL has
// one rank.
#pragma once

#include <optional>

#include "examples/moe/cuda/instances.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/runner/device/ranks.hpp"
#ifdef MOE_HAS_NCCL
#include "moe/comm/nccl.hpp"
#endif

namespace moe_tool {

#ifdef MOE_HAS_NCCL

using DeviceParallel = moe::runner::parallel::Groups<moe::comm::Nccl>;

class TpGroup {
 public:
  /// Collective over the job's ranks, on this rank's device.
  explicit TpGroup(Job const& job) : moe_(job.moe) {
    if (moe_.tp_size == 1) return;
    together(*job.comm, [&] { comm_.emplace(moe::comm::Nccl::over_communicator(*job.tp_group, {.timeout_ms = job.options.timeout_ms})); });
  }
  /// The tool gives the ranks of a group the same rows.
  DeviceParallel::Params params() { return {.moe = moe_, .tp = comm_ ? &*comm_ : nullptr, .rows_agree = true}; }
  /// Waits for the stream; for the group's sums within the deadline.
  void wait(cudaStream_t stream) {
    if (comm_) comm_->synchronize(stream);
  }

 private:
  moe::MoeParallel moe_;
  std::optional<moe::comm::Nccl> comm_;
};

#else

using DeviceParallel = moe::runner::parallel::None;

class TpGroup {
 public:
  /// E_UNSUPPORTED for several ranks.
  explicit TpGroup(Job const& job) {
    together(*job.comm, [&] {
      if (job.moe.tp_size > 1) throw moe::Error(moe::ErrorCode::unsupported, moe::text("--tp on cuda: ", what_builds()));
    });
  }
  static DeviceParallel::Params params() { return {}; }
  static void wait(cudaStream_t) {}
};

#endif

}  // namespace moe_tool
