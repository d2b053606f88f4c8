// SPDX-License-Identifier: Apache-2.0
// experts/common/activated_row.hpp: the activation between the two matrix products, fused with the quantisation of the second product's
// input.
#pragma once

#include <cstdint>

#include "moe/core/types.hpp"

namespace moe::experts {

/// A row of the first product with the activation applied on reading: element i is act(gate i, up i) in float32. A scheme quantises it like
/// any row, so no activated row is stored: scheme.quantize_row<Act>(row, width, q, s). The codes and scales equal those of two separate
/// steps with a float32 row between them, without the rounding to Act that a stored row would have. In: element of the first product's row
/// (float, or Act).
template <class Activation, class In>
struct ActivatedRow {
  Activation activation;
  In const* in = nullptr;  ///< gate then up [2 width], interleaved g0, u0, g1, …, or [width] of an ungated activation
  std::int64_t width = 0;  ///< I of this partition
  bool interleaved = false;

  MOE_HD float operator[](std::int64_t i) const {
    if (!activation.gated()) return activation(to_float(in[i]), 0.0F);
    return interleaved ? activation(to_float(in[2 * i]), to_float(in[2 * i + 1])) : activation(to_float(in[i]), to_float(in[width + i]));
  }

#if defined(__CUDACC__)
  /// Elements [at, at + 8) of the row, zero from n on. Halves that begin at 16-byte boundaries are read in vectors.
  __device__ void load8(std::int64_t at, std::int64_t n, float (&v)[8]) const {
    bool const halves = activation.gated() && !interleaved;
    auto const address = reinterpret_cast<std::uintptr_t>(in) | reinterpret_cast<std::uintptr_t>(in + (halves ? width : 0));
    if (!halves || at + 8 > n || address % 16 != 0 || at * static_cast<std::int64_t>(sizeof(In)) % 16 != 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) v[i] = at + i < n ? (*this)[at + i] : 0.0F;
      return;
    }
    alignas(16) In gate[8], up[8];
    constexpr int kVectors = static_cast<int>(sizeof gate / sizeof(uint4));
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      reinterpret_cast<uint4*>(gate)[i] = reinterpret_cast<uint4 const*>(in + at)[i];
      reinterpret_cast<uint4*>(up)[i] = reinterpret_cast<uint4 const*>(in + width + at)[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = activation(to_float(gate[i]), to_float(up[i]));
  }
#endif
};
template <class Activation, class In>
ActivatedRow(Activation, In const*, std::int64_t, bool) -> ActivatedRow<Activation, In>;

}  // namespace moe::experts
