// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/token_plan.hpp: how the one-token kernel of packed weights divides shared memory, and which shapes it takes. Plain host
// C++.
#pragma once

#include <algorithm>

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

/// Offsets in dynamic shared memory. Both products are cut into units: two bricks that lie side by side along the rows, at one step of K.
/// The units of the first product are in the order (slot, pair of bricks, step), those of the second (pair of bricks, slot, step); a thread
/// block has a contiguous part of either, and so has each of its warps.
struct TokenPlan {
  int warps;     ///< 0: the kernel does not take this shape
  int inter_at;  ///< after x [H] bf16: the intermediate of the block's steps, 64 features each
  int sums_at;   ///< [warps][kTokenFlushes][kPairRows] float32
  int buffers_at;
  int bytes;
};

/// For gated layers in the standard format.
constexpr TokenPlan plan_token(LocalShape const& s, W4Scheme scheme, int workers) {
  TokenPlan p{};
  long long const steps[2] = {s.hidden / kBrickDepth, padded_intermediate(s.intermediate) / kBrickDepth};
  long long const pairs[2] = {steps[1], (steps[0] + 1) / 2};  // a step of the second product is 64 features, the first's pair of bricks
  long long const units[2] = {s.topk * pairs[0] * steps[0], pairs[1] * s.topk * steps[1]};
  auto const aligned = [](long long bytes) { return static_cast<int>((bytes + 127) / 128 * 128); };
  p.inter_at = aligned(2LL * s.hidden);
  p.sums_at = p.inter_at + aligned((units[1] / workers + 1) * kBrickDepth * 2);
  p.buffers_at = p.sums_at + token_warps(scheme) * kTokenFlushes * kPairRows * 4;
  int const of_warp = kTokenStages * token_buffer_bytes(scheme);
  p.warps = std::clamp((kSharedMemoryLimit - 4096 - p.buffers_at) / of_warp, 0, token_warps(scheme));
  p.bytes = p.buffers_at + p.warps * of_warp;
  // A warp's units touch at most two pairs of bricks of rows, and at most kTokenParts thread blocks share one.
  bool fits = s.topk <= kTokenSlots && s.hidden % kBrickDepth == 0 && units[0] < 1 << 21 && units[1] < 1 << 21 && p.warps >= 6;
  if (fits) {
    long long const all = static_cast<long long>(workers) * p.warps;
    fits = units[0] / all + 2 <= steps[0] && pairs[1] * steps[1] / all + 2 <= steps[1];  // with one slot or more
    for (long long const n : pairs) fits = fits && workers / n + 2 <= kTokenParts;
    long long const sums = (s.topk * pairs[0] + pairs[1]) * kTokenParts * kPairRows * 4;
    fits = fits && sums <= W4Workspace::kPartialBytes && pairs[1] + 2 <= W4Workspace::kMaxSplitUnits;
  }
  if (!fits) p.warps = 0;
  return p;
}

}  // namespace moe::hopper::w4
