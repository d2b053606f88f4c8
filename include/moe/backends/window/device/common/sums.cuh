// SPDX-License-Identifier: Apache-2.0
// backends/window/device/common/sums.cuh: weighted sums of bf16 rows in float32 registers, and the loads of the rows from peers.
#pragma once

#include <cuda_bf16.h>

#include "moe/comm/symmetric_memory.cuh"

namespace moe::detail {

/// acc += weight * the eight bf16 values of v.
__device__ inline void accumulate_eight(float (&acc)[8], uint4 const& v, float weight) {
  std::uint32_t const words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    acc[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), acc[2 * i]);
    acc[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xffff0000U), acc[2 * i + 1]);
  }
}
__device__ inline uint4 round_eight(float const (&acc)[8]) {
  uint4 v;
  __nv_bfloat162* const pairs = reinterpret_cast<__nv_bfloat162*>(&v);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = __floats2bfloat162_rn(acc[2 * i], acc[2 * i + 1]);
  }
  return v;
}

/// v[i] = sixteen bytes at `offset` of each of the `n` <= 8 rows, loaded in the order kFirst, kFirst + 1, …
template <int kFirst>
__device__ inline void load_terms_from(uint4 (&v)[8], char const* const* rows, int n, std::size_t offset) {
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    constexpr int kLast = 7;
    int const i = (s + kFirst) & kLast;
    if (i < n) {
      v[i] = comm::detail::load_peer(reinterpret_cast<uint4 const*>(rows[i] + offset));
    }
  }
}
/// Order of loads: decides which link is busy. The order of the sum does not depend on it.
__device__ inline void load_terms(uint4 (&v)[8], char const* const* rows, int n, int first, std::size_t offset) {
  switch (first & 7) {
    case 0: load_terms_from<0>(v, rows, n, offset); break;
    case 1: load_terms_from<1>(v, rows, n, offset); break;
    case 2: load_terms_from<2>(v, rows, n, offset); break;
    case 3: load_terms_from<3>(v, rows, n, offset); break;
    case 4: load_terms_from<4>(v, rows, n, offset); break;
    case 5: load_terms_from<5>(v, rows, n, offset); break;
    case 6: load_terms_from<6>(v, rows, n, offset); break;
    default: load_terms_from<7>(v, rows, n, offset); break;
  }
}

}  // namespace moe::detail
