// SPDX-License-Identifier: Apache-2.0
// comm/nccl_status.hpp: results of NCCL calls as moe::Error, and the check that the library is the one that was compiled against.
#pragma once

#include <nccl.h>

#include <source_location>

#include "moe/core/error.hpp"

namespace moe::comm::detail {

/// E_CUDA naming the call, with NCCL's own text, unless `result` is ncclSuccess.
inline void check_nccl(ncclResult_t result, char const* call, ncclComm_t comm = nullptr, SourceLocation where = SourceLocation::current()) {
  if (result != ncclSuccess) {
    char const* const last = ncclGetLastError(comm);
    throw Error(ErrorCode::cuda,
                text(call, ": ", ncclGetErrorString(result), last != nullptr && *last != '\0' ? "; " : "", last != nullptr ? last : ""),
                where);
  }
}

/// E_UNSUPPORTED unless the NCCL that runs is the one whose headers were compiled: its device structs change between patch releases.
inline void check_nccl_version(int compiled = NCCL_VERSION_CODE) {
  int running = 0;
  check_nccl(ncclGetVersion(&running), "ncclGetVersion");
  if (running != compiled) {
    throw Error(ErrorCode::unsupported, text("nccl: the program was built against version code ", compiled, " and runs on ", running,
                                             "; device structs differ between releases. Load the library of that version"));
  }
}

}  // namespace moe::comm::detail
