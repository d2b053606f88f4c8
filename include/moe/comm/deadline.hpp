// SPDX-License-Identifier: Apache-2.0
// comm/deadline.hpp: the default deadline of every wait for another rank.
#pragma once

#include <cstdint>

namespace moe::comm {

/// Milliseconds; 0 waits for ever. Set it with a communicator's Params::timeout_ms: its windows and exchanges use the same value.
inline constexpr std::int64_t kDefaultTimeoutMs = 100'000;

}  // namespace moe::comm
