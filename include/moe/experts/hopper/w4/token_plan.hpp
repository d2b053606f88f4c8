// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/token_plan.hpp: how the one-token kernel of packed weights divides the work and shared memory, and which shapes it
// takes. Plain C++.
#pragma once

#include <algorithm>

#include "moe/experts/hopper/common/divisor.hpp"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/w4/problem.hpp"

namespace moe::hopper::w4 {

inline constexpr int kTokenWarps = 16;  ///< the most warps
inline constexpr int kTokenSlots = 32;  ///< the most experts of a token
inline constexpr int kTokenParts = 16;  ///< the most thread blocks that share a pair of bricks of rows
inline constexpr int kPairRows = 2 * kBrickRows;
inline constexpr int kTokenFlushes = 2;  ///< pairs of bricks of rows that a warp's units touch, at most

/// The most warps of a scheme's kernel: with codes of 8 bits fewer buffers fit.
MOE_HD constexpr int token_warps(W4Scheme s) { return code_bits(s) == 8 ? 12 : kTokenWarps; }
inline constexpr int kTokenStages = 2;  ///< loads that a warp has under way, of two bricks each
MOE_HD constexpr int token_buffer_bytes(W4Scheme s) { return 2 * brick_bytes(s); }

/// Units or runs, [begin, end).
struct Range {
  int begin;
  int end;
  MOE_HD constexpr int size() const { return end - begin; }
  /// Part `i` of as many as `parts` says.
  MOE_HD constexpr Range part(int i, Divisor const& parts) const {
    return {begin + parts.quotient(size() * i), begin + parts.quotient(size() * (i + 1))};
  }
};

/// Both products of one token, cut into units: two bricks that lie side by side along the rows, at one step of K. Units of the first
/// product (index 0) are in the order (slot, pair of bricks, step), those of the second (pair of bricks, slot, step); a thread block has a
/// contiguous part of either, and so has each of its warps. A run is the units whose products have one sum: those of a slot and a pair of
/// bricks, of the second product those of a pair of bricks.
struct TokenUnits {
  int slots;
  int steps[2];
  int pairs[2];
  int units[2];
  int run[2];    ///< units of a run
  int parts[2];  ///< thread blocks with units: of fewer units than blocks the first blocks have one each
  Divisor by_steps[2];
  Divisor by_inner[2];  ///< pairs of a slot, slots of a pair
  Divisor by_units[2];
  Divisor by_run[2];
  Divisor by_parts[2];
  Divisor by_warps;

  TokenUnits() = default;
  /// `slots`, `blocks`, `warps` ≥ 1; fewer than 2^21 units of either product.
  MOE_HD constexpr TokenUnits(int slots_, int hidden, int intermediate, int blocks, int warps)
      : slots(slots_),
        steps{hidden / kBrickDepth, intermediate / kBrickDepth},
        pairs{steps[1], (steps[0] + 1) / 2},  // a step of the second product is 64 features, the first's pair of bricks
        units{slots * pairs[0] * steps[0], pairs[1] * slots * steps[1]},
        run{steps[0], slots * steps[1]},
        parts{blocks < units[0] ? blocks : units[0], blocks < units[1] ? blocks : units[1]},
        by_steps{Divisor(steps[0]), Divisor(steps[1])},
        by_inner{Divisor(pairs[0]), Divisor(slots)},
        by_units{Divisor(units[0]), Divisor(units[1])},
        by_run{Divisor(run[0]), Divisor(run[1])},
        by_parts{Divisor(parts[0]), Divisor(parts[1])},
        by_warps(warps) {}

