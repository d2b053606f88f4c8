// SPDX-License-Identifier: Apache-2.0
// routing/device/route_warp.cuh: route_row() by one warp: the same arithmetic in the same order, with the row in registers.
#pragma once

#include <cstdint>

#include "moe/core/types.hpp"
#include "moe/routing/row/route_row.hpp"

namespace moe::routing::detail {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

/// A warp's result for its row: lane j < k holds slot j.
struct WarpRow {
  std::int32_t id;
  float weight;
  float shared_weight;  ///< lane i < num_joint_shared
  bool degenerate;
};

/// The butterfly sum of 32 lanes. Lanes from `Lanes` on hold 0, so their steps are skipped. The result is in the first `Lanes` lanes.
template <int Lanes = kWarp>
__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int half = Lanes / 2; half > 0; half /= 2) v = add_rn(v, __shfl_xor_sync(kAllLanes, v, half));
  return v;
}
/// An integer key with the order of the floats. The float must not be NaN or -0.
__device__ inline unsigned order_key(float v) {
  auto const bits = static_cast<unsigned>(float_bits(v));
  return bits ^ (static_cast<unsigned>(float_bits(v) >> 31) | 0x80000000U);
}
/// The same for signed comparisons.
__device__ inline int signed_key(float v) { return float_bits(v) ^ ((float_bits(v) >> 31) & 0x7FFFFFFF); }
inline constexpr unsigned kDisabledKey = 0x007FFFFFU;  // order_key(-inf)
__device__ inline float key_value(unsigned key) {
  return bits_float(static_cast<std::int32_t>((key & 0x80000000U) != 0 ? key ^ 0x80000000U : ~key));
}

/// A lane's V values of a row: [lane V, lane V + V), -inf past n. 16-byte loads where the row allows them.
template <int V, class Config, class L>
__device__ inline void load_logits(Config const& cfg, L const* row, int n, int lane, float (&z)[V]) {
  int const first = lane * V;
  constexpr int kPerLoad = 16 / static_cast<int>(sizeof(L));
  if constexpr (V % kPerLoad == 0) {
    if (first + V <= n && reinterpret_cast<std::uintptr_t>(row) % 16 == 0) {
      alignas(16) L part[V];
#pragma unroll
      for (int i = 0; i < V; i += kPerLoad) {
        *reinterpret_cast<uint4*>(&part[i]) = *reinterpret_cast<uint4 const*>(row + first + i);
      }
#pragma unroll
      for (int i = 0; i < V; ++i) z[i] = clean_logit(cfg, to_float(part[i]));
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < V; ++i) z[i] = first + i < n ? clean_logit(cfg, to_float(row[first + i])) : -kInfinity;
}

/// Sets sel to -inf outside the best groups. Groups that fill whole lanes, a power of two of lanes each, stay in registers. Others use
/// `scratch`: num_experts + num_expert_group floats of this warp.
template <int V, class Config>
__device__ inline void mask_groups_warp(Config const& cfg, int lane, float* scratch, float (&sel)[V]) {
  int const groups = cfg.num_expert_group > 1 ? cfg.num_expert_group : 1;  // a fixed 0 compiles this too
  int const size = cfg.num_experts / groups;
  int const lanes = size / V;
  if (lanes * V == size && (lanes & (lanes - 1)) == 0 && lanes <= kWarp) {
    float best = -kInfinity;
    float second = -kInfinity;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      second = max_of(sel[i] < best ? sel[i] : best, second);
      best = max_of(sel[i], best);
    }
    for (int step = 1; step < lanes; step *= 2) {
      float const b = __shfl_xor_sync(kAllLanes, best, step);
      float const s = __shfl_xor_sync(kAllLanes, second, step);
      second = max_of(best < b ? best : b, max_of(second, s));
      best = max_of(best, b);
    }
    float const mine = cfg.group_score == GroupScore::max ? best : top2_sum(best, second);
    int const group = lane / lanes;
    int rank = 0;
    for (int g = 0; g < groups; ++g) {
      float const other = __shfl_sync(kAllLanes, mine, g * lanes);
      rank += other > mine || (other == mine && g < group) ? 1 : 0;
    }
    if (rank < cfg.topk_group) return;
#pragma unroll
    for (int i = 0; i < V; ++i) sel[i] = -kInfinity;
    return;
  }
  float* const scores = scratch + cfg.num_experts;
#pragma unroll
  for (int i = 0; i < V; ++i) {
    if (lane * V + i < cfg.num_experts) scratch[lane * V + i] = sel[i];
  }
  __syncwarp();
  for (int g = lane; g < groups; g += kWarp) scores[g] = group_score(cfg.group_score, scratch, g * size, size);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < V; ++i) {
    int const e = lane * V + i;
    int const group = e / size;
    if (e >= cfg.num_experts) continue;
    int rank = 0;
    for (int g = 0; g < groups; ++g) rank += scores[g] > scores[group] || (scores[g] == scores[group] && g < group) ? 1 : 0;
    if (rank >= cfg.topk_group) sel[i] = -kInfinity;
  }
  __syncwarp();
}

