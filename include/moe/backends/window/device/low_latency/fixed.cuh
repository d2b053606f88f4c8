// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/fixed.cuh: dispatch and combine of one row for each (token, expert), compiled for the sizes of one
// configuration. A model library instantiates low_latency_fixed<Config, kFp8>(). Where a size is dynamic there are no kernels.
#pragma once

#include "moe/backends/window/device/common/launch.cuh"
#include "moe/backends/window/device/low_latency/calls.hpp"
#include "moe/backends/window/device/low_latency/combine.cuh"
#include "moe/backends/window/device/low_latency/dispatch.cuh"
#include "moe/core/array.hpp"

namespace moe::detail {

/// Arguments of a kernel with the sizes of Config as constants.
template <class Args, class Config>
struct FixedLowLatency : Args {
  static constexpr int hidden = Config::hidden, topk = Config::topk, num_experts = Config::num_experts;
};

template <class Config, bool kFp8>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    low_latency_dispatch_fixed(FixedLowLatency<LowLatencyDispatch, Config> const __grid_constant__ a) {
  dispatch_rows<kFp8, false>(a);
}
template <class Config>
__global__ void __launch_bounds__(kLowLatencyThreads, 1)
    low_latency_combine_fixed(FixedLowLatency<LowLatencyCombine, Config> const __grid_constant__ a) {
  combine_rows<false>(a);
}

template <class Config, bool kFp8>
auto low_latency_fixed() -> LowLatencyFixed const& {
  if constexpr (Config::hidden == dynamic || Config::topk == dynamic || Config::num_experts == dynamic) {
    static constexpr LowLatencyFixed kNone{};
    return kNone;  // it fits no shape
  } else {
    static constexpr LowLatencyFixed kKernels{
        .hidden = Config::hidden,
        .topk = Config::topk,
        .num_experts = Config::num_experts,
        .fp8 = kFp8,
        .prepare =
            [](LowLatencyShape const& s, std::size_t shared) {
              allow_dynamic_shared(&low_latency_dispatch_fixed<Config, kFp8>, shared);
              expect_resident(&low_latency_dispatch_fixed<Config, kFp8>, "low_latency", s.blocks, kLowLatencyThreads, shared);
            },
        .dispatch =
            [](LowLatencyDispatch const& a, std::size_t shared, bool programmatic, cudaStream_t stream) {
              launch_exchange(&low_latency_dispatch_fixed<Config, kFp8>, "low_latency_dispatch", a.blocks, kLowLatencyThreads, shared,
                              programmatic, stream, FixedLowLatency<LowLatencyDispatch, Config>{a});
            },
        .combine =
            [](LowLatencyCombine const& a, bool programmatic, cudaStream_t stream) {
              launch_exchange(&low_latency_combine_fixed<Config>, "low_latency_combine", a.blocks, kLowLatencyThreads, 0, programmatic,
                              stream, FixedLowLatency<LowLatencyCombine, Config>{a});
            }};
    return kKernels;
  }
}

}  // namespace moe::detail
