// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/split_model.hpp: into how many parts a phase of the layer kernel cuts K. Plain C++, for the kernels that plan and
// for the host that tests them.
#pragma once

namespace moe::hopper {

/// One phase: `tiles` tiles of about `rows` rows and `k_steps` steps of K on `workers` CTAs.
struct SplitProblem {
  int tiles;
  int rows;
  int k_steps;
  int workers;
  int max_splits;
  int max_units;  ///< at most this many parts in all tiles
  int before;     ///< steps of a unit of the previous phase; 0 in the first phase
};

inline constexpr int kMostSplits = 32;  ///< one for each lane of the warp that chooses

constexpr bool may_split(SplitProblem const& p, int splits) {
  return splits == 1 || (splits <= p.max_splits && splits <= p.k_steps && p.tiles < 2 * p.workers && p.tiles * splits <= p.max_units);
}

/// Time of the phase in steps if K is split into this many parts, by a model (docs/log/hopper.md, change 28). Two neighbouring
/// multiprocessors share their load bandwidth, so a wave of up to half of the CTAs takes half of a unit's time, a larger wave all of it.
/// With more units than CTAs, which draw them one by one, the last unit costs a part of a unit. Every part costs its sum, and at the end of
/// the layer no other work hides this cost. CTAs start the second phase as far apart in time as the units of the first are long.
constexpr float split_cost(SplitProblem const& p, int splits) {
  int const units = p.tiles * splits;
  float const waves = static_cast<float>(units) / static_cast<float>(p.workers);
  int const steps_of_part = (p.k_steps + splits - 1) / splits, eights = (p.rows + 7) / 8;
  auto const steps = static_cast<float>(steps_of_part);
  float const sum = splits == 1 ? 0.0F : p.before > 0 || units < p.workers ? 6.0F : 1.0F;
  if (units < p.workers) {
    float const apart = 0.8F * static_cast<float>(p.before);
    float const late = splits > 1 ? 0.0F : apart < 0.25F * steps ? apart : 0.25F * steps;
    return (2 * units <= p.workers ? 0.55F : 1.0F) * steps + late + sum;
  }
  float const part = splits == 1 ? 0.0F : 1.0F + 0.2F * static_cast<float>(eights * 8);
  return (waves + (p.before > 0 ? 0.1F : 0.3F)) * steps + waves * part + sum;
}

}  // namespace moe::hopper
