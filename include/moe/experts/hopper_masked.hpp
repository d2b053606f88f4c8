// SPDX-License-Identifier: Apache-2.0
// experts/hopper_masked.hpp: experts on one Hopper GPU, batched format: a block of rows and a count on the device per local expert.
// Otherwise as experts/hopper_contiguous.hpp.
#pragma once

#include "moe/experts/hopper/policy.hpp"
#include "moe/experts/weights.hpp"

namespace moe::experts {

template <class Tiles>
struct HopperMaskedWith : detail::HopperPolicy<ActivationFormat::batched, Tiles> {
  static constexpr char const* kName = "hopper_masked";
};
using HopperMasked = HopperMaskedWith<hopper::DefaultTiles>;

}  // namespace moe::experts
