// SPDX-License-Identifier: Apache-2.0
// quantization/format/codecs.hpp: the arithmetic inside one scale group (the elements that share a scale): amax → scale, value ↔ code.
//
// A type of this file, a codec, is only the arithmetic of a scheme; rows.hpp, block_weights.hpp and quantize_row.cuh loop over rows, scale
// groups and lanes. It has
//   Code, Scale       storage types;  kCodeDType, kScaleDType  the same as values;  kPack  codes a Code holds
//   magnitude(x)      what enters the scale group's amax: an unsigned integer whose order is that of |x|
//   scale(amax)       the stored scale
//   factor(scale)     the float32 that codes are multiplied with;  kPowerOfTwo  true if it always is one (or NaN)
//   encode(x, factor) one code (4-bit codes in the low nibble): that of the correctly rounded x / factor, round_code(x / factor)
//   decode(code, factor)  its value
// Below them: groups of weight-only integers, and codes stored to and loaded from a row.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/core/rounded.hpp"
#include "moe/quantization/format/formats.hpp"
#include "moe/quantization/format/scales.hpp"

namespace moe::quantization {

/// e4m3 elements, s = amax / 448. A scale group with NaN or infinity: scale NaN, every code NaN.
template <ScaleFloor Floor = ScaleFloor::amax_1e10, ScaleFormat Format = ScaleFormat::f32>
struct Fp8Codec {
  using Code = std::uint8_t;
  using Scale = std::conditional_t<Format == ScaleFormat::ue8m0, std::uint8_t, float>;
  static constexpr DType kCodeDType = DType::e4m3;
  static constexpr DType kScaleDType = Format == ScaleFormat::ue8m0 ? DType::e8m0 : DType::f32;
  static constexpr int kPack = 1;
  static constexpr bool kPowerOfTwo = Format != ScaleFormat::f32;

  MOE_HD static std::uint32_t magnitude(float x) { return abs_bits(x); }
  MOE_HD static Scale scale(std::uint32_t amax) {
    float const s = scale_from_amax<Floor>(amax, kE4m3Max);
    if constexpr (Format == ScaleFormat::f32) {
      return s;
    } else if constexpr (Format == ScaleFormat::ue8m0) {
      return ceil_e8m0(s);
    } else {
      return decode_e8m0(ceil_e8m0(s));
    }
  }
  MOE_HD static float factor(Scale s) {
    if constexpr (Format == ScaleFormat::ue8m0) {
      return decode_e8m0(s);
    } else {
      return s;
    }
  }
  MOE_HD static std::uint8_t round_code(float v) { return v == v ? encode_e4m3(v) : kE4m3Nan; }
  MOE_HD static std::uint8_t encode(float x, float d) { return round_code(div_rn(x, d)); }
  MOE_HD static float decode(std::uint32_t code, float d) { return decode_e4m3(static_cast<std::uint8_t>(code)) * d; }
};

/// int8 elements, s = amax / 127 over the finite elements: infinity clamps, NaN becomes 0.
struct Int8Codec {
  using Code = std::int8_t;
  using Scale = float;
  static constexpr DType kCodeDType = DType::i8;
  static constexpr DType kScaleDType = DType::f32;
  static constexpr int kPack = 1;
  static constexpr bool kPowerOfTwo = false;

  MOE_HD static std::uint32_t magnitude(float x) {
    std::uint32_t const u = abs_bits(x);
    return u < kInfBits ? u : 0U;
  }
  MOE_HD static float scale(std::uint32_t amax) { return scale_from_amax<ScaleFloor::amax_1e10>(amax, kInt8Max); }
  MOE_HD static float factor(float s) { return s; }
  MOE_HD static std::int8_t round_code(float v) { return encode_int8(v); }
  MOE_HD static std::int8_t encode(float x, float d) { return round_code(div_rn(x, d)); }
  MOE_HD static float decode(std::int32_t code, float d) { return static_cast<float>(code) * d; }
};

/// Symmetric integers of `Bits` = 4 or 8 (WNa16 checks it) stored with an offset (zero point 8 or 128), as weight-only kernels read them.
template <int Bits>
struct OffsetIntCodec {
  using Code = std::uint8_t;
  using Scale = float;
  static constexpr DType kCodeDType = Bits == 4 ? DType::u4 : DType::u8;
  static constexpr DType kScaleDType = DType::f32;
  static constexpr int kPack = 8 / Bits;
  static constexpr bool kPowerOfTwo = false;
  static constexpr int kZero = Bits == 4 ? 8 : 128;
  static constexpr float kLimit = Bits == 4 ? kInt4Max : kInt8Max;

  MOE_HD static std::uint32_t magnitude(float x) { return Int8Codec::magnitude(x); }
  MOE_HD static float scale(std::uint32_t amax) { return scale_from_amax<ScaleFloor::amax_1e10>(amax, kLimit); }
  MOE_HD static float factor(float s) { return s; }
  MOE_HD static std::uint8_t round_code(float v) { return static_cast<std::uint8_t>(encode_integer(v, -kLimit, kLimit) + kZero); }
  MOE_HD static std::uint8_t encode(float x, float d) { return round_code(div_rn(x, d)); }
  MOE_HD static float decode(std::uint32_t code, float d) { return static_cast<float>(static_cast<int>(code) - kZero) * d; }
};

/// e4m3 elements under a shared power of two (e8m0).
template <MxRule Rule>
struct Mxfp8Codec {
  using Code = std::uint8_t;
  using Scale = std::uint8_t;
  static constexpr DType kCodeDType = DType::e4m3;
  static constexpr DType kScaleDType = DType::e8m0;
  static constexpr int kPack = 1;
  static constexpr bool kPowerOfTwo = true;

