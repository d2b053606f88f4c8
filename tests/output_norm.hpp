// SPDX-License-Identifier: Apache-2.0
// tests/output_norm.hpp: layers with a norm of each expert's output, for tests of host and device: configurations, sizes, weights, routing,
// and what experts of the host give.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/weights.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "numbers.hpp"

namespace moe_test::output_norm {

using namespace moe;

/// Rows and weights of T, without a norm, with one, and as the weights say.
template <class T>
struct Plain : LayerDefaults {
  using Act = T;
  using Weight = T;
  using Activation = activation::Any;
};
template <class T>
struct Normed : Plain<T> {
  static constexpr ExpertNorm expert_norm = ExpertNorm::always;
};
template <class T>
using IfGiven = models::RuntimeLayer<T, T>;

struct Sizes {
  std::int64_t rows, hidden, intermediate;
  int experts = 5, topk = 3;
  bool on_input = false, biases = true;
};
inline constexpr Sizes kStandard[] = {{1, 24, 16}, {7, 72, 40}, {70, 48, 16}, {7, 24, 16, 5, 3, true}, {9, 600, 328, 3, 2}};
inline constexpr Sizes kBatched[] = {{1, 24, 16}, {33, 72, 40}};

inline constexpr float kEps = 0.02F;
inline std::vector<float> scale_of(std::int64_t hidden) { return normal(5, hidden); }

template <class Config, class Space = space::host>
experts::WeightStore<Config, quantization::None, Space> store(Sizes const& s, bool normed) {
  experts::WeightStore<Config, quantization::None, Space> out(s.experts, s.hidden, s.intermediate, true);
  for (int e = 0; e < s.experts; ++e) {
    out.set_expert(e, normal(10 + e, 2 * s.intermediate * s.hidden, 0.3F).data(), normal(50 + e, s.hidden * s.intermediate, 0.3F).data());
    if (s.biases) out.set_bias(e, normal(90 + e, 2 * s.intermediate, 0.3F).data(), normal(95 + e, s.hidden, 0.3F).data());
  }
  if (normed) out.set_norm(scale_of(s.hidden).data(), kEps);
  return out;
}
template <class Config>
Shape<Config> shape(Sizes const& s) {
  return Shape<Config>({s.hidden, s.intermediate, s.experts, s.topk, s.on_input});
}

struct Routing {
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};
/// Row r chooses the experts r, r + 1, …, with -1 in place of choice r % 3.
inline Routing routing_of(Sizes const& s) {
  Routing out{{}, normal(3, s.rows * s.topk)};
  for (std::int64_t r = 0; r < s.rows; ++r) {
    for (int j = 0; j < s.topk; ++j) out.ids.push_back(r % 3 == j ? kNoExpert : static_cast<std::int32_t>((r + j) % s.experts));
  }
  return out;
}
/// Rows of each expert's batch: expert e leaves out the last e rows.
inline std::vector<std::int32_t> counts_of(Sizes const& s) {
  std::vector<std::int32_t> out;
  for (int e = 0; e < s.experts; ++e) out.push_back(static_cast<std::int32_t>(std::max<std::int64_t>(s.rows - e, 0)));
  return out;
}

/// x [rows, hidden] through the experts of routing_of().
template <class Policy, class Config>
std::vector<float> standard(Sizes const& s, std::vector<typename Config::Act> const& x, bool normed) {
  Arena<space::host> arena;
  auto const weights = store<Config>(s, normed);
  typename Policy::template Kernel<Config, quantization::None, ActivationFormat::standard> kernel(shape<Config>(s), weights.view(), s.rows,
                                                                                                  {}, {}, {}, arena);
  Routing const routing = routing_of(s);
  std::vector<float> y(x.size(), std::numeric_limits<float>::quiet_NaN());
  kernel.apply({make_rows(x.data(), s.rows, s.hidden), make_rows(static_cast<float const*>(nullptr), s.rows, 0),
                make_rows(routing.ids.data(), s.rows, s.topk), make_rows(routing.weights.data(), s.rows, s.topk)},
               make_rows(y.data(), s.rows, s.hidden), HostStream{});
  return y;
}
/// Every row through every expert, [E, rows, H], unweighted; rows past counts_of() are 0.
template <class Policy, class Config>
std::vector<float> batched(Sizes const& s, std::vector<typename Config::Act> const& x, bool normed) {
  using Act = typename Config::Act;
  Arena<space::host> arena;
  auto const weights = store<Config>(s, normed);
  typename Policy::template Kernel<Config, quantization::None, ActivationFormat::batched> kernel(shape<Config>(s), weights.view(), s.rows,
                                                                                                 {}, {}, {}, arena);
  std::vector<Act> all;
  for (int e = 0; e < s.experts; ++e) all.insert(all.end(), x.begin(), x.end());
  std::vector<std::int32_t> const counts = counts_of(s);
  std::vector<float> y(all.size(), 0.0F);
  kernel.apply({make_blocks<dynamic, Act const>(all.data(), s.experts, s.rows, s.hidden),
                make_blocks(static_cast<float const*>(nullptr), s.experts, s.rows, 0), make_vector(counts.data(), s.experts)},
               make_blocks(y.data(), s.experts, s.rows, s.hidden), HostStream{});
  return y;
}

}  // namespace moe_test::output_norm
