// SPDX-License-Identifier: Apache-2.0
// experts/hopper/common/activation.cuh: the activations on the registers of a thread, inlined into GEMM1's epilogue.
#pragma once

#include "moe/core/ptx/approximate.cuh"
#include "moe/experts/hopper/common/activation.hpp"

namespace moe::hopper {

namespace detail {

template <GateShape Shape, int N>
__device__ inline void shape_gates(ActivationParams const& p, float (&gate)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] = shape_gate<Shape>(p, gate[i]);
}
template <bool TanhUp, int N>
__device__ inline void multiply_ups(ActivationParams const& p, float (&gate)[N], float const (&up)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] *= shape_up<TanhUp>(p, up[i]);
}

}  // namespace detail

// The template arguments of the kernels. kGating: 1 gated, 0 ungated, -1 known at run time. apply() works on the whole register array of a
// thread: gated, `gate` becomes the result; ungated, `gate` and `up` are two arrays of values and both become results.

/// SwiGLU; as an element-wise function it needs the fewest registers.
struct FastSilu {
  static constexpr char const* kName = "silu";
  static constexpr bool kFineTiles = true;  ///< products for tiles of every multiple of 8 rows, and for clusters
  static constexpr int kGating = 1;
  static constexpr bool kElementwise = true;
  __device__ explicit FastSilu(ActivationParams const&) {}
  __device__ float operator()(float gate, float up) const { return detail::fast_divide(gate * up, 1.0F + detail::fast_exp(-gate)); }
  /// Two elements of one row that share a division: three special functions instead of four. Below a gate of -41 the result is gate · up ·
  /// 2^-60.
  __device__ static void pair(float& gate0, float& gate1, float up0, float up1) {
    float const a = 1.0F + ptx::approximate_exp2(fminf(gate0 * -1.44269504F, 60.0F));
    float const b = 1.0F + ptx::approximate_exp2(fminf(gate1 * -1.44269504F, 60.0F));
    float const both = ptx::approximate_reciprocal(a * b);
    gate0 = gate0 * up0 * (both * b);
    gate1 = gate1 * up1 * (both * a);
  }
};

/// An activation that the composition fixes.
template <activation::Kind K>
struct FixedActivation {
  static constexpr char const* kName = activation::name(K).data();
  static constexpr bool kFineTiles = true;
  static constexpr int kGating = activation::gated(K) ? 1 : 0;
  static constexpr bool kElementwise = false;
  static constexpr ActivationParams kShape = activation_params(K, activation::Constants{});
  ActivationParams const& params;
  __device__ explicit FixedActivation(ActivationParams const& p) : params(p) {}
  template <int N>
  __device__ void apply(float (&gate)[N], float (&up)[N]) const {
    detail::shape_gates<kShape.shape>(params, gate);
    if constexpr (kGating == 1) {
      detail::multiply_ups<kShape.tanh_up>(params, gate, up);
    } else {
      detail::shape_gates<kShape.shape>(params, up);
    }
  }
};

/// Any activation, chosen at run time by one branch for all elements. The formulas together are a lot of code, so it has fewer tile sizes.
struct AnyActivation {
  static constexpr char const* kName = "any";
  static constexpr bool kFineTiles = false;
  static constexpr int kGating = -1;
  static constexpr bool kElementwise = false;
  ActivationParams const& params;
  __device__ explicit AnyActivation(ActivationParams const& p) : params(p) {}
  template <int N>
  __device__ void apply(float (&gate)[N], float (&up)[N]) const {
    shape(gate);
    if (!params.gated) {
      shape(up);
    } else if (params.tanh_up) {
      detail::multiply_ups<true>(params, gate, up);
    } else {
      detail::multiply_ups<false>(params, gate, up);
    }
  }

 private:
  template <int N>
  __device__ void shape(float (&gate)[N]) const {
    switch (params.shape) {
      case GateShape::sigmoid: detail::shape_gates<GateShape::sigmoid>(params, gate); break;
      case GateShape::erf: detail::shape_gates<GateShape::erf>(params, gate); break;
      case GateShape::situ: detail::shape_gates<GateShape::situ>(params, gate); break;
      case GateShape::relu: detail::shape_gates<GateShape::relu>(params, gate); break;
      case GateShape::relu2: detail::shape_gates<GateShape::relu2>(params, gate); break;
    }
  }
};

}  // namespace moe::hopper
