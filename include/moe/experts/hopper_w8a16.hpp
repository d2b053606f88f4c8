// SPDX-License-Identifier: Apache-2.0
// experts/hopper_w8a16.hpp: experts with 8-bit weights (int8 or e4m3 with a scale per output channel, mxfp8) and products of bf16 on one
// Hopper GPU, standard and batched formats. Plain host C++: a program links the kernels (cmake/MoeHopperKernels.cmake) or includes
// experts/hopper_w8a16.cuh.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/packed_weights.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/fp8_per_channel.hpp"
#include "moe/quantization/int8_per_channel.hpp"
#include "moe/quantization/mxfp8.hpp"

namespace moe::experts {

namespace detail {

/// The layer's scheme for a quantisation's 8-bit weights; kSupported is false if there is none.
template <class Quant>
struct W8Storage {
  static constexpr bool kSupported = false;
};
template <>
struct W8Storage<quantization::Int8PerChannel> {
  static constexpr bool kSupported = true;
  static constexpr hopper::W4Scheme kScheme = hopper::W4Scheme::int8;
  static constexpr int group(std::int64_t cols) { return static_cast<int>(cols); }
};
template <>
struct W8Storage<quantization::Fp8PerChannel<>> {
  static constexpr bool kSupported = true;
  static constexpr hopper::W4Scheme kScheme = hopper::W4Scheme::fp8;
  static constexpr int group(std::int64_t cols) { return static_cast<int>(cols); }
};
template <quantization::MxRule WeightRule>
struct W8Storage<quantization::Mxfp8W8A16<WeightRule>> {
  static constexpr bool kSupported = true;
  static constexpr hopper::W4Scheme kScheme = hopper::W4Scheme::mxfp8;
  static constexpr int group(std::int64_t /*cols*/) { return 32; }
};

template <quantization::MxRule WeightRule>
struct W8Storage<quantization::Mxfp8<quantization::MxRule::ceil, WeightRule>> : W8Storage<quantization::Mxfp8W8A16<WeightRule>> {
  static constexpr hopper::RowFormat kRows = hopper::RowFormat::mxfp8;
};

struct W8Storages : WidenedStorages {
  static constexpr char const* kName = "hopper_w8a16";
  template <class Quant>
  using Of = W8Storage<Quant>;
};

}  // namespace detail

/// int8 or e4m3 weights with a scale per output channel, or mxfp8 weights, and bf16 activations, standard and batched formats, biases,
/// every activation, the router weight on either side. Any intermediate width; mxfp8: a multiple of 32. Codes become bf16 in registers,
/// exactly. Scales of channels multiply the float32 sums, powers of two of mxfp8 the bf16 weights. E_UNSUPPORTED for an e4m3 weight that is
/// not a number. Rows in mxfp8 (of the rule ceil) become bf16, exactly, and the float32 intermediate is rounded to mxfp8 between the
/// products, in kernels of their own.
struct HopperW8A16 : detail::PackedWeights<detail::W8Storages> {};

}  // namespace moe::experts
