// SPDX-License-Identifier: Apache-2.0
// capi/cuda/obstacle.hpp: the rows of the table on GPUs, each with whether its experts run a request on the GPU of its weights.
#pragma once

#include <string>
#include <vector>

#include "capi/instances.hpp"
#include "moe/c/runner.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/models/experts_obstacle.hpp"

namespace moe_c {

inline int architecture_of(int device) {
  int major = 0;
  int minor = 0;
  moe::check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  moe::check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
  return 10 * major + minor;
}

/// Why the experts cannot run the request on its GPU; empty: they can.
template <class Act, class Quant, class Experts>
std::string obstacle(moe::c::Request const& r) {
  return moe::models::experts_obstacle<Experts, Quant, Act>({.architecture = architecture_of(r.device.id),
                                                             .hidden = r.shape.hidden,
                                                             .intermediate = r.shape.intermediate,
                                                             .activation = r.activation.kind,
                                                             .weight_on_input = r.shape.weight_on_input});
}

template <class Act, class Backend, class Experts, class... Quants>
void add_on_gpu(std::vector<Instance>& all) {
  (all.push_back(instance<Act, Quants, Backend, Experts>(&obstacle<Act, Quants, Experts>)), ...);
}

}  // namespace moe_c
