// SPDX-License-Identifier: Apache-2.0
// quantization/format/granularity.hpp: how many elements share a scale.
#pragma once

#include <cstdint>
#include <string_view>

namespace moe::quantization {

/// What one scale covers.
enum class ScaleGranularity : std::uint8_t {
  none,         ///< no scale
  per_tensor,   ///< the whole tensor
  per_token,    ///< a row of activations
  per_channel,  ///< a row of a weight matrix (an output channel)
  group,        ///< consecutive elements of a row
  block,        ///< a block of rows and columns
};
constexpr std::string_view name(ScaleGranularity g) {
  switch (g) {
    case ScaleGranularity::none: return "none";
    case ScaleGranularity::per_tensor: return "per_tensor";
    case ScaleGranularity::per_token: return "per_token";
    case ScaleGranularity::per_channel: return "per_channel";
    case ScaleGranularity::group: return "group";
    case ScaleGranularity::block: return "block";
  }
  return "?";
}

}  // namespace moe::quantization