/// The largest of all lanes' keys, each lane's first largest at `at`: returns its expert and removes it, -1 if every key is disabled.
template <int V>
__device__ inline std::int32_t take_largest(int lane, unsigned (&keys)[V], unsigned& best, int& at) {
  unsigned const largest = __reduce_max_sync(kAllLanes, best);
  if (largest == kDisabledKey) return kNoExpert;
  int const owner = __ffs(static_cast<int>(__ballot_sync(kAllLanes, best == largest))) - 1;  // the lowest lane holds the lowest ids
  std::int32_t const id = owner * V + __shfl_sync(kAllLanes, at, owner);
  if (lane == owner) {
    best = 0;
    int next = 0;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      if (i == at) keys[i] = kDisabledKey;
      if (keys[i] > best) {
        best = keys[i];
        next = i;
      }
    }
    at = next;
  }
  return id;
}
template <int V>
__device__ inline void first_largest(unsigned const (&keys)[V], unsigned& best, int& at) {
  best = keys[0];
  at = 0;
#pragma unroll
  for (int i = 1; i < V; ++i) {
    if (keys[i] > best) {
      best = keys[i];
      at = i;
    }
  }
}

template <class Config>
__device__ inline void fill_degenerate_warp(Config const& cfg, int lane, WarpRow& row) {
  row.id = kNoExpert;
  row.weight = 0.0F;
  int const n = cfg.num_experts + cfg.num_zero_experts;
  int chosen = 0;
  for (int e = 0; cfg.degenerate == DegeneratePolicy::uniform_first_k && e < n && chosen < cfg.topk; ++e) {
    if (cfg.correction_bias != nullptr && !(cfg.correction_bias[e] > -kInfinity)) continue;
    if (chosen++ != lane) continue;
    row.id = e;
    row.weight = div_rn(1.0F, static_cast<float>(cfg.topk));
  }
}

/// A chosen expert's weight, from its score.
template <class Config>
__device__ inline void finish_weight(Config const& cfg, float divisor, WarpRow& row) {
  if (row.id == kNoExpert) return;
  if (renormalises(cfg)) row.weight = divided(row.weight, divisor);
  row.weight = mul_rn(row.weight, cfg.routed_scaling_factor);
  if (cfg.per_expert_scale != nullptr && row.id < cfg.num_experts) row.weight = mul_rn(row.weight, cfg.per_expert_scale[row.id]);
}

/// Both picks of sparsemixer; z becomes the masked logits.
template <int V, class Config>
__device__ inline void sparsemixer_warp(Config const& cfg, int lane, float (&z)[V], WarpRow& row) {
  unsigned keys[V];
#pragma unroll
  for (int i = 0; i < V; ++i) keys[i] = order_key(add_rn(z[i], 0.0F));
  for (int j = 0; j < cfg.topk; ++j) {
    unsigned best;
    int at;
    first_largest(keys, best, at);
    float const m = key_value(__reduce_max_sync(kAllLanes, best));
    std::int32_t const id = take_largest(lane, keys, best, at);
    float sum = 0.0F;
#pragma unroll
    for (int i = 0; i < V; ++i) {
      sum = add_rn(sum, sparsemixer_called(z[i], m, cfg.sparsemixer_eps));
      if (lane * V + i == id) z[i] = -kInfinity;
    }
    sum = warp_sum(sum);
    if (lane != j) continue;
    row.id = id;
    row.weight = id == kNoExpert ? 0.0F : div_rn(1.0F, sum);
  }
}

