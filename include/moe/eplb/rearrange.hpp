// SPDX-License-Identifier: Apache-2.0
// eplb/rearrange.hpp: moves a model from its expert maps to the next ones, layer by layer, while the engine makes no steps.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <span>

#include "moe/core/error.hpp"
#include "moe/eplb/group.hpp"
#include "moe/eplb/hold_forwards.hpp"
#include "moe/eplb/maps.hpp"
#include "moe/eplb/weight_mover.hpp"

namespace moe::eplb {

/// The result of a rearrangement on this rank.
struct RearrangeReport {
  int layers_changed = 0;
  MoveStats moved{};
  double milliseconds = 0;
};

namespace detail {

/// E_ARG unless `next` can follow `current` and the mover has their layers and expert slots.
template <class Mover>
void check_rearrangement(Mover const& mover, ExpertMaps const& current, ExpertMaps const& next) {
  if (!current.same_shape(next)) {
    throw Error(ErrorCode::argument, text("new maps of [", next.num_layers(), ", ", next.num_physical(), "] for maps of [",
                                          current.num_layers(), ", ", current.num_physical(), "]"));
  }
  if (mover.num_layers() != current.num_layers() ||
      std::int64_t{mover.num_ranks()} * mover.slots_per_rank() != std::int64_t{current.num_physical()}) {
    throw Error(ErrorCode::argument,
                text("maps of ", current.num_layers(), " layers and ", current.num_physical(), " expert slots; weights of ",
                     mover.num_layers(), " layers, ", mover.num_ranks(), " ranks and ", mover.slots_per_rank(), " expert slots a rank"));
  }
}

/// part() on this rank; if it throws on any rank, all throw (succeed_together).
template <class Group, class What, class Part>
void together(Group& group, What const& what, Part&& part) {
  std::exception_ptr failed;
  try {
    part();
  } catch (...) {
    failed = std::current_exception();
  }
  succeed_together(group, failed, what);
}

/// One layer from old_row to new_row, committed once every rank holds its experts. After a failure the layer is unchanged everywhere.
template <class Mover, class Group>
void move_layer(Mover& mover, int layer, std::span<std::int32_t const> old_row, std::span<std::int32_t const> new_row, Group& group,
                typename Mover::StreamType stream) {
  try {
    together(group, text("rearranging layer ", layer), [&] {
      mover.fetch(layer, old_row, new_row, stream);
      mover.wait();
    });
  } catch (...) {
    mover.discard();
    throw;
  }
  mover.commit(stream);
}

/// What a mover has done since `before`.
inline RearrangeReport report_since(MoveStats const& before, MoveStats const& after, std::chrono::steady_clock::time_point start) {
  return {.moved = {after.bytes_sent - before.bytes_sent, after.bytes_received - before.bytes_received,
                    after.bytes_copied - before.bytes_copied, after.slots_changed - before.slots_changed},
          .milliseconds = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count()};
}

}  // namespace detail

/// Collective over the mover's communicator and over `group` (one communicator, or two of the same ranks). The group's deadline should be
/// longer than the mover's: a rank whose wait for a dead rank has timed out can then still tell the others. No forward may run
/// meanwhile. hold(layer) is called before that layer's transfer, and its result is destroyed after commit(layer): a function that returns
/// HoldForwards makes forwards that begin meanwhile E_STATE; by default nothing is refused.
///
/// For each layer that differs: its experts move, all ranks agree that they have theirs, the weights are replaced, and `commit(layer)`
/// is called, which must put next's map of that layer into use (ExpertMaps::set_layer, MapTables::publish). For equal maps, ranks exchange
/// the agreement only. Device space: enqueued on `stream`; all but the last copies are complete on return.
///
/// E_ARG on maps that do not fit, E_MISMATCH if ranks have other maps. If a rank fails in a layer, all ranks throw (succeed_together);
/// the layers before it are changed everywhere, that layer and those after it nowhere.
template <Communicator Comm, BalancingGroup Group, class Commit, class Hold = HoldNone>
RearrangeReport rearrange(WeightMover<Comm>& mover, ExpertMaps const& current, ExpertMaps const& next, Group& group, Commit&& commit,
                          Stream<typename Comm::Space> stream = {}, Hold const& hold = {}) {
  auto const start = std::chrono::steady_clock::now();
  MoveStats const before = mover.stats();
  int changed = 0;
  detail::together(group, "rearrangement", [&] { detail::check_rearrangement(mover, current, next); });
  check_same_maps(group.all_gather(current.hash()));
  check_same_maps(group.all_gather(next.hash()));
  for (int layer = 0; layer < current.num_layers(); ++layer) {
    if (!current.layer_differs(layer, next)) continue;
    [[maybe_unused]] auto const held = hold(layer);
    auto const old_row = current.physical_to_logical().row(layer);
    auto const new_row = next.physical_to_logical().row(layer);
    if (!std::ranges::equal(old_row, new_row)) detail::move_layer(mover, layer, old_row, new_row, group, stream);
    commit(layer);
    ++changed;
  }
  RearrangeReport report = detail::report_since(before, mover.stats(), start);
  report.layers_changed = changed;
  return report;
}

}  // namespace moe::eplb