  MOE_HD static std::uint32_t magnitude(float x) { return abs_bits(x); }
  MOE_HD static std::uint8_t scale(std::uint32_t amax) { return mx_exponent<Rule, 3, 8>(amax); }
  MOE_HD static float factor(std::uint8_t b) { return decode_e8m0(b); }
  MOE_HD static std::uint8_t round_code(float v) { return Fp8Codec<>::round_code(v); }
  MOE_HD static std::uint8_t encode(float x, float d) { return round_code(div_rn(x, d)); }
  MOE_HD static float decode(std::uint32_t code, float d) { return Fp8Codec<>::decode(code, d); }
};

/// e2m1 elements under a shared power of two (e8m0). e2m1 has no NaN: a block with NaN or infinity has exponent byte 255 and codes 0.
template <MxRule Rule>
struct Mxfp4Codec {
  using Code = std::uint8_t;
  using Scale = std::uint8_t;
  static constexpr DType kCodeDType = DType::e2m1;
  static constexpr DType kScaleDType = DType::e8m0;
  static constexpr int kPack = 2;
  static constexpr bool kPowerOfTwo = true;

  MOE_HD static std::uint32_t magnitude(float x) { return abs_bits(x); }
  MOE_HD static std::uint8_t scale(std::uint32_t amax) { return mx_exponent<Rule, 1, 2>(amax); }
  MOE_HD static float factor(std::uint8_t b) { return decode_e8m0(b); }
  MOE_HD static std::uint8_t round_code(float v) { return v == v ? encode_e2m1(v) : std::uint8_t{0}; }
  MOE_HD static std::uint8_t encode(float x, float d) { return round_code(div_rn(x, d)); }
  MOE_HD static float decode(std::uint32_t code, float d) { return decode_e2m1(static_cast<std::uint8_t>(code)) * d; }
};

/// e2m1 elements under an e4m3 block scale under one float32 for the tensor. `global_scale` multiplies when dequantising, as checkpoints
/// store it (weight_scale_2, input_scale): amax of the tensor / (448 · 6). Its reciprocal is what some kernels call the global scale.
struct Nvfp4Codec {
  using Code = std::uint8_t;
  using Scale = std::uint8_t;
  static constexpr DType kCodeDType = DType::e2m1;
  static constexpr DType kScaleDType = DType::e4m3;
  static constexpr int kPack = 2;
  static constexpr bool kPowerOfTwo = false;

  float global_scale = 1.0F;

  /// The global scale of a tensor whose largest finite magnitude has these bits.
  MOE_HD static float global_from_amax(std::uint32_t amax) {
    float const a = bits_float(amax);
    return div_rn(a < kAmaxFloor ? kAmaxFloor : a, kE2m1Max * kE4m3Max);
  }
  MOE_HD static std::uint32_t magnitude(float x) { return abs_bits(x); }
  MOE_HD std::uint8_t scale(std::uint32_t amax) const {
    if (amax >= kInfBits) return kE4m3Nan;
    return encode_e4m3(div_rn(div_rn(bits_float(amax), kE2m1Max), global_scale));
  }
  MOE_HD float factor(std::uint8_t s) const { return decode_e4m3(s) * global_scale; }
  MOE_HD static std::uint8_t round_code(float v) { return Mxfp4Codec<MxRule::ocp>::round_code(v); }
  MOE_HD static std::uint8_t encode(float x, float d) {
    if (d == 0.0F) return 0;  // the block is too small for any e4m3 scale under this global scale
    return round_code(div_rn(x, d));
  }
  MOE_HD static float decode(std::uint32_t code, float d) { return decode_e2m1(static_cast<std::uint8_t>(code)) * d; }
};

/// The actual group of a row of `cols` elements: `group` halved until it divides `cols`; 0 if that would be fewer than 32 (or fewer than
/// `group` if `group` is already below 32). group 0: the whole row. docs/semantics/quantization.md §5.
MOE_HD constexpr std::int64_t effective_group(std::int64_t cols, std::int64_t group) {
  if (group == 0) return cols;
  if (cols <= 0) return group;
  std::int64_t g = group;
  while (cols % g != 0) {
    if (g / 2 < 32) return 0;
    g /= 2;
  }
  return g;
}

/// Scale of a group, with the zero point that is subtracted from the code first.
struct ScaleZero {
  float scale;
  float zero;
  friend bool operator==(ScaleZero const&, ScaleZero const&) = default;
};

/// Asymmetric codes 0 … 2^Bits - 1: x ≈ (code - zero) · scale. Only decoded here: released checkpoints contain the codes.
template <int Bits>
struct ZeroPointCodec {
  using Code = std::uint8_t;
  using Scale = ScaleZero;
  static constexpr DType kCodeDType = Bits == 4 ? DType::u4 : DType::u8;
  static constexpr int kPack = 8 / Bits;

  MOE_HD static ScaleZero factor(ScaleZero s) { return s; }
  MOE_HD static float decode(std::uint32_t code, ScaleZero s) { return (static_cast<float>(code) - s.zero) * s.scale; }
};

namespace detail {

/// Stores code i of a row; the even code of a packed pair is stored first, which also clears the odd one.
template <class Codec>
MOE_HD inline void store_code(typename Codec::Code* row, std::int64_t i, typename Codec::Code code) {
  if constexpr (Codec::kPack == 1) {
    row[i] = code;
  } else if ((i & 1) == 0) {
    row[i >> 1] = code & 15U;
  } else {
    row[i >> 1] = pack_nibbles(row[i >> 1], code);
  }
}
template <class Codec>
MOE_HD inline auto load_code(typename Codec::Code const* row, std::int64_t i) {
  if constexpr (Codec::kPack == 1) {
    return row[i];
  } else {
    return nibble(row, i);
  }
}

}  // namespace detail

}  // namespace moe::quantization
