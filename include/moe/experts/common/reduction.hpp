// SPDX-License-Identifier: Apache-2.0
// experts/common/reduction.hpp: who applies the router weights and sums over the top-k, for the experts of this library.
#pragma once

#include "moe/core/types.hpp"

namespace moe::experts {

/// A base of policies: the experts weight and sum standard rows; batched rows are weighted and summed by the backend.
struct ReducesByFormat {
  static constexpr TopKReduction reduction(ActivationFormat f) {
    return f == ActivationFormat::standard ? TopKReduction::experts : TopKReduction::backend;
  }
};

}  // namespace moe::experts
