// SPDX-License-Identifier: Apache-2.0
// runner/probes.hpp: what probes of a forward have in common: the stream of a stage, and two probes in one.
#pragma once

#include "moe/layer/options.hpp"

namespace moe::runner {

/// Tells a probe of a stage that is enqueued on `stream`, which may be another than the forward's. A probe that has begin(Phase, stream)
/// gets the stream too.
template <class Probe, class StreamT>
void begin_stage(Probe& probe, Phase phase, StreamT stream) {
  if constexpr (requires { probe.begin(phase, stream); }) {
    probe.begin(phase, stream);
  } else {
    probe.begin(phase);
  }
}

/// Two probes in one.
template <class First, class Second>
class BothProbes {
 public:
  BothProbes(First& first, Second& second) : first_(first), second_(second) {}
  void begin(Phase phase) {
    first_.begin(phase);
    second_.begin(phase);
  }
  template <class StreamT>
  void begin(Phase phase, StreamT stream) {
    begin_stage(first_, phase, stream);
    begin_stage(second_, phase, stream);
  }
  void end(Phase phase) {
    second_.end(phase);
    first_.end(phase);
  }

 private:
  First& first_;
  Second& second_;
};

}  // namespace moe::runner
