// SPDX-License-Identifier: Apache-2.0
// capi/cuda/nccl/instances.cpp: the rows of the table for layers between GPUs.
#include "capi/instances.hpp"
#include "capi/cuda/nccl/layers.hpp"
#include "capi/cuda/obstacle.hpp"

void moe_c::add_nccl_instances(std::vector<Instance>& all) {
  add_on_gpu<moe::bf16, AllToAllV, HopperContiguous, None, Fp8, Fp8Rows>(all);
  add_on_gpu<moe::bf16, AllToAllV, HopperW4A16, Int4Group32, Int4Group64, Int4Group128, Mxfp4>(all);
  add_on_gpu<moe::f16, AllToAllV, HopperContiguous, None>(all);
  add_on_gpu<float, AllToAllV, CudaReference, None>(all);
  add_on_gpu<moe::bf16, LowLatency, HopperMasked, None, Fp8>(all);
  add_on_gpu<moe::bf16, LowLatency, HopperW4A16, Int4Group32, Int4Group64, Int4Group128, Mxfp4>(all);
  add_on_gpu<moe::bf16, HighThroughput, HopperContiguous, None, Fp8>(all);
  add_on_gpu<moe::bf16, HighThroughput, HopperW4A16, Int4Group32, Int4Group64, Int4Group128, Mxfp4>(all);
}
