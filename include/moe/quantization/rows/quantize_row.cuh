// SPDX-License-Identifier: Apache-2.0
// quantization/rows/quantize_row.cuh: a warp quantises one row with 16-byte loads, bit for bit as Quantization::quantize_row does.
//
// These are device functions for other kernels to inline: a transport calls them in its send loop, an experts kernel between its GEMMs.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/core/rounded.hpp"
#include "moe/core/types.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

namespace detail {

inline constexpr int kWarp = 32;
inline constexpr int kLaneElements = 8;  ///< 16 bytes of bf16; a group of 128 is 16 lanes, of 32 is 4, of 16 is 2
inline constexpr int kWarpElements = kWarp * kLaneElements;

__device__ inline bool aligned(void const* p, unsigned bytes) { return (reinterpret_cast<std::uintptr_t>(p) & (bytes - 1U)) == 0; }

/// Elements [at, at + 8) of a row of n as float; zero past the end, which does not change the amax.
template <class Act>
__device__ inline void load8(Act const* x, std::int64_t at, std::int64_t n, bool vector, float (&v)[kLaneElements]) {
  if (vector && at + kLaneElements <= n) {
    alignas(16) Act raw[kLaneElements];
    auto* const to = reinterpret_cast<uint4*>(raw);
    auto const* const from = reinterpret_cast<uint4 const*>(x + at);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof raw / sizeof(uint4)); ++i) to[i] = from[i];
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) v[i] = to_float(raw[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) v[i] = at + i < n ? to_float(x[at + i]) : 0.0F;
  }
}

/// The same for any row: an array, or values that are computed eight at a time.
template <class Row>
__device__ inline void read8(Row const& x, std::int64_t at, std::int64_t n, bool vector, float (&v)[kLaneElements]) {
  if constexpr (std::is_pointer_v<Row>) {
    load8(x, at, n, vector, v);
  } else {
    x.load8(at, n, v);
  }
}
template <class Row>
__device__ inline bool in_vectors([[maybe_unused]] Row const& x) {
  if constexpr (std::is_pointer_v<Row>) {
    return aligned(x, 16);
  } else {
    return false;
  }
}

/// Eight values over the factor d, rounded as by Codec::encode. A power of two is multiplied by its exact reciprocal: the same bits.
template <class Codec>
__device__ inline void ratios8(float (&v)[kLaneElements], float d) {
  if constexpr (Codec::kPowerOfTwo) {
    std::uint32_t const exponent = float_bits(d) >> 23;  // 0 (2^-127) … 254, 255: NaN
    float const reciprocal = exponent == 255U ? d : exponent == 254U ? bits_float(0x00400000U) : bits_float((254U - exponent) << 23);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) v[i] *= reciprocal;
  } else {
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) v[i] = div_rn(v[i], d);
  }
}

/// Codes of eight values, in the order of memory: 8 bytes, or 4 of packed nibbles in the low half.
template <class Codec>
__device__ inline std::uint64_t encode8(float (&v)[kLaneElements], float d) {
  std::uint64_t out = 0;
  if constexpr (std::is_same_v<Codec, Nvfp4Codec>) {
    if (d == 0.0F) return 0;
  }
  ratios8<Codec>(v, d);
#if __CUDA_ARCH__ >= 890
  if constexpr (Codec::kCodeDType == DType::e4m3) {
#pragma unroll
    for (int i = 0; i < kLaneElements; i += 2) {  // the instruction converts two; every NaN becomes 0x7F
      std::uint64_t const pair = __nv_cvt_float2_to_fp8x2(make_float2(v[i], v[i + 1]), __NV_SATFINITE, __NV_E4M3);
      out |= pair << (8 * i);
    }
    return out;
  }
#endif
  constexpr int kBits = 8 / Codec::kPack;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) {
    out |= static_cast<std::uint64_t>(static_cast<std::uint8_t>(Codec::round_code(v[i]))) << (kBits * i);
  }
  return out;
}

/// Writes the codes of elements [at, at + 8) of a row of n.
template <class Codec>
__device__ inline void store8(typename Codec::Code* q, std::int64_t at, std::int64_t n, bool vector, std::uint64_t codes) {
  if (vector && at + kLaneElements <= n) {
    if constexpr (Codec::kPack == 1) {
      *reinterpret_cast<uint2*>(q + at) = make_uint2(static_cast<unsigned>(codes), static_cast<unsigned>(codes >> 32));
    } else {
      *reinterpret_cast<unsigned*>(q + at / 2) = static_cast<unsigned>(codes);
    }
  } else {
    constexpr int kPack = Codec::kPack;
#pragma unroll
    for (int i = 0; i < kLaneElements; i += kPack) {
      if (at + i >= n) return;
      auto byte = static_cast<std::uint8_t>(codes >> (8 / kPack * i));
      if (kPack == 2 && at + i + 1 == n) byte &= 15U;
      q[(at + i) / kPack] = static_cast<typename Codec::Code>(byte);
    }
  }
}

