// SPDX-License-Identifier: Apache-2.0
// runner/nvtx.hpp: a probe that makes a range of NVTX of each stage, for a profiler's time line. Needs the headers of the CUDA toolkit.
#pragma once

#include <nvtx3/nvToolsExt.h>

#include "moe/layer/options.hpp"
#include "moe/runner/probes.hpp"

namespace moe::runner {

/// Ranges in the domain "moe", named as the stages. They span the host's calls; a profiler relates the kernels to them. Without a profiler
/// a range costs some nanoseconds.
class NvtxProbe {
 public:
  NvtxProbe() : domain_(nvtxDomainCreateA("moe")) {}
  NvtxProbe(NvtxProbe const&) = delete;
  NvtxProbe& operator=(NvtxProbe const&) = delete;
  ~NvtxProbe() { nvtxDomainDestroy(domain_); }

  void begin(Phase phase) {
    nvtxEventAttributes_t range{};
    range.version = NVTX_VERSION;
    range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    range.messageType = NVTX_MESSAGE_TYPE_ASCII;
    range.message.ascii = name(phase).data();  // of a literal
    nvtxDomainRangePushEx(domain_, &range);
  }
  void end(Phase) { nvtxDomainRangePop(domain_); }

 private:
  nvtxDomainHandle_t domain_;
};

}  // namespace moe::runner
