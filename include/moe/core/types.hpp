// SPDX-License-Identifier: Apache-2.0
// core/types.hpp: element types, their run-time names, conversions, and the enumerations that policies state as facts.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <string_view>
#include <type_traits>

#ifdef __CUDACC__
#define MOE_HD __host__ __device__
#else
#define MOE_HD
#endif

namespace moe {

using bf16 = __nv_bfloat16;
using f16 = __half;
using e4m3 = __nv_fp8_e4m3;  ///< the "fn" variant: no infinity, max 448
using e5m2 = __nv_fp8_e5m2;

/// Element types of tensors in memory and in files. Four-bit types hold two elements a byte, low nibble first.
enum class DType : std::uint8_t { f64, f32, f16, bf16, e4m3, e5m2, e8m0, e2m1, i64, i32, i16, i8, u8, u4, boolean };

constexpr std::string_view name(DType t) {
  switch (t) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::f16: return "f16";
    case DType::bf16: return "bf16";
    case DType::e4m3: return "e4m3";
    case DType::e5m2: return "e5m2";
    case DType::e8m0: return "e8m0";
    case DType::e2m1: return "e2m1";
    case DType::i64: return "i64";
    case DType::i32: return "i32";
    case DType::i16: return "i16";
    case DType::i8: return "i8";
    case DType::u8: return "u8";
    case DType::u4: return "u4";
    case DType::boolean: return "bool";
  }
  return "?";
}

/// Bits of one element.
constexpr int bits(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64: return 64;
    case DType::f32:
    case DType::i32: return 32;
    case DType::f16:
    case DType::bf16:
    case DType::i16: return 16;
    case DType::e2m1:
    case DType::u4: return 4;
    default: return 8;
  }
}

template <class T>
struct dtype_of_impl;
template <>
struct dtype_of_impl<double> {
  static constexpr DType value = DType::f64;
};
template <>
struct dtype_of_impl<float> {
  static constexpr DType value = DType::f32;
};
template <>
struct dtype_of_impl<f16> {
  static constexpr DType value = DType::f16;
};
template <>
struct dtype_of_impl<bf16> {
  static constexpr DType value = DType::bf16;
};
template <>
struct dtype_of_impl<e4m3> {
  static constexpr DType value = DType::e4m3;
};
template <>
struct dtype_of_impl<e5m2> {
  static constexpr DType value = DType::e5m2;
};
template <>
struct dtype_of_impl<std::int64_t> {
  static constexpr DType value = DType::i64;
};
template <>
struct dtype_of_impl<std::int32_t> {
  static constexpr DType value = DType::i32;
};
template <>
struct dtype_of_impl<std::int16_t> {
  static constexpr DType value = DType::i16;
};
template <>
struct dtype_of_impl<std::int8_t> {
  static constexpr DType value = DType::i8;
};
template <>
struct dtype_of_impl<std::uint8_t> {
  static constexpr DType value = DType::u8;
};
/// The DType of a C++ element type.
template <class T>
inline constexpr DType dtype_of = dtype_of_impl<std::remove_cv_t<T>>::value;

/// Widening to float is exact for every type here.
MOE_HD inline float to_float(float v) { return v; }
MOE_HD inline float to_float(bf16 v) { return __bfloat162float(v); }
MOE_HD inline float to_float(f16 v) { return __half2float(v); }

/// Narrowing rounds to nearest even (float32 → T, one rounding).
template <class T>
MOE_HD inline T from_float(float v) {
  if constexpr (std::is_same_v<T, bf16>) {
    return __float2bfloat16_rn(v);
  } else if constexpr (std::is_same_v<T, f16>) {
    return __float2half_rn(v);
  } else {
    static_assert(std::is_same_v<T, float>, "from_float narrows to float, bf16 or f16");
    return v;
  }
}

/// Where memory lives and code runs. A composition is of one space.
enum class SpaceKind : std::uint8_t { host, cuda };
constexpr std::string_view name(SpaceKind s) { return s == SpaceKind::host ? "host" : "cuda"; }

namespace space {
struct host {
  static constexpr SpaceKind kKind = SpaceKind::host;
  static constexpr char const* kName = "host";
};
struct cuda {
  static constexpr SpaceKind kKind = SpaceKind::cuda;
  static constexpr char const* kName = "cuda";
};
}  // namespace space

/// The layout of tokens for the experts.
enum class ActivationFormat : std::uint8_t {
  standard,  ///< [rows, hidden], any order, k local ids per row
  batched,   ///< [num_local_experts, capacity, hidden], the first expert_num_tokens[e] rows of each block are defined
};
constexpr std::string_view name(ActivationFormat f) { return f == ActivationFormat::standard ? "standard" : "batched"; }

/// Which stage multiplies by the top-k weights and sums over k.
enum class TopKReduction : std::uint8_t {
  experts,  ///< apply() writes weighted rows, summed over the row's local experts
  backend,  ///< finalize() weights and sums ("delegate")
};
constexpr std::string_view name(TopKReduction r) { return r == TopKReduction::experts ? "experts" : "backend"; }

/// "No expert": masked token, padding, dropped slot, expert on another rank. Contributes exactly zero and reads nothing.
inline constexpr int kNoExpert = -1;
/// Most experts per token.
inline constexpr int kMaxTopK = 32;
/// Base and row alignment in bytes of every tensor that an exchange or a grouped GEMM touches.
inline constexpr int kAlignment = 16;

}  // namespace moe
