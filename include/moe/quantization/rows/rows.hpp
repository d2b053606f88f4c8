// SPDX-License-Identifier: Apache-2.0
// quantization/rows/rows.hpp: the activation half of a scheme: a row of hidden values ↔ codes and scales, one scale group after the other.
// A row is anything with elements x[i]: an array, or values that are computed as they are read (experts/common/activated_row.hpp).
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/core/types.hpp"
#include "moe/quantization/format/codecs.hpp"
#include "moe/quantization/format/granularity.hpp"

namespace moe::quantization {

namespace detail {

/// An element of a row as Act: unchanged, or rounded from float32.
template <class Act, class T>
MOE_HD inline Act element_as(T v) {
  if constexpr (std::is_same_v<Act, T>) {
    return v;
  } else {
    return from_float<Act>(v);
  }
}

}  // namespace detail

/// Activations are exchanged and computed in their own type: no codes, no scales.
struct UnquantizedRows {
  static constexpr ScaleGranularity kActGranularity = ScaleGranularity::none;
  /// Nominal: a row has the dtype of the activations.
  static constexpr DType kPayloadDType = DType::bf16;
  static constexpr int kActGroup = 0;
  static constexpr int kPayloadPack = 1;
  static constexpr bool kQuantizesActivations = false;
  template <class Act>
  using Payload = Act;
  using Scale = float;

  MOE_HD static constexpr std::int64_t payload_cols(std::int64_t hidden) { return hidden; }
  MOE_HD static constexpr std::int64_t scale_cols(std::int64_t) { return 0; }

  /// Copies the row.
  template <class Act, class Row>
  MOE_HD void quantize_row(Row const& x, std::int64_t n, Act* q, float*) const {
    for (std::int64_t i = 0; i < n; ++i) q[i] = detail::element_as<Act>(x[i]);
  }
  /// Widens the row.
  template <class Act>
  MOE_HD void dequantize_row(Act const* q, float const*, std::int64_t n, float* out) const {
    for (std::int64_t i = 0; i < n; ++i) out[i] = to_float(q[i]);
  }
};

/// One scale for `Group` consecutive elements (the last group of a row may be shorter), or for the whole row if Group is 0.
/// NaN and infinity stay inside their scale group.
template <class Codec_, int Group>
struct QuantizedRows {
  using Codec = Codec_;
  static constexpr ScaleGranularity kActGranularity = Group == 0 ? ScaleGranularity::per_token : ScaleGranularity::group;
  static constexpr DType kPayloadDType = Codec::kCodeDType;
  static constexpr DType kScaleDType = Codec::kScaleDType;
  static constexpr int kActGroup = Group;
  static constexpr int kPayloadPack = Codec::kPack;
  static constexpr bool kQuantizesActivations = true;
  template <class Act>
  using Payload = typename Codec::Code;
  using Scale = typename Codec::Scale;

  /// Run-time state of the arithmetic (nvfp4's global scale, an upper bound of amax); empty in most schemes.
  Codec act{};

  MOE_HD static constexpr std::int64_t payload_cols(std::int64_t hidden) { return (hidden + kPayloadPack - 1) / kPayloadPack; }
  MOE_HD static constexpr std::int64_t scale_cols(std::int64_t hidden) {
    if constexpr (Group == 0) {
      return 1;
    } else {
      return (hidden + Group - 1) / Group;
    }
  }

  /// x [n] → q [payload_cols(n)], s [scale_cols(n)].
  template <class Act, class Row>
  MOE_HD void quantize_row(Row const& x, std::int64_t n, Payload<Act>* q, Scale* s) const {
    std::int64_t const step = Group == 0 ? n : Group;
    for (std::int64_t begin = 0, g = 0; g < scale_cols(n); begin += step, ++g) {
      std::int64_t const end = begin + step < n ? begin + step : n;
      std::uint32_t amax = 0;
      for (std::int64_t i = begin; i < end; ++i) {
        std::uint32_t const m = act.magnitude(to_float(x[i]));
        amax = m > amax ? m : amax;
      }
      s[g] = act.scale(amax);
      float const d = act.factor(s[g]);
      for (std::int64_t i = begin; i < end; ++i) detail::store_code<Codec>(q, i, act.encode(to_float(x[i]), d));
    }
  }
  /// q, s → out [n], each value code · scale in float32.
  template <class Act>
  MOE_HD void dequantize_row(Payload<Act> const* q, Scale const* s, std::int64_t n, float* out) const {
    for (std::int64_t i = 0; i < n; ++i) out[i] = act.decode(detail::load_code<Codec>(q, i), act.factor(s[Group == 0 ? 0 : i / Group]));
  }
};

/// A scale from the checkpoint (static, one for the tensor and equal on all ranks): no scale is sent with a row, values beyond it saturate,
/// NaN stays NaN (0 in int8).
template <class Codec_>
struct StaticRows {
  using Codec = Codec_;
  static constexpr ScaleGranularity kActGranularity = ScaleGranularity::per_tensor;
  static constexpr DType kPayloadDType = Codec::kCodeDType;
  static constexpr DType kScaleDType = Codec::kScaleDType;
  static constexpr int kActGroup = 0;
  static constexpr int kPayloadPack = 1;
  static constexpr bool kQuantizesActivations = true;
  template <class Act>
  using Payload = typename Codec::Code;
  using Scale = float;
  static_assert(Codec::kPack == 1, "static scales are for 8-bit elements");

  /// input_scale: x ≈ code · scale. Finite and > 0.
  struct Params {
    float scale = 1.0F;
  };
  Params params{};
  Codec act{};

  MOE_HD static constexpr std::int64_t payload_cols(std::int64_t hidden) { return hidden; }
  MOE_HD static constexpr std::int64_t scale_cols(std::int64_t) { return 0; }

  /// s is not written and may be null.
  template <class Act, class Row>
  MOE_HD void quantize_row(Row const& x, std::int64_t n, Payload<Act>* q, float*) const {
    for (std::int64_t i = 0; i < n; ++i) q[i] = act.encode(to_float(x[i]), params.scale);
  }
  template <class Act>
  MOE_HD void dequantize_row(Payload<Act> const* q, float const*, std::int64_t n, float* out) const {
    for (std::int64_t i = 0; i < n; ++i) out[i] = act.decode(q[i], params.scale);
  }
};

}  // namespace moe::quantization
