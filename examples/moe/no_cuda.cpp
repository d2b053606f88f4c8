// SPDX-License-Identifier: Apache-2.0
// examples/moe/no_cuda.cpp: what `--device cuda` says in a build without the CUDA space.
#include "examples/moe/job.hpp"

#ifndef MOE_HAS_CUDA
namespace moe_tool {

JobResult run_cuda(Job const&) {
  throw moe::Error(moe::ErrorCode::unsupported,
                   "--device cuda: this program was built without CUDA; build the cuda preset, or use --device host");
}

}  // namespace moe_tool
#endif
