// SPDX-License-Identifier: Apache-2.0
// io/router_logits.hpp: the router's linear layer in float32 on the host, and the additional steps of the few models whose router has them.
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/core/error.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/io/one_line.hpp"

namespace moe::io {

namespace detail {

/// Inner product in float32 with 16 partial sums, so that it vectorises and its rounding error stays small.
inline float dot(float const* a, float const* b, std::int64_t n) {
  constexpr std::int64_t kLanes = 16;
  float lanes[kLanes] = {};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t j = 0; j < kLanes; ++j) lanes[j] += a[i + j] * b[i + j];
  }
  for (; i < n; ++i) lanes[i % kLanes] += a[i] * b[i];
  for (std::int64_t step = kLanes / 2; step > 0; step /= 2) {
    for (std::int64_t j = 0; j < step; ++j) lanes[j] += lanes[j + step];
  }
  return lanes[0];
}
/// out[n] = w [n, k] x (+ bias).
inline void matvec(std::vector<float> const& w, std::vector<float> const& bias, float const* x, std::int64_t n, std::int64_t k,
                   float* out) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = dot(w.data() + i * k, x, k) + (bias.empty() ? 0.0F : bias[at(i)]);
}
/// out = x / sqrt(mean(x^2) + eps)
inline void rms_normalise(float const* x, std::int64_t n, float eps, float* out) {
  float const scale = 1.0F / std::sqrt(dot(x, x, n) / static_cast<float>(n) + eps);
  for (std::int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
}

}  // namespace detail

/// Logits [rows, num_logits] of the hidden states [rows, H] (contiguous, host): before soft-capping, scoring and selection bias.
/// E_ARG if the number of elements is not a multiple of H.
template <class T>
std::vector<float> compute_router_logits(HostLayerWeights<T> const& w, std::span<float const> hidden) {
  LayerDescription const& d = w.description;
  std::int64_t const h = d.hidden, n = d.router.num_logits();
  auto const total = static_cast<std::int64_t>(hidden.size());
  if (total % h != 0) throw Error(ErrorCode::argument, one_line("hidden: ", total, " elements are not a multiple of hidden_size ", h));
  std::int64_t const rows = total / h;
  std::vector<float> out(detail::at(rows * n)), x(detail::at(h));
  RouterMlp const& m = w.router_mlp;
  std::vector<float> r(detail::at(m.width)), s(detail::at(m.width));
  for (std::int64_t t = 0; t < rows; ++t) {
    float const* row = hidden.data() + t * h;
    float* const logits = out.data() + t * n;
    switch (d.router_input) {
      case RouterInput::hidden: detail::matvec(w.router_weight, w.router_bias, row, n, h, logits); break;
      case RouterInput::scaled_rms_norm: {
        detail::rms_normalise(row, h, d.rms_norm_eps, x.data());
        float const root = 1.0F / std::sqrt(static_cast<float>(h));
        for (std::int64_t i = 0; i < h; ++i) x[detail::at(i)] *= w.router_scale[detail::at(i)] * root;
        detail::matvec(w.router_weight, w.router_bias, x.data(), n, h, logits);
        break;
      }
      case RouterInput::mlp: {
        detail::matvec(m.down, m.down_bias, row, m.width, h, s.data());
        detail::rms_normalise(s.data(), m.width, d.rms_norm_eps, r.data());
        for (std::int64_t i = 0; i < m.width; ++i) r[detail::at(i)] *= m.norm[detail::at(i)];
        auto const hidden_layer = [&](auto const& weight, auto const& bias) {
          detail::matvec(weight, bias, r.data(), m.width, m.width, s.data());
          for (std::int64_t i = 0; i < m.width; ++i) r[detail::at(i)] = activation::detail::gelu(s[detail::at(i)]);
        };
        hidden_layer(m.fc1, m.fc1_bias);
        hidden_layer(m.fc2, m.fc2_bias);
        detail::matvec(m.out, {}, r.data(), n, m.width, logits);
        break;
      }
    }
  }
  return out;
}

}  // namespace moe::io
