// SPDX-License-Identifier: Apache-2.0
// io/packed_experts.hpp: reads experts in the form of a quantisation, codes and scales as they are stored, without a copy in floating
// point: fp8 in blocks and per channel, int8, mxfp8, mxfp4, nvfp4, integers in groups, and unquantised weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "moe/core/contract/facts.hpp"
#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/io/checkpoint_quantization.hpp"
#include "moe/io/expert_layout.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/packed_linear.hpp"
#include "moe/io/scaled_matrix.hpp"
#include "moe/io/stored_form.hpp"
#include "moe/io/tensor_store.hpp"
#include "moe/quantization/format/codecs.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/format/packed_int.hpp"
#include "moe/quantization/format/weight_scales.hpp"

namespace moe::io {

namespace detail {

/// Bytes of a cache-resident piece: what is copied is looked at while it is there.
inline constexpr std::int64_t kPiece = 1 << 16;

/// Copies `count` bytes from byte `first` of a tensor; look(pointer, bytes) sees every piece.
template <class Look>
void copy_pieces(StoredTensor const& t, std::int64_t first, std::int64_t count, std::uint8_t* out, Look const& look) {
  for (std::int64_t at = 0; at < count; at += kPiece) {
    std::int64_t const n = std::min(kPiece, count - at);
    t.file->read_bytes(*t.info, first + at, n, out + at);
    look(out + at, n);
  }
}
/// Copies rows [0, rows) of `width` bytes; interleaved: even rows to the first half, odd rows to the second.
template <class Look>
void copy_rows(StoredTensor const& t, std::int64_t first, std::int64_t rows, std::int64_t width, bool interleaved, std::uint8_t* out,
               Look const& look) {
  if (!interleaved) return copy_pieces(t, first, rows * width, out, look);
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int64_t const to = r % 2 == 0 ? r / 2 : rows / 2 + r / 2;
    copy_pieces(t, first + r * width, width, out + to * width, look);
  }
}

/// Whether (byte & mask) == value holds for one of the bytes. Eight at a time: a word has a zero byte if one of its bytes borrows.
inline bool has_byte(std::uint8_t const* bytes, std::int64_t n, std::uint8_t mask, std::uint8_t value) {
  constexpr std::uint64_t kOnes = 0x0101010101010101U;
  std::uint64_t found = 0, last = 0;
  auto const look = [&](std::uint64_t word) {
    std::uint64_t const x = (word & (kOnes * mask)) ^ (kOnes * value);
    return (x - kOnes) & ~x & (kOnes * 0x80U);
  };
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes + i, 8);
    found |= look(word);
  }
  last = kOnes * static_cast<std::uint8_t>(~value & mask);  // padding that never matches
  if (i < n) std::memcpy(&last, bytes + i, static_cast<std::size_t>(n - i));
  return (found | look(last)) != 0;
}

inline void no_look(std::uint8_t const*, std::int64_t) {}

/// "row 3", in a matrix of several also of which: where in the tensor the byte lies that copy_rows() put to `at` of the matrix. `width`:
/// bytes of a row.
inline std::string stored_row(StoredMatrix const& m, std::int64_t at, std::int64_t width) {
  std::int64_t const row = at / width, half = m.rows / 2;
  std::int64_t const stored = !m.interleaved ? row : row < half ? 2 * row : 2 * (row - half) + 1;
  return m.stack == 0 ? text("row ", stored) : text("row ", stored, " of matrix ", m.index);
}

}  // namespace detail

/// Reads matrices of experts as `Quant` stores them. Weight: element of unquantised weights.
template <class Quant, class Weight>
class PackedMatrixReader {
 public:
  using Code = typename Quant::template WeightCode<Weight>;
  using Scale = typename Quant::WeightScale;

  PackedMatrixReader(TensorStore const& store, CheckpointQuantization const& q) : store_(store), q_(q) {}

  /// Whether there is a reader for what `Quant` stores.
  static constexpr bool reads() { return form() != StoredForm::other; }

  /// Whether the matrix is stored in this form; else it can be read in floating point only.
  bool takes(StoredMatrix const& m) const {
    if constexpr (!reads()) return false;
    auto const stored = detail::find_codes(store_, m);
    if constexpr (kForm == StoredForm::mxfp8 || kForm == StoredForm::nvfp4) {
      return stored.form == kForm && m.stack == 0;
    } else if constexpr (kForm == StoredForm::fp8 || kForm == StoredForm::int8) {
      if (stored.form != kForm || m.interleaved || store_.contains(m.base + ".weight_zero_point")) return false;
      auto const scale = find_scale(m);  // the reader in floating point names one that is missing
      return scale && fits(scales_of(m, stored.codes, *scale), m) && m.row % block_rows(m) == 0;
    } else {
      return stored.form == kForm && !(kForm == StoredForm::floats && bits(stored.codes.info->dtype) < 16);
    }
  }

