// SPDX-License-Identifier: Apache-2.0
// c/tensor.hpp: a DLTensor to a view of the library, with a check of everything that the view relies on.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "moe/c/status.hpp"
#include "moe/core/array.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/moe.h"

namespace moe::c {

/// "float32", "bfloat16", "uint8", "float4_e2m1fnx2", ...
inline std::string describe(DLDataType type) {
  std::string const lanes = type.lanes == 1 ? "" : text("x", type.lanes);
  int const bits = type.bits;
  switch (type.code) {
    case kDLInt: return text("int", bits, lanes);
    case kDLUInt: return text("uint", bits, lanes);
    case kDLFloat: return text("float", bits, lanes);
    case kDLBfloat: return text("bfloat", bits, lanes);
    case kDLBool: return text("bool", lanes);
    case MOE_DL_FLOAT8_E4M3FN: return text("float8_e4m3fn", lanes);
    case MOE_DL_FLOAT8_E8M0FNU: return text("float8_e8m0fnu", lanes);
    case MOE_DL_FLOAT4_E2M1FN: return text("float4_e2m1fn", lanes);
    default: return text("DLPack type code ", static_cast<int>(type.code), " of ", bits, " bits", lanes);
  }
}
inline std::string describe(DLDevice device) {
  switch (static_cast<int>(device.device_type)) {
    case kDLCPU: return "cpu";
    case kDLCUDA: return text("cuda:", device.device_id);
    case kDLCUDAHost: return "cuda_host";
    case kDLCUDAManaged: return "cuda_managed";
    default: return text("DLPack device ", static_cast<int>(device.device_type), ":", device.device_id);
  }
}
/// "[3, 4]": `n` extents or strides.
inline std::string describe(std::int64_t const* values, int n) {
  std::string out = "[";
  for (int i = 0; i < n; ++i) out += text(i == 0 ? "" : ", ", values[i]);
  return out + "]";
}

/// The dtype that DLPack has for an element of the library.
template <class T>
constexpr DLDataType dl_type() {
  using U = std::remove_cv_t<T>;
  constexpr auto kBits = static_cast<std::uint8_t>(sizeof(U) * 8);
  if constexpr (std::is_same_v<U, bf16>) {
    return {kDLBfloat, kBits, 1};
  } else if constexpr (std::is_same_v<U, float> || std::is_same_v<U, double> || std::is_same_v<U, f16>) {
    return {kDLFloat, kBits, 1};
  } else {
    static_assert(std::is_integral_v<U>, "no DLPack type for this element");
    return {static_cast<std::uint8_t>(std::is_signed_v<U> ? kDLInt : kDLUInt), kBits, 1};
  }
}
constexpr bool same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes; }

/// Where a runner works. `id`: of the GPU.
struct Device {
  SpaceKind space = SpaceKind::host;
  int id = 0;
  bool operator==(Device const&) const = default;
};
inline std::string describe(Device device) { return device.space == SpaceKind::host ? std::string("cpu") : text("cuda:", device.id); }

/// Page-locked memory counts as the host's, managed memory as that of the GPU it names. E_UNSUPPORTED for any other device.
inline Device device_of(char const* what, DLTensor const& t) {
  switch (static_cast<int>(t.device.device_type)) {
    case kDLCPU:
    case kDLCUDAHost: return {};
    case kDLCUDA:
    case kDLCUDAManaged: return {SpaceKind::cuda, t.device.device_id};
    default: throw Error(ErrorCode::unsupported, text(what, ": device is ", describe(t.device), ", the library has cpu and cuda"));
  }
}

