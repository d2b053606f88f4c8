// SPDX-License-Identifier: Apache-2.0
// capi/make_runner.cpp: a request to one of libmoe's layers, by its names.
#include <array>
#include <string>

#include "capi/instances.hpp"
#include "moe/c/weights.hpp"

namespace moe_c {
namespace {

std::vector<Instance> const& instances() {
  static std::vector<Instance> const all = [] {
    std::vector<Instance> rows;
#ifdef MOE_C_HAS_ONEDNN
    add_host_instances(rows);
#endif
#ifdef MOE_C_HAS_MPI
    add_mpi_instances(rows);
#endif
#ifdef MOE_HAS_CUDA
    add_cuda_instances(rows);
#endif
#ifdef MOE_C_HAS_NCCL
    add_nccl_instances(rows);
#endif
    return rows;
  }();
  return all;
}

void append_once(std::string& list, std::string_view name) {
  if ((", " + list + ", ").find(moe::text(", ", name, ", ")) == std::string::npos) list += moe::text(list.empty() ? "" : ", ", name);
}

/// Which of the five names no layer has, given those before it.
[[noreturn]] void refuse(moe::c::Request const& r) {
  auto const has = [&](Instance const& i, int names) {
    return i.space == r.device.space && (names < 1 || i.quantization == r.quantization) && (names < 2 || i.backend == r.backend) &&
           (names < 3 || i.dtype == r.dtype) && (names < 4 || r.experts.empty() || i.experts == r.experts);
  };
  constexpr std::array<char const*, 4> kWhat{"quantization", "backend", "dtype", "experts"};
  for (int names = 0; names < 4; ++names) {
    std::string known;
    bool found = false;
    for (Instance const& i : instances()) {
      if (has(i, names))
        append_once(known, names == 0 ? i.quantization : names == 1 ? i.backend : names == 2 ? moe::c::name_of(i.dtype) : i.experts);
      found = found || has(i, names + 1);
    }
    if (found) continue;
    std::string_view const given = names == 0 ? r.quantization : names == 1 ? r.backend : names == 2 ? moe::c::name_of(r.dtype) : r.experts;
    std::string const with =
        names < 1 ? "" : moe::text(" with quantization ", r.quantization, names < 2 ? "" : moe::text(" and backend ", r.backend));
    throw moe::Error(known.empty() ? moe::ErrorCode::unsupported : moe::ErrorCode::config,
                     moe::text(kWhat[static_cast<std::size_t>(names)], ": \"", given, "\" is none of this library's on ",
                               moe::c::describe(r.device), with, "; it has: ", known.empty() ? "none" : known));
  }
  throw moe::Error(moe::ErrorCode::internal, "the table of layers has this composition");
}

}  // namespace
}  // namespace moe_c

std::unique_ptr<moe::c::Runner> moe::c::make_runner(Request const& r, bool& told) {
  std::string unfit;
  for (moe_c::Instance const& i : moe_c::instances()) {
    if (i.space != r.device.space || i.dtype != r.dtype || i.quantization != r.quantization || i.backend != r.backend) continue;
    if (!r.experts.empty() && i.experts != r.experts) continue;
    std::string const why = i.unfit == nullptr ? "" : i.unfit(r);
    if (why.empty()) return i.make(r, told);
    unfit += text(unfit.empty() ? "" : "; ", why);
  }
  if (!unfit.empty()) throw Error(ErrorCode::unsupported, unfit);
  moe_c::refuse(r);
}
