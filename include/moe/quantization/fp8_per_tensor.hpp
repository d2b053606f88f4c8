// SPDX-License-Identifier: Apache-2.0
// quantization/fp8_per_tensor.hpp: e4m3 with one scale for a weight matrix; activations by a scale from the checkpoint or by row.
#pragma once

#include <algorithm>
#include <cstdint>

#include "moe/quantization/format/block_weights.hpp"
#include "moe/quantization/format/shape.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::quantization {

/// Dynamic activation scale. A dynamic scale of the whole tensor would differ between the ranks of a dispatch, so every row has its own
/// scale (docs/semantics/quantization.md §2): quantize_row is that of fp8_per_token. If all rows are present, quantize_tensor() gives the
/// one scale.
template <ScaleFloor Floor = ScaleFloor::amax_1e10, ScaleFormat Format = ScaleFormat::f32>
struct Fp8PerTensor : QuantizedRows<Fp8Codec<Floor, Format>, 0>,
                      BlockWeights<Fp8Codec<ScaleFloor::amax_1e10, Format>, 0, 0>,
                      ShapeMultiple<1> {
  static constexpr char const* kName = Format == ScaleFormat::f32 ? "fp8_per_tensor" : "fp8_per_tensor_ue8m0";
};

/// The activation scale comes from the checkpoint (input_scale); no scale is sent.
struct Fp8PerTensorStatic : StaticRows<Fp8Codec<>>, BlockWeights<Fp8Codec<>, 0, 0>, ShapeMultiple<1> {
  static constexpr char const* kName = "fp8_per_tensor_static";

  Fp8PerTensorStatic() = default;
  MOE_HD constexpr explicit Fp8PerTensorStatic(Params p) { params = p; }
};

/// x [rows, cols], row_stride elements apart, → q [rows, cols] contiguous and one scale over all of it. Pass only valid rows: padding
/// rows would enter the amax. Host.
template <class Codec, class Act>
typename Codec::Scale quantize_tensor(Codec const& codec, Act const* x, std::int64_t rows, std::int64_t cols, std::int64_t row_stride,
                                      typename Codec::Code* q) {
  static_assert(Codec::kPack == 1, "per-tensor scales are for 8-bit elements");
  std::uint32_t amax = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) amax = std::max(amax, codec.magnitude(to_float(x[r * row_stride + c])));
  }
  auto const scale = codec.scale(amax);
  float const d = codec.factor(scale);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) q[r * cols + c] = codec.encode(to_float(x[r * row_stride + c]), d);
  }
  return scale;
}

}  // namespace moe::quantization
