// SPDX-License-Identifier: Apache-2.0
// quantization/config.hpp: a quantisation as a run-time value: the descriptor for checkpoints and the command line, and its rules.
// docs/semantics/quantization.md §7.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/format/int_format.hpp"
#include "moe/quantization/format/scales.hpp"

namespace moe::quantization {

/// The range of one scale, with its extents if that is a group (1 × cols) or a block (rows × cols).
struct GroupShape {
  ScaleGranularity kind = ScaleGranularity::none;
  int rows = 0;
  int cols = 0;
  friend constexpr bool operator==(GroupShape const&, GroupShape const&) = default;
};
inline constexpr GroupShape kPerTensor{ScaleGranularity::per_tensor, 0, 0};
inline constexpr GroupShape kPerToken{ScaleGranularity::per_token, 1, 0};
inline constexpr GroupShape kPerChannel{ScaleGranularity::per_channel, 1, 0};
constexpr GroupShape group_of(int cols) { return {ScaleGranularity::group, 1, cols}; }
constexpr GroupShape block_of(int rows, int cols) { return {ScaleGranularity::block, rows, cols}; }

/// One operand. No dtype: it stays in the activation dtype. Pointers are borrowed and may be null (dynamic, symmetric, no bias).
struct QuantDesc {
  std::optional<DType> dtype{};
  GroupShape group_shape{};
  float const* scale = nullptr;            ///< static scales
  float const* alpha_or_gscale = nullptr;  ///< nvfp4: global scales [L]
  std::uint8_t const* zero_point = nullptr;
  float const* bias = nullptr;
};

/// The four operands of a layer: activations into the two GEMMs and their weights.
struct QuantConfig {
  QuantDesc a1{}, a2{}, w1{}, w2{};
  bool scales_swizzled = false;
  std::optional<float> gemm1_alpha{}, gemm1_beta{}, gemm1_clamp_limit{};
  bool ue8m0 = false;
  MxRule mx_rule = MxRule::ceil;
  int mx_alignment = 32;

  std::optional<DType> quant_dtype() const { return a1.dtype; }
  bool use_fp8() const { return a1.dtype == DType::e4m3; }
  bool is_block_quantised() const { return w1.group_shape.kind == ScaleGranularity::block; }
  bool per_act_token() const { return a1.group_shape.kind == ScaleGranularity::per_token; }
  bool per_out_ch() const { return w1.group_shape.kind == ScaleGranularity::per_channel; }
  int weight_bits() const { return w1.dtype ? bits(*w1.dtype) : 16; }
  /// True for the one pair of scale groups with a fast path in exchanges: 128 × 128 weights and 1 × 128 activations.
  bool is_transport_block() const { return w1.group_shape == block_of(128, 128) && a1.group_shape == group_of(128); }

  /// Shape of the activation scales of `rows` rows; [0, 0] if none is computed per row or tensor.
  std::array<std::int64_t, 2> scale_shape(std::int64_t rows, std::int64_t hidden) const {
    switch (a1.group_shape.kind) {
      case ScaleGranularity::none: return {0, 0};
      case ScaleGranularity::per_tensor: return {1, 1};
      case ScaleGranularity::group: return {rows, (hidden + a1.group_shape.cols - 1) / a1.group_shape.cols};
      default: return {rows, 1};
    }
  }
  /// The same in the batched format: [L, C, columns].
  std::array<std::int64_t, 3> batched_scale_shape(std::int64_t experts, std::int64_t capacity, std::int64_t hidden) const {
    auto const [rows, cols] = scale_shape(capacity, hidden);
    return {experts, rows, cols};
  }

