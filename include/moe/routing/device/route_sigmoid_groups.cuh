// SPDX-License-Identifier: Apache-2.0
// routing/device/route_sigmoid_groups.cuh: route_row() by one warp for DeepSeek-V3's router: sigmoid, 256 experts, the 4 best of 8 groups,
// top 8.
//
// route_warp() works for every router; this makes the same choice, bit for bit, with less than half its instructions. A lane scores 8
// experts and 4 lanes hold a group. The 128 experts of the kept groups then pass through shared memory, so that every lane holds 4 of them,
// lower lanes lower ids. Each lane sorts its 4; then, 8 times, the lowest lane with the largest head gives it up.
#pragma once

#include <cstdint>

#include "moe/core/ptx/approximate.cuh"
#include "moe/core/types.hpp"
#include "moe/routing/device/route_warp.cuh"
#include "moe/routing/fixed_sizes.hpp"
#include "moe/routing/grouped_topk.hpp"

namespace moe::routing::detail {

/// The sizes that this file is written for.
struct SigmoidGroups {
  static constexpr int kExperts = 256, kGroups = 8, kKept = 4, kTopK = 8;
  static constexpr int kValues = kExperts / kWarp;                ///< per lane
  static constexpr int kGroupLanes = kWarp / kGroups;             ///< lanes of a group
  static constexpr int kGroupSize = kExperts / kGroups;           ///< experts of a group
  static constexpr int kCandidates = kGroupSize * kKept / kWarp;  ///< per lane, once groups are dropped
  /// Floats between groups in shared memory: 16-byte accesses at 32-byte steps then meet no bank twice.
  static constexpr int kPitch = kGroupSize + 4;
  static constexpr int kScratchFloats = kPitch * (kGroups + kKept) + kTopK;
};

/// A configuration of these sizes: makes them compile-time constants and changes nothing else.
template <class Config>
struct SigmoidGroupsConfig : Config {
  static constexpr int num_experts = SigmoidGroups::kExperts;
  static constexpr int topk = SigmoidGroups::kTopK;
  static constexpr int num_fused_shared = 0;
  static constexpr int num_zero_experts = 0;
  static constexpr int num_joint_shared = 0;
  MOE_HD static constexpr int num_slots() { return topk; }
};

/// Whether route_sigmoid_groups() may route for this type of configuration, and whether it does for this one.
template <class Config>
inline constexpr bool kMayBeSigmoidGroups = false;
template <>
inline constexpr bool kMayBeSigmoidGroups<RouterConfig> = true;
template <Renormalize R>
inline constexpr bool kMayBeSigmoidGroups<GroupedTopKConfig<Scoring::sigmoid, GroupScore::top2_sum, R>> = true;
template <class Base, class Sizes>
inline constexpr bool kMayBeSigmoidGroups<FixedSizesConfig<Base, Sizes>> =
    kMayBeSigmoidGroups<Base> && Sizes::num_experts == SigmoidGroups::kExperts && Sizes::topk == SigmoidGroups::kTopK;
template <class Config>
inline constexpr bool kIsSigmoidGroups = false;
template <class Config>
inline constexpr bool kIsSigmoidGroups<SigmoidGroupsConfig<Config>> = true;
inline bool is_sigmoid_groups(RouterConfig const& c) {
  using S = SigmoidGroups;
  return c.num_experts == S::kExperts && c.num_expert_group == S::kGroups && c.topk_group == S::kKept && c.topk == S::kTopK &&
         c.scoring == Scoring::sigmoid && c.order == Order::score_then_topk && c.selection == Selection::topk &&
         c.group_score == GroupScore::top2_sum && c.logit_softcap == 0.0F && c.num_zero_experts == 0 && c.num_joint_shared == 0 &&
         c.num_fused_shared == 0 && reinterpret_cast<std::uintptr_t>(c.correction_bias) % 16 == 0;
}

/// sigmoid_rn(z) for |z| < kUsualLogit, bit for bit: there e^-z is normal, so its exponent is added as an integer, and 1 + e^-z has a
/// normal reciprocal, which one Newton step from the approximation rounds correctly (a test compares every float).
inline constexpr float kUsualLogit = 87.0F;
__device__ inline float usual_sigmoid(float z) {
  float const shifted = fma_rn(z, -1.44269504F, 12582912.0F);
  float const n = sub_rn(shifted, 12582912.0F);
  float const p = exp_of_rest(-z, n);
  float const e = __int_as_float(__float_as_int(p) + (__float_as_int(shifted) << 23));
  float const y = add_rn(1.0F, e);
  float const near = ptx::approximate_reciprocal(y);
  return fma_rn(near, fma_rn(-y, near, 1.0F), near);
}

/// N consecutive elements as floats, by 16-byte loads that the compiler does not move.
template <int N, class L>
__device__ inline void load_floats(L const* from, float (&to)[N]) {
  constexpr int kPerLoad = 16 / static_cast<int>(sizeof(L));
  alignas(16) L part[N];
#pragma unroll
  for (int i = 0; i < N; i += kPerLoad) *reinterpret_cast<uint4*>(&part[i]) = *reinterpret_cast<uint4 const*>(from + i);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_float(part[i]);
}
template <int N>
__device__ inline void store_floats(float const (&from)[N], float* to) {
#pragma unroll
  for (int i = 0; i < N; i += 4) *reinterpret_cast<float4*>(to + i) = make_float4(from[i], from[i + 1], from[i + 2], from[i + 3]);
}

/// A lane's scores of its logits z, as score() defines them, and selection values. bias: this lane's part, or null. `slot`: 8 floats of
/// this lane in shared memory, used only for unusual logits, whose values take the general functions one by one.
__device__ inline void score_sigmoid(float const (&z)[SigmoidGroups::kValues], float const* bias, float* slot,
                                     float (&score)[SigmoidGroups::kValues], float (&sel)[SigmoidGroups::kValues]) {
  constexpr int V = SigmoidGroups::kValues;
  float b[V] = {};
  if (bias != nullptr) load_floats(bias, b);
  bool usual = true;
#pragma unroll
  for (int i = 0; i < V; ++i) usual = usual && fabsf(z[i]) < kUsualLogit;
#pragma unroll
  for (int i = 0; i < V; ++i) score[i] = usual_sigmoid(z[i]);
#pragma unroll
  for (int i = 0; i < V; ++i) sel[i] = fmaxf(add_rn(score[i], b[i]), -kInfinity);  // NaN never wins
  if (usual) return;
  store_floats(z, slot);
#pragma unroll 1
  for (int i = 0; i < V; ++i) slot[i] = slot[i] > -kInfinity ? sigmoid_rn(slot[i] < kLargest ? slot[i] : kLargest) : 0.0F;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    score[i] = slot[i];
    sel[i] = z[i] > -kInfinity ? fmaxf(add_rn(score[i], b[i]), -kInfinity) : -kInfinity;
  }
}

