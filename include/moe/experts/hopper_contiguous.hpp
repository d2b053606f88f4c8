// SPDX-License-Identifier: Apache-2.0
// experts/hopper_contiguous.hpp: experts on one Hopper GPU, standard format: rows in any order with local ids; the sum over the slots is
// done here. bf16, fp16, and e4m3 with 128 × 128 blocks, a scale per token and channel, or per tensor; int8 with a scale per token and
// channel; every activation; biases. Plain host C++: a program links the kernels (cmake/MoeHopperKernels.cmake) or includes
// experts/hopper_contiguous.cuh.
#pragma once

#include "moe/experts/hopper/policy.hpp"
#include "moe/experts/weights.hpp"

namespace moe::experts {

template <class Tiles>
struct HopperContiguousWith : detail::HopperPolicy<ActivationFormat::standard, Tiles> {
  static constexpr char const* kName = "hopper_contiguous";
};
using HopperContiguous = HopperContiguousWith<hopper::DefaultTiles>;

}  // namespace moe::experts
