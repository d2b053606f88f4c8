// SPDX-License-Identifier: Apache-2.0
// capi/cuda/instances.cpp: the rows of the table for one GPU: the Hopper experts where they take the request, cuda_reference elsewhere.
#include "capi/instances.hpp"
#include "capi/cuda/obstacle.hpp"
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/quantization/schemes.hpp"

namespace moe_c {
namespace {

namespace quantization = moe::quantization;
using moe::experts::CudaReference;
using moe::experts::HopperContiguous;
using moe::experts::HopperW4A16;
using moe::experts::HopperW4A8;
using moe::experts::HopperW8A16;

template <class Act, class Experts, class... Quants>
void add(std::vector<Instance>& all) {
  add_on_gpu<Act, moe::backends::NoExpertParallel<moe::space::cuda>, Experts, Quants...>(all);
}

}  // namespace

void add_cuda_instances(std::vector<Instance>& all) {
  using moe::bf16;
  using moe::f16;
  using Int4Group32 = quantization::WNa16<4, 32>;
  using Int4Group64 = quantization::WNa16<4, 64>;
  add<bf16, HopperContiguous, quantization::None, quantization::Fp8Block<>, quantization::Fp8PerToken<>, quantization::Int8PerToken>(all);
  add<f16, HopperContiguous, quantization::None>(all);
  add<bf16, HopperW4A16, Int4Group32, Int4Group64, quantization::Int4Group128, quantization::Int4Group128Zero, quantization::Mxfp4W4A16<>,
      quantization::Nvfp4W4A16>(all);
  add<bf16, HopperW8A16, quantization::Int8PerChannel, quantization::Fp8PerChannel<>, quantization::Mxfp8W8A16<>, quantization::Mxfp8<>>(
      all);
  add<bf16, HopperW4A8, quantization::Mxfp4Fp8<>, quantization::Int4Fp8<32>, quantization::Int4Fp8<64>, quantization::Int4Fp8<128>,
      quantization::Int4Fp8<128, true>>(all);

  add<float, CudaReference, quantization::None>(all);
  add<bf16, CudaReference, quantization::None, quantization::Fp8Block<>, quantization::Fp8PerToken<>, Int4Group32, Int4Group64,
      quantization::Int4Group128, quantization::Mxfp4W4A16<>, quantization::Mxfp8<>>(all);
  add<f16, CudaReference, quantization::None>(all);
}

}  // namespace moe_c
