// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/nccl/run_over_nccl_window.hpp: the definition of run_over_nccl_window. Each windows_*.cpp instantiates it for one
// scheme, experts and format, so that they compile side by side; the kernels are in the library moe_exchange_kernels.
#pragma once

#include "examples/moe/cuda/nccl/run_over_nccl.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/backends/window/device/one_sided/exchange.hpp"
#include "moe/backends/window/device/pplx/exchange.hpp"
#include "moe/backends/window/device/two_sided/exchange.hpp"
#include "moe/comm/nccl_symmetric.hpp"

namespace moe_tool {

template <class Quant, class Experts, moe::ActivationFormat Format>
JobResult run_over_nccl_window(Job const& job) {
  constexpr auto backends = boost::hana::filter(moe::registry::backends_over_window<moe::comm::NcclSymmetric>,
                                                [](auto type) { return boost::hana::bool_c<decltype(type)::type::kFormat == Format>; });
  return run_with_nccl<Quant, Experts>(job, backends, 90);
}

}  // namespace moe_tool
