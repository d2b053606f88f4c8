// SPDX-License-Identifier: Apache-2.0
// io/linear_reader.hpp: reads one linear weight [out, in] of a checkpoint as float or bf16, whatever it is stored as.
//
// Stored forms: any float type; e4m3 with a scale per tensor, per output channel or per block ("weight_scale", "weight_scale_inv");
// int4 packed eight to an int32 with a scale per group ("weight_packed"); mxfp4 blocks of 32 with e8m0 scales ("_blocks", "_scales").
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/tensor_store.hpp"

namespace moe::io {

/// E_ARG with both shapes unless the tensor has exactly the shape that is expected.
inline void require_shape(StoredTensor const& t, std::initializer_list<std::int64_t> expected) {
  if (!std::ranges::equal(t.shape(), expected)) {
    throw Error(ErrorCode::argument, one_line(t.where(), ": shape ", t.info->shape_text(), ", expected ",
                                              shape_text(std::span(expected.begin(), expected.size()))));
  }
}

namespace detail {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

/// A scale of a quantised weight [n, k], spread over rows and columns.
struct ScaleGrid {
  std::vector<float> values;
  std::int64_t row_block = 1, col_block = 1, cols = 1;
  float operator()(std::int64_t row, std::int64_t col) const { return values[at(row / row_block * cols + col / col_block)]; }
};

inline ScaleGrid read_scale_grid(StoredTensor const& s, std::int64_t n, std::int64_t k, std::int64_t block_rows, std::int64_t block_cols) {
  ScaleGrid grid;
  auto const& shape = s.shape();
  std::int64_t const rows = (n + block_rows - 1) / block_rows, cols = (k + block_cols - 1) / block_cols;
  std::int64_t const count = s.info->elements();
  if (count == 1) {  // per tensor
    grid.row_block = n, grid.col_block = k;
  } else if (shape.size() == 2 && shape[0] == rows && shape[1] == cols) {  // per block
    grid.row_block = block_rows, grid.col_block = block_cols, grid.cols = cols;
  } else if (count == n && (shape.size() == 1 || (shape.size() == 2 && shape[1] == 1))) {  // per output channel
    grid.col_block = k;
  } else {
    throw Error(ErrorCode::argument,
                one_line(s.where(), ": shape ", s.info->shape_text(), ", expected [1], [", n, ", 1] or [", rows, ", ", cols, "]"));
  }
  grid.values = s.file->read<float>(*s.info);
  for (std::size_t i = 0; i < grid.values.size(); ++i) {
    if (!std::isfinite(grid.values[i])) throw Error(ErrorCode::argument, one_line(s.where(), ": scale ", i, " is not finite"));
  }
  return grid;
}

/// e4m3 codes times their scales. NaN codes (0x7F, 0xFF) are refused: no released checkpoint means them.
template <class T>
void read_e4m3(TensorStore const& store, StoredTensor const& w, std::string const& base, std::int64_t n, std::int64_t k,
               std::int64_t const (&block)[2], T* out) {
  auto scale = store.find(base + ".weight_scale_inv");
  if (!scale) scale = store.find(base + ".weight_scale");
  if (!scale) {
    throw Error(ErrorCode::argument,
                one_line(w.where(), ": an e4m3 weight needs '", base, ".weight_scale_inv' or '", base, ".weight_scale'"));
  }
  ScaleGrid const grid = read_scale_grid(*scale, n, k, block[0], block[1]);
  auto const codes = w.file->raw(*w.info);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      auto const code = static_cast<std::uint8_t>(codes[at(i * k + j)]);
      if ((code & 0x7F) == 0x7F) throw Error(ErrorCode::argument, one_line(w.where(), ": NaN code at row ", i, ", column ", j));
      out[i * k + j] = from_float<T>(kE4m3Values[code] * grid(i, j));
    }
  }
}

