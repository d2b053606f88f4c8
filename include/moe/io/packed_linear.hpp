// SPDX-License-Identifier: Apache-2.0
// io/packed_linear.hpp: reads one linear weight whose codes are packed: GPTQ, AWQ and compressed-tensors integers, nvfp4, mxfp4.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/io/checkpoint_quantization.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/scaled_matrix.hpp"
#include "moe/io/tensor_store.hpp"
#include "moe/quantization/format/packed_int.hpp"

namespace moe::io::detail {

/// Runs `f`; prefixes its errors with the tensor's name.
template <class F>
auto naming(StoredTensor const& t, F&& f) {
  try {
    return f();
  } catch (Error const& error) {
    throw Error(error.code(), one_line(t.where(), ": ", error.message()));
  }
}

/// Packed codes of 4 or 8 bits, from which a zero point is subtracted.
constexpr DType integer_type(int bits) { return bits == 4 ? DType::u4 : DType::u8; }
/// A whole tensor of words with packed codes or zero points. E_ARG unless it is I32.
inline std::vector<std::int32_t> read_words(StoredTensor const& t) {
  require_dtype(t, {FileDType::i32});
  return t.file->read<std::int32_t>(*t.info);
}

/// The group of each of k columns; empty if column j belongs to group j / group. E_ARG for a group outside [0, groups). E_UNSUPPORTED for
/// another order in matrices split between ranks: the groups of one part would be scattered over the whole row.
inline std::vector<std::int32_t> read_group_index(TensorStore const& store, std::string const& tensor, std::int64_t k, std::int64_t group,
                                                  bool split) {
  auto const t = store.find(tensor);
  if (!t) return {};
  require_shape(*t, {k});
  std::vector<std::int32_t> index = t->file->read<std::int32_t>(*t->info);  // numbers, not packed: of any integer type
  // If columns were not reordered, some writers still store the tensor, with -1 as its first element.
  if (!index.empty() && index[0] == -1) return {};
  bool in_order = true;
  for (std::int64_t j = 0; j < k; ++j) {
    std::int32_t const g = index[at(j)];
    if (g < 0 || g >= k / group) {
      throw Error(ErrorCode::argument, one_line(t->where(), ": group ", g, " of column ", j, " is out of range [0, ", k / group, ")"));
    }
    in_order = in_order && g == j / group;
    if (!in_order && split) {
      throw Error(ErrorCode::unsupported, one_line(t->where(), ": desc_act: column ", j, " belongs to group ", g, ", not ", j / group,
                                                   "; such a matrix cannot be cut into tensor-parallel parts"));
    }
  }
  return in_order ? std::vector<std::int32_t>{} : index;
}

/// Codes of a matrix, with the group of each column; no index: column j belongs to group j / group.
struct IntegerMatrix {
  quantization::IntWeight weight;
  std::vector<std::int32_t> index;
};

/// out[n, k] = (code - zero) · scale, column j in group index[j], or in group j / group if index is empty.
template <class T>
void dequantize_integers(IntegerMatrix const& m, T* out) {
  auto const& [w, index] = m;
  std::int64_t const groups = w.groups();
  for (std::int64_t i = 0; i < w.rows; ++i) {
    for (std::int64_t j = 0; j < w.cols; ++j) {
      std::int64_t const g = index.empty() ? j / w.group : index[at(j)];
      float const code = static_cast<float>(w.codes[at(i * w.cols + j)] - w.zero(i, g));
      out[i * w.cols + j] = from_float<T>(code * w.scales[at(i * groups + g)]);
    }
  }
}

/// base.qweight, .scales, .qzeros and perhaps .g_idx, as GPTQ or AWQ pack them: the configuration says which, and the widths.
inline IntegerMatrix read_qweight(TensorStore const& store, StoredTensor const& w, std::string const& base, std::int64_t n, std::int64_t k,
                                  CheckpointQuantization const& q) {
  bool const gptq = q.method == QuantMethod::gptq;
  if (!gptq && q.method != QuantMethod::awq) {
    throw Error(ErrorCode::config, one_line(w.where(), ": GPTQ or AWQ codes, but the configuration's quant_method is ", name(q.method),
                                            ", expected gptq or awq"));
  }
  int const bits = q.weights.at(0).bits, per_word = 32 / bits;
  std::int64_t const stated = q.weights.at(0).group, group = stated == -1 ? k : stated;
  std::string const because = text("quantization_config: ", name(q.method), " with ", bits, " bits, group_size ", stated);
  if (k % group != 0 || k % per_word != 0 || n % per_word != 0) {
    throw Error(ErrorCode::config, one_line(w.where(), ": a weight [", n, ", ", k, "] is not a multiple of ", per_word, " rows and of ",
                                            std::max<std::int64_t>(group, per_word), " columns (", because, ")"));
  }
  if (gptq) {
    require_shape(w, {k / per_word, n}, because);
  } else {
    require_shape(w, {k, n / per_word}, because);
  }
  StoredTensor const s = store.at(base + ".scales");
  require_shape(s, {k / group, n}, because);
  std::vector<std::int32_t> zeros;
  if (auto const z = store.find(base + ".qzeros")) {
    require_shape(*z, {k / group, n / per_word}, because);
    zeros = read_words(*z);
  } else {
    q.refuse_missing_zero_points(bits, w.where(), base + ".qzeros");
  }
  auto const words = read_words(w);
  auto const scales = read_scales(s);
  require_finite_weights(s, scales, integer_type(bits));
  auto const size = static_cast<int>(stated);
  if (!gptq) {
    return {naming(w,
                   [&] {
                     return quantization::read_awq({.qweight = words, .qzeros = zeros, .scales = scales, .bits = bits, .group_size = size},
                                                   n, k);
                   }),
            {}};
  }
  auto index = read_group_index(store, base + ".g_idx", k, group, q.split);
  // The order of the columns does not affect the layout of the words.
  auto unpacked = naming(w, [&] {
    return quantization::read_gptq({.qweight = words,
                                    .qzeros = zeros,
                                    .scales = scales,
                                    .g_idx = {},
                                    .bits = bits,
                                    .group_size = size,
                                    .zeros_minus_one = q.zeros_minus_one},
                                   n, k);
  });
  return {std::move(unpacked), std::move(index)};
}

/// What belongs to base.weight_packed I32 of compressed-tensors: element 8j + i (4j + i) of a row in bits 4i (8i) of word j, a scale per
/// group, zero points of consecutive rows in a word.
struct PackedIntegers {
  int bits = 4;
  std::int64_t group = 0;
  StoredTensor scale;
  std::optional<StoredTensor> zero_points;
  std::vector<std::int32_t> index;  ///< as IntegerMatrix::index

