// SPDX-License-Identifier: Apache-2.0
// backends/common/open_half.hpp: the order of the halves of prepare() and finalize(), for exchanges that have one call in flight.
#pragma once

#include <cstdint>

#include "moe/core/error.hpp"

namespace moe::detail {

/// The call whose first half was made and whose second is due.
enum class Half : std::uint8_t { none, dispatch, combine };

class OpenHalf {
 public:
  Half which() const { return half_; }
  void set(Half half) { half_ = half; }
  /// E_STATE with this text unless `half` is the open one.
  void expect(Half half, char const* message) const {
    if (half_ != half) throw Error(ErrorCode::state, message);
  }

 private:
  Half half_ = Half::none;
};

}  // namespace moe::detail