/// Routes one token with the 32 lanes of a warp; V = lane_values(E + Z). `scratch`: see mask_groups_warp().
template <int V, class Config, class L>
__device__ inline WarpRow route_warp(Config const& cfg, L const* logits, std::int64_t token_id, int lane, float* scratch) {
  int const k = cfg.topk;
  int const n = cfg.num_experts + cfg.num_zero_experts;
  bool const sparsemixer = cfg.selection == Selection::sparsemixer;
  bool const over_chosen = cfg.order == Order::topk_then_score && cfg.scoring == Scoring::softmax;
  WarpRow row{kNoExpert, 0.0F, 0.0F, false};

  float sel[V];
  load_logits(cfg, logits, n, lane, sel);
  float max = 0.0F;
  if (cfg.scoring == Scoring::softmax || cfg.selection == Selection::hash_table) {
    max = -kInfinity;
#pragma unroll
    for (int i = 0; i < V; ++i) max = max_of(sel[i], max);
    max = key_value(__reduce_max_sync(kAllLanes, order_key(add_rn(max, 0.0F))));
  }
  float sum = 1.0F;
  if (cfg.scoring == Scoring::softmax && cfg.order == Order::score_then_topk && !sparsemixer && max != -kInfinity) {
    sum = 0.0F;
#pragma unroll
    for (int i = 0; i < V; ++i) sum = add_rn(sum, exp_rn(sub_rn(sel[i], max)));
    sum = warp_sum(sum);
  }

  auto const logit = [&](std::int32_t e) { return clean_logit(cfg, to_float(logits[e])); };
  if (sparsemixer) {
    sparsemixer_warp(cfg, lane, sel, row);
    row.degenerate = __shfl_sync(kAllLanes, row.id, 0) == kNoExpert;
  } else if (cfg.selection == Selection::hash_table) {
    bool const known = token_id >= 0 && token_id < cfg.vocabulary;
    std::int64_t const id = known && lane < k ? cfg.hash_table[token_id * k + lane] : kNoExpert;
    bool usable = id >= 0 && id < cfg.num_experts;
    if (usable) usable = selection_value(cfg, logit(static_cast<std::int32_t>(id)), max, sum, static_cast<int>(id)) != -kInfinity;
    for (int i = 0; i < k; ++i) {
      std::int64_t const earlier = __shfl_sync(kAllLanes, static_cast<long long>(id), i);
      if (i < lane && earlier == id) usable = false;
    }
    row.id = usable ? static_cast<std::int32_t>(id) : kNoExpert;
    row.degenerate = known && max == -kInfinity;
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) sel[i] = selection_value(cfg, sel[i], max, sum, lane * V + i);
    if (cfg.num_expert_group > 1) mask_groups_warp(cfg, lane, scratch, sel);
    unsigned keys[V];
#pragma unroll
    for (int i = 0; i < V; ++i) keys[i] = order_key(sel[i]);
    unsigned best;
    int at;
    first_largest(keys, best, at);
    for (int j = 0; j < k; ++j) {
      std::int32_t const id = take_largest(lane, keys, best, at);
      if (lane == j) row.id = id;
      if (id == kNoExpert) {
        row.degenerate = j == 0;
        break;
      }
    }
  }

  // Weights, always from the unbiased score: each lane reads its expert's logit again.
  bool const chosen = row.id != kNoExpert;
  if (!sparsemixer) {
    float const z = chosen ? logit(row.id) : -kInfinity;
    float top = max;
    if (over_chosen) {
      top = key_value(__reduce_max_sync(kAllLanes, order_key(add_rn(z, 0.0F))));
      sum = warp_sum(chosen ? exp_rn(sub_rn(z, top)) : 0.0F);
    }
    row.weight = chosen ? score(cfg, z, top, sum) : 0.0F;
  }
  float divisor = 1.0F;
  if (renormalises(cfg)) {
    float total = warp_sum(lane < k ? renorm_term(cfg, row.weight) : 0.0F);
    for (int i = 0; i < cfg.num_joint_shared; ++i) total = add_rn(total, renorm_term(cfg, score(cfg, logit(n + i), max, sum)));
    divisor = renorm_divisor(cfg, total);
  }
  finish_weight(cfg, divisor, row);
  if (lane < cfg.num_joint_shared) {
    float gamma = score(cfg, logit(n + lane), max, sum);
    if (renormalises(cfg)) gamma = divided(gamma, divisor);
    row.shared_weight = mul_rn(gamma, cfg.routed_scaling_factor);
  }
  if (row.degenerate) fill_degenerate_warp(cfg, lane, row);
  return row;
}

}  // namespace moe::routing::detail
