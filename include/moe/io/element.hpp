// SPDX-License-Identifier: Apache-2.0
// io/element.hpp: the element types of safetensors files, and their conversion to the library's types while loading.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

/// Every element type of the safetensors format. Sub-byte types are packed, low bits first.
enum class FileDType : std::uint8_t {
  f64,
  f32,
  f16,
  bf16,
  f8_e4m3,
  f8_e5m2,
  f8_e8m0,
  f6_e2m3,
  f6_e3m2,
  f4,
  i64,
  i32,
  i16,
  i8,
  u64,
  u32,
  u16,
  u8,
  boolean,
  c64,
};

namespace detail {
struct FileDTypeRow {
  FileDType type;
  std::string_view name;
  int bits;
};
inline constexpr std::array<FileDTypeRow, 20> kFileDTypes{{
    {FileDType::f64, "F64", 64},        {FileDType::f32, "F32", 32},        {FileDType::f16, "F16", 16},
    {FileDType::bf16, "BF16", 16},      {FileDType::f8_e4m3, "F8_E4M3", 8}, {FileDType::f8_e5m2, "F8_E5M2", 8},
    {FileDType::f8_e8m0, "F8_E8M0", 8}, {FileDType::f6_e2m3, "F6_E2M3", 6}, {FileDType::f6_e3m2, "F6_E3M2", 6},
    {FileDType::f4, "F4", 4},           {FileDType::i64, "I64", 64},        {FileDType::i32, "I32", 32},
    {FileDType::i16, "I16", 16},        {FileDType::i8, "I8", 8},           {FileDType::u64, "U64", 64},
    {FileDType::u32, "U32", 32},        {FileDType::u16, "U16", 16},        {FileDType::u8, "U8", 8},
    {FileDType::boolean, "BOOL", 8},    {FileDType::c64, "C64", 64},
}};
}  // namespace detail

/// The name in the file's header: "F32", "BF16", …
constexpr std::string_view name(FileDType t) { return detail::kFileDTypes[static_cast<std::size_t>(t)].name; }
/// Bits of one element.
constexpr int bits(FileDType t) { return detail::kFileDTypes[static_cast<std::size_t>(t)].bits; }
/// The type with that name in a header; nullopt if there is none.
constexpr std::optional<FileDType> file_dtype(std::string_view spelled) {
  for (auto const& row : detail::kFileDTypes) {
    if (row.name == spelled) return row.type;
  }
  return std::nullopt;
}

/// True for the types that hold one real floating-point number in whole bytes.
constexpr bool is_floating(FileDType t) {
  return t == FileDType::f64 || t == FileDType::f32 || t == FileDType::f16 || t == FileDType::bf16 || t == FileDType::f8_e4m3 ||
         t == FileDType::f8_e5m2 || t == FileDType::f8_e8m0;
}
/// True for the integer types (BOOL included).
constexpr bool is_integer(FileDType t) { return (t >= FileDType::i64 && t <= FileDType::u8) || t == FileDType::boolean; }

/// The file's type for an element type of the library.
template <class T>
constexpr FileDType file_dtype_of() {
  using U = std::remove_cv_t<T>;
  if constexpr (std::is_same_v<U, double>)
    return FileDType::f64;
  else if constexpr (std::is_same_v<U, float>)
    return FileDType::f32;
  else if constexpr (std::is_same_v<U, f16>)
    return FileDType::f16;
  else if constexpr (std::is_same_v<U, bf16>)
    return FileDType::bf16;
  else if constexpr (std::is_same_v<U, e4m3>)
    return FileDType::f8_e4m3;
  else if constexpr (std::is_same_v<U, e5m2>)
    return FileDType::f8_e5m2;
  else if constexpr (std::is_same_v<U, std::int64_t>)
    return FileDType::i64;
  else if constexpr (std::is_same_v<U, std::int32_t>)
    return FileDType::i32;
  else if constexpr (std::is_same_v<U, std::int16_t>)
    return FileDType::i16;
  else if constexpr (std::is_same_v<U, std::int8_t>)
    return FileDType::i8;
  else {
    static_assert(std::is_same_v<U, std::uint8_t>, "no safetensors type for this element type");
    return FileDType::u8;
  }
}

