// SPDX-License-Identifier: Apache-2.0
// capi/cuda/nccl/collective.cpp: the layers between GPUs over NCCL's collectives.
#include "capi/cuda/nccl/layers.hpp"
#include "capi/make_layer.hpp"
#include "moe/backends/collective/device/all_to_all_v.hpp"

namespace moe_c {

template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, None, AllToAllV, HopperContiguous>(moe::c::Request const&, bool&);
template std::unique_ptr<moe::c::Runner> make_layer<moe::f16, None, AllToAllV, HopperContiguous>(moe::c::Request const&, bool&);
template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, Fp8, AllToAllV, HopperContiguous>(moe::c::Request const&, bool&);
template std::unique_ptr<moe::c::Runner> make_layer<moe::bf16, Fp8Rows, AllToAllV, HopperContiguous>(moe::c::Request const&, bool&);
template std::unique_ptr<moe::c::Runner> make_layer<float, None, AllToAllV, CudaReference>(moe::c::Request const&, bool&);

}  // namespace moe_c