  int group_size(std::int64_t k) const {
    return group == k ? -1 : static_cast<int>(std::min<std::int64_t>(group, std::numeric_limits<int>::max()));
  }
};
inline PackedIntegers find_packed_integers(TensorStore const& store, StoredTensor const& w, std::string const& base, std::int64_t n,
                                           std::int64_t k, CheckpointQuantization const& q) {
  if (auto const shape = store.find(base + ".weight_shape")) {
    auto const stated = shape->file->read<std::int64_t>(*shape->info);
    if (stated != std::vector<std::int64_t>{n, k}) {
      throw Error(ErrorCode::argument,
                  one_line(shape->where(), ": holds ", shape_text(stated), ", expected ", shape_text(std::vector<std::int64_t>{n, k})));
    }
  }
  bool const eight = w.shape().size() == 2 && w.shape()[1] == k / 4;
  require_shape(w, {n, eight ? k / 4 : k / 8}, eight ? "" : "4 bits");
  require_dtype(w, {FileDType::i32});
  int const bits = eight ? 8 : 4;
  StoredTensor const s = store.at(base + ".weight_scale");
  auto const& shape = s.shape();
  if (shape.size() != 2 || shape[0] != n || shape[1] < 1 || k % shape[1] != 0) {
    throw Error(ErrorCode::argument,
                one_line(s.where(), ": shape ", s.info->shape_text(), ", expected [", n, ", groups] with groups dividing ", k));
  }
  std::int64_t const groups = shape[1], group = k / groups;
  q.require({true, bits, group}, k, w.where());
  auto zeros = store.find(base + ".weight_zero_point");
  if (zeros) {
    require_shape(*zeros, {n / (32 / bits), groups});
  } else {
    q.refuse_missing_zero_points(bits, w.where(), base + ".weight_zero_point");
  }
  PackedIntegers out{bits, group, s, zeros, read_group_index(store, base + ".weight_g_idx", k, group, q.split)};
  naming(w, [&] { quantization::check_int_format(bits, out.group_size(k)); });
  return out;
}
inline IntegerMatrix read_packed_integers(TensorStore const& store, StoredTensor const& w, std::string const& base, std::int64_t n,
                                          std::int64_t k, CheckpointQuantization const& q) {
  PackedIntegers found = find_packed_integers(store, w, base, n, k, q);
  std::vector<std::int32_t> zeros;
  if (found.zero_points) zeros = read_words(*found.zero_points);
  auto const words = read_words(w);
  auto const scales = read_scales(found.scale);
  require_finite_weights(found.scale, scales, integer_type(found.bits));
  auto unpacked = naming(w, [&] {
    return quantization::read_compressed_tensors(
        {.weight_packed = words, .weight_zero_point = zeros, .weight_scale = scales, .bits = found.bits, .group_size = found.group_size(k)},
        n, k);
  });
  return {std::move(unpacked), std::move(found.index)};
}

/// Packed e2m1 codes [rows, k / 2] from byte `first`, low nibble first, times scale(row, group of 16 or 32).
template <class Scale>
void read_e2m1(StoredTensor const& codes, std::int64_t first, std::int64_t rows, std::int64_t k, std::int64_t group, Scale scale,
               float* out) {
  std::vector<std::uint8_t> bytes(at(rows * k / 2));
  codes.file->read_bytes(*codes.info, first, rows * k / 2, bytes.data());
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t j = 0; j < k; j += 2) {
      float const s = scale(i, j / group);
      std::uint8_t const two = bytes[at((i * k + j) / 2)];
      out[i * k + j] = kE2m1Values[two & 15U] * s;
      out[i * k + j + 1] = kE2m1Values[two >> 4U] * s;
    }
  }
}

