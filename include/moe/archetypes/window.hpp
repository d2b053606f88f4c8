// SPDX-License-Identifier: Apache-2.0
// archetypes/window.hpp: a window of the host for the library's exchanges over windows, of one rank. Its base class has the words, waits
// and deadlines that they use; a window of several ranks gives attach() the parts of all ranks, as comm::MpiShared does.
#pragma once

#include <cstdint>
#include <cstring>

#include "moe/comm/deadline.hpp"
#include "moe/comm/host_window.hpp"
#include "moe/comm/self.hpp"
#include "moe/core/buffer.hpp"

namespace moe::archetypes {

class StatedWindow : public comm::HostWindow {
 public:
  using Comm = comm::Self<>;
  struct Params {
    std::int64_t timeout_ms = comm::kDefaultTimeoutMs;  ///< of each wait for a peer; 0: none
  };
  /// `user_bytes` follow the control part; the same on all ranks.
  StatedWindow(Comm& comm, std::int64_t user_bytes, Params const& params)
      : part_(user_bytes + static_cast<std::int64_t>(comm::kWindowControlBytes)) {
    std::memset(part_.data(), 0, part_.bytes());
    char* const parts[] = {part_.data()};
    attach(parts, comm.rank(), comm.size(), part_.bytes(), params.timeout_ms);
    meet();
  }

 private:
  Buffer<char, space::host> part_;
};

}  // namespace moe::archetypes
