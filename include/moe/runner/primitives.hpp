// SPDX-License-Identifier: Apache-2.0
// runner/primitives.hpp: the arithmetic that the parts of a runner are written over: products, functions of rows, the sum at the end of a
// block. Class templates on the space; the host's are in runner/host/primitives.hpp.
#pragma once

#include <cstdint>
#include <string>

#include "moe/core/array.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/rule.hpp"
#include "moe/core/space.hpp"
#include "moe/routing/row/router_config.hpp"

namespace moe {

namespace rules {
MOE_INCLUDED(RunnerPrimitives, "the arithmetic of a runner's parts in this memory space", "moe/runner/host/primitives.hpp");
}  // namespace rules

namespace runner {

/// Widths and rows of one runner, known to every part.
struct Sizes {
  std::int64_t hidden = 0;         ///< H, of the block's input and output
  std::int64_t expert_hidden = 0;  ///< H', of the routed path: H, or the latent width
  std::int64_t max_rows = 0;       ///< the most rows of one pass
};

/// Whether a row's bits may depend on the other rows of a product.
enum class Sums : std::uint8_t { per_row, blocked };

/// Whether the weights of a product may change after its construction. once: they have their values at construction, and the product may
/// keep a copy instead of reading them again. every_call: they may change in place.
enum class WeightReads : std::uint8_t { once, every_call };

/// y [M, N] = x [M, K] · wᵀ (+ bias), float32 accumulation, one rounding to Out.
///   Linear(Rows<Weight const> w [N, K], float const* bias [N] or null, Sums, int64_t max_rows, Arena<Space>&, WeightReads)
///   void apply(Rows<Act const> x, Rows<Out> y, Stream<Space>)
/// Weights are borrowed, in the space's memory. It may have choice() (how it computes and why, in words) and unread_weight() (weights that
/// it does not read after its construction, or null).
template <class Space, class Weight, class Act, class Out>
class Linear : rules::RunnerPrimitives::Broken<Space> {};

namespace detail {

/// choice() of a part or a product; empty if it has none.
template <class Part>
std::string choice_of([[maybe_unused]] Part const& part) {
  if constexpr (requires { part.choice(); }) return part.choice();
  return {};
}
/// unread_weight() of a part or a product; null if it has none.
template <class Part>
void const* unread_weight_of([[maybe_unused]] Part const& part) {
  if constexpr (requires { part.unread_weight(); }) return part.unread_weight();
  return nullptr;
}

}  // namespace detail

/// What finish() adds up: y = norm?( factor · (c · (routed + z x) + s · shared) + bias ).
template <class X, class S>
struct FinishRows {
  Rows<X const> routed = {};  ///< [M, H]
  Rows<X> output = {};        ///< [M, H]; may be `routed`
  float scale = 1.0F;         ///< c
  /// Zero experts: z is the sum of a row's weights at ids >= num_experts, times zero_scale. No rows of ids: none.
  Rows<std::int32_t const> ids = {};
  Rows<float const> weights = {};
  Rows<X const> x = {};  ///< [M, H]
  int num_experts = 0;
  int topk = 0;
  routing::ZeroExpertKind zero_kind = routing::ZeroExpertKind::none;
  float zero_scale = 1.0F;
  Rows<S const> shared = {};    ///< [M, H], or no rows
  float shared_scale = 1.0F;    ///< s
  float factor = 1.0F;          ///< with shared rows only: 0.5 for an average
  float const* bias = nullptr;  ///< [H], or null
  bool normalise = false;       ///< RMSNorm of the sum
  float const* norm = nullptr;  ///< [H], or null: 1
  float eps = 0.0F;
};

/// Functions of rows, static:
///   rms_norm(Rows<X const> x, float const* weight, float eps, float scale, Rows<Y> y, stream)
///     y = x / sqrt(mean(x²) + eps) · (weight · scale), in float32; weight null: 1; y may be x
///   gelu(Rows<X> x, stream)                                             in place, exact
///   sigmoid_gate(Rows<X const> x, float const* v, Rows<float> y, stream)     every column of y_t = sigmoid(v · x_t)
///   quantize(Quant const&, Rows<X const> x, Rows<Payload> q, Rows<Scale> s, stream)     rows by the rule of a scheme
///   copy_columns(Rows<X const> from, Rows<X> to, stream)                columns that `from` lacks become zero, more columns are dropped
///   finish(FinishRows<X, S> const&, stream)
template <class Space>
struct RowKernels : rules::RunnerPrimitives::Broken<Space> {};

}  // namespace runner
}  // namespace moe
