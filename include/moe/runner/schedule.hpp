// SPDX-License-Identifier: Apache-2.0
// runner/schedule.hpp: the order in which the stages of two halves of a batch are enqueued, as data: a sequence of steps on two queues.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace moe::runner {

/// What is done between the routing of a batch and the end of its block.
enum class Stage : std::uint8_t { dispatch_send, dispatch_receive, shared, experts, combine_send, combine_receive };

/// What a step works on: one half of the batch, or the whole batch (the shared experts).
enum class Part : std::uint8_t { first, second, whole };

/// Where a step runs. In the CUDA space two streams, in the host space one after the other in the order of the schedule.
enum class Queue : std::uint8_t { compute, communication };

struct Step {
  Stage stage;
  Part part;
  Queue queue;
};

/// The step that step i needs, besides those before it on its queue: the last one of its part; -1: none.
template <std::size_t N>
constexpr int predecessor(std::array<Step, N> const& steps, std::size_t i) {
  for (std::size_t j = i; j > 0; --j) {
    if (steps[j - 1].part == steps[i].part) return static_cast<int>(j - 1);
  }
  return -1;
}
/// Whether step i must wait for its predecessor, which runs on the other queue.
template <std::size_t N>
constexpr bool waits(std::array<Step, N> const& steps, std::size_t i) {
  int const before = predecessor(steps, i);
  return before >= 0 && steps[static_cast<std::size_t>(before)].queue != steps[i].queue;
}
/// Whether another step waits for step i.
template <std::size_t N>
constexpr bool is_awaited(std::array<Step, N> const& steps, std::size_t i) {
  for (std::size_t j = i + 1; j < N; ++j) {
    if (waits(steps, j) && predecessor(steps, j) == static_cast<int>(i)) return true;
  }
  return false;
}
/// Whether each half passes all its stages once and in order, and the shared experts run once.
template <std::size_t N>
constexpr bool is_complete(std::array<Step, N> const& steps) {
  constexpr std::array<Stage, 5> kStages{Stage::dispatch_send, Stage::dispatch_receive, Stage::experts, Stage::combine_send,
                                         Stage::combine_receive};
  std::array<std::size_t, 2> passed{};
  int shared = 0;
  for (Step const& step : steps) {
    if ((step.stage == Stage::shared) != (step.part == Part::whole)) return false;
    if (step.part == Part::whole) {
      ++shared;
      continue;
    }
    std::size_t& next = passed[static_cast<std::size_t>(step.part)];
    if (next == kStages.size() || kStages[next] != step.stage) return false;
    ++next;
  }
  return passed[0] == kStages.size() && passed[1] == kStages.size() && shared == 1;
}

/// Host space: a half's rows are under way while the shared experts, or the experts of the other half, compute.
inline constexpr std::array<Step, 11> kHostDualBatch{{
    {Stage::dispatch_send, Part::first, Queue::communication},
    {Stage::dispatch_send, Part::second, Queue::communication},
    {Stage::shared, Part::whole, Queue::compute},
    {Stage::dispatch_receive, Part::first, Queue::communication},
    {Stage::experts, Part::first, Queue::compute},
    {Stage::combine_send, Part::first, Queue::communication},
    {Stage::dispatch_receive, Part::second, Queue::communication},
    {Stage::experts, Part::second, Queue::compute},
    {Stage::combine_send, Part::second, Queue::communication},
    {Stage::combine_receive, Part::first, Queue::communication},
    {Stage::combine_receive, Part::second, Queue::communication},
}};
static_assert(is_complete(kHostDualBatch));

/// CUDA space: the same, with both dispatches ahead of the first combine on their stream, which would wait for the experts.
inline constexpr std::array<Step, 11> kDeviceDualBatch{{
    {Stage::dispatch_send, Part::first, Queue::communication},
    {Stage::dispatch_receive, Part::first, Queue::communication},
    {Stage::dispatch_send, Part::second, Queue::communication},
    {Stage::dispatch_receive, Part::second, Queue::communication},
    {Stage::shared, Part::whole, Queue::compute},
    {Stage::experts, Part::first, Queue::compute},
    {Stage::combine_send, Part::first, Queue::communication},
    {Stage::combine_receive, Part::first, Queue::communication},
    {Stage::experts, Part::second, Queue::compute},
    {Stage::combine_send, Part::second, Queue::communication},
    {Stage::combine_receive, Part::second, Queue::communication},
}};
static_assert(is_complete(kDeviceDualBatch));

}  // namespace moe::runner