/// The sum of the two largest selection values of this lane's group, in each of its lanes.
__device__ inline float top2_of_group(float const (&sel)[SigmoidGroups::kValues]) {
  float best = fmaxf(sel[0], sel[1]);
  float second = fminf(sel[0], sel[1]);
  auto const merge = [&](float b, float s) {
    second = fmaxf(fminf(best, b), fmaxf(second, s));
    best = fmaxf(best, b);
  };
#pragma unroll
  for (int i = 2; i < SigmoidGroups::kValues; i += 2) merge(fmaxf(sel[i], sel[i + 1]), fminf(sel[i], sel[i + 1]));
#pragma unroll
  for (int step = 1; step < SigmoidGroups::kGroupLanes; step *= 2) {
    merge(__shfl_xor_sync(kAllLanes, best, step), __shfl_xor_sync(kAllLanes, second, step));
  }
  return top2_sum(best, second);
}

/// Bit l: lane l's group is among the best. Each lane compares its group with two others.
__device__ inline unsigned best_groups(float mine, int lane) {
  constexpr int kLanes = SigmoidGroups::kGroupLanes;
  int const group = lane / kLanes;
  int const low = lane % kLanes;
  int const high = low + kLanes;
  auto const beaten_by = [&](int other) {
    float const score = __shfl_sync(kAllLanes, mine, other * kLanes);
    return score > mine || (score == mine && other < group);
  };
  unsigned const by_low = __ballot_sync(kAllLanes, beaten_by(low));
  unsigned const by_high = __ballot_sync(kAllLanes, beaten_by(high));
  unsigned const first = 0xFU << (group * kLanes);
  bool const kept = __popc(by_low & first) + __popc(by_high & first) < SigmoidGroups::kKept;
  return __ballot_sync(kAllLanes, kept);
}

