// SPDX-License-Identifier: Apache-2.0
// quantization/rows/apply.hpp: applies a scheme to matrices in host memory and checks the shapes.
#pragma once

#include <cstdint>
#include <span>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"

namespace moe::quantization {

namespace detail {

inline void check_shape_of(char const* what, std::int64_t rows, std::int64_t cols, std::int64_t want_rows, std::int64_t want_cols) {
  if (rows != want_rows || cols != want_cols) {
    throw Error(ErrorCode::argument, text(what, " is [", rows, ", ", cols, "], expected [", want_rows, ", ", want_cols, "]"));
  }
}

}  // namespace detail

/// x [rows, H] → q [rows, payload_cols(H)], s [rows, scale_cols(H)], row by row. E_ARG on another shape. No rows: nothing is touched.
template <class Scheme, class Act>
void quantize_rows(Scheme const& scheme, Rows<Act const> x, Rows<typename Scheme::template Payload<Act>> q,
                   Rows<typename Scheme::Scale> s) {
  std::int64_t const rows = x.extent(0), hidden = x.extent(1);
  detail::check_shape_of("quantised rows", q.extent(0), q.extent(1), rows, Scheme::payload_cols(hidden));
  if (Scheme::scale_cols(hidden) != 0) detail::check_shape_of("scales", s.extent(0), s.extent(1), rows, Scheme::scale_cols(hidden));
  for (std::int64_t r = 0; r < rows; ++r) {
    scheme.template quantize_row<Act>(row_ptr(x, r), hidden, row_ptr(q, r), Scheme::scale_cols(hidden) == 0 ? nullptr : row_ptr(s, r));
  }
}

/// Batched rows x [L, C, H]: only the first counts[e] rows of expert e are read and written. E_ARG on a count outside [0, C].
template <class Scheme, class Act>
void quantize_batched(Scheme const& scheme, Blocks<Act const> x, std::span<std::int32_t const> counts,
                      Blocks<typename Scheme::template Payload<Act>> q, Blocks<typename Scheme::Scale> s) {
  std::int64_t const capacity = x.extent(1), hidden = x.extent(2);
  detail::check_shape_of("expert counts", 1, static_cast<std::int64_t>(counts.size()), 1, x.extent(0));
  detail::check_shape_of("quantised rows", q.extent(1), q.extent(2), capacity, Scheme::payload_cols(hidden));
  if (Scheme::scale_cols(hidden) != 0) detail::check_shape_of("scales", s.extent(1), s.extent(2), capacity, Scheme::scale_cols(hidden));
  for (std::int64_t e = 0; e < x.extent(0); ++e) {
    std::int64_t const count = counts[static_cast<std::size_t>(e)];
    if (count < 0 || count > capacity) {
      throw Error(ErrorCode::argument, text("expert ", e, " has ", count, " rows, expected 0 to ", capacity));
    }
    for (std::int64_t r = 0; r < count; ++r) {
      scheme.template quantize_row<Act>(row_ptr(x, e, r), hidden, row_ptr(q, e, r),
                                        Scheme::scale_cols(hidden) == 0 ? nullptr : row_ptr(s, e, r));
    }
  }
}

}  // namespace moe::quantization
