// SPDX-License-Identifier: Apache-2.0
// backends/common/carries.hpp: which rows and which expert outputs the exchanges over device windows support.
#pragma once

#include <type_traits>

#include "moe/core/space.hpp"
#include "moe/core/types.hpp"
#include "moe/quantization/format/facts.hpp"

namespace moe::backends::detail {

/// The row formats of the device exchanges: bf16 without scales, or e4m3 with a float scale for each 128 values.
template <class Quant>
constexpr bool device_exchange_carries() {
  if constexpr (!facts::states_format<Quant>()) {
    return false;
  } else if constexpr (!Quant::kQuantizesActivations) {
    return true;
  } else if constexpr (Quant::kPayloadDType == DType::e4m3) {
    return Quant::kActGroup == 128 && std::is_same_v<typename Quant::Scale, float>;
  } else {
    return false;
  }
}
/// The element types of expert outputs that a window exchange brings back: any on the host, bf16 and float on the device, which rounds
/// float to bf16 before it travels.
template <class Space, class Output>
inline constexpr bool window_exchange_returns_element =
    Space::kKind == SpaceKind::host || std::is_same_v<Output, bf16> || std::is_same_v<Output, float>;

}  // namespace moe::backends::detail
