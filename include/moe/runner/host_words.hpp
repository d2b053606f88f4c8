// SPDX-License-Identifier: Apache-2.0
// runner/host_words.hpp: one word of every rank, gathered in host memory: how the ranks of a runner agree before they work.
#pragma once

#include <cstdint>
#include <string_view>

#include "moe/core/rule.hpp"
#include "moe/core/space.hpp"

namespace moe {

namespace rules {
MOE_INCLUDED(RunnerRanks, "what the ranks of a runner on devices exchange", "moe/runner/device/ranks.hpp");
}  // namespace rules

namespace runner {

/// Of a communicator:
///   check(obstacle, stream)       E_STATE if there is an obstacle, a sentence, and the stream is being captured
///   gather(word, all [size])      collective; blocks within the communicator's deadline; no allocation
template <class Comm, class Space = typename Comm::Space>
class HostWords : rules::RunnerRanks::Broken<Space> {};

template <class Comm>
class HostWords<Comm, space::host> {
 public:
  explicit HostWords(Comm& comm) : comm_(comm) {}
  void check(std::string_view, HostStream) const {}
  void gather(std::int64_t word, std::int64_t* all) { comm_.all_gather(&word, sizeof word, all, HostStream{}); }

 private:
  Comm& comm_;
};

}  // namespace runner
}  // namespace moe
