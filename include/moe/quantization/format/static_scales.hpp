// SPDX-License-Identifier: Apache-2.0
// quantization/format/static_scales.hpp: scales from a checkpoint: merging them over experts, and requantising codes to another scale.
// docs/semantics/quantization.md §2, §4, §6.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>

#include "moe/core/error.hpp"
#include "moe/core/rounded.hpp"
#include "moe/quantization/format/codecs.hpp"

namespace moe::quantization {

/// E_ARG unless a scale of a checkpoint is finite and > 0.
inline void check_scale(char const* what, float scale) {
  if (!(scale > 0.0F) || !std::isfinite(scale)) throw Error(ErrorCode::argument, text(what, " is ", scale, ", expected finite and > 0"));
}

/// One activation scale for all experts: the largest of theirs, so that one quantised row can go to any of them.
inline float merge_static_scales(std::span<float const> per_expert) {
  if (per_expert.empty()) throw Error(ErrorCode::argument, "no activation scales to merge: expected at least 1");
  for (float const s : per_expert) check_scale("static activation scale", s);
  return *std::max_element(per_expert.begin(), per_expert.end());
}

/// Requantises codes from scale `from` to scale `to`, in place: gate and up with different scales become one matrix with the larger scale.
inline void requantize_e4m3(std::span<std::uint8_t> codes, float from, float to) {
  if (from == to) return;
  for (std::uint8_t& code : codes) code = Fp8Codec<>::encode(Fp8Codec<>::decode(code, from), to);
}

/// Requantises nvfp4 block scales (e4m3) from global scale `from` to the larger global scale `to`, in place.
inline void rescale_nvfp4_blocks(std::span<std::uint8_t> block_scales, float from, float to) {
  if (from == to) return;
  for (std::uint8_t& s : block_scales) s = encode_e4m3(div_rn(decode_e4m3(s) * from, to));
}

/// Multiplier of the nvfp4 GEMM's result: input_scale · weight_scale_2. Kernels that take the quantiser's factor need 1 / input_scale.
inline float nvfp4_alpha(float input_scale, float weight_scale_2) {
  check_scale("input_scale", input_scale);
  check_scale("weight_scale_2", weight_scale_2);
  return input_scale * weight_scale_2;
}

}  // namespace moe::quantization