  /// E_CONFIG, naming the tensor and both forms, for a matrix that takes() refuses where it took another.
  void require_taken(StoredMatrix const& m) const {
    if (takes(m)) return;
    auto const stored = detail::find_codes(store_, m);
    if (stored.form == kForm) {
      throw Error(ErrorCode::config,
                  one_line(stored.codes.where(), ": stored as ", name(stored.form), " with other scales than the first expert"));
    }
    throw Error(ErrorCode::config,
                one_line(stored.codes.where(), ": stored as ", name(stored.form), ", the first expert as ", name(kForm)));
  }

  /// takes(), and of integers that the scheme has their bits, groups and order of columns. E_ARG, E_CONFIG as read().
  bool holds(StoredMatrix const& m) const {
    if (!takes(m)) return false;
    if constexpr (kForm == StoredForm::integers) {
      std::int64_t const group = quantization::effective_group(m.cols, Quant::kWeightGroupCols);
      auto const fits = [&](int bits, std::int64_t stored, std::vector<std::int32_t> const& order) {
        return bits == 8 / Quant::kWeightPack && group > 0 && stored % group == 0 && order.empty();
      };
      if (!store_.contains(m.base + ".qweight")) {
        auto const found = detail::find_packed_integers(store_, detail::find_codes(store_, m).codes, m.base, m.rows, m.cols, q_);
        return fits(found.bits, found.group, found.index);
      }
      if (q_.weights.empty()) return true;  // read() refuses it
      std::int64_t const stored = q_.weights[0].group == -1 ? m.cols : q_.weights[0].group;
      bool const ordered = m.cols % stored == 0;
      return fits(q_.weights[0].bits, stored,
                  ordered ? detail::read_group_index(store_, m.base + ".g_idx", m.cols, stored, false) : std::vector<std::int32_t>{});
    }
    return true;
  }

  /// codes, scales: those of the whole w13 or w2; the matrix goes to its rows. E_ARG, naming the tensor, for a shape, code or scale that
  /// cannot be. Only matrices that takes() accepts.
  void read(StoredMatrix const& m, Code* codes, Scale* scales) const {
    auto const stored = detail::find_codes(store_, m);
    Code* const to = codes + m.row * Quant::weight_code_cols(m.cols);
    if constexpr (kForm == StoredForm::floats) {
      require(stored.codes, m, m.cols);
      stored.codes.file->read_elements(*stored.codes.info, m.index * m.rows * m.cols, m.rows * m.cols, to);
      if (m.interleaved) detail::deinterleave_rows(to, m.rows, m.cols);
    } else if constexpr (kForm == StoredForm::fp8 || kForm == StoredForm::int8) {
      read_scaled(stored.codes, m, to, scales);
    } else if constexpr (kForm == StoredForm::mxfp8) {
      read_mxfp8(stored, m, to, scales);
    } else if constexpr (kForm == StoredForm::mxfp4) {
      read_mxfp4(stored, m, to, scales);
    } else if constexpr (kForm == StoredForm::nvfp4) {
      read_nvfp4(stored.codes, m, to, scales);
    } else if constexpr (kForm == StoredForm::integers) {
      read_integers(stored.codes, m, to, scales + Quant::weight_scale_count(m.row, m.cols));
    }
  }

 private:
  static constexpr StoredForm form() {
    using quantization::ScaleGranularity;
    if constexpr (facts::states_format<Quant>()) {
      if (Quant::kWeightGranularity == ScaleGranularity::none) return StoredForm::floats;
      constexpr bool kFloat = std::is_same_v<Scale, float>, kByte = std::is_same_v<Scale, std::uint8_t>;
      bool const of_rows = Quant::kWeightGranularity != ScaleGranularity::per_tensor;
      if (Quant::kWeightDType == DType::e4m3 && kFloat && of_rows) return StoredForm::fp8;
      if (Quant::kWeightDType == DType::i8 && kFloat && of_rows) return StoredForm::int8;
      if (kByte && Quant::kWeightGroupRows == 1 && Quant::kWeightGroupCols == 32) {
        if (Quant::kWeightDType == DType::e4m3) return StoredForm::mxfp8;
        if (Quant::kWeightDType == DType::e2m1) return StoredForm::mxfp4;
      }
      if constexpr (requires { Quant::weight_global_offset(1, 1); }) return StoredForm::nvfp4;
      if (!kByte && Quant::kWeightGroupRows == 1 && (Quant::kWeightDType == DType::u4 || Quant::kWeightDType == DType::u8)) {
        return StoredForm::integers;
      }
    }
    return StoredForm::other;  // no reader here
  }
  static constexpr StoredForm kForm = form();