namespace detail {

[[noreturn, gnu::noinline, gnu::cold]] inline void refuse(char const* what, std::string const& is, std::string const& expected) {
  throw Error(ErrorCode::argument, text(what, ": ", is, ", expected ", expected));
}
[[noreturn, gnu::noinline, gnu::cold]] inline void refuse_dtype(char const* what, DLDataType is, DLDataType expected) {
  refuse(what, text("dtype is ", describe(is)), describe(expected));
}
[[noreturn, gnu::noinline, gnu::cold]] inline void refuse_shape(char const* what, DLTensor const& t, std::string const& expected) {
  refuse(what, t.ndim < 0 || t.ndim > 8 ? text("ndim is ", t.ndim) : text("shape is ", describe(t.shape, t.ndim)), expected);
}

/// Of one array, in elements: no product of an extent or stride below it and an element's bytes overflows.
inline constexpr std::int64_t kMostElements = std::int64_t{1} << 46;

/// kMostElements where the array has more.
inline std::int64_t count(DLTensor const& t) {
  std::int64_t n = 1;
  for (int i = 0; i < t.ndim; ++i) {
    if (__builtin_mul_overflow(n, t.shape[i], &n) || n > kMostElements) return kMostElements;
  }
  return n;
}

/// Number of dimensions, non-negative extents, fewer than kMostElements, device.
inline void check_frame(char const* what, DLTensor const& t, int ndim, Device device) {
  if (t.ndim != ndim) refuse_shape(what, t, text(ndim, ndim == 1 ? " dimension" : " dimensions"));
  if (t.shape == nullptr) throw Error(ErrorCode::argument, text(what, ": shape is NULL"));
  for (int i = 0; i < ndim; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > (std::int64_t{1} << 40)) refuse_shape(what, t, "extents of [0, 2^40]");
  }
  if (count(t) == kMostElements) refuse_shape(what, t, "fewer than 2^46 elements");
  if (Device const is = device_of(what, t); is != device) refuse(what, text("device is ", describe(t.device)), describe(device));
}
template <class T>
T* data_of(char const* what, DLTensor const& t, std::int64_t elements) {
  if (elements > 0 && t.data == nullptr) throw Error(ErrorCode::argument, text(what, ": data is NULL for ", elements, " elements"));
  auto* const data = static_cast<std::byte*>(t.data) + (t.data == nullptr ? 0 : t.byte_offset);
  if (reinterpret_cast<std::uintptr_t>(data) % alignof(T) != 0) {
    refuse(what, text("data is at address ", static_cast<void const*>(data)), text("a multiple of ", alignof(T), " bytes"));
  }
  return reinterpret_cast<T*>(data);
}
/// An array without elements is, whatever its strides.
inline bool contiguous(DLTensor const& t) {
  if (t.strides == nullptr || count(t) == 0) return true;
  std::int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] > 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

}  // namespace detail

/// [rows, cols] with adjacent elements in a row; rows may lie apart. E_ARG, naming `what`. Cols: a fixed width, or dynamic.
template <class T, int Cols = dynamic>
Rows<T, Cols> rows_of(char const* what, DLTensor const* given, Device device) {
  DLTensor const& t = *not_null(what, given);
  detail::check_frame(what, t, 2, device);
  if (!same(t.dtype, dl_type<T>())) detail::refuse_dtype(what, t.dtype, dl_type<T>());
  std::int64_t const rows = t.shape[0];
  std::int64_t const cols = t.shape[1];
  if (Cols != dynamic && cols != Cols) detail::refuse_shape(what, t, text("[rows, ", Cols, "]"));
  std::int64_t stride = cols;
  if (t.strides != nullptr) {
    if (rows > 0 && cols > 1 && t.strides[1] != 1) {
      detail::refuse(what, text("strides are ", describe(t.strides, 2)), "adjacent elements in a row, stride 1");
    }
    if (rows > 1) stride = t.strides[0];
    if (rows > 1 && stride < cols)
      detail::refuse(what, text("strides are ", describe(t.strides, 2)), text("a row stride of at least ", cols));
    if (rows > 1 && stride > detail::kMostElements / rows)
      detail::refuse(what, text("strides are ", describe(t.strides, 2)), "fewer than 2^46 elements from the first row to the last");
  }
  return make_strided_rows<Cols>(detail::data_of<T>(what, t, rows * cols), rows, cols, stride);
}

/// The data of a contiguous array of any shape with `elements` elements. E_ARG.
template <class T>
T* contiguous_data(char const* what, DLTensor const& t) {
  if (!detail::contiguous(t))
    detail::refuse(what, text("strides are ", describe(t.strides, t.ndim)), text("contiguous rows of ", describe(t.shape, t.ndim)));
  return detail::data_of<T>(what, t, detail::count(t));
}

/// [n], contiguous, of exactly these extents. E_ARG.
template <class T>
T* vector_of(char const* what, DLTensor const* given, std::int64_t n, Device device) {
  DLTensor const& t = *not_null(what, given);
  detail::check_frame(what, t, 1, device);
  if (!same(t.dtype, dl_type<T>())) detail::refuse_dtype(what, t.dtype, dl_type<T>());
  if (t.shape[0] != n) detail::refuse_shape(what, t, text("[", n, "]"));
  return contiguous_data<T>(what, t);
}

}  // namespace moe::c
