// SPDX-License-Identifier: Apache-2.0
// io/packed_experts.hpp: reads experts in the form of a quantisation, codes and scales as they are stored, without a copy in floating
// point: fp8 in blocks and per channel, mxfp4, integers in groups, and unquantised weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
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
#include "moe/io/tensor_store.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/format/packed_int.hpp"
#include "moe/quantization/int4_group128.hpp"

namespace moe::io {

/// How a checkpoint stores a matrix.
enum class StoredForm : std::uint8_t { floats, fp8, int8, mxfp4, nvfp4, integers, other };

constexpr std::string_view name(StoredForm f) {
  constexpr std::string_view kNames[] = {"unquantised", "fp8", "int8", "mxfp4", "nvfp4", "packed integers", "another form"};
  return kNames[static_cast<std::size_t>(f)];
}

namespace detail {

/// The codes of a matrix: its tensor, and of mxfp4 the tensor of its exponents.
struct StoredCodes {
  StoredForm form = StoredForm::floats;
  StoredTensor codes;
  std::optional<StoredTensor> exponents;
};

/// E_ARG if the store has no such matrix.
inline StoredCodes find_codes(TensorStore const& store, StoredMatrix const& m) {
  auto const exponents = [&](StoredTensor const& codes, std::string const& tensor) {
    return StoredCodes{StoredForm::mxfp4, codes, store.at(tensor)};
  };
  if (auto const blocks = store.find(m.base + "_blocks")) return exponents(*blocks, m.base + "_scales");
  for (char const* suffix : {".qweight", ".weight_packed"}) {
    auto const w = store.find(m.base + suffix);
    if (!w) continue;
    if (w->info->dtype != FileDType::u8) return {StoredForm::integers, *w, {}};
    if (store.contains(m.base + ".weight_global_scale")) return {StoredForm::nvfp4, *w, {}};
    return exponents(*w, m.base + ".weight_scale");
  }
  auto w = store.find(m.base + ".weight");
  if (!w) w = store.at(m.base);
  switch (w->info->dtype) {
    case FileDType::f8_e4m3: return {StoredForm::fp8, *w, {}};
    case FileDType::i8: return store.contains(m.base + ".scale") ? exponents(*w, m.base + ".scale") : StoredCodes{StoredForm::int8, *w, {}};
    case FileDType::u8: return {StoredForm::nvfp4, *w, {}};
    default: return {StoredForm::floats, *w, {}};
  }
}

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
  last = kOnes * static_cast<std::uint8_t>(~value & mask);  // bytes that are not such values
  if (i < n) std::memcpy(&last, bytes + i, static_cast<std::size_t>(n - i));
  return (found | look(last)) != 0;
}

template <class Quant>
inline constexpr bool kIsIntegers = false;
template <int Bits, int Group, bool ZeroPoint>
inline constexpr bool kIsIntegers<quantization::WNa16<Bits, Group, ZeroPoint>> = true;

inline void no_look(std::uint8_t const*, std::int64_t) {}

}  // namespace detail

/// Reads matrices of experts as `Quant` stores them. Weight: element of unquantised weights.
template <class Quant, class Weight>
class PackedMatrixReader {
 public:
  using Code = typename Quant::template WeightCode<Weight>;
  using Scale = typename Quant::WeightScale;

  PackedMatrixReader(TensorStore const& store, CheckpointQuantization const& q) : store_(store), q_(q) {}

  /// Whether there is a reader for what `Quant` stores.
  static constexpr bool reads() { return form() != StoredForm::nvfp4; }

