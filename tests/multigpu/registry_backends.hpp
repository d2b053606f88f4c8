// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/registry_backends.hpp: the registry's backends of the CUDA space over NCCL and its windows, for typed tests: a backend
// that the registry gets is tested by all of them. Host C++ only; their kernels are in device_backends.cu.
#pragma once

#include <gtest/gtest.h>

#include <boost/hana.hpp>
#include <string>

#include "moe/backends/collective/device/all_to_all_v.hpp"
#include "moe/backends/collective/device/gather_exchange.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/backends/window/device/one_sided/exchange.hpp"
#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/backends/window/device/two_sided/exchange.hpp"
#include "moe/comm/nccl.hpp"
#include "moe/comm/nccl_symmetric.hpp"
#include "moe/models/registry.hpp"

namespace moe_test {

namespace hana = boost::hana;

inline constexpr auto backends_over_nccl = moe::registry::cuda_backends_over_comm<moe::comm::Nccl>;
inline constexpr auto backends_over_nccl_windows = moe::registry::backends_over_window<moe::comm::NcclSymmetric>;
inline constexpr auto all_backends_between_gpus = hana::concat(backends_over_nccl, backends_over_nccl_windows);
static_assert(hana::size(all_backends_between_gpus) == hana::size(moe::registry::all_cuda_backends),
              "the registry has a backend of the CUDA space that is in neither list above");

struct MakeTypes {
  template <class... Backends>
  constexpr auto operator()(Backends...) const {
    return hana::type_c<testing::Types<typename Backends::type...>>;
  }
};
/// A list of the registry as the types of a typed test.
template <auto const& List>
using TestTypes = typename decltype(hana::unpack(List, MakeTypes{}))::type;

/// Names the tests after their backends.
struct BackendNames {
  template <class Backend>
  static std::string GetName(int) {
    return Backend::kName;
  }
};

}  // namespace moe_test
