// SPDX-License-Identifier: Apache-2.0
// experts/common/host_products.hpp: float32 inner products on the host. Every sum has 16 partial sums and one order, so that the bits of a
// product do not depend on the rows and columns beside it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace moe::experts::detail {

/// Partial sums of an inner product: element i is added to partial sum i % kDotLanes.
inline constexpr std::int64_t kDotLanes = 16;

/// A vector of floats as wide as the processor's registers. Compilers do not keep the sums of several products in registers if they are
/// arrays (docs/log/host.md).
#if defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif
using FloatVector = float __attribute__((vector_size(kVectorBytes)));
inline constexpr std::int64_t kVectorFloats = kVectorBytes / 4;

inline FloatVector load_vector(float const* from) {
  FloatVector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

/// The partial sums added up: each with that half of the lanes away, until one is left.
inline float sum_of_lanes(FloatVector const* sums) {
  using Quad = float __attribute__((vector_size(16)));
  Quad q[kDotLanes / 4];
  std::memcpy(q, sums, sizeof q);
  Quad const sum = (q[0] + q[2]) + (q[1] + q[3]);
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

/// C [Rows, Columns] (row stride ldc) = A [Rows, k] · B [Columns, k]ᵀ, all sums in registers.
template <int Rows, int Columns>
void dot_tile(float const* a, std::int64_t lda, float const* b, std::int64_t ldb, std::int64_t k, float* c, std::int64_t ldc) {
  constexpr int kVectors = kDotLanes / kVectorFloats;
  FloatVector sums[Rows][Columns][kVectors] = {};
  std::int64_t i = 0;
  for (; i + kDotLanes <= k; i += kDotLanes) {
    for (int row = 0; row < Rows; ++row) {
      for (int column = 0; column < Columns; ++column) {
        for (int v = 0; v < kVectors; ++v) {
          std::int64_t const at = i + v * kVectorFloats;
          sums[row][column][v] += load_vector(a + row * lda + at) * load_vector(b + column * ldb + at);
        }
      }
    }
  }
  for (int row = 0; row < Rows; ++row) {
    for (int column = 0; column < Columns; ++column) {
      if (i < k) {
        float lanes[kDotLanes];
        std::memcpy(lanes, sums[row][column], sizeof lanes);
        for (std::int64_t j = 0; i + j < k; ++j) lanes[j] += a[row * lda + i + j] * b[column * ldb + i + j];
        std::memcpy(sums[row][column], lanes, sizeof lanes);
      }
      c[row * ldc + column] = sum_of_lanes(sums[row][column]);
    }
  }
}

/// C [m, Columns] = A [m, k] · B [Columns, k]ᵀ, `Rows` rows at a time.
template <int Rows, int Columns>
void dot_columns(std::int64_t m, float const* a, std::int64_t lda, float const* b, std::int64_t ldb, std::int64_t k, float* c,
                 std::int64_t ldc) {
  std::int64_t row = 0;
  for (; row + Rows <= m; row += Rows) dot_tile<Rows, Columns>(a + row * lda, lda, b, ldb, k, c + row * ldc, ldc);
  for (; row < m; ++row) dot_tile<1, Columns>(a + row * lda, lda, b, ldb, k, c + row * ldc, ldc);
}

/// a · b.
inline float dot(float const* a, float const* b, std::int64_t n) {
  float lanes[kDotLanes] = {};
  std::int64_t i = 0;
  for (; i + kDotLanes <= n; i += kDotLanes) {
#if defined(_OPENMP) && !defined(__clang__)  // vectors at any level of optimisation
#pragma omp simd
#endif
    for (std::int64_t j = 0; j < kDotLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (std::int64_t j = 0; j < kDotLanes && i + j < n; ++j) lanes[j] += a[i + j] * b[i + j];
  for (std::int64_t step = kDotLanes / 2; step > 0; step /= 2) {
    for (std::int64_t j = 0; j < step; ++j) lanes[j] += lanes[j + step];
  }
  return lanes[0];
}

/// Where B of dot_products() lies. Rows of memory are read one after the other, as prefetching wants it; four at a time, they arrive at
/// half the rate (docs/log/host.md).
enum class Resident : std::uint8_t { memory, cache };

/// C [m, n] (row stride ldc) = A [m, k] · B [n, k]ᵀ by inner products.
inline void dot_products(std::int64_t m, std::int64_t n, std::int64_t k, float const* a, std::int64_t lda, float const* b, std::int64_t ldb,
                         float* c, std::int64_t ldc, Resident where) {
  constexpr std::int64_t kShortRow = 128;  // four of them are few cache lines in a row
  std::int64_t column = 0;
  if (where == Resident::cache || ldb <= kShortRow) {
    for (; column + 4 <= n; column += 4) dot_columns<2, 4>(m, a, lda, b + column * ldb, ldb, k, c + column, ldc);
  }
  for (; column < n; ++column) {
    if (m >= 4) {
      dot_columns<4, 1>(m, a, lda, b + column * ldb, ldb, k, c + column, ldc);
    } else {
      for (std::int64_t row = 0; row < m; ++row) c[row * ldc + column] = dot(a + row * lda, b + column * ldb, k);
    }
  }
}

/// Columns per task: few enough that the widened weights stay in a core's cache, at least 16.
inline std::int64_t block_columns(std::int64_t inner, std::int64_t columns) {
  std::int64_t const fits = (std::int64_t{1} << 17) / std::max<std::int64_t>(inner, 1);  // 512 KiB of float32
  return std::clamp<std::int64_t>(fits / 16 * 16, 16, std::max<std::int64_t>(columns, 16));
}

/// Columns per task, at most `block`: eight tasks, unless that would be fewer than 32 columns each, beside which other work counts.
inline std::int64_t shared_columns(std::int64_t columns, std::int64_t block) {
  constexpr std::int64_t kTasks = 8;
  return std::min(block, std::max<std::int64_t>((columns / kTasks + 15) / 16 * 16, 32));
}

}  // namespace moe::experts::detail