  /// Whether the matrix is stored in this form; else it can be read in floating point only.
  bool takes(StoredMatrix const& m) const {
    if constexpr (!reads()) return false;
    auto const stored = detail::find_codes(store_, m);
    if constexpr (kForm == StoredForm::fp8) {
      if (stored.form != kForm || m.interleaved) return false;
      auto const grid = scales_of(m, stored.codes);
      return grid && fits(*grid, m) && m.row % tile_rows(m) == 0;
    } else {
      return stored.form == kForm && !(kForm == StoredForm::floats && bits(stored.codes.info->dtype) < 16);
    }
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
    } else if constexpr (kForm == StoredForm::fp8) {
      read_fp8(stored.codes, m, to, scales);
    } else if constexpr (kForm == StoredForm::mxfp4) {
      read_mxfp4(stored, m, to, scales);
    } else if constexpr (kForm == StoredForm::integers) {
      read_integers(stored.codes, m, to, scales + m.row * Quant::weight_scale_cols(m.cols));
    }
  }

 private:
  static constexpr StoredForm form() {
    using quantization::ScaleGranularity;
    if constexpr (facts::states_format<Quant>()) {
      if (Quant::kWeightGranularity == ScaleGranularity::none) return StoredForm::floats;
      if (Quant::kWeightDType == DType::e4m3 && std::is_same_v<Scale, float> && Quant::kWeightGranularity != ScaleGranularity::per_tensor) {
        return StoredForm::fp8;
      }
      if (Quant::kWeightPack == 2 && std::is_same_v<Scale, std::uint8_t> && Quant::kWeightGroupCols == 32) return StoredForm::mxfp4;
      if (std::is_same_v<Code, std::uint8_t> && facts::has_weight_unit<Quant>() && !std::is_same_v<Scale, std::uint8_t> && requires {
            quantization::to_internal<Quant>;
          } && Quant::kWeightGroupRows == 1 && Quant::kWeightDType != DType::e4m3 && !Quant::kQuantizesActivations) {
        return StoredForm::integers;
      }
    }
    return StoredForm::nvfp4;  // no reader here
  }
  static constexpr StoredForm kForm = form();

  static std::int64_t tile_rows(StoredMatrix const& m) { return Quant::kWeightGroupRows == 0 ? m.rows : Quant::kWeightGroupRows; }
  static std::int64_t tile_cols(StoredMatrix const& m) { return Quant::kWeightGroupCols == 0 ? m.cols : Quant::kWeightGroupCols; }

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

  std::optional<detail::ScaleGrid> scales_of(StoredMatrix const& m, StoredTensor const& codes) const {
    require(codes, m, m.cols);
    auto const scale =
        m.stack > 0 ? detail::find_any(store_, m.base, {".weight_scale_inv", ".weight_scale", "_scale_inv", "_weight_scale", "_scale"})
                    : detail::find_any(store_, m.base, {".weight_scale_inv", ".weight_scale", ".scale"});
    if (!scale) return std::nullopt;  // the reader in floating point names it
    detail::MatrixPosition const position{.rows = m.rows, .cols = m.cols, .index = m.index, .stack = m.stack};
    detail::ScaleGrid grid = detail::read_scale_grid(*scale, position, q_.block[0], q_.block[1]);
    q_.require({false, 8, grid.group}, m.cols, codes.where());
    return grid;
  }
  /// Whether each tile of the scheme has one scale.
  static bool fits(detail::ScaleGrid const& grid, StoredMatrix const& m) {
    return grid.row_block % tile_rows(m) == 0 && (grid.col_block % tile_cols(m) == 0 || grid.col_block == m.cols);
  }

  void read_fp8(StoredTensor const& w, StoredMatrix const& m, Code* to, Scale* scales) const {
    auto const grid = *scales_of(m, w);
    std::int64_t const scale_cols = Quant::weight_scale_count(tile_rows(m), m.cols);
    Scale* out = scales + m.row / tile_rows(m) * scale_cols;
    for (std::int64_t r = 0; r < m.rows; r += tile_rows(m)) {
      for (std::int64_t c = 0; c < m.cols; c += tile_cols(m)) *out++ = grid(r, c);
    }
    detail::copy_pieces(w, m.index * m.rows * m.cols, m.rows * m.cols, reinterpret_cast<std::uint8_t*>(to),
                        [&](std::uint8_t const* bytes, std::int64_t n) {
                          if (detail::has_byte(bytes, n, 0x7F, 0x7F)) {
                            throw Error(ErrorCode::argument, one_line(w.where(), ": NaN code in expert ", m.index, " of '", m.base, "'"));
                          }
                        });
  }
  void read_mxfp4(detail::StoredCodes const& stored, StoredMatrix const& m, Code* to, Scale* scales) const {
    StoredTensor const& w = stored.codes;
    StoredTensor const& s = *stored.exponents;
    if (m.cols % 32 != 0) throw Error(ErrorCode::argument, one_line(w.where(), ": mxfp4 needs K to be a multiple of 32, is ", m.cols));
    require(w, m, m.cols / 2);
    if (m.stack == 0) {
      require_shape(s, {m.rows, m.cols / 32});
    } else {
      require_shape(s, {m.stack, m.rows, m.cols / 32});
    }
    q_.require({false, 4, 32}, m.cols, w.where());
    std::int64_t const width = m.cols / 2, groups = m.cols / 32;
    detail::copy_rows(w, m.index * m.rows * width, m.rows, width, m.interleaved, reinterpret_cast<std::uint8_t*>(to), detail::no_look);
    detail::copy_rows(s, m.index * m.rows * groups, m.rows, groups, m.interleaved, reinterpret_cast<std::uint8_t*>(scales + m.row * groups),
                      [&](std::uint8_t const* bytes, std::int64_t n) {
                        if (detail::has_byte(bytes, n, 0xFF, 0xFF)) throw Error(ErrorCode::argument, one_line(s.where(), ": NaN scale"));
                      });
  }
  void read_integers(StoredTensor const& w, StoredMatrix const& m, Code* to, Scale* scales) const {
    bool const qweight = store_.contains(m.base + ".qweight");
    auto const matrix = qweight ? detail::read_qweight(store_, w, m.base, m.rows, m.cols, q_)
                                : detail::read_packed_integers(store_, w, m.base, m.rows, m.cols, q_);
    if (!matrix.index.empty()) {
      throw Error(ErrorCode::unsupported,
                  one_line(w.where(), ": desc_act: its columns are in the order of activations, which ", Quant::kName, " cannot hold"));
    }
    detail::naming(w, [&] { quantization::to_internal<Quant>(matrix.weight, to, scales); });
  }

  TensorStore const& store_;
  CheckpointQuantization const& q_;
};

}  // namespace moe::io
