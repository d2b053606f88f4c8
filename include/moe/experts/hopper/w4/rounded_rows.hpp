// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/rounded_rows.hpp: quantised rows for products of bf16. A row in codes becomes bf16 without an error: each code times a
// part of its scale that keeps it exact, and what is left of the scales multiplies the sums. Plain C++, for host and device.
//
//   format        element in bf16               factor of the row's sums
//   mxfp8, mxfp4  code · 2^b                    1
//   nvfp4         code · e4m3 scale             the global scale, one for the layer
//   fp8, int8     code                          the row's scale
//
// An e4m3 code has 4 significant bits, a product of e2m1 and e4m3 at most 6, an int8 code 7: bf16 has 8. Powers of two under 2^-126 are the
// exception: what bf16 cannot hold of them is below 2^-134.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/core/types.hpp"
#include "moe/quantization/rows/rows.hpp"

namespace moe::hopper {

/// How rows of x are stored, and how the intermediate is rounded between the products.
enum class RowFormat : std::uint8_t {
  bf16,   ///< as they are: nothing is rounded
  mxfp8,  ///< e4m3 with a power of two (ue8m0) per 32, the rule ceil
  mxfp4,  ///< e2m1 with the same
  nvfp4,  ///< e2m1 with an e4m3 scale per 16 and a float32 scale for the layer
  fp8,    ///< e4m3 with a float32 scale per row
  int8    ///< with a float32 scale per row
};

/// The rows of a layer.
struct W4Rows {
  RowFormat format = RowFormat::bf16;
  float global_scale = 1.0F;  ///< nvfp4: multiplies
};

/// Rows of x in codes; device memory. Strides in elements, of codes in bytes.
struct W4Codes {
  void const* codes = nullptr;  ///< [M, H] bytes, or [M, H / 2] of 4 bits, low nibble first
  std::int64_t stride = 0;
  void const* scales = nullptr;  ///< [M, groups of H] bytes, or [M] float32
  std::int64_t scale_stride = 0;
};

namespace w4 {

using Mxfp8Rows = quantization::QuantizedRows<quantization::Mxfp8Codec<quantization::MxRule::ceil>, 32>;
using Mxfp4Rows = quantization::QuantizedRows<quantization::Mxfp4Codec<quantization::MxRule::ceil>, 32>;
using Nvfp4Rows = quantization::QuantizedRows<quantization::Nvfp4Codec, 16>;
using Fp8Rows = quantization::QuantizedRows<quantization::Fp8Codec<>, 0>;
using Int8Rows = quantization::QuantizedRows<quantization::Int8Codec, 0>;

/// Calls call(rows) with the scheme of the rows, one of those above.
template <class Call>
void visit_rows(W4Rows const& rows, Call const& call) {
  switch (rows.format) {
    case RowFormat::bf16: return;
    case RowFormat::mxfp8: return call(Mxfp8Rows{});
    case RowFormat::mxfp4: return call(Mxfp4Rows{});
    case RowFormat::nvfp4: {
      Nvfp4Rows nvfp4{};
      nvfp4.act.global_scale = rows.global_scale;
      return call(nvfp4);
    }
    case RowFormat::fp8: return call(Fp8Rows{});
    case RowFormat::int8: return call(Int8Rows{});
  }
}

/// Whether each row has a factor of its own.
template <class Rows>
inline constexpr bool kHasRowFactors = Rows::kActGroup == 0;

/// What a code is multiplied with; the product is exact in bf16.
template <class Rows>
MOE_HD float exact_part(typename Rows::Scale scale) {
  if constexpr (kHasRowFactors<Rows>) {
    return 1.0F;
  } else if constexpr (std::is_same_v<typename Rows::Codec, quantization::Nvfp4Codec>) {
    return quantization::decode_e4m3(scale);
  } else {
    return Rows::Codec::factor(scale);
  }
}
/// What the sums of every row are multiplied with.
inline float common_part(W4Rows const& rows) { return rows.format == RowFormat::nvfp4 ? rows.global_scale : 1.0F; }

/// Element i of eight, whose codes lie in the order of memory: 8 bytes, or 4 of nibbles in the low half.
template <class Rows>
MOE_HD bf16 exact_element(std::uint64_t codes, int i, float part) {
  using Codec = typename Rows::Codec;
  constexpr int kBits = 8 / Codec::kPack;
  auto const code = static_cast<typename Codec::Code>((codes >> (kBits * i)) & ((1U << kBits) - 1U));
  return from_float<bf16>(Codec::decode(code, part));
}

/// Where a call's rows lie in the workspace, behind W4Workspace.
struct RoundedWorkspace {
  std::int64_t x = 0;              ///< [M, H] bf16
  std::int64_t x_factors = 0;      ///< [M] float32
  std::int64_t wide = 0;           ///< [slots, I padded] float32
  std::int64_t inter_factors = 0;  ///< [slots] float32
  std::int64_t bytes = 0;          ///< total, with what is before
};
/// `before`: bytes of the workspace in front of it, a multiple of 1024.
constexpr RoundedWorkspace plan_rounded_workspace(std::int64_t before, std::int64_t tokens, std::int64_t slots, std::int64_t hidden,
                                                  std::int64_t padded_intermediate) {
  RoundedWorkspace w{};
  std::int64_t at = before;
  auto const take = [&at](std::int64_t bytes) {
    std::int64_t const here = at;
    at = (at + bytes + 1023) / 1024 * 1024;
    return here;
  };
  w.x = take(tokens * hidden * 2);
  w.x_factors = take(tokens * 4);
  w.wide = take(slots * padded_intermediate * 4);
  w.inter_factors = take(slots * 4);
  w.bytes = at;
  return w;
}

}  // namespace w4

}  // namespace moe::hopper