template <class Codec>
__device__ inline std::uint32_t amax8(Codec const& codec, float const (&v)[kLaneElements]) {
  std::uint32_t amax = 0;
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i) amax = max(amax, codec.magnitude(v[i]));
  return amax;
}

}  // namespace detail

/// One row by one full warp; every lane calls it with its lane number. x [n], an array or a row that is computed (load8()), q
/// [payload_cols(n)], s [scale_cols(n)] in global or shared memory, of this or of a peer device; s may be null if the scheme sends no
/// scales. Rows that begin at 16-byte boundaries (q: 8 bytes, 4 for 4-bit codes) move in vectors, others element by element.
template <class Scheme, class Act, class Row>
__device__ inline void quantize_row_warp(Scheme const& scheme, Row const& x, std::int64_t n, typename Scheme::template Payload<Act>* q,
                                         [[maybe_unused]] typename Scheme::Scale* s, int lane) {
  using namespace detail;
  if constexpr (!Scheme::kQuantizesActivations && !std::is_pointer_v<Row>) {
    for (std::int64_t i = lane; i < n; i += kWarp) q[i] = element_as<Act>(x[i]);
  } else if constexpr (!Scheme::kQuantizesActivations) {
    constexpr int kPerVector = 16 / static_cast<int>(sizeof(Act));
    std::int64_t const vectors = aligned(x, 16) && aligned(q, 16) ? n / kPerVector : 0;
    for (std::int64_t i = lane; i < vectors; i += kWarp) reinterpret_cast<uint4*>(q)[i] = reinterpret_cast<uint4 const*>(x)[i];
    for (std::int64_t i = vectors * kPerVector + lane; i < n; i += kWarp) q[i] = x[i];
  } else {
    using Codec = typename Scheme::Codec;
    bool const vector_in = in_vectors(x);
    bool const vector_out = aligned(q, 8 / Codec::kPack);
    constexpr int kGroup = Scheme::kActGroup;
    float v[kLaneElements];
    if constexpr (kGroup == 0) {
      float d = 0;
      if constexpr (Scheme::kActGranularity == ScaleGranularity::per_tensor) {
        d = scheme.params.scale;
      } else {
        std::uint32_t amax = 0;
        for (std::int64_t at = lane * kLaneElements; at < n; at += kWarpElements) {
          read8(x, at, n, vector_in, v);
          amax = max(amax, amax8(scheme.act, v));
        }
        auto const scale = scheme.act.scale(__reduce_max_sync(0xFFFFFFFFU, amax));
        if (lane == 0) s[0] = scale;
        d = scheme.act.factor(scale);
      }
      // The row is read again: it is in the cache now, and registers could not hold a row of any width.
      for (std::int64_t at = lane * kLaneElements; at < n; at += kWarpElements) {
        read8(x, at, n, vector_in, v);
        store8<Codec>(q, at, n, vector_out, encode8<Codec>(v, d));
      }
    } else {
      constexpr int kLanes = kGroup / kLaneElements;
      static_assert(kGroup % kLaneElements == 0 && kWarp % kLanes == 0, "a group is a power of two of lanes");
      // All lanes run every step, because the shuffles need them.
      for (std::int64_t base = 0; base < n; base += kWarpElements) {
        std::int64_t const at = base + lane * kLaneElements;
        read8(x, at, n, vector_in, v);
        std::uint32_t amax = amax8(scheme.act, v);
#pragma unroll
        for (int offset = kLanes / 2; offset > 0; offset /= 2) amax = max(amax, __shfl_xor_sync(0xFFFFFFFFU, amax, offset));
        auto const scale = scheme.act.scale(amax);
        if (at < n) {
          if (lane % kLanes == 0) s[at / kGroup] = scale;
          store8<Codec>(q, at, n, vector_out, encode8<Codec>(v, scheme.act.factor(scale)));
        }
      }
    }
  }
}

/// The inverse, by one warp: out [n] in float32 = code · scale, bit for bit as dequantize_row does.
template <class Scheme, class Act>
__device__ inline void dequantize_row_warp(Scheme const& scheme, typename Scheme::template Payload<Act> const* q,
                                           [[maybe_unused]] typename Scheme::Scale const* s, std::int64_t n, float* out, int lane) {
  for (std::int64_t i = lane; i < n; i += detail::kWarp) {
    if constexpr (!Scheme::kQuantizesActivations) {
      out[i] = to_float(q[i]);
    } else {
      using Codec = typename Scheme::Codec;
      float d = 0;
      if constexpr (Scheme::kActGranularity == ScaleGranularity::per_tensor) {
        d = scheme.params.scale;
      } else {
        d = scheme.act.factor(s[Scheme::kActGroup == 0 ? 0 : i / (Scheme::kActGroup == 0 ? 1 : Scheme::kActGroup)]);
      }
      out[i] = scheme.act.decode(detail::load_code<Codec>(q, i), d);
    }
  }
}

}  // namespace moe::quantization
