// SPDX-License-Identifier: Apache-2.0
// activation/activation.hpp: the expert activations, each one function over one (gate, up) pair, for host and device.
// docs/semantics/experts.md §9.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string_view>

#include "moe/core/error.hpp"
#include "moe/core/types.hpp"

namespace moe::activation {

/// Every activation by its name in the field. The *_no_mul kinds are ungated: they consume I values and yield I.
enum class Kind : std::uint8_t {
  silu,              ///< g σ(g) u
  gelu,              ///< ½ g (1 + erf(g/√2)) u
  gelu_tanh,         ///< ½ g (1 + tanh(√(2/π)(g + 0.044715 g³))) u
  swigluoai,         ///< (clamp(u, ±lim) + β) g' σ(α g'), g' = min(g, lim); α 1.702, β 1, lim 7; gate and up interleaved in the weights
  swigluoai_halves,  ///< the same with α, β, lim given and gate rows before up rows
  silu_clamped,      ///< g' σ(g') clamp(u, ±lim), g' = min(g, lim)
  swiglu_step,       ///< min(g σ(g), lim) clamp(u, ±lim)
  situ,              ///< b tanh(g/b) σ(g) l tanh(u/l)
  silu_no_mul,
  gelu_no_mul,
  gelu_tanh_no_mul,
  relu2_no_mul,  ///< max(x, 0)²
  relu_no_mul,   ///< max(x, 0)
};
inline constexpr int kKinds = 13;

constexpr std::string_view name(Kind k) {
  constexpr std::array<std::string_view, kKinds> names{
      "silu", "gelu",        "gelu_tanh",   "swigluoai",        "swigluoai_halves", "silu_clamped", "swiglu_step",
      "situ", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul",     "relu_no_mul"};
  return names[static_cast<std::size_t>(k)];
}
/// The kind of that name; E_ARG listing the names otherwise.
inline Kind parse(std::string_view wanted) {
  std::string known;
  for (int i = 0; i < kKinds; ++i) {
    auto const kind = static_cast<Kind>(i);
    if (name(kind) == wanted) {
      return kind;
    }
    known += text(i == 0 ? "" : ", ", name(kind));
  }
  throw Error(ErrorCode::argument, text("activation: unknown name \"", wanted, "\"; known: ", known));
}

/// Gated activations consume gate and up (2I values) and yield I.
MOE_HD constexpr bool gated(Kind k) { return k < Kind::silu_no_mul; }

/// Constants of the formulas; a kind reads those that its formula names. Infinity means no limit.
struct Constants {
  float alpha = 1.702F;
  float beta = 1.0F;
  float limit = std::numeric_limits<float>::infinity();
  float situ_gate = 4.0F;  ///< b
  float situ_up = 25.0F;   ///< l
};

namespace detail {
MOE_HD inline float sigmoid(float x) { return 1.0F / (1.0F + ::expf(-x)); }
MOE_HD inline float silu(float x) { return x / (1.0F + ::expf(-x)); }
MOE_HD inline float gelu(float x) { return 0.5F * x * (1.0F + ::erff(x * 0.70710678118654752F)); }
MOE_HD inline float gelu_tanh(float x) { return 0.5F * x * (1.0F + ::tanhf(0.79788456080286536F * (x + 0.044715F * x * x * x))); }
MOE_HD inline float clamp(float x, float limit) { return ::fminf(::fmaxf(x, -limit), limit); }
}  // namespace detail

/// act(gate, up) in float32; an ungated kind ignores `up`.
MOE_HD inline float apply(Kind kind, Constants const& c, float gate, float up) {
  switch (kind) {
    case Kind::silu: return detail::silu(gate) * up;
    case Kind::gelu: return detail::gelu(gate) * up;
    case Kind::gelu_tanh: return detail::gelu_tanh(gate) * up;
    case Kind::swigluoai:
    case Kind::swigluoai_halves: {
      float const g = ::fminf(gate, c.limit);
      return (detail::clamp(up, c.limit) + c.beta) * (g * detail::sigmoid(c.alpha * g));
    }
    case Kind::silu_clamped: return detail::silu(::fminf(gate, c.limit)) * detail::clamp(up, c.limit);
    case Kind::swiglu_step: return ::fminf(detail::silu(gate), c.limit) * detail::clamp(up, c.limit);
    case Kind::situ: return c.situ_gate * ::tanhf(gate / c.situ_gate) * detail::sigmoid(gate) * (c.situ_up * ::tanhf(up / c.situ_up));
    case Kind::silu_no_mul: return detail::silu(gate);
    case Kind::gelu_no_mul: return detail::gelu(gate);
    case Kind::gelu_tanh_no_mul: return detail::gelu_tanh(gate);
    case Kind::relu2_no_mul: {
      float const x = ::fmaxf(gate, 0.0F);
      return x * x;
    }
    case Kind::relu_no_mul: return ::fmaxf(gate, 0.0F);
  }
  return 0.0F;
}

/// An activation that the composition fixes: the switch above folds to one formula.
template <Kind K>
struct Fixed {
  static constexpr char const* kName = name(K).data();
  static constexpr Kind kKind = K;
  static constexpr bool kGated = activation::gated(K);
  Constants constants{K == Kind::swigluoai ? Constants{1.702F, 1.0F, 7.0F, 4.0F, 25.0F} : Constants{}};
  MOE_HD constexpr bool gated() const { return kGated; }
  MOE_HD float operator()(float gate, float up) const { return apply(K, constants, gate, up); }
};
using Silu = Fixed<Kind::silu>;
using Gelu = Fixed<Kind::gelu>;
using GeluTanh = Fixed<Kind::gelu_tanh>;
using SwigluOai = Fixed<Kind::swigluoai_halves>;  ///< gpt-oss after de-interleaving at load; set limit = 7
using Relu2 = Fixed<Kind::relu2_no_mul>;

/// An activation that is chosen at run time (the command-line tool).
struct Any {
  static constexpr char const* kName = "any";
  Kind kind = Kind::silu;
  Constants constants{};
  MOE_HD constexpr bool gated() const { return activation::gated(kind); }
  MOE_HD float operator()(float gate, float up) const { return apply(kind, constants, gate, up); }
};

/// E_CONFIG on a constant that is not a finite number (limit may be infinite), and if the kind needs a limit and has none.
inline void validate(Kind kind, Constants const& c) {
  auto const finite = [](char const* what, float x) {
    if (!std::isfinite(x)) throw Error(ErrorCode::config, text("activation: ", what, " ", x, " is not a finite number"));
  };
  finite("alpha", c.alpha);
  finite("beta", c.beta);
  finite("situ_gate", c.situ_gate);
  finite("situ_up", c.situ_up);
  if (kind == Kind::swiglu_step && !(c.limit < std::numeric_limits<float>::infinity())) {
    throw Error(ErrorCode::config, "activation: swiglu_step needs a limit, none was given");
  }
  if (!(c.limit > 0.0F)) {
    throw Error(ErrorCode::config, text("activation: limit ", c.limit, " must be positive"));
  }
}

/// One row: in holds gate then up (2I values; interleaved g0,u0,g1,u1,… if `interleaved`), or I values if ungated; out holds I.
/// E_ARG if the widths do not fit.
template <class A>
void apply_row(A const& activation, float const* in, std::int64_t in_width, float* out, std::int64_t out_width, bool interleaved = false) {
  if (in_width != (activation.gated() ? 2 : 1) * out_width) {
    throw Error(ErrorCode::argument, text("activation: output width ", out_width, " does not fit the input width ", in_width,
                                          activation.gated() ? " (gated: half of it)" : " (ungated: the same)"));
  }
  for (std::int64_t i = 0; i < out_width; ++i) {
    float const gate = !activation.gated() ? in[i] : interleaved ? in[2 * i] : in[i];
    float const up = !activation.gated() ? 0.0F : interleaved ? in[2 * i + 1] : in[out_width + i];
    out[i] = activation(gate, up);
  }
}

}  // namespace moe::activation
