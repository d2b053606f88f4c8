// SPDX-License-Identifier: Apache-2.0
// core/ptx/permute.cuh: bytes of two words by a selector.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace moe::ptx {

/// Byte i of the result is byte s of {low, high}, s the lower three bits of nibble i of `select`; if the nibble's bit 3 is set, that byte's
/// sign in all eight bits. Unlike __byte_perm(), which ignores bit 3, this needs no masking; the upper half of `select` is ignored.
__device__ inline std::uint32_t permute(std::uint32_t low, std::uint32_t high, std::uint32_t select) {
  std::uint32_t bytes = 0;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "r"(select));
  return bytes;
}

}  // namespace moe::ptx