  static std::int64_t block_rows(StoredMatrix const& m) { return Quant::kWeightGroupRows == 0 ? m.rows : Quant::kWeightGroupRows; }
  static std::int64_t block_cols(StoredMatrix const& m) { return Quant::kWeightGroupCols == 0 ? m.cols : Quant::kWeightGroupCols; }

  /// E_ARG unless the tensor is [rows, width], or [stack, rows, width].
  static void require(StoredTensor const& t, StoredMatrix const& m, std::int64_t width) {
    if (m.stack == 0) {
      require_shape(t, {m.rows, width});
    } else if (t.shape().size() == 4) {
      require_shape(t, {m.stack, m.rows, width / 16, 16});  // mxfp4 blocks
    } else {
      require_shape(t, {m.stack, m.rows, width});
    }
  }

  std::optional<StoredTensor> find_scale(StoredMatrix const& m) const {
    return m.stack > 0 ? detail::find_any(store_, m.base, {".weight_scale_inv", ".weight_scale", "_scale_inv", "_weight_scale", "_scale"})
                       : detail::find_any(store_, m.base, {".weight_scale_inv", ".weight_scale", ".scale"});
  }
  detail::ScaleGrid scales_of(StoredMatrix const& m, StoredTensor const& codes, StoredTensor const& scale) const {
    require(codes, m, m.cols);
    detail::MatrixPosition const position{.rows = m.rows, .cols = m.cols, .index = m.index, .stack = m.stack};
    detail::ScaleGrid grid = detail::read_scale_grid(scale, position, q_.block[0], q_.block[1]);
    q_.require({kForm == StoredForm::int8, 8, grid.group}, m.cols, codes.where());
    if (kForm == StoredForm::int8) q_.refuse_missing_zero_points(8, codes.where(), m.base + ".weight_zero_point");
    return grid;
  }
  /// Whether the checkpoint's scale blocks cover whole blocks of the scheme.
  static bool fits(detail::ScaleGrid const& grid, StoredMatrix const& m) {
    return grid.row_block % block_rows(m) == 0 && (grid.col_block % block_cols(m) == 0 || grid.col_block == m.cols);
  }

  /// E_ARG, naming the tensor of the scales, unless every code is finite under this one. `index`: its position in the tensor.
  template <class T>
  static void require_packable(StoredTensor const& s, T const& scale, std::int64_t index) {
    if constexpr (std::is_same_v<T, quantization::ScaleZero>) {
      if (quantization::is_packable(scale, Quant::kWeightDType)) return;
      detail::require_finite_weights(s, std::span(&scale.scale, 1), Quant::kWeightDType, index);
      throw Error(ErrorCode::argument, one_line(s.where(), ": the zero point ", scale.zero, " of scale ", index, " is out of range [0, ",
                                                quantization::largest_code(Quant::kWeightDType), "]"));
    } else {
      float const value = scale;
      detail::require_finite_weights(s, std::span(&value, 1), Quant::kWeightDType, index);
    }
  }
  /// Copies exponents; E_ARG, naming their tensor, for another type, NaN and those under which a code would not be finite.
  static void copy_exponents(StoredTensor const& s, StoredMatrix const& m, std::uint8_t* to) {
    detail::require_dtype(s, {FileDType::u8, FileDType::f8_e8m0});
    std::int64_t const groups = m.cols / 32;
    constexpr std::uint8_t kLargest = quantization::largest_exponent(Quant::kWeightDType);
    detail::copy_rows(s, m.index * m.rows * groups, m.rows, groups, m.interleaved, to, [&](std::uint8_t const* bytes, std::int64_t n) {
      std::uint8_t const* const largest = std::max_element(bytes, bytes + n);
      if (*largest <= kLargest) return;
      std::string const place = detail::stored_row(m, largest - to, groups);
      if (*largest == 255) throw Error(ErrorCode::argument, one_line(s.where(), ": NaN scale in ", place));
      throw Error(ErrorCode::argument,
                  one_line(s.where(), ": exponent ", int{*largest}, " in ", place, " is out of range, at most ", int{kLargest}));
    });
  }
  /// E_ARG for a NaN of e4m3 among these bytes of a matrix with `width` bytes a row, which begins at `to`.
  static void refuse_nan(StoredTensor const& t, StoredMatrix const& m, char const* what, void const* to, std::int64_t width,
                         std::uint8_t const* bytes, std::int64_t n) {
    if (!detail::has_byte(bytes, n, 0x7F, 0x7F)) return;
    std::uint8_t const* const nan = std::find_if(bytes, bytes + n, [](std::uint8_t byte) { return (byte & 0x7F) == 0x7F; });
    std::int64_t const at = nan - static_cast<std::uint8_t const*>(to);
    throw Error(ErrorCode::argument,
                one_line(t.where(), ": NaN ", what, " at ", detail::stored_row(m, at, width), ", column ", at % width));
  }

