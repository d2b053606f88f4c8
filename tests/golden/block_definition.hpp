// SPDX-License-Identifier: Apache-2.0
// tests/golden/block_definition.hpp: a block's output by the plain definition, in double precision, from weights, ids and routing weights.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "moe/io/layer_weights.hpp"
#include "stored_array.hpp"

namespace moe_test {

using namespace moe::io;

inline double max_abs(std::vector<float> const& v) {
  double worst = 0;
  for (float x : v) worst = std::max(worst, std::fabs(static_cast<double>(x)));
  return worst;
}

using Row = std::vector<double>;

/// y = W x, W [n, x.size()].
template <class T>
Row times(T const* w, std::size_t n, Row const& x) {
  Row y(n);
  for (std::size_t i = 0; i < n; ++i) {
    for (std::size_t j = 0; j < x.size(); ++j) y[i] += static_cast<double>(w[i * x.size() + j]) * x[j];
  }
  return y;
}
/// down(act(gate x, up x) * scale) with biases where they are given.
inline Row ffn(ActivationChoice const& act, float const* w13, float const* w2, std::size_t width, Row const& x, std::size_t out,
               float const* b13 = nullptr, float const* b2 = nullptr, double scale = 1.0) {
  Row const gu = times(w13, (act.gated() ? 2 : 1) * width, x);
  Row a(width);
  for (std::size_t i = 0; i < width; ++i) {
    double const g = gu[i] + (b13 != nullptr ? b13[i] : 0.0F);
    double const u = act.gated() ? gu[width + i] + (b13 != nullptr ? b13[width + i] : 0.0F) : 0.0;
    a[i] = static_cast<double>(moe::activation::apply(act.kind, act.constants, static_cast<float>(g), static_cast<float>(u))) * scale;
  }
  Row y = times(w2, out, a);
  for (std::size_t i = 0; b2 != nullptr && i < out; ++i) y[i] += b2[i];
  return y;
}

inline Row rms_norm(Row x, double eps) {
  double mean = 0;
  for (double v : x) mean += v * v / static_cast<double>(x.size());
  for (double& v : x) v /= std::sqrt(mean + eps);
  return x;
}
/// A token's input of the experts.
inline Row expert_input(HostLayerWeights<float> const& w, Row const& x) {
  LayerDescription const& d = w.description;
  if (d.latent == 0) return x;
  Row in = times(w.latent_in.data(), static_cast<std::size_t>(d.latent), x);
  if (d.latent_in_norm) {
    Row const normed = rms_norm(in, d.rms_norm_eps);
    for (std::size_t i = 0; i < in.size(); ++i) in[i] = normed[i] * w.latent_in_norm[i];
  }
  return in;
}
/// The weighted sum over those experts of one token that `w` holds, restricted to the rows and columns that `w` holds.
inline Row routed_sum(HostLayerWeights<float> const& w, Row const& in, std::int32_t const* ids, float const* weights, std::size_t topk) {
  LayerDescription const& d = w.description;
  auto const hx = static_cast<std::size_t>(d.expert_hidden()), width = static_cast<std::size_t>(w.intermediate);
  auto const rows = static_cast<std::size_t>(w.w13_rows());
  Row routed(hx);
  for (std::size_t j = 0; j < topk; ++j) {
    auto const held = std::find(w.experts.begin(), w.experts.end(), ids[j]);
    if (held == w.experts.end()) continue;
    auto const e = static_cast<std::size_t>(held - w.experts.begin());
    double const weight = weights[j];
    Row scaled = in;
    if (d.weight_on == WeightOn::expert_input) std::ranges::for_each(scaled, [&](double& v) { v *= weight; });
    Row y = ffn(d.activation, w.w13.data() + e * rows * hx, w.w2.data() + e * hx * width, width, scaled, hx,
                d.expert_bias ? w.w13_bias.data() + e * rows : nullptr, d.expert_bias ? w.w2_bias.data() + e * hx : nullptr);
    if (d.expert_norm) {
      for (std::size_t i = 0; i < hx; ++i) y[i] *= w.expert_norm[i];
      y = rms_norm(y, d.expert_norm_eps);
    }
    for (std::size_t i = 0; i < hx; ++i) routed[i] += y[i] * (d.weight_on == WeightOn::expert_input ? 1.0 : weight);
  }
  return routed;
}
/// The shared experts' contribution, restricted to the rows and columns that `w` holds.
inline Row shared_sum(HostLayerWeights<float> const& w, Row const& x, float const* gammas) {
  LayerDescription const& d = w.description;
  auto const h = static_cast<std::size_t>(d.hidden), width = static_cast<std::size_t>(w.shared.intermediate);
  std::size_t const rows = (d.shared.activation.gated() ? 2 : 1) * width;
  Row out(h);
  for (std::size_t s = 0; s < static_cast<std::size_t>(w.shared.count); ++s) {
    Row const y = ffn(d.shared.activation, w.shared.w13.data() + s * rows * h, w.shared.w2.data() + s * h * width, width, x, h, nullptr,
                      nullptr, gammas != nullptr ? gammas[s] : 1.0);
    double gate = 1.0;
    if (d.shared.gate == SharedGate::sigmoid) gate = 1.0 / (1.0 + std::exp(-times(w.shared.gate.data(), 1, x)[0]));
    for (std::size_t i = 0; i < h; ++i) out[i] += gate * y[i];
  }
  return out;
}
/// From both sums to the block's output: docs/semantics/block.md §2.
inline Row finished(HostLayerWeights<float> const& w, Row const& in, std::int32_t const* ids, float const* weights, std::size_t topk,
                    Row routed, Row const& shared) {
  LayerDescription const& d = w.description;
  auto const h = static_cast<std::size_t>(d.hidden);
  for (std::size_t j = 0; j < topk; ++j) {
    if (ids[j] < d.router.num_experts || d.router.zero_expert_kind != moe::routing::ZeroExpertKind::identity) continue;
    for (std::size_t i = 0; i < routed.size(); ++i) routed[i] += static_cast<double>(weights[j]) * in[i];
  }
  for (double& v : routed) v *= d.output_scaling_factor;
  if (d.latent_norm) {
    routed = rms_norm(routed, d.rms_norm_eps);
    for (std::size_t i = 0; i < routed.size(); ++i) routed[i] *= w.latent_norm[i];
  }
  if (d.latent > 0) routed = times(w.latent_out.data(), h, routed);
  for (std::size_t i = 0; i < h; ++i) routed[i] += shared[i];
  if (d.shared.combination == Combination::average) std::ranges::for_each(routed, [](double& v) { v *= 0.5; });
  if (d.post_norm) {
    routed = rms_norm(routed, d.rms_norm_eps);
    for (std::size_t i = 0; i < h; ++i) routed[i] *= w.post_norm[i];
  }
  for (std::size_t i = 0; d.output_bias && i < h; ++i) routed[i] += w.output_bias[i];
  return routed;
}
inline Row block_output(HostLayerWeights<float> const& w, Row const& x, std::int32_t const* ids, float const* weights, std::size_t topk,
                        float const* gammas) {
  Row const in = expert_input(w, x);
  return finished(w, in, ids, weights, topk, routed_sum(w, in, ids, weights, topk), shared_sum(w, x, gammas));
}

}  // namespace moe_test