  /// E_CONFIG if the operands contradict each other.
  void validate() const {
    if (per_act_token() && is_block_quantised()) throw Error(ErrorCode::config, "illegal quantisation: per-token and block");
    if (a1.dtype != a2.dtype) {
      throw Error(ErrorCode::config, text("a1 is ", label(a1), " but a2 is ", label(a2), "; both activations have the same dtype"));
    }
    if (a1.group_shape != a2.group_shape) {
      throw Error(ErrorCode::config, text("a1 has ", name(a1.group_shape.kind), " scales but a2 ", name(a2.group_shape.kind),
                                          "; both activations have the same granularity"));
    }
    if (w1.dtype != w2.dtype || w1.group_shape != w2.group_shape) {
      throw Error(ErrorCode::config, text("w1 is ", label(w1), " but w2 is ", label(w2), "; both weights are quantised alike"));
    }
    if (a1.dtype && !w1.dtype) {
      throw Error(ErrorCode::config, text("activations are ", label(a1), " but the weights are not quantised"));
    }
  }
  /// "e4m3 per_token", "none": an operand as errors name it.
  static std::string label(QuantDesc const& d) {
    return d.dtype ? text(name(*d.dtype), " ", name(d.group_shape.kind)) : std::string("none");
  }
};

namespace detail {
inline QuantConfig checked(std::optional<DType> act, GroupShape act_group, std::optional<DType> weight, GroupShape weight_group) {
  QuantConfig c;
  c.a1 = c.a2 = QuantDesc{.dtype = act, .group_shape = act_group};
  c.w1 = c.w2 = QuantDesc{.dtype = weight, .group_shape = weight_group};
  c.validate();
  return c;
}
inline GroupShape int_group(int bits, int group_size) {
  check_int_format(bits, group_size);
  return group_size == -1 ? kPerChannel : group_of(group_size);
}
}  // namespace detail

/// Activations and weights in bf16 or f16.
inline QuantConfig unquantized() { return {}; }
/// Unquantised with expert biases: b1 [L, N], b2 [L, H].
inline QuantConfig bias_only(float const* b1, float const* b2) {
  QuantConfig c;
  c.w1.bias = b1;
  c.w2.bias = b2;
  return c;
}
/// `act`: kPerTensor, kPerToken or group_of(bk); `weight`: kPerTensor, kPerChannel, group_of(bk) or block_of(bn, bk).
inline QuantConfig fp8_w8a8(GroupShape act, GroupShape weight) { return detail::checked(DType::e4m3, act, DType::e4m3, weight); }
inline QuantConfig int8_w8a8(GroupShape act, GroupShape weight) { return detail::checked(DType::i8, act, DType::i8, weight); }
inline QuantConfig int8_w8a16(int group_size) { return detail::checked({}, {}, DType::u8, detail::int_group(8, group_size)); }
inline QuantConfig int4_w4a16(int group_size) { return detail::checked({}, {}, DType::u4, detail::int_group(4, group_size)); }
/// e4m3 activations per token.
inline QuantConfig int4_w4a8(int group_size) {
  return detail::checked(DType::e4m3, kPerToken, DType::u4, detail::int_group(4, group_size));
}
inline QuantConfig mxfp8_w8a8() { return detail::checked(DType::e4m3, group_of(32), DType::e4m3, group_of(32)); }
inline QuantConfig mxfp8_w8a16() { return detail::checked({}, {}, DType::e4m3, group_of(32)); }
inline QuantConfig mxfp4_w4a16() { return detail::checked({}, {}, DType::e2m1, group_of(32)); }
/// mxfp8 activations.
inline QuantConfig mxfp4_w4a8() { return detail::checked(DType::e4m3, group_of(32), DType::e2m1, group_of(32)); }
inline QuantConfig mxfp4_w4a4() { return detail::checked(DType::e2m1, group_of(32), DType::e2m1, group_of(32)); }
inline QuantConfig nvfp4_w4a4() { return detail::checked(DType::e2m1, group_of(16), DType::e2m1, group_of(16)); }
inline QuantConfig nvfp4_w4a16() { return detail::checked({}, {}, DType::e2m1, group_of(16)); }
/// Weight-only integers by their width. E_CONFIG for widths other than 4 and 8.
inline QuantConfig wna16(int bits, int group_size) {
  check_int_format(bits, group_size);
  return bits == 4 ? int4_w4a16(group_size) : int8_w8a16(group_size);
}

/// The descriptor of a policy.
template <class Scheme>
QuantConfig config_of() {
  QuantDesc act, weight;
  if constexpr (Scheme::kQuantizesActivations) {
    act.dtype = Scheme::kPayloadDType;
    act.group_shape = {Scheme::kActGranularity, Scheme::kActGranularity == ScaleGranularity::per_tensor ? 0 : 1, Scheme::kActGroup};
  }
  if constexpr (Scheme::kWeightGranularity != ScaleGranularity::none) {
    weight.dtype = Scheme::kWeightDType;
    weight.group_shape = {Scheme::kWeightGranularity, Scheme::kWeightGroupRows, Scheme::kWeightGroupCols};
  }
  QuantConfig c{.a1 = act, .a2 = act, .w1 = weight, .w2 = weight};
  c.validate();
  return c;
}

/// A tensor-parallel slice of the intermediate dimension cuts between blocks of bn rows (w13) and bk columns (w2), else E_CONFIG.
inline void check_block_slice(std::int64_t intermediate_per_partition, int block_rows, int block_cols) {
  for (int const block : {block_rows, block_cols}) {
    if (intermediate_per_partition % block != 0) {
      throw Error(ErrorCode::config, text("intermediate size per partition not a multiple of the quant block: ", intermediate_per_partition,
                                          " with blocks of ", block));
    }
  }
}

/// Dtype of a float8 tensor by the name a checkpoint gives it. The "fnuz" variants are E_UNSUPPORTED: their codes mean other numbers.
inline DType float8_dtype(std::string_view checkpoint_name) {
  if (checkpoint_name == "F8_E4M3" || checkpoint_name == "float8_e4m3fn") return DType::e4m3;
  if (checkpoint_name == "F8_E5M2" || checkpoint_name == "float8_e5m2") return DType::e5m2;
  if (checkpoint_name == "F8_E8M0" || checkpoint_name == "float8_e8m0fnu") return DType::e8m0;
  throw Error(ErrorCode::unsupported,
              text("float8 dtype '", checkpoint_name, "' is not supported; the supported ones are e4m3fn, e5m2, e8m0fnu"));
}

}  // namespace moe::quantization
