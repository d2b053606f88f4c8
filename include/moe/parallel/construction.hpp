// SPDX-License-Identifier: Apache-2.0
// parallel/construction.hpp: how ranks that build one object learn that one of them cannot, so that none waits for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/space.hpp"

namespace moe::detail {

/// Collective. The word of every rank that has come this far, 0 or less, else 1 + the code that it failed with. A communicator that cannot
/// gather host words (simulated ranks) reports this rank alone, and 0 of the others.
template <class Comm>
std::vector<std::int64_t> gather_construction(Comm& comm, std::int64_t status) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(comm.size()), 0);
  all[static_cast<std::size_t>(comm.rank())] = status;
  if (comm.size() == 1) return all;
  if constexpr (requires { comm.set_phase("construction"); }) comm.set_phase("construction");
  if constexpr (requires { comm.all_gather_host(&status, 1, all.data()); }) {
    comm.all_gather_host(&status, sizeof status, all.data());
  } else if constexpr (requires { comm.all_gather(&status, 1, all.data(), HostStream{}); }) {
    comm.all_gather(&status, sizeof status, all.data(), HostStream{});
  }
  return all;
}

/// Collective. The words of all ranks; E_PEER if another one has failed in build().
template <class Comm>
std::vector<std::int64_t> agree_on_construction(Comm& comm, std::int64_t word = 0) {
  std::vector<std::int64_t> all = gather_construction(comm, word);
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] > 0) {
      throw TransportError(ErrorCode::peer, comm.rank(), static_cast<int>(r), "construction", 0,
                           text("rank ", r, " refused its arguments with ", name(static_cast<ErrorCode>(all[r] - 1))));
    }
  }
  return all;
}

/// agree_on_construction(), and E_MISMATCH on every rank, naming the first whose `hash` of `what` is not rank 0's.
template <class Comm>
void agree_on_hash(Comm& comm, char const* what, std::uint64_t hash) {
  std::vector<std::int64_t> const all = agree_on_construction(comm, -1 - static_cast<std::int64_t>(hash >> 1));
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r] != all[0] && all[r] != 0 && all[0] != 0) {
      throw Error(ErrorCode::mismatch, text(what, " of rank ", r, " are not those of rank 0"));
    }
  }
}

/// make(). What it throws is thrown once the peers, who are at their next agree_on_construction(), know.
template <class Comm, class Make>
auto build(Comm& comm, Make const& make) -> decltype(make()) {
  auto tell = [&](ErrorCode code) {
    try {
      gather_construction(comm, 1 + static_cast<std::int64_t>(code));
    } catch (Error const&) {  // the communicator reports its failure to the next call as well
    }
  };
  try {
    return make();
  } catch (Error const& e) {
    tell(e.code());
    throw;
  } catch (...) {
    tell(ErrorCode::internal);
    throw;
  }
}

}  // namespace moe::detail