/// Rows [first, first + rows) of mxfp4 blocks U8 [..., k/32, 16] (or [..., k/2]) and exponents [..., k/32], counted over the flattened
/// leading dimensions, into out[rows, k] as float.
inline void read_mxfp4_rows(StoredTensor const& blocks, StoredTensor const& scales, std::int64_t first, std::int64_t rows, std::int64_t k,
                            float* out) {
  require_dtype(blocks, {FileDType::u8, FileDType::i8});
  require_dtype(scales, {FileDType::u8, FileDType::f8_e8m0});
  std::int64_t const groups = k / 32;
  std::vector<std::uint8_t> exponents(at(rows * groups));
  scales.file->read_bytes(*scales.info, first * groups, rows * groups, exponents.data());
  constexpr std::uint8_t kLargest = quantization::largest_exponent(DType::e2m1);
  for (std::int64_t g = 0; g < rows * groups; ++g) {
    std::uint8_t const exponent = exponents[at(g)];
    if (exponent == 255) throw Error(ErrorCode::argument, one_line(scales.where(), ": NaN scale in row ", first + g / groups));
    if (exponent > kLargest) {
      throw Error(ErrorCode::argument, one_line(scales.where(), ": exponent ", int{exponent}, " in row ", first + g / groups,
                                                " is out of range, at most ", int{kLargest}));
    }
  }
  read_e2m1(
      blocks, first * k / 2, rows, k, 32, [&](std::int64_t i, std::int64_t g) { return e8m0_value(exponents[at(i * groups + g)]); }, out);
}

/// E_ARG, naming the tensor, unless every code of nvfp4 is finite under this global scale, which multiplies.
inline void require_packable_global(StoredTensor const& g, float global) {
  if (quantization::is_packable_global(global)) return;
  throw Error(ErrorCode::argument,
              one_line(g.where(), ": the global scale ", global, " is out of range: it must be positive, and 2688 times it finite"));
}

/// 4-bit floats [n, k / 2], U8: nvfp4 with `base.weight_scale` e4m3 [n, k / 16] and either a scale of the tensor that multiplies
/// (weight_scale_2) or one that divides (weight_global_scale); mxfp4 with exponents [n, k / 32], also named `base.scale` (codes I8 then).
template <class T>
void read_packed_floats(TensorStore const& store, StoredTensor const& w, std::string const& base, std::int64_t n, std::int64_t k,
                        CheckpointQuantization const& q, T* out) {
  auto const multiplies = store.find(base + ".weight_scale_2"), divides = store.find(base + ".weight_global_scale");
  StoredTensor const s = store.at(base + (store.contains(base + ".scale") ? ".scale" : ".weight_scale"));
  bool const nvfp4 = multiplies || divides || s.info->dtype == FileDType::f8_e4m3;
  if (nvfp4 && !multiplies && !divides) {
    throw Error(ErrorCode::argument, one_line(w.where(), ": nvfp4 needs '", base, ".weight_scale_2' or '", base, ".weight_global_scale'"));
  }
  std::int64_t const group = nvfp4 ? 16 : 32;
  if (k % group != 0) {
    throw Error(ErrorCode::argument,
                one_line(w.where(), ": ", nvfp4 ? "nvfp4" : "mxfp4", " needs K to be a multiple of ", group, ", is ", k));
  }
  require_shape(w, {n, k / 2});
  q.require({false, 4, group}, k, w.where());
  require_shape(s, {n, k / group}, nvfp4 ? "nvfp4: 16 elements a scale" : "mxfp4: 32 elements a scale");
  if (nvfp4) require_dtype(s, {FileDType::f8_e4m3});
  std::vector<float> wide(at(n * k));
  if (nvfp4) {
    StoredTensor const& g = multiplies ? *multiplies : *divides;
    float const global = read_scale(g);
    require_packable_global(g, multiplies ? global : 1.0F / global);
    std::vector<float> scales = read_scales(s);
    for (float& scale : scales) scale = multiplies ? scale * global : scale / global;
    read_e2m1(w, 0, n, k, 16, [&](std::int64_t i, std::int64_t g) { return scales[at(i * (k / 16) + g)]; }, wide.data());
  } else {
    read_mxfp4_rows(w, s, 0, n, k, wide.data());
  }
  std::ranges::transform(wide, out, from_float<T>);
}

}  // namespace moe::io::detail
