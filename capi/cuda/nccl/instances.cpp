// SPDX-License-Identifier: Apache-2.0
// capi/cuda/nccl/instances.cpp: the rows of the table for layers between GPUs.
#include "capi/instances.hpp"
#include "capi/cuda/nccl/layers.hpp"
#include "capi/cuda/obstacle.hpp"

namespace moe_c {
namespace {

template <class Act, class Backend, class Experts, class... Quants>
void add(std::vector<Instance>& all) {
  (all.push_back(instance<Act, Quants, Backend, Experts>(&obstacle<Act, Quants, Experts>)), ...);
}

}  // namespace
}  // namespace moe_c

void moe_c::add_nccl_instances(std::vector<Instance>& all) {
  add<moe::bf16, AllToAllV, HopperContiguous, None, Fp8, Fp8Rows>(all);
  add<moe::bf16, AllToAllV, HopperW4A16, Int4Group32, Int4Group128, Mxfp4>(all);
  add<float, AllToAllV, CudaReference, None>(all);
  add<moe::bf16, LowLatency, HopperMasked, None, Fp8>(all);
  add<moe::bf16, LowLatency, HopperW4A16, Int4Group32, Int4Group128, Mxfp4>(all);
  add<moe::bf16, HighThroughput, HopperContiguous, None, Fp8>(all);
  add<moe::bf16, HighThroughput, HopperW4A16, Int4Group32, Int4Group128, Mxfp4>(all);
}
