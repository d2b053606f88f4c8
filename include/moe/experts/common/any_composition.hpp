// SPDX-License-Identifier: Apache-2.0
// experts/common/any_composition.hpp: the facts of experts that take every format, element type, activation, scheme and shape of the
// library.
#pragma once

#include <type_traits>

#include "moe/core/types.hpp"
#include "moe/experts/common/reduction.hpp"

namespace moe::experts {

struct AnyComposition : ReducesByFormat {
  static constexpr bool reads(ActivationFormat) { return true; }
  template <class T>
  static constexpr bool is_element = std::is_same_v<T, float> || std::is_same_v<T, bf16> || std::is_same_v<T, f16>;
  template <class Act, class Weight>
  static constexpr bool supports_element() {
    return is_element<Act> && is_element<Weight>;
  }
  template <class A>
  static constexpr bool supports_activation() {
    return true;
  }
  template <class Q>
  static constexpr bool supports_quantization() {
    return true;
  }
  template <class Config, class Quant>
  static constexpr bool fits_shape() {
    return true;
  }
  static constexpr int kSharedMemoryLimit = 0;  ///< none is taken dynamically
  template <class Config, class Quant>
  static constexpr int shared_memory_bytes() {
    return 0;
  }
};

}  // namespace moe::experts
