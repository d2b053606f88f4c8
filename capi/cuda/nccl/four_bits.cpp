// SPDX-License-Identifier: Apache-2.0
// capi/cuda/nccl/four_bits.cpp: the layers between GPUs with 4-bit weights.
#include "capi/cuda/nccl/layers.hpp"
#include "capi/make_layer.hpp"
#include "moe/backends/collective/device/all_to_all_v.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"

#define MOE_C_FOUR_BITS(Backend)                                                                                                     \
  template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, Int4Group32, Backend, HopperW4A16>(moe::c::Request const&, bool&);  \
  template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, Int4Group64, Backend, HopperW4A16>(moe::c::Request const&, bool&);  \
  template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, Int4Group128, Backend, HopperW4A16>(moe::c::Request const&, bool&); \
  template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, Mxfp4, Backend, HopperW4A16>(moe::c::Request const&, bool&);

namespace moe_c {

MOE_C_FOUR_BITS(AllToAllV)
MOE_C_FOUR_BITS(LowLatency)
MOE_C_FOUR_BITS(HighThroughput)

}  // namespace moe_c