  /// e4m3 or int8 codes with float32 scales.
  void read_scaled(StoredTensor const& w, StoredMatrix const& m, Code* to, Scale* scales) const {
    StoredTensor const s = *find_scale(m);
    detail::ScaleGrid const grid = scales_of(m, w, s);
    std::int64_t const scale_cols = Quant::weight_scale_count(block_rows(m), m.cols);
    Scale* out = scales + m.row / block_rows(m) * scale_cols;
    for (std::int64_t r = 0; r < m.rows; r += block_rows(m)) {
      for (std::int64_t c = 0; c < m.cols; c += block_cols(m)) {
        *out = grid(r, c);
        require_packable(s, *out++, grid.first + grid.index(r, c));
      }
    }
    detail::copy_pieces(w, m.index * m.rows * m.cols, m.rows * m.cols, reinterpret_cast<std::uint8_t*>(to),
                        [&](std::uint8_t const* bytes, std::int64_t n) {
                          if constexpr (kForm == StoredForm::fp8) refuse_nan(w, m, "code", to, m.cols, bytes, n);
                        });
  }
  void read_mxfp8(detail::StoredCodes const& stored, StoredMatrix const& m, Code* to, Scale* scales) const {
    StoredTensor const& w = stored.codes;
    require(w, m, m.cols);
    require_shape(*stored.exponents, {m.rows, m.cols / 32});
    q_.require({false, 8, 32}, m.cols, w.where());
    detail::copy_rows(w, 0, m.rows, m.cols, m.interleaved, reinterpret_cast<std::uint8_t*>(to),
                      [&](std::uint8_t const* bytes, std::int64_t n) { refuse_nan(w, m, "code", to, m.cols, bytes, n); });
    copy_exponents(*stored.exponents, m, scales + m.row * (m.cols / 32));
  }
  void read_mxfp4(detail::StoredCodes const& stored, StoredMatrix const& m, Code* to, Scale* scales) const {
    StoredTensor const& w = stored.codes;
    StoredTensor const& s = *stored.exponents;
    if (m.cols % 32 != 0) throw Error(ErrorCode::argument, one_line(w.where(), ": mxfp4 needs K to be a multiple of 32, is ", m.cols));
    require(w, m, m.cols / 2);
    detail::require_dtype(w, {FileDType::u8, FileDType::i8});
    if (m.stack == 0) {
      require_shape(s, {m.rows, m.cols / 32});
    } else {
      require_shape(s, {m.stack, m.rows, m.cols / 32});
    }
    q_.require({false, 4, 32}, m.cols, w.where());
    std::int64_t const width = m.cols / 2, groups = m.cols / 32;
    detail::copy_rows(w, m.index * m.rows * width, m.rows, width, m.interleaved, reinterpret_cast<std::uint8_t*>(to), detail::no_look);
    copy_exponents(s, m, reinterpret_cast<std::uint8_t*>(scales + m.row * groups));
  }
  /// The global scale of w13 is that of its first matrix: the scheme holds one, so the other must have the same.
  void read_nvfp4(StoredTensor const& w, StoredMatrix const& m, Code* to, Scale* scales) const {
    auto const multiplies = store_.find(m.base + ".weight_scale_2"), divides = store_.find(m.base + ".weight_global_scale");
    if (!multiplies && !divides) {
      throw Error(ErrorCode::argument,
                  one_line(w.where(), ": nvfp4 needs '", m.base, ".weight_scale_2' or '", m.base, ".weight_global_scale'"));
    }
    if (m.cols % 16 != 0) throw Error(ErrorCode::argument, one_line(w.where(), ": nvfp4 needs K to be a multiple of 16, is ", m.cols));
    StoredTensor const s = store_.at(m.base + ".weight_scale"), &g = multiplies ? *multiplies : *divides;
    require(w, m, m.cols / 2);
    q_.require({false, 4, 16}, m.cols, w.where());
    require_shape(s, {m.rows, m.cols / 16}, "nvfp4: 16 elements a scale");
    detail::require_dtype(s, {FileDType::f8_e4m3});
    float const stored = detail::read_scale(g), global = multiplies ? stored : 1.0F / stored;
    detail::require_packable_global(g, global);
    std::int64_t const rows = m.all_rows, groups = m.cols / 16;
    if (m.row == 0) {
      std::fill(scales + rows * groups, scales + Quant::weight_global_offset(rows, m.cols), Scale{0});
      Quant::set_weight_global(scales, rows, m.cols, global);
    } else if (float const first = Quant::weight_global(scales, rows, m.cols); first != global) {
      throw Error(ErrorCode::config, one_line(g.where(), ": the global scale ", global, " differs from ", first,
                                              " of the other half of w13; ", Quant::kName, " stores one for both"));
    }
    detail::copy_pieces(w, 0, m.rows * m.cols / 2, to, detail::no_look);
    std::uint8_t* const to_scales = scales + m.row * groups;
    detail::copy_pieces(s, 0, m.rows * groups, to_scales,
                        [&](std::uint8_t const* bytes, std::int64_t n) { refuse_nan(s, m, "scale", to_scales, groups, bytes, n); });
  }
  /// Packed words of compressed-tensors are the scheme's bytes; those of GPTQ and AWQ are rearranged.
  void read_integers(StoredTensor const& w, StoredMatrix const& m, Code* to, Scale* scales) const {
    if (!store_.contains(m.base + ".qweight")) return read_words_as_they_are(w, m, to, scales);
    auto const matrix = detail::read_qweight(store_, w, m.base, m.rows, m.cols, q_);
    refuse_order(w, matrix.index);
    detail::naming(w, [&] { quantization::to_internal<Quant>(matrix.weight, to, scales); });
    StoredTensor const s = store_.at(m.base + ".scales");  // [groups, rows]
    std::int64_t const per_row = Quant::weight_scale_count(m.rows, m.cols) / m.rows, repeated = per_row / matrix.weight.groups();
    for (std::int64_t i = 0; i < m.rows * per_row; ++i) require_packable(s, scales[i], i % per_row / repeated * m.rows + i / per_row);
  }
  static void refuse_order(StoredTensor const& w, std::vector<std::int32_t> const& index) {
    if (index.empty()) return;
    throw Error(ErrorCode::unsupported,
                one_line(w.where(), ": desc_act: its columns are in the order of activations, which ", Quant::kName, " cannot hold"));
  }
  void read_words_as_they_are(StoredTensor const& w, StoredMatrix const& m, Code* to, Scale* scales) const {
    detail::PackedIntegers const found = detail::find_packed_integers(store_, w, m.base, m.rows, m.cols, q_);
    refuse_order(w, found.index);
    std::int64_t const group = quantization::effective_group(m.cols, Quant::kWeightGroupCols), per_word = 32 / found.bits;
    if (found.bits != 8 / Quant::kWeightPack || group == 0 || found.group % group != 0) {
      throw Error(ErrorCode::config, one_line(w.where(), ": ", Quant::kName, " cannot hold ", found.bits, " bit weights in groups of ",
                                              found.group, " with K ", m.cols));
    }
    std::vector<std::int32_t> zeros;
    if (found.zero_points) zeros = detail::read_words(*found.zero_points);
    std::vector<float> const values = detail::read_scales(found.scale);
    std::int64_t const groups = m.cols / found.group;
    for (std::int64_t i = 0; i < m.rows * groups; ++i) {
      int zero = Quant::WeightCodec::kZero;
      if (!zeros.empty()) {
        std::int64_t const row = i / groups;
        zero = quantization::detail::field(zeros[detail::at(row / per_word * groups + i % groups)], static_cast<int>(row % per_word),
                                           found.bits);
      }
      Scale scale;
      if constexpr (std::is_same_v<Scale, quantization::ScaleZero>) {
        scale = {values[detail::at(i)], static_cast<float>(zero)};
      } else {
        scale = values[detail::at(i)];
        if (zero != Quant::WeightCodec::kZero) {
          throw Error(ErrorCode::config, one_line(found.zero_points->where(), ": ", Quant::kName, " is symmetric, but row ", i / groups,
                                                  " has the zero point ", zero));
        }
      }
      require_packable(found.scale, scale, i);
      scales = std::fill_n(scales, found.group / group, scale);
    }
    detail::copy_pieces(w, 0, m.rows * m.cols / Quant::kWeightPack, to, detail::no_look);
  }

  TensorStore const& store_;
  CheckpointQuantization const& q_;
};

}  // namespace moe::io
