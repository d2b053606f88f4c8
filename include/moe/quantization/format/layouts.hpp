// SPDX-License-Identifier: Apache-2.0
// quantization/format/layouts.hpp: scale layouts of kernels that need them rearranged: swizzled, packed, column-major.
// docs/semantics/quantization.md §3, §4, §6.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::quantization {

MOE_HD constexpr std::int64_t round_up(std::int64_t n, std::int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// Block scales of the tensor cores, "128 × 4": [rows, cols] bytes padded to multiples of 128 and 4, in blocks of 512 bytes. A block mixes
/// rows, so a swizzled scale cannot be exchanged by row: exchanges carry linear scales, and swizzling follows the dispatch.
struct SwizzledScales {
  std::int64_t rows = 0;
  std::int64_t cols = 0;  ///< scales of a row: K / 16 (nvfp4) or K / 32 (mx)

  MOE_HD constexpr std::int64_t padded_rows() const { return round_up(rows, 128); }
  MOE_HD constexpr std::int64_t padded_cols() const { return round_up(cols, 4); }
  /// Bytes of the swizzled tensor.
  MOE_HD constexpr std::int64_t size() const { return padded_rows() * padded_cols(); }
  /// Position of scale c of row r.
  MOE_HD constexpr std::int64_t offset(std::int64_t r, std::int64_t c) const {
    return ((r / 128) * (padded_cols() / 4) + c / 4) * 512 + (r % 32) * 16 + ((r / 32) % 4) * 4 + c % 4;
  }
};

/// linear [rows, cols] → swizzled [size()], padding zero. Host.
inline void swizzle(SwizzledScales layout, std::uint8_t const* linear, std::uint8_t* swizzled) {
  std::fill(swizzled, swizzled + layout.size(), std::uint8_t{0});
  for (std::int64_t r = 0; r < layout.rows; ++r) {
    for (std::int64_t c = 0; c < layout.cols; ++c) swizzled[layout.offset(r, c)] = linear[r * layout.cols + c];
  }
}
/// swizzled [size()] → linear [rows, cols]. Host.
inline void unswizzle(SwizzledScales layout, std::uint8_t const* swizzled, std::uint8_t* linear) {
  for (std::int64_t r = 0; r < layout.rows; ++r) {
    for (std::int64_t c = 0; c < layout.cols; ++c) linear[r * layout.cols + c] = swizzled[layout.offset(r, c)];
  }
}

/// Four consecutive UE8M0 group scales of a row in one 32-bit word, little-endian; words column-major with the row count padded to 4, as a
/// TMA copy needs them.
struct PackedUe8m0 {
  std::int64_t rows = 0;
  std::int64_t groups = 0;  ///< scales of a row, a multiple of 4

  /// For rows of `hidden` elements in groups of 128. E_UNSUPPORTED if hidden is not a multiple of 512.
  static PackedUe8m0 of(std::int64_t rows, std::int64_t hidden) {
    if (hidden % 512 != 0) {
      throw Error(ErrorCode::unsupported, text("packed UE8M0 scales need hidden to be a multiple of 512, got ", hidden));
    }
    return {rows, hidden / 128};
  }
  MOE_HD constexpr std::int64_t padded_rows() const { return round_up(rows, 4); }
  MOE_HD constexpr std::int64_t words_per_row() const { return (groups + 3) / 4; }
  /// 32-bit words of the packed tensor.
  MOE_HD constexpr std::int64_t size() const { return padded_rows() * words_per_row(); }
  /// The byte that holds scale g of row r.
  MOE_HD constexpr std::int64_t byte_offset(std::int64_t r, std::int64_t g) const { return ((g / 4) * padded_rows() + r) * 4 + g % 4; }
};

/// linear [rows, groups] bytes → packed words [size()], padding zero. Host.
inline void pack_ue8m0(PackedUe8m0 layout, std::uint8_t const* linear, std::int32_t* packed) {
  std::fill(packed, packed + layout.size(), 0);
  auto* const bytes = reinterpret_cast<std::uint8_t*>(packed);
  for (std::int64_t r = 0; r < layout.rows; ++r) {
    for (std::int64_t g = 0; g < layout.groups; ++g) bytes[layout.byte_offset(r, g)] = linear[r * layout.groups + g];
  }
}

/// Float32 group scales of batched rows [L, C, G], column-major inside an expert: strides (C_pad · G, 1, C_pad) with C_pad a multiple of 4,
/// so that a column is 16-byte aligned. With one expert it is the MN-major layout of the sm_90 grouped block GEMM.
struct ColumnMajorScales {
  std::int64_t experts = 1;
  std::int64_t capacity = 0;
  std::int64_t groups = 0;

  MOE_HD constexpr std::int64_t padded_capacity() const { return round_up(capacity, 4); }
  MOE_HD constexpr std::int64_t expert_stride() const { return padded_capacity() * groups; }
  MOE_HD constexpr std::int64_t size() const { return experts * expert_stride(); }
  MOE_HD constexpr std::int64_t offset(std::int64_t e, std::int64_t row, std::int64_t g) const {
    return e * expert_stride() + g * padded_capacity() + row;
  }
};

/// src [rows, cols] → dst [padded_rows, padded_cols], the rest `fill`: codes are padded with the code of 0, scales with 1, biases with 0,
/// and the result of the padded layer, cut to size, is that of the unpadded one. Host.
template <class T>
void pad_matrix(T const* src, std::int64_t rows, std::int64_t cols, T* dst, std::int64_t padded_rows, std::int64_t padded_cols, T fill) {
  if (padded_rows < rows || padded_cols < cols) {
    throw Error(ErrorCode::argument, text("cannot pad [", rows, ", ", cols, "] to [", padded_rows, ", ", padded_cols, "]"));
  }
  std::fill(dst, dst + padded_rows * padded_cols, fill);
  for (std::int64_t r = 0; r < rows; ++r) std::copy(src + r * cols, src + (r + 1) * cols, dst + r * padded_cols);
}

}  // namespace moe::quantization