namespace detail {

/// Value of an 8-bit float code with `mantissa` fraction bits; OCP 8-bit formats (e4m3 without infinity, e5m2 with).
constexpr float f8_value(int code, int mantissa, bool has_infinity) {
  int const exponent_bits = 7 - mantissa;
  int const bias = (1 << (exponent_bits - 1)) - 1;
  int const exponent = (code & 0x7F) >> mantissa;
  int const fraction = code & ((1 << mantissa) - 1);
  int const last = (1 << exponent_bits) - 1;
  if (has_infinity && exponent == last) {
    if (fraction != 0) return std::numeric_limits<float>::quiet_NaN();
    return (code & 0x80) != 0 ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
  }
  if (!has_infinity && (code & 0x7F) == 0x7F) return std::numeric_limits<float>::quiet_NaN();
  float value = exponent == 0 ? static_cast<float>(fraction) : static_cast<float>(fraction + (1 << mantissa));
  int shift = (exponent == 0 ? 1 : exponent) - bias - mantissa;
  for (; shift > 0; --shift) value *= 2.0F;
  for (; shift < 0; ++shift) value *= 0.5F;
  return (code & 0x80) != 0 ? -value : value;
}
template <int Mantissa, bool HasInfinity>
constexpr std::array<float, 256> f8_table() {
  std::array<float, 256> table{};
  for (int code = 0; code < 256; ++code) table[static_cast<std::size_t>(code)] = f8_value(code, Mantissa, HasInfinity);
  return table;
}

}  // namespace detail

/// Values of the 256 codes of e4m3 ("fn": no infinity, 0x7F and 0xFF are NaN) and e5m2.
inline constexpr std::array<float, 256> kE4m3Values = detail::f8_table<3, false>();
inline constexpr std::array<float, 256> kE5m2Values = detail::f8_table<2, true>();
/// Values of the 16 codes of e2m1.
inline constexpr std::array<float, 16> kE2m1Values{0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,  4.0F,  6.0F,
                                                   -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F};
/// Value of an exponent-only scale: 2^(code - 127); 255 is NaN.
inline float e8m0_value(std::uint8_t code) {
  return code == 255 ? std::numeric_limits<float>::quiet_NaN() : std::ldexp(1.0F, static_cast<int>(code) - 127);
}

namespace detail {

template <class T>
T load(std::byte const* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

/// Calls f(i, float value of element i) for `count` elements that start at `bytes`.
template <class F>
void for_each_float(FileDType type, std::byte const* bytes, std::int64_t count, F&& f) {
  auto each = [&](auto&& at) {
    for (std::int64_t i = 0; i < count; ++i) f(i, at(i));
  };
  switch (type) {
    case FileDType::f64: return each([&](std::int64_t i) { return static_cast<float>(load<double>(bytes + 8 * i)); });
    case FileDType::f32: return each([&](std::int64_t i) { return load<float>(bytes + 4 * i); });
    case FileDType::f16:
      return each([&](std::int64_t i) { return __half2float(__half(std::bit_cast<__half_raw>(load<std::uint16_t>(bytes + 2 * i)))); });
    case FileDType::bf16:
      return each(
          [&](std::int64_t i) { return std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(bytes + 2 * i)) << 16); });
    case FileDType::f8_e4m3: return each([&](std::int64_t i) { return kE4m3Values[static_cast<std::uint8_t>(bytes[i])]; });
    case FileDType::f8_e5m2: return each([&](std::int64_t i) { return kE5m2Values[static_cast<std::uint8_t>(bytes[i])]; });
    case FileDType::f8_e8m0: return each([&](std::int64_t i) { return e8m0_value(static_cast<std::uint8_t>(bytes[i])); });
    default: throw Error(ErrorCode::internal, one_line("dtype ", name(type), " has no floating-point value"));
  }
}

/// Calls f(i, value of element i as int64) for `count` elements; U64 values above the int64 range are passed as nullopt.
template <class F>
void for_each_integer(FileDType type, std::byte const* bytes, std::int64_t count, F&& f) {
  auto each = [&]<class U>(U) {
    for (std::int64_t i = 0; i < count; ++i) {
      U const value = load<U>(bytes + static_cast<std::int64_t>(sizeof(U)) * i);
      f(i, std::in_range<std::int64_t>(value) ? std::optional(static_cast<std::int64_t>(value)) : std::nullopt);
    }
  };
  switch (type) {
    case FileDType::i64: return each(std::int64_t{});
    case FileDType::i32: return each(std::int32_t{});
    case FileDType::i16: return each(std::int16_t{});
    case FileDType::i8: return each(std::int8_t{});
    case FileDType::u64: return each(std::uint64_t{});
    case FileDType::u32: return each(std::uint32_t{});
    case FileDType::u16: return each(std::uint16_t{});
    case FileDType::u8:
    case FileDType::boolean: return each(std::uint8_t{});
    default: throw Error(ErrorCode::internal, one_line("dtype ", name(type), " is not an integer type"));
  }
}

}  // namespace detail

}  // namespace moe::io