/// Offset-8 int4, element 8j + i of a row in bits 4i of word j, a scale per group of columns (compressed-tensors "pack-quantized").
template <class T>
void read_packed_int4(TensorStore const& store, StoredTensor const& w, std::string const& base, std::int64_t n, std::int64_t k, T* out) {
  require_shape(w, {n, (k + 7) / 8});
  if (store.contains(base + ".weight_zero_point")) {
    throw Error(ErrorCode::unsupported, one_line(w.where(), ": int4 weights with zero points cannot be read"));
  }
  StoredTensor const s = store.at(base + ".weight_scale");
  auto const& shape = s.shape();
  if (shape.size() != 2 || shape[0] != n || shape[1] < 1 || k % shape[1] != 0) {
    throw Error(ErrorCode::argument,
                one_line(s.where(), ": shape ", s.info->shape_text(), ", expected [", n, ", groups] with groups dividing ", k));
  }
  std::int64_t const groups = shape[1], group = k / groups;
  auto const scales = s.file->read<float>(*s.info);
  std::vector<std::int32_t> words(at(w.info->elements()));
  w.file->read_elements(*w.info, 0, w.info->elements(), words.data());
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < k; ++j) {
      auto const word = static_cast<std::uint32_t>(words[at(i * ((k + 7) / 8) + j / 8)]);
      int const code = static_cast<int>(word >> (4 * (j % 8)) & 15U) - 8;
      out[i * k + j] = from_float<T>(static_cast<float>(code) * scales[at(i * groups + j / group)]);
    }
  }
}

/// Rows [first, first + rows) of mxfp4 blocks U8 [..., k/32, 16] and scales U8 [..., k/32], counted over the flattened leading
/// dimensions, into out[rows, k] as float.
inline void read_mxfp4_rows(StoredTensor const& blocks, StoredTensor const& scales, std::int64_t first, std::int64_t rows, std::int64_t k,
                            float* out) {
  std::int64_t const groups = k / 32;
  std::vector<std::uint8_t> codes(at(rows * groups * 16)), exponents(at(rows * groups));
  blocks.file->read_elements(*blocks.info, first * groups * 16, rows * groups * 16, codes.data());
  scales.file->read_elements(*scales.info, first * groups, rows * groups, exponents.data());
  for (std::int64_t g = 0; g < rows * groups; ++g) {
    if (exponents[at(g)] == 255) throw Error(ErrorCode::argument, one_line(scales.where(), ": NaN scale in row ", first + g / groups));
    float const scale = e8m0_value(exponents[at(g)]);
    for (std::int64_t i = 0; i < 16; ++i) {
      std::uint8_t const two = codes[at(g * 16 + i)];
      out[g * 32 + 2 * i] = kE2m1Values[two & 15U] * scale;
      out[g * 32 + 2 * i + 1] = kE2m1Values[two >> 4U] * scale;
    }
  }
}

}  // namespace detail

/// True if the store holds the linear weight `base` (a name without ".weight") in any stored form.
inline bool has_linear(TensorStore const& store, std::string const& base) {
  return store.contains(base + ".weight") || store.contains(base + ".weight_packed");
}

/// Reads the linear weight `base` [n, k] into out[n * k]. block: rows and columns that one scale of a block-quantised weight covers.
/// Returns false if the store has no such weight. E_ARG with both shapes on a wrong shape, E_UNSUPPORTED for another stored form.
template <class T>
bool read_linear(TensorStore const& store, std::string const& base, std::int64_t n, std::int64_t k, std::int64_t const (&block)[2],
                 T* out) {
  if (auto const w = store.find(base + ".weight")) {
    require_shape(*w, {n, k});
    if (w->info->dtype == FileDType::f8_e4m3) {
      detail::read_e4m3(store, *w, base, n, k, block, out);
    } else if (is_floating(w->info->dtype) && bits(w->info->dtype) >= 16) {
      w->file->read_elements(*w->info, 0, n * k, out);
    } else {
      throw Error(ErrorCode::unsupported,
                  one_line(w->where(), ": weights of dtype ", name(w->info->dtype), " cannot be read; F64, F32, F16, BF16, F8_E4M3 can"));
    }
    return true;
  }
  if (auto const w = store.find(base + ".weight_packed")) {
    detail::read_packed_int4(store, *w, base, n, k, out);
    return true;
  }
  for (char const* suffix : {".qweight", ".weight_q"}) {
    if (auto const w = store.find(base + suffix))
      throw Error(ErrorCode::unsupported, one_line(w->where(), ": this packing cannot be read"));
  }
  return false;
}

}  // namespace moe::io
