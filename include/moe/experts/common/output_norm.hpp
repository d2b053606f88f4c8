// SPDX-License-Identifier: Apache-2.0
// experts/common/output_norm.hpp: the RMSNorm of an expert's output on the host, before the router's weight.
#pragma once

#include <cmath>
#include <cstdint>

#include "moe/core/tokens.hpp"

namespace moe::experts::detail {

/// y ← s·y / sqrt(mean((s·y)²) + eps), y [hidden]. The squares are summed in double, so that none overflows, and in one order, so
/// that other rows of the call change no bit.
inline void normalise_output(ExpertNormWeights const& norm, float* y, std::int64_t hidden) {
  double squares = 0.0;
  for (std::int64_t i = 0; i < hidden; ++i) {
    y[i] *= norm.scale(i);
    squares += static_cast<double>(y[i]) * static_cast<double>(y[i]);
  }
  auto const factor = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(hidden) + static_cast<double>(norm.eps)));
  for (std::int64_t i = 0; i < hidden; ++i) {
    y[i] *= factor;
  }
}

}  // namespace moe::experts::detail