  /// The units of a thread block.
  MOE_HD constexpr Range of_block(int phase, int block) const {
    return block < parts[phase] ? Range{0, units[phase]}.part(block, by_parts[phase]) : Range{0, 0};
  }
  /// The thread block that has a unit.
  MOE_HD constexpr int block_of(int phase, int unit) const { return by_units[phase].quotient((unit + 1) * parts[phase] - 1); }
  /// The first thread block that has units of a run, and the number of those.
  MOE_HD constexpr int first_block(int phase, int of_run) const { return block_of(phase, of_run * run[phase]); }
  MOE_HD constexpr int blocks_of(int phase, int of_run) const {
    return block_of(phase, (of_run + 1) * run[phase] - 1) - first_block(phase, of_run) + 1;
  }
  /// The runs that units touch.
  MOE_HD constexpr Range runs_of(int phase, Range const& of) const {
    return of.size() == 0 ? Range{0, 0} : Range{by_run[phase].quotient(of.begin), by_run[phase].quotient(of.end - 1) + 1};
  }
};

/// One warp's work at a time.
struct TokenUnit {
  int phase;
  int slot;
  int pair;
  int step;

  TokenUnit() = default;
  MOE_HD constexpr TokenUnit(TokenUnits const& all, int phase_, int unit) : phase(phase_) {
    int const rest = all.by_steps[phase].quotient(unit);
    int const outer = all.by_inner[phase].quotient(rest);
    int const inner = rest - outer * (phase == 0 ? all.pairs[0] : all.slots);
    step = unit - rest * all.steps[phase];
    slot = phase == 0 ? outer : inner;
    pair = phase == 0 ? inner : outer;
  }
};

/// Offsets in dynamic shared memory, and the units.
struct PackedTokenPlan {
  int warps;     ///< 0: the kernel does not take this shape
  int inter_at;  ///< after x [H] bf16: the intermediate of the block's steps, 64 features each
  int sums_at;   ///< [warps][kTokenFlushes][kPairRows] float32
  int buffers_at;
  int bytes;
  TokenUnits units;  ///< of topk slots
};

/// For gated layers in the standard format.
constexpr PackedTokenPlan plan_packed_token(LocalShape const& s, W4Scheme scheme, int workers) {
  PackedTokenPlan p{};
  int const inter = padded_intermediate(s.intermediate);
  long long const steps[2] = {s.hidden / kBrickDepth, inter / kBrickDepth};
  long long const pairs[2] = {steps[1], (steps[0] + 1) / 2};
  long long const units[2] = {s.topk * pairs[0] * steps[0], pairs[1] * s.topk * steps[1]};
  auto const aligned = [](long long bytes) { return static_cast<int>((bytes + 127) / 128 * 128); };
  p.inter_at = aligned(2LL * s.hidden);
  p.sums_at = p.inter_at + aligned((units[1] / workers + 1) * kBrickDepth * 2);
  p.buffers_at = p.sums_at + token_warps(scheme) * kTokenFlushes * kPairRows * 4;
  int const of_warp = kTokenStages * token_buffer_bytes(scheme);
  int const warps = std::clamp((kSharedMemoryLimit - 4096 - p.buffers_at) / of_warp, 0, token_warps(scheme));
  p.bytes = p.buffers_at + warps * of_warp;
  // A warp's units touch at most two pairs of bricks of rows, and at most kTokenParts thread blocks share one.
  bool fits = s.topk <= kTokenSlots && s.hidden % kBrickDepth == 0 && units[0] < 1 << 21 && units[1] < 1 << 21 && warps >= 6;
  if (fits) {
    long long const all = static_cast<long long>(workers) * warps;
    fits = units[0] / all + 2 <= steps[0] && pairs[1] * steps[1] / all + 2 <= steps[1];  // with one slot or more
    for (long long const n : pairs) fits = fits && workers / n + 2 <= kTokenParts;
    long long const sums = (s.topk * pairs[0] + pairs[1]) * kTokenParts * kPairRows * 4;
    fits = fits && sums <= W4Workspace::kPartialBytes && pairs[1] + 2 <= W4Workspace::kMaxSplitUnits;
  }
  if (!fits) return p;
  p.warps = warps;
  p.units = TokenUnits(s.topk, s.hidden, inter, workers, warps);
  return p;
}

}  // namespace moe::hopper::w4
