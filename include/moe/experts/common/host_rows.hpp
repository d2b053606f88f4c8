// SPDX-License-Identifier: Apache-2.0
// experts/common/host_rows.hpp: how the host experts read quantised weights and rows: as float32 rows, without a copy if they are float32
// already.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/core/contract/facts.hpp"
#include "moe/core/tokens.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/granularity.hpp"

namespace moe::experts::detail {

/// True if the matrix is stored as plain float32, so that a row can be read in place.
template <class Quant, class Weight>
inline constexpr bool kPlainFloat = std::is_same_v<typename Quant::template WeightCode<Weight>, float> &&
                                    facts::weight_granularity<Quant>() == quantization::ScaleGranularity::none;

/// True if the matrix is stored as plain bf16.
template <class Quant, class Weight>
inline constexpr bool kPlainBf16 = std::is_same_v<typename Quant::template WeightCode<Weight>, bf16> &&
                                   facts::weight_granularity<Quant>() == quantization::ScaleGranularity::none;

/// `n` values as float32. Below -O3 g++ vectorises this loop only with the pragma (docs/log/host.md), which it knows under -fopenmp;
/// clang++ does at -O2, and warns of the pragma where it cannot.
inline void widen(bf16 const* from, std::int64_t n, float* to) {
#if defined(_OPENMP) && !defined(__clang__)
#pragma omp simd
#endif
  for (std::int64_t i = 0; i < n; ++i) to[i] = to_float(from[i]);
}

/// Rows [first, first + count) of expert e as float32 [count, cols]: a pointer into the weights, or dequantised into `scratch`.
template <class Weight, class Quant, class Matrix>
float const* weight_rows(Quant const& quant, Matrix const& m, std::int64_t e, std::int64_t first, std::int64_t count, float* scratch) {
  if constexpr (kPlainFloat<Quant, Weight>) {
    return row_ptr(m.codes, e, first);
  } else if constexpr (kPlainBf16<Quant, Weight>) {
    widen(row_ptr(m.codes, e, first), count * m.cols, scratch);
    return scratch;
  } else {
    for (std::int64_t r = 0; r < count; ++r) {
      quant.template dequantize_weight_row<Weight>(row_ptr(m.codes, e, 0), row_ptr(m.scales, e), m.rows, m.cols, first + r,
                                                   scratch + r * m.cols);
    }
    return scratch;
  }
}

/// Whether the scheme quantises activations from any row; a user's scheme may support only arrays.
template <class Quant, class Row>
inline constexpr bool kQuantizesComputedRows =
    facts::act_granularity<Quant>() != quantization::ScaleGranularity::none && facts::quantizes_computed_rows<Quant, Row>();

/// For an activation scheme that also rounds the second GEMM's input (a2): quantises and dequantises one row in place.
template <class Quant, class Act>
void requantize_row(Quant const& quant, float* row, std::int64_t n, typename Quant::template Payload<float>* codes,
                    typename Quant::Scale* scales) {
  if constexpr (facts::act_granularity<Quant>() != quantization::ScaleGranularity::none) {
    quant.template quantize_row<float>(row, n, codes, scales);
    quant.template dequantize_row<float>(codes, scales, n, row);
  }
}

}  // namespace moe::experts::detail
