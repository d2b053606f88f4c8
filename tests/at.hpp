// SPDX-License-Identifier: Apache-2.0
// tests/at.hpp: sizes and positions of this library, which are signed, in standard containers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace moe_test {

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

}  // namespace moe_test
