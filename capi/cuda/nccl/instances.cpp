// SPDX-License-Identifier: Apache-2.0
// capi/cuda/nccl/instances.cpp: the rows of the table for layers between GPUs.
#include "capi/instances.hpp"
#include "capi/cuda/nccl/layers.hpp"

void moe_c::add_nccl_instances(std::vector<Instance>& all) {
  all.push_back(instance<moe::bf16, None, AllToAllV, HopperContiguous>());
  all.push_back(instance<moe::bf16, Fp8, AllToAllV, HopperContiguous>());
  all.push_back(instance<float, None, AllToAllV, CudaReference>());
  all.push_back(instance<moe::bf16, None, LowLatency, HopperMasked>());
  all.push_back(instance<moe::bf16, Fp8, LowLatency, HopperMasked>());
  all.push_back(instance<moe::bf16, None, HighThroughput, HopperContiguous>());
  all.push_back(instance<moe::bf16, Fp8, HighThroughput, HopperContiguous>());
}
