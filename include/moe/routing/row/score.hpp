// SPDX-License-Identifier: Apache-2.0
// routing/row/score.hpp: the arithmetic of routing, with the same bits on the host and on the device.
//
// The top-k of a row depends on single bits where scores nearly tie, so a device kernel can agree with the host only if both compute the
// same scores. Everything here is built from the operations of core/rounded.hpp in a stated order, and sums over experts follow the shape
// of a warp: 32 partial sums, then a butterfly. If a host compiler contracts a product and a sum, the result is the same: a product is
// added to something only if it is exact.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "moe/core/rounded.hpp"
#include "moe/core/types.hpp"
#include "moe/routing/row/router_config.hpp"

namespace moe::routing {

/// Most logits of a row: E + Z + joint shared.
inline constexpr int kMaxLogits = 1024;

namespace detail {

inline constexpr int kWarp = 32;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr float kLargest = std::numeric_limits<float>::max();

MOE_HD inline std::int32_t float_bits(float v) {
#ifdef __CUDA_ARCH__
  return __float_as_int(v);
#else
  std::int32_t bits;
  std::memcpy(&bits, &v, sizeof bits);
  return bits;
#endif
}
MOE_HD inline float bits_float(std::int32_t bits) {
#ifdef __CUDA_ARCH__
  return __int_as_float(bits);
#else
  float v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
#endif
}
MOE_HD inline float max_of(float a, float b) { return a > b ? a : b; }  // NaN in a gives b

/// e^r for r = x - n ln2, |r| <= ln2 / 2: the Taylor series to r^7 leaves 5e-9.
MOE_HD inline float exp_of_rest(float x, float n) {
  float r = fma_rn(n, -0.693145751953125F, x);  // ln2 in two parts, the first exact in products with n
  r = fma_rn(n, -1.42860677e-6F, r);
  float p = fma_rn(r, 1.98412698e-4F, 1.38888889e-3F);  // 1/7!, 1/6!, ...
  p = fma_rn(p, r, 8.33333333e-3F);
  p = fma_rn(p, r, 4.16666667e-2F);
  p = fma_rn(p, r, 1.66666667e-1F);
  p = fma_rn(p, r, 0.5F);
  p = fma_rn(p, r, 1.0F);
  return fma_rn(p, r, 1.0F);
}
/// e^x to about one unit in the last place, as 2^n e^(x - n ln2); NaN gives e^-104 = 0.
MOE_HD inline float exp_rn(float x) {
  x = max_of(x, -104.0F);
  x = x < 89.0F ? x : 89.0F;
  float const shifted = fma_rn(x, 1.44269504F, 12582912.0F);  // 1.5 * 2^23: rounds x / ln2 to an integer in the low bits
  float const n = sub_rn(shifted, 12582912.0F);
  float const p = exp_of_rest(x, n);
  std::int32_t const e = float_bits(shifted) - 0x4B400000;
  std::int32_t const half = e >> 1;  // in two steps: 2^e alone may be subnormal or infinite
  return mul_rn(mul_rn(p, bits_float((half + 127) << 23)), bits_float((e - half + 127) << 23));
}

/// ln(1 + t) for 0 <= t <= 1, plus c: 2 atanh(u) + c with u = t / (2 + t) <= 1/3.
MOE_HD inline float log1p_plus(float t, float c) {
  float const u = div_rn(t, add_rn(2.0F, t));
  float const q = mul_rn(u, u);
  float p = fma_rn(q, 6.66666667e-2F, 7.69230769e-2F);  // 1/15, 1/13, ...
  p = fma_rn(p, q, 9.09090909e-2F);
  p = fma_rn(p, q, 1.11111111e-1F);
  p = fma_rn(p, q, 1.42857143e-1F);
  p = fma_rn(p, q, 0.2F);
  p = fma_rn(p, q, 3.33333333e-1F);
  p = fma_rn(p, q, 1.0F);
  return fma_rn(mul_rn(2.0F, u), p, c);
}

/// tanh. Below 5/8 by Lambert's continued fraction cut after the seventh level (error below 1e-8), above it by exp.
MOE_HD inline float tanh_rn(float x) {
  float const a = x < 0.0F ? -x : x;
  float t;
  if (a < 0.625F) {
    float const q = mul_rn(a, a);
    float const above = fma_rn(fma_rn(add_rn(q, 378.0F), q, 17325.0F), q, 135135.0F);
    float const below = fma_rn(fma_rn(fma_rn(28.0F, q, 3150.0F), q, 62370.0F), q, 135135.0F);
    t = mul_rn(a, div_rn(above, below));
  } else {
    t = sub_rn(1.0F, div_rn(2.0F, add_rn(1.0F, exp_rn(add_rn(a, a)))));
  }
  return x < 0.0F ? -t : t;
}

MOE_HD inline float sigmoid_rn(float z) { return div_rn(1.0F, add_rn(1.0F, exp_rn(-z))); }
MOE_HD inline float sqrtsoftplus_rn(float z) {
  float const a = z < 0.0F ? -z : z;
  return sqrt_rn(log1p_plus(exp_rn(-a), max_of(z, 0.0F)));
}

/// Values that each lane of a warp holds of a row of n: the power of two that covers n with 32 lanes. Lane l holds [l*V, (l+1)*V).
MOE_HD constexpr int lane_values(int n) {
  int v = 1;
  while (v * kWarp < n) v *= 2;
  return v;
}

/// The butterfly sum of 32 lane values, as every lane of a warp gets it.
MOE_HD inline float butterfly_sum(float (&lanes)[kWarp]) {
  for (int half = kWarp / 2; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = add_rn(lanes[l], lanes[l + half]);
  }
  return lanes[0];
}

/// Sum over i < n of value(i), as a warp computes it.
template <class Value>
MOE_HD inline float row_sum(int n, Value const& value) {
  float lanes[kWarp];
  int const v = lane_values(n);
  for (int l = 0; l < kWarp; ++l) {
    float sum = 0.0F;
    int const end = (l + 1) * v < n ? (l + 1) * v : n;
    for (int i = l * v; i < end; ++i) sum = add_rn(sum, value(i));
    lanes[l] = sum;
  }
  return butterfly_sum(lanes);
}

/// The softcap, and the score by a scoring function chosen at run time, of a finite logit.
MOE_HD inline float softcapped(float z, float cap) { return mul_rn(cap, tanh_rn(div_rn(z, cap))); }
MOE_HD inline float score_by(Scoring scoring, float z, float max, float sum) {
  switch (scoring) {
    case Scoring::softmax: return div_rn(exp_rn(sub_rn(z, max)), sum);
    case Scoring::sigmoid: return sigmoid_rn(z);
    case Scoring::sqrtsoftplus: return sqrtsoftplus_rn(z);
    case Scoring::identity: return z;
  }
  return 0.0F;
}
#ifdef __CUDACC__
// A kernel with run-time choices holds each function once, not once per register of a row, which would make its code twenty times as long.
__device__ __noinline__ inline float softcapped_called(float z, float cap) { return softcapped(z, cap); }
__device__ __noinline__ inline float score_called(Scoring scoring, float z, float max, float sum) { return score_by(scoring, z, max, sum); }
#endif

/// A logit as routing reads it: float32, -inf and NaN as -inf (a disabled expert, which softcapping does not revive), capped, finite above.
template <class Config>
MOE_HD inline float clean_logit(Config const& cfg, float z) {
  if (!(z > -kInfinity)) return -kInfinity;
  z = z < kLargest ? z : kLargest;
  if (!(cfg.logit_softcap > 0.0F)) return z;
#ifdef __CUDA_ARCH__
  return softcapped_called(z, cfg.logit_softcap);
#else
  return softcapped(z, cfg.logit_softcap);
#endif
}

/// The unbiased score of a clean logit (docs/semantics/routing.md §3). For softmax: `max` is the row's largest logit and `sum` the sum of
/// exp(z - max). A disabled expert scores 0, whatever the score function.
template <class Config>
MOE_HD inline float score(Config const& cfg, float z, float max, float sum) {
  if (z == -kInfinity) return 0.0F;
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<Config, RouterConfig>) return score_called(cfg.scoring, z, max, sum);
#endif
  return score_by(cfg.scoring, z, max, sum);
}

/// What experts are chosen by: score or logit, plus bias; -inf where the expert must not be chosen.
template <class Config>
MOE_HD inline float selection_value(Config const& cfg, float z, float max, float sum, int e) {
  if (z == -kInfinity) return -kInfinity;
  float sel = cfg.order == Order::topk_then_score ? z : score(cfg, z, max, sum);
  if (cfg.correction_bias != nullptr) sel = add_rn(sel, cfg.correction_bias[e]);
  return sel > -kInfinity ? add_rn(sel, 0.0F) : -kInfinity;  // NaN never wins; -0 and +0 are one value
}

/// The divisor of the k weights. `sum`: of the weights, or of their p-th powers for Renorm::p_norm.
template <class Config>
MOE_HD inline float renorm_divisor(Config const& cfg, float sum) {
  switch (cfg.renorm) {
    case Renorm::none: return 1.0F;
    case Renorm::sum: return add_rn(sum, cfg.renorm_eps);
    case Renorm::floor: return max_of(sum, cfg.renorm_eps);
    case Renorm::p_norm:
      if (cfg.renorm_p == 1.0F) return sum;
      if (cfg.renorm_p == 2.0F) return sqrt_rn(sum);
      return powf(sum, 1.0F / cfg.renorm_p);
  }
  return 1.0F;
}
/// One weight's part of that sum.
template <class Config>
MOE_HD inline float renorm_term(Config const& cfg, float w) {
  if (cfg.renorm != Renorm::p_norm || cfg.renorm_p == 1.0F) return w;
  return cfg.renorm_p == 2.0F ? mul_rn(w, w) : powf(w, cfg.renorm_p);
}
MOE_HD inline float divided(float w, float divisor) { return divisor == 0.0F ? 0.0F : div_rn(w, divisor); }

/// Whether a weight is divided at all: softmax over the chosen already sums to one.
template <class Config>
MOE_HD constexpr bool renormalises(Config const& cfg) {
  return cfg.renorm != Renorm::none && !(cfg.order == Order::topk_then_score && cfg.scoring == Scoring::softmax);
}

/// A logit's part of sparsemixer's softmax: 0 if it is too far below the maximum m of its pick.
MOE_HD inline float sparsemixer_term(float z, float m, float eps) {
  if (z == -kInfinity) return 0.0F;
  float const size = max_of(z < 0.0F ? -z : z, m);
  return div_rn(sub_rn(m, z), size) > add_rn(eps, eps) ? 0.0F : exp_rn(sub_rn(z, m));
}
#ifdef __CUDACC__
__device__ __noinline__ inline float sparsemixer_called(float z, float m, float eps) { return sparsemixer_term(z, m, eps); }
#endif

}  // namespace detail
}  // namespace moe::routing
