// SPDX-License-Identifier: Apache-2.0
// backends/common/carries.hpp: which quantised rows the exchanges over device windows can carry.
#pragma once

#include <type_traits>

#include "moe/core/space.hpp"
#include "moe/core/types.hpp"

namespace moe::backends::detail {

/// What the device exchanges can carry: bf16 rows as they are, or e4m3 with a float scale for 128 values.
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
/// The elements that rows of a window exchange may have: any on the host, bf16 on the device, which quantises from bf16 too.
template <class Space, class Act>
inline constexpr bool window_exchange_carries_element = Space::kKind == SpaceKind::host || std::is_same_v<Act, bf16>;

}  // namespace moe::backends::detail
