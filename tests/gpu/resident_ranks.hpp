// SPDX-License-Identifier: Apache-2.0
// tests/gpu/resident_ranks.hpp: prepares a process in which ranks share one GPU.
#pragma once

#include <cstdlib>

namespace moe_test {

/// Kernels of all ranks must run at the same time: nothing may be loaded lazily, and every stream needs its own queue.
[[maybe_unused]] static bool const ranks_can_be_resident = [] {
  setenv("CUDA_MODULE_LOADING", "EAGER", 1);
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  return true;
}();

}  // namespace moe_test
