// SPDX-License-Identifier: Apache-2.0
// tests/multigpu/several_hosts.hpp: ranks of one machine that NCCL believes on different hosts.
#pragma once

#include <cstdlib>
#include <string>
#include <utility>

namespace moe_test {

/// Whether this program runs so.
inline bool on_several_hosts() { return std::getenv("MOE_TEST_HOSTS") != nullptr; }

/// Call it before NCCL's first call of the process: this rank then has a host of its own, reached through sockets on the loopback address.
inline void pretend_own_host(int rank) {
  setenv("NCCL_HOSTID", ("host-" + std::to_string(rank)).c_str(), 1);
  for (auto [name, value] : {std::pair{"NCCL_SOCKET_IFNAME", "lo"}, {"NCCL_NET", "Socket"}, {"NCCL_MNNVL_ENABLE", "0"}}) {
    setenv(name, value, 1);
  }
}

}  // namespace moe_test
