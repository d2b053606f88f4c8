// SPDX-License-Identifier: Apache-2.0
// capi/cuda/nccl/windows.cpp: the layers between GPUs of a node over windows of NCCL's.
#include "capi/cuda/nccl/layers.hpp"
#include "capi/make_layer.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"

namespace moe_c {

template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, None, LowLatency, HopperMasked>(moe::c::Request const&, bool&);
template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, Fp8, LowLatency, HopperMasked>(moe::c::Request const&, bool&);
template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, None, HighThroughput, HopperContiguous>(moe::c::Request const&, bool&);
template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, Fp8, HighThroughput, HopperContiguous>(moe::c::Request const&, bool&);

}  // namespace moe_c
