// SPDX-License-Identifier: Apache-2.0
// runner/run_schedule.hpp: enqueues the steps of a schedule.
#pragma once

#include <cstddef>

#include "moe/layer/options.hpp"
#include "moe/runner/probes.hpp"
#include "moe/runner/schedule.hpp"

namespace moe::runner {

/// One stage of a half (detail::HalfBatch).
template <class Half, class StreamT, class Probe>
void run_stage(Half& half, Stage stage, StreamT stream, Probe& probe) {
  bool const combines = stage == Stage::combine_send || stage == Stage::combine_receive;
  Phase const phase = stage == Stage::experts ? Phase::experts : combines ? Phase::combine : Phase::dispatch;
  begin_stage(probe, phase, stream);
  switch (stage) {
    case Stage::dispatch_send: half.dispatch_send(stream); break;
    case Stage::dispatch_receive: half.dispatch_receive(stream); break;
    case Stage::experts: half.experts(stream); break;
    case Stage::combine_send: half.combine_send(stream); break;
    case Stage::combine_receive: half.combine_receive(stream); break;
    case Stage::shared: break;  // of the whole batch
  }
  probe.end(phase);
}

/// shared(stream) enqueues the shared experts.
template <auto const& Schedule, class Halves, class Queues, class Probe, class Shared>
void run_schedule(Halves& halves, Queues& queues, Probe& probe, Shared const& shared) {
  for (std::size_t i = 0; i < Schedule.size(); ++i) {
    Step const& step = Schedule[i];
    if (waits(Schedule, i)) queues.wait(static_cast<std::size_t>(predecessor(Schedule, i)), step.queue);
    if (step.part == Part::whole) {
      shared(queues.of(step.queue));
    } else {
      run_stage(halves[static_cast<std::size_t>(step.part)], step.stage, queues.of(step.queue), probe);
    }
    if (is_awaited(Schedule, i)) queues.record(i, step.queue);
  }
}

}  // namespace moe::runner
