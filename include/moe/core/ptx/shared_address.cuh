// SPDX-License-Identifier: Apache-2.0
// core/ptx/shared_address.cuh: shared-memory addresses as instructions and descriptors take them.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::ptx {

/// The 32-bit address of something in this block's shared memory.
__device__ inline std::uint32_t smem_address(void const* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

}  // namespace moe::ptx
