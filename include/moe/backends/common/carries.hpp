// SPDX-License-Identifier: Apache-2.0
// backends/common/carries.hpp: which quantised rows the exchanges over device windows support.
#pragma once

#include <type_traits>

#include "moe/core/space.hpp"
#include "moe/core/types.hpp"

namespace moe::backends::detail {

/// The row formats of the device exchanges: bf16 without scales, or e4m3 with a float scale for each 128 values.
template <class Quant>
constexpr bool device_exchange_carries() {
  if constexpr (!Quant::kQuantizesActivations) {
    return true;
  } else if constexpr (Quant::kPayloadDType == DType::e4m3) {
    return Quant::kActGroup == 128 && std::is_same_v<typename Quant::Scale, float>;
  } else {
    return false;
  }
}
/// The element types that a window exchange accepts: any on the host, bf16 on the device, which also quantises from bf16.
template <class Space, class Act>
inline constexpr bool window_exchange_carries_element = Space::kKind == SpaceKind::host || std::is_same_v<Act, bf16>;

}  // namespace moe::backends::detail
