// SPDX-License-Identifier: Apache-2.0
// parallel/construction.hpp: how ranks that build one object learn that one of them cannot, so that none waits for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/parallel/fingerprint.hpp"

namespace moe::detail {

/// Collective. `in`, `bytes` of host memory, of all ranks to `all`. False, and nothing done, for a communicator that cannot (simulated
/// ranks).
template <class Comm>
bool gather_host(Comm& comm, void const* in, std::int64_t bytes, void* all) {
  if constexpr (requires { comm.set_phase("construction"); }) comm.set_phase("construction");
  if constexpr (requires { comm.all_gather_host(in, bytes, all); }) {
    comm.all_gather_host(in, bytes, all);
    return true;
  } else if constexpr (requires { comm.all_gather(in, bytes, all, HostStream{}); }) {
    comm.all_gather(in, bytes, all, HostStream{});
    return true;
  }
  return false;
}

/// Collective. The word of every rank that has come this far, 0 or less, else 1 + the code that it failed with. A communicator that cannot
/// gather host words (simulated ranks) reports this rank alone, and 0 of the others.
template <class Comm>
std::vector<std::int64_t> gather_construction(Comm& comm, std::int64_t status) {
  std::vector<std::int64_t> all(static_cast<std::size_t>(comm.size()), 0);
  all[static_cast<std::size_t>(comm.rank())] = status;
  if (comm.size() > 1) gather_host(comm, &status, sizeof status, all.data());
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

/// agree_on_construction(), then the first rank whose `hash` is not rank 0's; 0 if there is none. The same on every rank.
template <class Comm>
int first_with_other_hash(Comm& comm, std::uint64_t hash) {
  std::vector<std::int64_t> const all = agree_on_construction(comm, -1 - static_cast<std::int64_t>(hash >> 1));
  bool const known = std::find(all.begin(), all.end(), 0) == all.end();
  auto const other = std::find_if(all.begin(), all.end(), [&](std::int64_t word) { return word != all[0]; });
  return known && other != all.end() ? static_cast<int>(other - all.begin()) : 0;
}

/// Collective, with agree_on_construction(). E_MISMATCH on every rank, naming the first whose `hash` of `what` is not rank 0's.
template <class Comm>
void agree_on_hash(Comm& comm, char const* what, std::uint64_t hash) {
  if (int const r = first_with_other_hash(comm, hash); r != 0) {
    throw Error(ErrorCode::mismatch, text(what, " of rank ", r, " are not those of rank 0"));
  }
}

/// Collective, with agree_on_construction(). check_identical()'s error on every rank.
template <class Comm>
void agree_on_fingerprint(Comm& comm, Fingerprint const& mine) {
  if (first_with_other_hash(comm, mine.hash()) == 0) return;
  constexpr std::size_t kRoom = 4096;  // of one rank's text; few fields of few characters
  std::string const own = mine.encode().substr(0, kRoom);
  std::vector<char> in(kRoom, 0);
  std::copy(own.begin(), own.end(), in.begin());
  std::vector<char> all(kRoom * static_cast<std::size_t>(comm.size()));
  gather_host(comm, in.data(), kRoom, all.data());
  std::vector<Fingerprint> ranks;
  for (auto at = all.begin(); at != all.end(); at += kRoom) {
    ranks.push_back(Fingerprint::decode(std::string(at, std::find(at, at + kRoom, 0))));
  }
  check_identical(ranks);
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