/// Routes one token with the 32 lanes of a warp. z: logits [lane 8, lane 8 + 8). scratch: kScratchFloats of this warp, 16-byte aligned.
template <class Config>
__device__ inline WarpRow route_sigmoid_groups(Config const& cfg, float const (&z)[SigmoidGroups::kValues], int lane, float* scratch) {
  using S = SigmoidGroups;
  int const group = lane / S::kGroupLanes;
  int const in_group = lane % S::kGroupLanes * S::kValues;
  float* const scores = scratch;                              // [group][kPitch]
  float* const candidates = scores + S::kGroups * S::kPitch;  // [number among the kept groups][kPitch]
  auto* const picks = reinterpret_cast<std::uint8_t*>(candidates + S::kKept * S::kPitch);

  float score[S::kValues];
  float sel[S::kValues];
  float* const mine = scores + group * S::kPitch + in_group;
  score_sigmoid(z, cfg.correction_bias == nullptr ? nullptr : cfg.correction_bias + lane * S::kValues, mine, score, sel);
  store_floats(score, mine);

  // Kept groups move together, in the order of their numbers.
  unsigned const kept = best_groups(top2_of_group(sel), lane);
  bool const keep = (kept >> lane & 1U) != 0;
  int const number = __popc(kept & ((1U << (group * S::kGroupLanes)) - 1)) / S::kGroupLanes;
  if (keep) store_floats(sel, candidates + number * S::kPitch + in_group);
  unsigned const groups = __reduce_or_sync(kAllLanes, keep ? static_cast<unsigned>(group) << (8 * number) : 0U);  // one byte each
  __syncwarp();

  // This lane's candidates in descending order; equal ones stay in the order of their ids, which a byte each of `order` holds.
  float v[S::kCandidates];
  load_floats(candidates + lane / 8 * S::kPitch + lane % 8 * S::kCandidates, v);
  unsigned order = 0x03020100U + 0x01010101U * static_cast<unsigned>(lane * S::kCandidates);
  auto const sort_pair = [&](int i, unsigned swapped) {
    if (v[i + 1] > v[i]) order = __byte_perm(order, 0, swapped);
    float const larger = fmaxf(v[i], v[i + 1]);
    v[i + 1] = fminf(v[i], v[i + 1]);
    v[i] = larger;
  };
#pragma unroll
  for (int pass = 0; pass < 2; ++pass) {
    sort_pair(0, 0x3201);
    sort_pair(2, 0x2310);
    sort_pair(1, 0x3120);
  }
  int keys[S::kCandidates];
#pragma unroll
  for (int i = 0; i < S::kCandidates; ++i) keys[i] = signed_key(v[i]);
  unsigned const lower_lanes = (1U << lane) - 1;
#pragma unroll
  for (int j = 0; j < S::kTopK; ++j) {
    bool const largest = keys[0] == __reduce_max_sync(kAllLanes, keys[0]);
    unsigned const all_largest = __ballot_sync(kAllLanes, largest);
    bool const first = largest && (all_largest & lower_lanes) == 0;
    if (first) picks[j] = static_cast<std::uint8_t>(order);
    order = first ? order >> 8 : order;
#pragma unroll
    for (int i = 0; i + 1 < S::kCandidates; ++i) keys[i] = first ? keys[i + 1] : keys[i];
    keys[S::kCandidates - 1] = first ? INT32_MIN : keys[S::kCandidates - 1];
  }
  __syncwarp();

  WarpRow row{kNoExpert, 0.0F, 0.0F, false};
  if (lane < S::kTopK) {
    int const pick = picks[lane];
    int const from = static_cast<int>(groups >> (pick / S::kGroupSize * 8) & 0xFFU);
    int const at = pick % S::kGroupSize;
    if (candidates[pick / S::kGroupSize * S::kPitch + at] > -kInfinity) {
      row.id = from * S::kGroupSize + at;
      row.weight = scores[from * S::kPitch + at];
    }
  }
  row.degenerate = __shfl_sync(kAllLanes, row.id, 0) == kNoExpert;
  float divisor = 1.0F;
  if (renormalises(cfg)) divisor = renorm_divisor(cfg, warp_sum<S::kTopK>(lane < S::kTopK ? renorm_term(cfg, row.weight) : 0.0F));
  finish_weight(cfg, divisor, row);
  if (row.degenerate) fill_degenerate_warp(cfg, lane, row);
  __syncwarp();  // the scratch is free for the next token
  return row;
}

}  // namespace moe::routing::detail
