// SPDX-License-Identifier: Apache-2.0
// routing/row/route_row.hpp: the whole semantics of routing one token, for the host and the device: logits to expert ids and weights.
#pragma once

#include <cstdint>

#include "moe/core/types.hpp"
#include "moe/routing/row/router_config.hpp"
#include "moe/routing/row/score.hpp"

namespace moe::routing {

/// What route_row() reports about its row.
struct RowResult {
  int num_chosen = 0;       ///< routed slots with an expert
  bool degenerate = false;  ///< no expert could be chosen; RouterConfig::degenerate decided its slots
};

/// Scratch of one row, on the caller's stack: selection values of up to kMaxLogits experts.
struct RowScratch {
  float sel[kMaxLogits];
};

/// A row that is padding: every slot -1 with weight 0, fused shared experts too.
template <class Config>
MOE_HD inline void pad_row(Config const& cfg, std::int32_t* ids, float* weights, float* shared_weights = nullptr) {
  for (int j = 0; j < cfg.num_slots(); ++j) {
    ids[j] = kNoExpert;
    weights[j] = 0.0F;
  }
  for (int i = 0; shared_weights != nullptr && i < cfg.num_joint_shared; ++i) shared_weights[i] = 0.0F;
}

namespace detail {

/// ids[0..k): the k largest selection values in descending order, the lower id first among equals; -1 where none is above -inf.
MOE_HD inline void top_k(float const* sel, int n, int k, std::int32_t* ids) {
  float best[kMaxTopK];
  int held = 0;
  for (int e = 0; e < n; ++e) {
    float const v = sel[e];
    if (v == -kInfinity || (held == k && !(v > best[k - 1]))) continue;
    int at = held < k ? held++ : k - 1;
    for (; at > 0 && v > best[at - 1]; --at) {
      best[at] = best[at - 1];
      ids[at] = ids[at - 1];
    }
    best[at] = v;
    ids[at] = e;
  }
  for (int j = held; j < k; ++j) ids[j] = kNoExpert;
}

/// A group's score by its two largest selection values; a disabled expert among them makes it -inf, also beside +inf.
MOE_HD inline float top2_sum(float best, float second) { return max_of(add_rn(best, second), -kInfinity); }

/// Score of group [first, first + size): its largest selection value, or the sum of its two largest.
MOE_HD inline float group_score(GroupScore kind, float const* sel, int first, int size) {
  float best = -kInfinity;
  float second = -kInfinity;
  for (int e = first; e < first + size; ++e) {
    if (sel[e] > best) {
      second = best;
      best = sel[e];
    } else if (sel[e] > second) {
      second = sel[e];
    }
  }
  return kind == GroupScore::max ? best : top2_sum(best, second);
}

/// Sets sel to -inf outside the topk_group best groups, the lower group first among equals.
template <class Config>
MOE_HD inline void mask_groups(Config const& cfg, float* sel) {
  int const groups = cfg.num_expert_group > 1 ? cfg.num_expert_group : 1;  // a fixed 0 compiles this too
  int const size = cfg.num_experts / groups;
  float scores[kMaxLogits];
  for (int g = 0; g < groups; ++g) scores[g] = group_score(cfg.group_score, sel, g * size, size);
  for (int g = 0; g < groups; ++g) {
    int rank = 0;
    for (int h = 0; h < groups; ++h) rank += scores[h] > scores[g] || (scores[h] == scores[g] && h < g) ? 1 : 0;
    if (rank < cfg.topk_group) continue;
    for (int e = g * size; e < (g + 1) * size; ++e) sel[e] = -kInfinity;
  }
}

template <class Config>
MOE_HD inline RowResult fill_degenerate(Config const& cfg, std::int32_t* ids, float* weights) {
  RowResult result{0, true};
  int const n = cfg.num_experts + cfg.num_zero_experts;
  for (int e = 0; cfg.degenerate == DegeneratePolicy::uniform_first_k && e < n && result.num_chosen < cfg.topk; ++e) {
    if (cfg.correction_bias != nullptr && !(cfg.correction_bias[e] > -kInfinity)) continue;
    ids[result.num_chosen] = e;
    weights[result.num_chosen++] = div_rn(1.0F, static_cast<float>(cfg.topk));
  }
  for (int j = result.num_chosen; j < cfg.topk; ++j) {
    ids[j] = kNoExpert;
    weights[j] = 0.0F;
  }
  return result;
}

/// One of sparsemixer's picks over sel (logits, chosen ones at -inf): its id and weight. Needs one finite value.
template <class Config>
MOE_HD inline int sparsemixer_pick(Config const& cfg, float const* sel, float& weight) {
  int best = 0;
  for (int e = 1; e < cfg.num_experts; ++e) best = sel[e] > sel[best] ? e : best;
  float const m = sel[best];
  if (m == -kInfinity) {
    weight = 0.0F;
    return kNoExpert;
  }
  float const sum = row_sum(cfg.num_experts, [&](int e) { return sparsemixer_term(sel[e], m, cfg.sparsemixer_eps); });
  weight = div_rn(1.0F, sum);
  return best;
}

/// Looks a token's experts up. An id that is out of range, chosen twice or disabled gives -1; so does a token outside the vocabulary.
template <class Config>
MOE_HD inline void look_up(Config const& cfg, float const* sel, std::int64_t token_id, std::int32_t* ids) {
  bool const known = token_id >= 0 && token_id < cfg.vocabulary;
  for (int j = 0; j < cfg.topk; ++j) {
    std::int64_t const id = known ? cfg.hash_table[token_id * cfg.topk + j] : kNoExpert;
    bool usable = id >= 0 && id < cfg.num_experts && sel[id] != -kInfinity;
    for (int i = 0; i < j; ++i) usable = usable && ids[i] != id;
    ids[j] = usable ? static_cast<std::int32_t>(id) : kNoExpert;
  }
}

}  // namespace detail

/// Routes one token: docs/semantics/routing.md §2-8 and §10. ids and weights: [cfg.num_slots()] out, k routed slots, then the fused shared
/// experts. Ids are logical: E … E+Z-1 are zero experts, -1 is no expert. `cfg` is a RouterConfig, or a type whose members of the same
/// names are static constexpr where the choice is fixed. logits: [cfg.num_logits()], L = float, bf16 or f16. token_id matters to hash
/// routing only. shared_weights: [num_joint_shared] out, or null. `cfg` must have passed validate(); nothing is allocated or thrown.
template <class Config, class L>
MOE_HD inline RowResult route_row(Config const& cfg, L const* logits, std::int64_t token_id, std::int32_t* ids, float* weights,
                                  float* shared_weights = nullptr) {
  using namespace detail;
  int const k = cfg.topk;
  int const n = cfg.num_experts + cfg.num_zero_experts;
  auto const logit = [&](int e) { return clean_logit(cfg, to_float(logits[e])); };
  RowScratch scratch;
  float* const sel = scratch.sel;

  float max = -kInfinity;
  for (int e = 0; e < n; ++e) {
    sel[e] = logit(e);
    max = max_of(sel[e], max);
  }
  bool const sparsemixer = cfg.selection == Selection::sparsemixer;
  float sum = 1.0F;
  if (cfg.scoring == Scoring::softmax && cfg.order == Order::score_then_topk && !sparsemixer && max != -kInfinity) {
    sum = row_sum(n, [&](int e) { return exp_rn(sub_rn(sel[e], max)); });
  }

  if (!sparsemixer) {
    for (int e = 0; e < n; ++e) sel[e] = selection_value(cfg, sel[e], max, sum, e);
    if (cfg.num_expert_group > 1) mask_groups(cfg, sel);
  }

  RowResult result;
  if (cfg.selection == Selection::hash_table) {
    look_up(cfg, sel, token_id, ids);
    result.degenerate = max == -kInfinity && token_id >= 0 && token_id < cfg.vocabulary;
  } else if (sparsemixer) {
    for (int j = 0; j < k; ++j) {
      ids[j] = sparsemixer_pick(cfg, sel, weights[j]);
      if (ids[j] != kNoExpert) sel[ids[j]] = -kInfinity;
    }
    result.degenerate = ids[0] == kNoExpert;
  } else {
    top_k(sel, n, k, ids);
    result.degenerate = ids[0] == kNoExpert;
  }
  for (int j = 0; j < k; ++j) result.num_chosen += ids[j] != kNoExpert ? 1 : 0;

  // Weights, always from the unbiased score.
  if (!sparsemixer) {
    float first = -kInfinity;
    for (int j = 0; j < k; ++j) first = ids[j] == kNoExpert ? first : max_of(logit(ids[j]), first);
    bool const over_chosen = cfg.order == Order::topk_then_score && cfg.scoring == Scoring::softmax;
    if (over_chosen) {
      sum = row_sum(kWarp, [&](int j) { return j < k && ids[j] != kNoExpert ? exp_rn(sub_rn(logit(ids[j]), first)) : 0.0F; });
    }
    for (int j = 0; j < k; ++j) weights[j] = ids[j] == kNoExpert ? 0.0F : score(cfg, logit(ids[j]), over_chosen ? first : max, sum);
  }
  float divisor = 1.0F;
  if (renormalises(cfg)) {
    float total = row_sum(kWarp, [&](int j) { return j < k ? renorm_term(cfg, weights[j]) : 0.0F; });
    for (int i = 0; i < cfg.num_joint_shared; ++i) {
      total = add_rn(total, renorm_term(cfg, score(cfg, logit(n + i), max, sum)));
    }
    divisor = renorm_divisor(cfg, total);
  }
  for (int j = 0; j < k; ++j) {
    if (ids[j] == kNoExpert) continue;
    if (renormalises(cfg)) weights[j] = divided(weights[j], divisor);
    weights[j] = mul_rn(weights[j], cfg.routed_scaling_factor);
    if (cfg.per_expert_scale != nullptr && ids[j] < cfg.num_experts) weights[j] = mul_rn(weights[j], cfg.per_expert_scale[ids[j]]);
  }
  for (int i = 0; i < cfg.num_joint_shared; ++i) {
    float gamma = score(cfg, logit(n + i), max, sum);
    if (renormalises(cfg)) gamma = divided(gamma, divisor);
    gamma = mul_rn(gamma, cfg.routed_scaling_factor);
    if (shared_weights != nullptr) shared_weights[i] = gamma;
    if (i < cfg.num_fused_shared) weights[k + i] = gamma;
  }

  if (result.degenerate) result = fill_degenerate(cfg, ids, weights);
  for (int i = 0; i < cfg.num_fused_shared; ++i) {
    ids[k + i] = cfg.num_experts + i;
    if (i >= cfg.num_joint_shared) weights[k + i] = cfg.fused_shared_weight;
  }
  return result;
}

}  // namespace moe::routing
