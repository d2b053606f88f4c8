// SPDX-License-Identifier: Apache-2.0
// tests/gpu/on_hopper.hpp: whether the current device can run the Hopper kernels.
#pragma once

#include <cuda_runtime_api.h>

namespace moe_test {

/// True if the current device has compute capability 9.x. False without a device.
inline bool on_hopper() {
  int device = 0;
  int major = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess && major == 9;
}

}  // namespace moe_test
