// SPDX-License-Identifier: Apache-2.0
// io/linear_reader.hpp: reads one linear weight [out, in] of a checkpoint as float or bf16, from any stored form.
//
// | tensors                                                       | stored as                                                         |
// |---------------------------------------------------------------|-------------------------------------------------------------------|
// | .weight F64, F32, F16, BF16                                   | itself                                                            |
// | .weight F8_E4M3, .weight_scale_inv, .weight_scale or .scale   | fp8, scales per tensor, row, group (mxfp8: exponents) or block    |
// | .weight I8, .weight_scale (.weight_zero_point)                | int8, scales per tensor, row or group                             |
// | .weight U8, .weight_scale, .weight_scale_2                    | nvfp4 as ModelOpt writes it                                       |
// | .weight_packed U8, .weight_scale, .weight_global_scale        | nvfp4 as compressed-tensors writes it                             |
// | .weight_packed U8, .weight_scale                              | mxfp4                                                             |
// | .weight I8, .scale F8_E8M0                                    | mxfp4 as DeepSeek-V4 is released                                  |
// | .weight_packed I32, .weight_scale, .weight_shape (…)          | int4 and int8 of compressed-tensors                               |
// | .qweight, .qzeros, .scales (.g_idx)                           | GPTQ or AWQ, as quantization_config says                          |
#pragma once

#include <cstdint>
#include <string>

#include "moe/core/error.hpp"
#include "moe/io/checkpoint_quantization.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/packed_linear.hpp"
#include "moe/io/scaled_matrix.hpp"
#include "moe/io/tensor_store.hpp"

namespace moe::io {

/// True if the store holds the linear weight `base` (a name without ".weight") in any stored form.
inline bool has_linear(TensorStore const& store, std::string const& base) {
  return store.contains(base + ".weight") || store.contains(base + ".weight_packed") || store.contains(base + ".qweight");
}

namespace detail {
/// True if the codes of `base.weight` are 4-bit floats, two a byte.
inline bool has_packed_floats(TensorStore const& store, StoredTensor const& w, std::string const& base) {
  return w.info->dtype == FileDType::u8 || (w.info->dtype == FileDType::i8 && store.contains(base + ".scale"));
}
}  // namespace detail

/// Checks that a weight can be [n, k] before n * k elements are allocated; else E_ARG with both shapes. Returns false if the store has no
/// such weight. Of packed codes it refuses only far too few; read_linear() checks the rest.
inline bool check_linear(TensorStore const& store, std::string const& base, std::int64_t n, std::int64_t k) {
  auto w = store.find(base + ".weight");
  if (w && !detail::has_packed_floats(store, *w, base)) {
    require_shape(*w, {n, k});
    return true;
  }
  if (!w) w = store.find(base + ".weight_packed");
  if (!w) w = store.find(base + ".qweight");
  if (!w) return false;
  // A word holds at most 8 codes. Tensors up to 8 times too small are left to read_linear(), whose error names what the packing needs.
  constexpr std::int64_t kSlack = 8 * 8;
  if (w->info->elements() < n * k / kSlack) {
    throw Error(ErrorCode::argument,
                one_line(w->where(), ": shape ", w->info->shape_text(), " is too small for a weight [", n, ", ", k, "]"));
  }
  return true;
}

/// Reads the linear weight `base` [n, k] into out[n * k]. Returns false if the store has no such weight. E_ARG with both shapes on a wrong
/// shape and for a tensor that is missing beside it, E_CONFIG if `q` states another form, E_UNSUPPORTED for another stored form.
template <class T>
bool read_linear(TensorStore const& store, std::string const& base, std::int64_t n, std::int64_t k, CheckpointQuantization const& q,
                 T* out) {
  if (auto const w = store.find(base + ".weight")) {
    FileDType const dtype = w->info->dtype;
    if (detail::has_packed_floats(store, *w, base)) {
      detail::read_packed_floats(store, *w, base, n, k, q, out);
      return true;
    }
    require_shape(*w, {n, k});
    if (detail::read_scaled(store, *w, base, {.rows = n, .cols = k}, q, false, out)) return true;
    if (!is_floating(dtype) || bits(dtype) < 16) {
      throw Error(ErrorCode::unsupported, one_line(w->where(), ": weights of dtype ", name(dtype),
                                                   " cannot be read; F64, F32, F16, BF16, F8_E4M3, I8 and U8 (nvfp4) can"));
    }
    w->file->read_elements(*w->info, 0, n * k, out);
    return true;
  }
  if (auto const w = store.find(base + ".weight_packed")) {
    if (w->info->dtype == FileDType::u8) {
      detail::read_packed_floats(store, *w, base, n, k, q, out);
    } else {
      detail::dequantize_integers(detail::read_packed_integers(store, *w, base, n, k, q), out);
    }
    return true;
  }
  if (auto const w = store.find(base + ".qweight")) {
    detail::dequantize_integers(detail::read_qweight(store, *w, base, n, k, q), out);
    return true;
  }
  return false;
}

}  // namespace moe::io
