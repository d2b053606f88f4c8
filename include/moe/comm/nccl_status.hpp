// SPDX-License-Identifier: Apache-2.0
// comm/nccl_status.hpp: results of NCCL calls as moe::Error, the check that the loaded library matches the headers, and ids in files.
#pragma once

#include <nccl.h>
#include <unistd.h>

#include <cstdio>
#include <string>
#include <type_traits>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::comm::detail {

/// E_CUDA naming the call, with NCCL's error text, unless `result` is ncclSuccess.
inline void check_nccl(ncclResult_t result, char const* call, ncclComm_t comm = nullptr, SourceLocation where = SourceLocation::current()) {
  if (result != ncclSuccess) {
    char const* const last = ncclGetLastError(comm);
    throw Error(ErrorCode::cuda,
                text(call, ": ", ncclGetErrorString(result), last != nullptr && *last != '\0' ? "; " : "", last != nullptr ? last : ""),
                where);
  }
}

/// NCCL's name of an element type.
template <class T>
constexpr ncclDataType_t nccl_type() {
  static_assert(std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, f16>);
  return std::is_same_v<T, float> ? ncclFloat : std::is_same_v<T, bf16> ? ncclBfloat16 : ncclHalf;
}

/// E_UNSUPPORTED unless the loaded NCCL has the version of the headers: its device structs change between patch releases.
inline void check_nccl_version(int compiled = NCCL_VERSION_CODE) {
  int running = 0;
  check_nccl(ncclGetVersion(&running), "ncclGetVersion");
  if (running != compiled) {
    throw Error(ErrorCode::unsupported, text("nccl: the program was built against version code ", compiled, " and runs on ", running,
                                             "; device structs differ between releases. Load the library of that version"));
  }
}

/// Writes an id to a new file: E_CONFIG if it exists or cannot be written.
inline void write_id(std::string const& path, ncclUniqueId const& id) {
  std::string const part = path + ".part";
  std::FILE* const file = std::fopen(part.c_str(), "wbx");
  bool good = file != nullptr && std::fwrite(&id, sizeof(id), 1, file) == 1;
  good = (file == nullptr || std::fclose(file) == 0) && good;
  // link() instead of rename(): an id left by an earlier job must not be taken for this job's
  good = good && ::link(part.c_str(), path.c_str()) == 0;
  if (file != nullptr) {
    std::remove(part.c_str());
  }
  if (!good) {
    throw Error(ErrorCode::config, text("nccl: cannot write the id file ", path, "; it must not exist before"));
  }
}
/// False while there is no id in the file.
inline bool read_id(std::string const& path, ncclUniqueId& id) {
  std::FILE* const file = std::fopen(path.c_str(), "rb");
  bool const good = file != nullptr && std::fread(&id, sizeof(id), 1, file) == 1;
  if (file != nullptr) {
    std::fclose(file);
  }
  return good;
}

}  // namespace moe::comm::detail
