// SPDX-License-Identifier: Apache-2.0
// models/policy_table.hpp: maps the names of the registry's policies to what a program writes: the C++ type, the headers that a translation
// unit which instantiates a layer includes, and the CMake target to link.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "moe/core/contract/facts.hpp"
#include "moe/models/registry.hpp"

namespace moe::registry {

/// A type as C++ writes it. Stand-ins for optional components are written with the names of the real types.
template <class Type>
std::string type_name() {
  std::string_view const function = __PRETTY_FUNCTION__;  // "… type_name() [with Type = T; …]" or "… [Type = T]"
  std::size_t const begin = function.find("Type = ") + 7;
  std::size_t const end = std::min(function.find(';', begin), function.rfind(']'));
  std::string name(function.substr(begin, end - begin));
  constexpr std::array<std::array<std::string_view, 2>, 4> kReplaced{
      {{"moe::registry::DeviceWindow", "moe::comm::NcclSymmetric"},
       {"DeviceWindow", "moe::comm::NcclSymmetric"},  // as g++ writes it here
       {"moe::comm::Self<moe::space::cuda>", "moe::comm::Nccl"},
       {" >", ">"}}};
  for (auto const& [old, real] : kReplaced) {
    for (std::size_t at = name.find(old); at != std::string::npos; at = name.find(old)) {
      name.replace(at, old.size(), real);
    }
  }
  return name;
}

/// The base name of the file that defines a policy: the policy's name, except for variants that share a file.
inline std::string_view file_of(std::string_view policy) {
  constexpr std::array<std::array<std::string_view, 2>, 9> kShared{{{"low_latency_rank_major", "low_latency"},
                                                                    {"monolithic", "monolithic"},
                                                                    {"any", "any_router"},
                                                                    {"zero_expert", "zero_expert"},
                                                                    {"int4_group", "int4_group128"},
                                                                    {"w4a8", "w4a8"},
                                                                    {"mxfp4_w4a", "mxfp4"},
                                                                    {"mxfp8_w8a16", "mxfp8"},
                                                                    {"nvfp4_w4a16", "nvfp4"}}};
  if (policy.starts_with("int4_group") && policy.ends_with("_fp8")) {
    return "int4_fp8";
  }
  for (auto const& [begins, file] : kShared) {
    if (policy.starts_with(begins)) {
      return file;
    }
  }
  std::size_t const topk = policy.find("_topk");  // softmax_topk_renormalize, biased_topk_sigmoid, ...
  return topk == std::string_view::npos ? policy : policy.substr(0, topk + 5);
}

template <class Policy>
constexpr bool on_device() {
  return Policy::Space::kKind == SpaceKind::cuda;
}

/// "moe/… and ": the header of the communicator or window of a backend with this type; "" for a backend of one rank.
inline std::string include_of_transport(std::string_view type) {
  constexpr std::array<std::array<std::string_view, 2>, 4> kHeaders{{{"<moe::comm::Mpi>", "mpi.hpp"},
                                                                     {"<moe::comm::MpiShared>", "mpi_shared.hpp"},
                                                                     {"<moe::comm::Nccl>", "nccl.hpp"},
                                                                     {"<moe::comm::NcclSymmetric>", "nccl_symmetric.cuh"}}};
  for (auto const& [over, file] : kHeaders) {
    if (type.ends_with(over)) {
      return text("moe/comm/", file, " and ");
    }
  }
  return {};
}

/// "moe/…": the header that a file needs to instantiate a layer with the policy; a .cuh for files that nvcc compiles. Of a backend over a
/// communicator or window "moe/comm/… and moe/…", both headers.
template <class Backend>
std::string include_of_backend() {
  std::string_view const file = file_of(Backend::kName);
  std::string const over = include_of_transport(type_name<Backend>());
  if constexpr (facts::has_window<Backend>()) {
    return on_device<Backend>() ? text(over, "moe/backends/window/device/", file, ".cuh")
                                : text(over, "moe/backends/window/host/", file, ".hpp");
  } else {
    return on_device<Backend>() ? text(over, "moe/backends/collective/device/", file, ".cuh") : text(over, "moe/backends/", file, ".hpp");
  }
}
/// The same; of experts around others "moe/… and moe/…", both headers.
template <class Experts>
std::string include_of_experts() {
  std::string own = text("moe/experts/", file_of(Experts::kName), on_device<Experts>() ? ".cuh" : ".hpp");
  if constexpr (facts::routes_inside<Experts>()) own += " and " + include_of_experts<typename Experts::Computes>();
  return own;
}

/// One line of the table.
struct PolicyRow {
  std::string_view kind;  ///< "router", "quantization", "backend", "experts"
  std::string_view name;
  std::string_view space;  ///< "host", "cuda", "both"
  std::string type;
  std::string include;
  std::string links;  ///< CMake targets
};

/// Every policy of the registry. Routers of a layer in the CUDA space also need moe/routing/device/route.cuh.
inline std::vector<PolicyRow> policy_table() {
  std::vector<PolicyRow> rows;
  hana::for_each(routers, [&](auto type) {
    using Router = typename decltype(type)::type;
    rows.push_back(
        {"router", Router::kName, "both", type_name<Router>(), text("moe/routing/", file_of(Router::kName), ".hpp"), "moe::moe"});
  });
  hana::for_each(quantizations, [&](auto type) {
    using Quant = typename decltype(type)::type;
    rows.push_back(
        {"quantization", Quant::kName, "both", type_name<Quant>(), text("moe/quantization/", file_of(Quant::kName), ".hpp"), "moe::moe"});
  });
  hana::for_each(all_backends, [&](auto type) {
    using Backend = typename decltype(type)::type;
    constexpr bool kAlone = std::string_view(Backend::kName) == "no_expert_parallel";
    std::string links = on_device<Backend>() ? "moe::cuda" : kAlone ? "moe::moe" : "moe::mpi";
    rows.push_back(
        {"backend", Backend::kName, Backend::Space::kName, type_name<Backend>(), include_of_backend<Backend>(), std::move(links)});
  });
  hana::for_each(all_experts, [&](auto type) {
    using Experts = typename decltype(type)::type;
    std::string_view const name = Experts::kName;
    std::string links = name == "onednn"           ? "moe::onednn"
                        : name == "cublas_grouped" ? "moe::cublas"
                        : on_device<Experts>()     ? "moe::cuda"
                                                   : "moe::moe";
    rows.push_back({"experts", name, Experts::Space::kName, type_name<Experts>(), include_of_experts<Experts>(), std::move(links)});
  });
  return rows;
}

}  // namespace moe::registry
