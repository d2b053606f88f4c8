// SPDX-License-Identifier: Apache-2.0
// core/array.hpp: arrays are cuda::std::mdspan views whose fixed dimensions are part of their type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda/std/mdspan>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe {

/// A dimension that is known only at run time.
inline constexpr int dynamic = -1;

namespace detail {
constexpr std::size_t extent_of(int n) { return n == dynamic ? cuda::std::dynamic_extent : static_cast<std::size_t>(n); }
}  // namespace detail

/// Layout of a matrix whose rows may lie further apart than their width. Strides are in elements.
struct layout_rows {
  template <class Extents>
  class mapping {
   public:
    static_assert(Extents::rank() == 2, "layout_rows is for matrices");
    using extents_type = Extents;
    using index_type = typename Extents::index_type;
    using size_type = typename Extents::size_type;
    using rank_type = typename Extents::rank_type;
    using layout_type = layout_rows;

    constexpr mapping() = default;
    MOE_HD constexpr mapping(Extents const& extents, index_type row_stride) : extents_(extents), row_stride_(row_stride) {}
    MOE_HD constexpr mapping(Extents const& extents) : mapping(extents, extents.extent(1)) {}

    MOE_HD constexpr Extents const& extents() const { return extents_; }
    MOE_HD constexpr index_type required_span_size() const {
      return extents_.extent(0) == 0 ? 0 : (extents_.extent(0) - 1) * row_stride_ + extents_.extent(1);
    }
    template <class I, class J>
    MOE_HD constexpr index_type operator()(I row, J col) const {
      return static_cast<index_type>(row) * row_stride_ + static_cast<index_type>(col);
    }
    static constexpr bool is_always_unique() { return true; }
    static constexpr bool is_always_exhaustive() { return false; }
    static constexpr bool is_always_strided() { return true; }
    static constexpr bool is_unique() { return true; }
    MOE_HD constexpr bool is_exhaustive() const { return row_stride_ == extents_.extent(1); }
    static constexpr bool is_strided() { return true; }
    MOE_HD constexpr index_type stride(rank_type r) const { return r == 0 ? row_stride_ : 1; }
    MOE_HD friend constexpr bool operator==(mapping const& a, mapping const& b) {
      return a.extents_ == b.extents_ && a.row_stride_ == b.row_stride_;
    }

   private:
    Extents extents_{};
    index_type row_stride_ = 0;
  };
};

/// [rows, Cols] with a row stride: hidden states, ids, weights, outputs. All offsets are 64-bit.
template <class T, int Cols = dynamic>
using Rows = cuda::std::mdspan<T, cuda::std::extents<std::int64_t, cuda::std::dynamic_extent, detail::extent_of(Cols)>, layout_rows>;

/// [A, B, Cols], contiguous: weights [L, N, K], batched activations [L, C, H].
template <class T, int Cols = dynamic>
using Blocks =
    cuda::std::mdspan<T, cuda::std::extents<std::int64_t, cuda::std::dynamic_extent, cuda::std::dynamic_extent, detail::extent_of(Cols)>>;

/// [n], contiguous.
template <class T>
using Vector = cuda::std::mdspan<T, cuda::std::extents<std::int64_t, cuda::std::dynamic_extent>>;

/// A view of `rows` rows of `cols` elements whose beginnings lie `row_stride` elements apart. E_ARG if Cols is fixed and `cols` is another.
template <int Cols = dynamic, class T>
constexpr Rows<T, Cols> make_strided_rows(T* data, std::int64_t rows, std::int64_t cols, std::int64_t row_stride) {
  using View = Rows<T, Cols>;
  using Extents = typename View::extents_type;
  if constexpr (Cols == dynamic) {
    return View(data, typename View::mapping_type(Extents(rows, cols), row_stride));
  } else {
    if (cols != Cols) {
      throw Error(ErrorCode::argument, text("make_rows<", Cols, ">: rows of ", cols, " elements, expected ", Cols,
                                            ". Fix: make_strided_rows<", Cols, ">(data, rows, ", Cols, ", stride) if rows lie apart"));
    }
    return View(data, typename View::mapping_type(Extents(rows), row_stride));
  }
}
/// The same with rows one behind the other.
template <int Cols = dynamic, class T>
constexpr Rows<T, Cols> make_rows(T* data, std::int64_t rows, std::int64_t cols) {
  return make_strided_rows<Cols>(data, rows, cols, cols);
}

template <int Cols = dynamic, class T>
MOE_HD constexpr Blocks<T, Cols> make_blocks(T* data, std::int64_t a, std::int64_t b, std::int64_t cols) {
  using View = Blocks<T, Cols>;
  using Extents = typename View::extents_type;
  if constexpr (Cols == dynamic) {
    return View(data, Extents(a, b, cols));
  } else {
    return View(data, Extents(a, b));
  }
}

template <class T>
MOE_HD constexpr Vector<T> make_vector(T* data, std::int64_t n) {
  return Vector<T>(data, typename Vector<T>::extents_type(n));
}

/// Pointer to the first element of row r.
template <class View>
MOE_HD constexpr auto* row_ptr(View const& a, std::int64_t r) {
  return a.data_handle() + r * a.stride(0);
}
/// Pointer to the first element of row r of block b.
template <class View>
MOE_HD constexpr auto* row_ptr(View const& a, std::int64_t b, std::int64_t r) {
  return a.data_handle() + b * a.stride(0) + r * a.stride(1);
}

}  // namespace moe
