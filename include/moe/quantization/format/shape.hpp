// SPDX-License-Identifier: Apache-2.0
// quantization/format/shape.hpp: the hidden and intermediate sizes that a scheme supports.
#pragma once

#include <cstdint>
#include <string>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::quantization {

/// hidden and intermediate (per partition) are multiples of `Multiple`; a negative size is known only at run time and passes. Transports
/// and grouped GEMMs of a scheme need multiples of `Transport` instead: they pad or refuse. docs/semantics/quantization.md §11.
template <int Multiple, int Transport = Multiple>
struct ShapeMultiple {
  static constexpr int kShapeMultiple = Multiple;
  static constexpr int kTransportMultiple = Transport;
  static constexpr bool supports(std::int64_t hidden, std::int64_t intermediate) {
    return (hidden < 0 || hidden % Multiple == 0) && (intermediate < 0 || intermediate % Multiple == 0);
  }
};

/// The sentence that names the size which scheme Q cannot take, or an empty string.
template <class Q>
std::string shape_violation(std::int64_t hidden, std::int64_t intermediate) {
  if (Q::supports(hidden, intermediate)) return {};
  bool const is_hidden = !Q::supports(hidden, -1);
  return text(Q::kName, " needs ", is_hidden ? "hidden" : "the intermediate size per partition", " to be a multiple of ", Q::kShapeMultiple,
              ", got ", is_hidden ? hidden : intermediate);
}

/// E_CONFIG with shape_violation()'s sentence if Q cannot take these sizes.
template <class Q>
void check_shape(std::int64_t hidden, std::int64_t intermediate) {
  if (std::string const why = shape_violation<Q>(hidden, intermediate); !why.empty()) throw Error(ErrorCode::config, why);
}

}  // namespace moe::quantization
