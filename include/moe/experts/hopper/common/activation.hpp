// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/activation.hpp: the activations as GEMM1's epilogue computes them. One parametric formula keeps a kernel for every
// activation small; the same formula also exists with its shape fixed at compile time. Hardware exponential and division on the device.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "moe/activation/activation.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/types.hpp"

namespace moe::hopper {

/// The kind of an activation of the library: fixed by its type, or chosen at run time.
template <class Activation>
constexpr activation::Kind kind_of(Activation const& activation) {
  if constexpr (facts::fixes_kind<Activation>()) {
    return Activation::kKind;
  } else {
    return activation.kind;
  }
}

/// The part of an activation that is applied to the gate value.
enum class GateShape : std::uint8_t {
  sigmoid,  ///< min(g σ(c1 g + c3 g³), post_limit), g cut at gate_limit: silu, gelu_tanh (½(1 + tanh y) = σ(2y)), the swiglu variants
  erf,      ///< ½ g (1 + erf(g / √2))
  situ,     ///< b tanh(g / b) σ(g)
  relu,
  relu2,  ///< max(g, 0)²
};

/// An activation for the kernels: shape(gate) · (clamp(up, ±up_limit) + beta), or · l tanh(up / l), or shape(gate) alone if ungated. Every
/// shape gives 0 at 0, and so does the whole formula, so that features past the end of a tile stay 0.
struct ActivationParams {
  GateShape shape = GateShape::sigmoid;
  bool gated = true;
  bool tanh_up = false;
  float gate_limit = std::numeric_limits<float>::infinity();
  float c1 = 1.0F;
  float c3 = 0.0F;
  float post_limit = std::numeric_limits<float>::infinity();
  float up_limit = std::numeric_limits<float>::infinity();
  float beta = 0.0F;
  float situ_gate = 4.0F;
  float situ_up = 25.0F;
};

/// The formula of docs/semantics/experts.md §9 for a kind and its constants, as ActivationParams.
constexpr ActivationParams activation_params(activation::Kind kind, activation::Constants const& c) {
  using activation::Kind;
  ActivationParams p;
  p.gated = activation::gated(kind);
  p.situ_gate = c.situ_gate;
  p.situ_up = c.situ_up;
  switch (kind) {
    case Kind::silu:
    case Kind::silu_no_mul: break;
    case Kind::gelu:
    case Kind::gelu_no_mul: p.shape = GateShape::erf; break;
    case Kind::gelu_tanh:
    case Kind::gelu_tanh_no_mul:
      p.c1 = 1.5957691216057308F;  // 2 √(2/π)
      p.c3 = 0.0713548162726009F;  // the same times 0.044715
      break;
    case Kind::swigluoai:
    case Kind::swigluoai_halves:
      p.gate_limit = c.limit;
      p.up_limit = c.limit;
      p.c1 = c.alpha;
      p.beta = c.beta;
      break;
    case Kind::silu_clamped:
      p.gate_limit = c.limit;
      p.up_limit = c.limit;
      break;
    case Kind::swiglu_step:
      p.post_limit = c.limit;
      p.up_limit = c.limit;
      break;
    case Kind::situ:
      p.shape = GateShape::situ;
      p.tanh_up = true;
      break;
    case Kind::relu2_no_mul: p.shape = GateShape::relu2; break;
    case Kind::relu_no_mul: p.shape = GateShape::relu; break;
  }
  return p;
}

namespace detail {

MOE_HD inline float fast_exp(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return std::exp(x);
#endif
}
MOE_HD inline float fast_divide(float a, float b) {
#ifdef __CUDA_ARCH__
  return __fdividef(a, b);
#else
  return a / b;
#endif
}
/// 1 - 2 / (e^2x + 1): absolute error about 1e-7.
MOE_HD inline float fast_tanh(float x) { return 1.0F - fast_divide(2.0F, fast_exp(::fminf(2.0F * x, 80.0F)) + 1.0F); }
/// ½ (1 + erf(x / √2)) by the five-term formula of Abramowitz and Stegun 7.1.26: absolute error 7.5e-8.
MOE_HD inline float fast_normal_cdf(float x) {
  float const z = ::fabsf(x) * 0.70710678118654752F;
  float const t = fast_divide(1.0F, 1.0F + 0.3275911F * z);
  float const poly = t * (0.254829592F + t * (-0.284496736F + t * (1.421413741F + t * (-1.453152027F + t * 1.061405429F))));
  float const tail = 0.5F * poly * fast_exp(-z * z);
  return x < 0.0F ? tail : 1.0F - tail;
}

template <GateShape Shape>
MOE_HD inline float shape_gate(ActivationParams const& p, float gate) {
  if constexpr (Shape == GateShape::sigmoid) {
    float const g = ::fminf(gate, p.gate_limit);
    float const z = g * (p.c1 + p.c3 * g * g);
    return ::fminf(fast_divide(g, 1.0F + fast_exp(-z)), p.post_limit);
  } else if constexpr (Shape == GateShape::erf) {
    return gate * fast_normal_cdf(gate);
  } else if constexpr (Shape == GateShape::situ) {
    return fast_divide(p.situ_gate * fast_tanh(gate / p.situ_gate), 1.0F + fast_exp(-gate));
  } else {
    float const g = ::fmaxf(gate, 0.0F);
    return Shape == GateShape::relu ? g : g * g;
  }
}
/// The factor of shape(gate) in a gated activation.
template <bool TanhUp>
MOE_HD inline float shape_up(ActivationParams const& p, float up) {
  if constexpr (TanhUp) {
    return p.situ_up * fast_tanh(up / p.situ_up);
  } else {
    return ::fminf(::fmaxf(up, -p.up_limit), p.up_limit) + p.beta;
  }
}

}  // namespace detail

/// The whole activation of one (gate, up) pair, as the kernels compute it; an ungated one ignores `up`.
MOE_HD inline float evaluate(ActivationParams const& p, float gate, float up) {
  float g = 0.0F;
  switch (p.shape) {
    case GateShape::sigmoid: g = detail::shape_gate<GateShape::sigmoid>(p, gate); break;
    case GateShape::erf: g = detail::shape_gate<GateShape::erf>(p, gate); break;
    case GateShape::situ: g = detail::shape_gate<GateShape::situ>(p, gate); break;
    case GateShape::relu: g = detail::shape_gate<GateShape::relu>(p, gate); break;
    case GateShape::relu2: g = detail::shape_gate<GateShape::relu2>(p, gate); break;
  }
  if (!p.gated) return g;
  return g * (p.tanh_up ? detail::shape_up<true>(p, up) : detail::shape_up<false>(p, up));
}

// The template arguments of the kernels; defined in activation.cuh.
struct FastSilu;  ///< SwiGLU without biases and without weights on the input, whose code costs time (docs/log/hopper.md, "Changes")
template <activation::Kind K>
struct FixedActivation;  ///< an activation that the composition fixes
struct AnyActivation;    ///< any activation, chosen at run time

/// Whether the kernels of an activation leave out biases and weights on the input.
template <class Activation>
inline constexpr bool kPlainKernels = std::is_same_v<Activation, FastSilu>;

/// The kernels' form of a composition's activation policy; `void` for a policy that they do not know.
template <class Policy>
struct DeviceActivation {
  using type = void;
};
template <activation::Kind K>
struct DeviceActivation<activation::Fixed<K>> {
  using type = std::conditional_t<K == activation::Kind::silu, FastSilu, FixedActivation<K>>;
};
template <>
struct DeviceActivation<activation::Any> {
  using type = AnyActivation;
};
template <class Policy>
using DeviceActivationOf = typename DeviceActivation<Policy>::type;

}  // namespace moe::hopper
