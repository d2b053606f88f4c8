// SPDX-License-Identifier: Apache-2.0
// parallel/construction.hpp: how ranks that build one object learn that one of them cannot, so that no rank waits for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "moe/core/contract/communicator.hpp"
#include "moe/core/error.hpp"
#include "moe/core/space.hpp"
#include "moe/parallel/fingerprint.hpp"

namespace moe::detail {

/// Collective. Gathers `bytes` bytes of host memory at `in` from all ranks to `all`. Returns false and does nothing if the communicator
/// cannot gather host memory (simulated ranks).
template <class Comm>
bool gather_host(Comm& comm, void const* in, std::int64_t bytes, void* all) {
  facts::set_phase(comm, "construction");
  if constexpr (facts::gathers_host_memory<Comm>()) {
    comm.all_gather_host(in, bytes, all);
    return true;
  } else if constexpr (facts::gathers_on_the_host<Comm, HostStream>()) {
    comm.all_gather(in, bytes, all, HostStream{});
    return true;
  }
  return false;
}

/// Collective. One word per rank: 0 or less if the rank has come this far, else 1 + the code of its error. If the communicator cannot
/// gather host words (simulated ranks): this rank's word, and 0 for the others.
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

/// Collective, with agree_on_construction(). check_identical()'s error on every rank; nothing is compared over a communicator that cannot
/// gather host words.
template <class Comm>
void agree_on_fingerprint(Comm& comm, Fingerprint const& mine) {
  std::vector<std::int64_t> const hashes = agree_on_construction(comm, -1 - static_cast<std::int64_t>(mine.hash() >> 1));
  if (std::all_of(hashes.begin(), hashes.end(), [&](std::int64_t word) { return word == hashes[0] || word == 0 || hashes[0] == 0; }))
    return;
  check_identical_over(mine, [&](std::string const& own) {
    std::vector<std::int64_t> const sizes = gather_construction(comm, -static_cast<std::int64_t>(own.size()));
    auto const room = static_cast<std::size_t>(-*std::min_element(sizes.begin(), sizes.end()));
    std::string padded = own;
    padded.resize(room);
    std::string all(room * sizes.size(), 0);
    gather_host(comm, padded.data(), static_cast<std::int64_t>(room), all.data());
    std::vector<std::string> texts;
    texts.reserve(sizes.size());
    for (std::size_t r = 0; r < sizes.size(); ++r) texts.push_back(all.substr(r * room, static_cast<std::size_t>(-sizes[r])));
    return texts;
  });
}

/// Calls make(). If it throws, the peers are told in their next agree_on_construction(); then the error is rethrown.
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
