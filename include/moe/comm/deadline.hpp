// SPDX-License-Identifier: Apache-2.0
// comm/deadline.hpp: the default deadline of every wait for another rank.
#pragma once

#include <cstdint>

namespace moe::comm {

/// Milliseconds. A communicator's Params::timeout_ms is the one option: its windows and the exchanges over them take it from there. 0 waits
/// for ever.
inline constexpr std::int64_t kDefaultTimeoutMs = 100'000;

}  // namespace moe::comm
