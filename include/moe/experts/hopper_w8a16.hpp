// SPDX-License-Identifier: Apache-2.0
// experts/hopper_w8a16.hpp: experts with 8-bit weights alone (int8 with a scale per output channel) and bf16 activations on one Hopper GPU,
// standard and batched formats. Plain host C++: a program links the kernels (cmake/MoeHopperKernels.cmake) or includes
// experts/hopper_w8a16.cuh.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/packed_weights.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/int8_per_channel.hpp"

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

struct W8Storages : WidenedStorages {
  static constexpr char const* kName = "hopper_w8a16";
  template <class Quant>
  using Of = W8Storage<Quant>;
};

}  // namespace detail

/// int8 weights with a scale per output channel and bf16 activations, standard and batched formats, biases, every activation, the router
/// weight on either side. Any intermediate width. Weights become bf16 in registers, exactly, and their float32 scales multiply the float32
/// sums.
struct HopperW8A16 : detail::PackedWeights<detail::W8Storages> {};

}  // namespace moe::experts
