// SPDX-License-Identifier: Apache-2.0
// experts/hopper_w4a16.hpp: experts with 4-bit weights (int4 in groups, mxfp4, nvfp4) and bf16 activations on one Hopper GPU, standard and
// batched formats. Plain host C++: a program links the kernels (cmake/MoeHopperKernels.cmake) or includes experts/hopper_w4a16.cuh.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/packed_weights.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/nvfp4.hpp"
#include "moe/quantization/w4a8.hpp"

namespace moe::experts {

namespace detail {

/// The layer's scheme for a quantisation's 4-bit weights; kSupported is false if there is none.
template <class Quant>
struct W4Storage {
  static constexpr bool kSupported = false;
};
template <int Group, bool ZeroPoint>
struct W4Storage<quantization::WNa16<4, Group, ZeroPoint>> {
  static constexpr bool kSupported = Group == 0 || Group >= 32;
  static constexpr hopper::W4Scheme kScheme = hopper::int4_scheme(Group, ZeroPoint);
  static constexpr int group(std::int64_t cols) { return static_cast<int>(quantization::effective_group(cols, Group)); }
};
template <quantization::MxRule Rule>
struct W4Storage<quantization::Mxfp4W4A16<Rule>> {
  static constexpr bool kSupported = true;
  static constexpr hopper::W4Scheme kScheme = hopper::W4Scheme::mxfp4;
  static constexpr int group(std::int64_t) { return 32; }
};

template <>
struct W4Storage<quantization::Nvfp4W4A16> {
  static constexpr bool kSupported = true;
  static constexpr hopper::W4Scheme kScheme = hopper::W4Scheme::nvfp4;
  static constexpr int group(std::int64_t) { return 16; }
};

template <quantization::MxRule WeightRule>
struct W4Storage<quantization::Mxfp4<quantization::MxRule::ceil, WeightRule>> : W4Storage<quantization::Mxfp4W4A16<WeightRule>> {
  static constexpr hopper::RowFormat kRows = hopper::RowFormat::mxfp4;
};
template <quantization::MxRule WeightRule>
struct W4Storage<quantization::Mxfp4W4A8<quantization::MxRule::ceil, WeightRule>> : W4Storage<quantization::Mxfp4W4A16<WeightRule>> {
  static constexpr hopper::RowFormat kRows = hopper::RowFormat::mxfp8;
};
template <>
struct W4Storage<quantization::Nvfp4> : W4Storage<quantization::Nvfp4W4A16> {
  static constexpr hopper::RowFormat kRows = hopper::RowFormat::nvfp4;
};
template <int Group>
struct W4Storage<quantization::W4A8<quantization::Fp8Codec<>, Group>> : W4Storage<quantization::WNa16<4, Group>> {
  static constexpr hopper::RowFormat kRows = hopper::RowFormat::fp8;
};
template <int Group>
struct W4Storage<quantization::W4A8<quantization::Int8Codec, Group>> : W4Storage<quantization::WNa16<4, Group>> {
  static constexpr hopper::RowFormat kRows = hopper::RowFormat::int8;
};

struct W4Storages : WidenedStorages {
  static constexpr char const* kName = "hopper_w4a16";
  template <class Quant>
  using Of = W4Storage<Quant>;
};

}  // namespace detail

/// int4 (groups of 32 and more, or whole rows, with or without zero points), mxfp4 and nvfp4 weights with bf16 activations, standard and
/// batched formats, biases, every activation, the router weight on either side. SwiGLU and its clamped forms with the weight on the output
/// have kernels of their own. Weights become bf16 in registers, exactly; int4's scales are rounded to 11 significant bits. Rows
/// in mxfp4, mxfp8 (under mxfp4 weights) and nvfp4, and in e4m3 or int8 with a scale per row (under int4 weights without zero points)
/// become bf16, exactly, and the float32 intermediate is rounded like them between the products, in kernels of their own.
struct HopperW4A16 : detail::PackedWeights<detail::W4Storages> {};

}  // namespace moe::experts
