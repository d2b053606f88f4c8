// SPDX-License-Identifier: Apache-2.0
// examples/moe/run_cuda.cu: `--device cuda`: the compositions of the CUDA space, run by the same code as those of the host.
#include "examples/moe/run_block.hpp"
#include "moe/backends/no_expert_parallel.cuh"
#include "moe/experts/cuda_reference.cuh"
#include "moe/routing/route.cuh"

namespace moe_tool {

JobResult run_cuda(Job const& job) {
  if (!moe::has_device()) {
    throw moe::Error(moe::ErrorCode::unsupported, "--device cuda: this machine has no usable GPU; use --device host");
  }
  if (job.options.quantization != moe::quantization::None::kName) {
    throw moe::Error(moe::ErrorCode::unsupported,
                     moe::text("--quantization ", job.options.quantization, ": on --device cuda only none is built into this program"));
  }
  return run_named<moe::quantization::None>(job, moe::registry::cuda_backends, moe::registry::cuda_experts);
}

}  // namespace moe_tool
