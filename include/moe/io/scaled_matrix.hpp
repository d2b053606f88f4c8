// SPDX-License-Identifier: Apache-2.0
// io/scaled_matrix.hpp: reads 8-bit matrices with scales per tensor, channel, group or block, alone or in a stack of experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/io/checkpoint_quantization.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/tensor_store.hpp"
#include "moe/quantization/format/weight_scales.hpp"

namespace moe::io {

/// E_ARG with both shapes unless the tensor has exactly the shape that is expected. `because` says where the expectation comes from.
inline void require_shape(StoredTensor const& t, std::initializer_list<std::int64_t> expected, std::string_view because = {}) {
  if (!std::ranges::equal(t.shape(), expected)) {
    throw Error(ErrorCode::argument, one_line(t.where(), ": shape ", t.info->shape_text(), ", expected ",
                                              shape_text(std::span(expected.begin(), expected.size())), because.empty() ? "" : " (",
                                              because, because.empty() ? "" : ")"));
  }
}

namespace detail {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// E_ARG unless the tensor has one of these types.
inline void require_dtype(StoredTensor const& t, std::initializer_list<FileDType> wanted) {
  if (std::ranges::find(wanted, t.info->dtype) != wanted.end()) return;
  std::string names;
  for (FileDType dtype : wanted) names += text(names.empty() ? "" : " or ", name(dtype));
  throw Error(ErrorCode::argument, one_line(t.where(), ": dtype ", name(t.info->dtype), ", expected ", names));
}

/// One matrix [rows, cols]: a tensor of its own (stack 0), or number `index` of a tensor [stack, rows, cols].
struct MatrixPosition {
  std::int64_t rows = 0, cols = 0;
  std::int64_t index = 0, stack = 0;
  std::int64_t elements() const { return rows * cols; }
};

/// Elements [first, first + count) of scales as float32; U8 and F8_E8M0 are exponents. E_ARG if one is not finite.
inline std::vector<float> read_scales(StoredTensor const& s, std::int64_t first, std::int64_t count) {
  std::vector<float> out(at(count));
  if (s.info->dtype == FileDType::u8) {
    std::vector<std::uint8_t> exponents(at(count));
    s.file->read_bytes(*s.info, first, count, exponents.data());
    std::ranges::transform(exponents, out.begin(), e8m0_value);
  } else {
    s.file->read_elements(*s.info, first, count, out.data());
  }
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (std::isfinite(out[i])) continue;
    std::string const value = std::isnan(out[i]) ? "NaN" : text(out[i]);
    throw Error(ErrorCode::argument, one_line(s.where(), ": scale ", at(first) + i, " is not finite: ", value));
  }
  return out;
}
inline std::vector<float> read_scales(StoredTensor const& s) { return read_scales(s, 0, s.info->elements()); }
/// The only element of a scale tensor. E_ARG if it has another number of elements, or is not finite and above zero.
inline float read_scale(StoredTensor const& s) {
  if (s.info->elements() != 1) throw Error(ErrorCode::argument, one_line(s.where(), ": shape ", s.info->shape_text(), ", expected [1]"));
  float const scale = read_scales(s)[0];
  if (!(scale > 0.0F)) throw Error(ErrorCode::argument, one_line(s.where(), ": the scale ", scale, " is not above 0"));
  return scale;
}

/// E_ARG, naming the tensor, for the first scale under which the largest code would not be finite. `first`: position of scales[0].
inline void require_finite_weights(StoredTensor const& s, std::span<float const> scales, DType codes, std::int64_t first = 0) {
  auto const bad = std::ranges::find_if(scales, [&](float scale) { return !quantization::is_packable(scale, codes); });
  if (bad == scales.end()) return;
  throw Error(ErrorCode::argument, one_line(s.where(), ": scale ", first + (bad - scales.begin()), " is out of range: ", *bad, " times ",
                                            quantization::largest_code(codes), " is not finite"));
}

/// Scales (or zero points) of a matrix, spread over rows and columns.
struct ScaleGrid {
  std::vector<float> values;
  std::int64_t row_block = 1, col_block = 1, cols = 1;
  std::int64_t first = 0;  ///< position of values[0] in its tensor
  std::int64_t group = 0;  ///< as StoredWeights::group
  std::int64_t index(std::int64_t row, std::int64_t col) const { return row / row_block * cols + col / col_block; }
  float operator()(std::int64_t row, std::int64_t col) const { return values[at(index(row, col))]; }
};

/// The scales of one matrix: one, one per row ([rows] or [rows, 1]), one per column of a stacked matrix ([1, cols]), one per block, or one
/// per group along a row. E_ARG naming the shapes that fit.
inline ScaleGrid read_scale_grid(StoredTensor const& s, MatrixPosition const& m, std::int64_t block_rows, std::int64_t block_cols) {
  ScaleGrid grid;
  std::int64_t const rows = (m.rows + block_rows - 1) / block_rows, cols = (m.cols + block_cols - 1) / block_cols;
  std::span<std::int64_t const> shape(s.shape());
  std::int64_t count = s.info->elements();
  if (m.stack > 0 && count != 1) {
    bool const stacked = !shape.empty() && shape[0] == m.stack;
    count = stacked ? count / m.stack : 0;  // no shape fits 0 elements
    grid.first = m.index * count;
    if (stacked) shape = shape.subspan(1);
  }
  bool const flat = shape.size() == 2 && count == shape[0] * shape[1];
  if (count == 1) {  // per tensor
    grid.row_block = m.rows, grid.col_block = m.cols;
  } else if (flat && shape[0] == rows && shape[1] == cols) {  // per block
    grid.row_block = block_rows, grid.col_block = block_cols, grid.cols = cols;
  } else if (count == m.rows && count > 0 && (shape.size() == 1 || shape[1] == 1)) {  // per row
    grid.col_block = m.cols, grid.group = -1;
  } else if (m.stack > 0 && flat && shape[0] == 1 && shape[1] == m.cols) {  // per column
    grid.row_block = m.rows, grid.cols = m.cols, grid.group = -1;
  } else if (flat && shape[0] == m.rows && shape[1] > 0 && m.cols % shape[1] == 0) {  // per group
    grid.cols = shape[1], grid.col_block = grid.group = m.cols / shape[1];
  } else {
    std::string const lead = m.stack > 0 ? text(m.stack, ", ") : std::string();
    throw Error(ErrorCode::argument, one_line(s.where(), ": shape ", s.info->shape_text(), ", expected [1], [", lead, m.rows, ", 1], [",
                                              lead, m.rows, ", groups] or [", lead, rows, ", ", cols, "]"));
  }
  grid.values = read_scales(s, grid.first, count);
  return grid;
}

/// out[rows, cols] = codes · scales. e4m3 codes that are NaN (0x7F, 0xFF) are refused: no released checkpoint uses them.
template <class T>
void read_scaled_e4m3(StoredTensor const& w, MatrixPosition const& m, ScaleGrid const& scales, T* out) {
  std::vector<float> codes(at(m.elements()));
  w.file->read_elements(*w.info, m.index * m.elements(), m.elements(), codes.data());
  for (std::int64_t i = 0; i < m.rows; ++i) {
    for (std::int64_t j = 0; j < m.cols; ++j) {
      float const value = codes[at(i * m.cols + j)];
      if (std::isnan(value)) throw Error(ErrorCode::argument, one_line(w.where(), ": NaN code at row ", i, ", column ", j));
      out[i * m.cols + j] = from_float<T>(value * scales(i, j));
    }
  }
}
/// The same for int8; zeros: laid out as the scales, or absent.
template <class T>
void read_scaled_int8(StoredTensor const& w, MatrixPosition const& m, ScaleGrid const& scales, ScaleGrid const* zeros, T* out) {
  std::vector<std::int8_t> codes(at(m.elements()));
  w.file->read_elements(*w.info, m.index * m.elements(), m.elements(), codes.data());
  for (std::int64_t i = 0; i < m.rows; ++i) {
    for (std::int64_t j = 0; j < m.cols; ++j) {
      float const value = static_cast<float>(codes[at(i * m.cols + j)]) - (zeros == nullptr ? 0.0F : (*zeros)(i, j));
      out[i * m.cols + j] = from_float<T>(value * scales(i, j));
    }
  }
}

/// The first of these tensors that the store has.
inline std::optional<StoredTensor> find_any(TensorStore const& store, std::string const& base,
                                            std::initializer_list<char const*> suffixes) {
  for (char const* suffix : suffixes) {
    if (auto found = store.find(base + suffix)) return found;
  }
  return std::nullopt;
}

/// Reads an e4m3 or int8 matrix with the scales that belong to `base`: base + ".weight_scale_inv", ".weight_scale" or ".scale", of a fused
/// tensor also base + "_scale_inv" or "_scale". `transposed`: the matrix is stored [in, out]. False for another dtype.
template <class T>
bool read_scaled(TensorStore const& store, StoredTensor const& w, std::string const& base, MatrixPosition const& m,
                 CheckpointQuantization const& q, bool transposed, T* out) {
  bool const e4m3 = w.info->dtype == FileDType::f8_e4m3;
  if (!e4m3 && w.info->dtype != FileDType::i8) return false;
  auto const scale = m.stack > 0 ? find_any(store, base, {".weight_scale_inv", ".weight_scale", "_scale_inv", "_weight_scale", "_scale"})
                                 : find_any(store, base, {".weight_scale_inv", ".weight_scale", ".scale"});
  if (!scale) {
    throw Error(ErrorCode::argument,
                one_line(w.where(), ": an ", e4m3 ? "e4m3" : "int8", " weight needs '", base,
                         m.stack > 0 ? "_scale_inv' or '" : ".weight_scale_inv' or '", base, m.stack > 0 ? "_scale'" : ".weight_scale'"));
  }
  std::int64_t const block_rows = q.block[transposed ? 1 : 0], block_cols = q.block[transposed ? 0 : 1];
  ScaleGrid const grid = read_scale_grid(*scale, m, block_rows, block_cols);
  q.require({!e4m3, 8, grid.group}, m.cols, w.where());
  bool const zero_points = !e4m3 && store.contains(base + ".weight_zero_point");
  if (!e4m3 && !zero_points) q.refuse_missing_zero_points(8, w.where(), base + ".weight_zero_point");
  require_finite_weights(*scale, grid.values, e4m3 ? DType::e4m3 : zero_points ? DType::u8 : DType::i8, grid.first);
  if (e4m3) {
    read_scaled_e4m3(w, m, grid, out);
    return true;
  }
  std::optional<ScaleGrid> zeros;
  if (auto const z = store.find(base + ".weight_zero_point")) {
    if (m.stack > 0) throw Error(ErrorCode::unsupported, one_line(z->where(), ": zero points of fused experts cannot be read"));
    if (z->info->dtype != FileDType::i8 || z->shape() != scale->shape()) {
      throw Error(ErrorCode::argument, one_line(z->where(), ": expected I8 ", scale->info->shape_text(), ", as the scales"));
    }
    zeros = grid;
    std::ranges::copy(z->file->read<std::int8_t>(*z->info), zeros->values.begin());
  }
  read_scaled_int8(w, m, grid, zeros ? &*zeros : nullptr, out);
  return true;
}

}  // namespace detail

}  // namespace moe::io
