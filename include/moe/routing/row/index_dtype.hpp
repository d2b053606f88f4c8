// SPDX-License-Identifier: Apache-2.0
// routing/row/index_dtype.hpp: converts expert ids to the index type that an exchange takes. Weights stay float32.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/core/array.hpp"
#include "moe/core/error.hpp"

namespace moe::routing {

/// What id -1 becomes in an unsigned type.
enum class NegativeId : std::uint8_t {
  refuse,    ///< E_UNSUPPORTED: the caller compacts first
  sentinel,  ///< the type's largest value, which the exchange recognises
};

/// out = ids as Index. Throws E_UNSUPPORTED if an id is negative and Index cannot represent it; nothing is written then.
template <std::integral Index>
void convert_ids(Rows<std::int32_t const> ids, Rows<Index> out, NegativeId negative = NegativeId::refuse) {
  if constexpr (std::unsigned_integral<Index>) {
    for (std::int64_t t = 0; negative == NegativeId::refuse && t < ids.extent(0); ++t) {
      for (std::int64_t j = 0; j < ids.extent(1); ++j) {
        if (ids(t, j) < 0) {
          throw Error(ErrorCode::unsupported, text("negative id in uint", 8 * sizeof(Index), ": topk_ids[", t, ", ", j, "] = ", ids(t, j)));
        }
      }
    }
  }
  for (std::int64_t t = 0; t < ids.extent(0); ++t) {
    for (std::int64_t j = 0; j < ids.extent(1); ++j) out(t, j) = static_cast<Index>(ids(t, j));
  }
}

}  // namespace moe::routing
