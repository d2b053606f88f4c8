// SPDX-License-Identifier: Apache-2.0
// tests/fuzz/source_location.hpp: clang 14 has no std::source_location with libstdc++; the fuzz targets include this first.
#pragma once

#include <version>
#if !defined(__cpp_lib_source_location)
#include <cstdint>
namespace std {
struct source_location {
  static constexpr source_location current() noexcept { return {}; }
  constexpr uint_least32_t line() const noexcept { return 0; }
  constexpr uint_least32_t column() const noexcept { return 0; }
  constexpr char const* file_name() const noexcept { return ""; }
  constexpr char const* function_name() const noexcept { return ""; }
};
}  // namespace std
#endif
