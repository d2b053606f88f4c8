// SPDX-License-Identifier: Apache-2.0
// experts/hopper_w4a8.hpp: experts with mxfp4 weights and e4m3 activations in groups of 128 on one Hopper GPU, standard format. Plain host
// C++: a program links the kernels (cmake/MoeHopperKernels.cmake) or includes experts/hopper_w4a8.cuh.
#pragma once

#include <concepts>
#include <cstdint>

#include "moe/activation/activation.hpp"
#include "moe/core/contract/check.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/experts/hopper/calls.hpp"
#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/facts.hpp"
#include "moe/experts/hopper/w4/activation.hpp"
#include "moe/experts/hopper/w4a8_layer.hpp"
#include "moe/experts/weights.hpp"
#include "moe/quantization/mxfp4_fp8.hpp"

namespace moe::experts {

namespace detail {

template <class Quant>
inline constexpr bool kIsMxfp4Fp8 = false;
template <quantization::MxRule Rule>
inline constexpr bool kIsMxfp4Fp8<quantization::Mxfp4Fp8<Rule>> = true;

}  // namespace detail

/// mxfp4 weights and rows of e4m3 codes with a scale per 128, biases, SwiGLU and its clamped forms. Weights become e4m3 in registers,
/// exactly; GEMM1 quantises the intermediate to e4m3 with a scale per 128.
struct HopperW4A8 : detail::PackedFacts<HopperW4A8> {
  static constexpr char const* kName = "hopper_w4a8";
  struct Params {};

  static constexpr bool reads(ActivationFormat f) { return f == ActivationFormat::standard; }
  template <class A>
  static constexpr bool supports_activation() {
    if constexpr (facts::fixes_kind<A>()) {
      return hopper::is_w4_activation(A::kKind);
    } else {
      return std::same_as<A, activation::Any>;  // checked when the layer is constructed
    }
  }
  /// Of a layer whose activation is known only at run time.
  static constexpr bool takes(activation::Kind kind, bool weight_on_input) { return hopper::is_w4_activation(kind) && !weight_on_input; }
  template <class Q>
  static constexpr bool supports_quantization() {
    return detail::kIsMxfp4Fp8<Q>;
  }
  template <class Config, class Quant>
  static constexpr bool fits_shape() {
    return moe::detail::fits(Config::hidden, 64) && moe::detail::fits(Config::intermediate, 32);
  }

  template <class Config, class Quant, ActivationFormat Format>
  class Kernel : detail::HopperCalls {
   public:
    using Act = typename Config::Act;
    using Output = Act;
    static constexpr bool kSkipsForeignIds = true;
    using Weights = WeightsOf<Config, Quant>;

    /// `weights` are device views; the packed copy is in the arena. E_UNSUPPORTED for a router weight on the input, an activation that is
    /// not built in, a scale byte over 252, or a device that is not Hopper.
    Kernel(Shape<Config> const& shape, Weights const& weights, std::int64_t max_rows, Quant const&,
           typename Config::Activation const& activation, Params const&, Arena<space::cuda>& arena)
        : HopperCalls("hopper_w4a8", shape, max_rows, weights.w13.codes.extent(0)), layer_(make_layer(shape, weights, activation, arena)) {
      fix::include_moe_experts_hopper_w4a8_cuh_or_link_a_library_of_moe_add_hopper_kernels();
      workspace_ = arena.template take<char>(layer_.workspace_bytes(workspace_tokens(Format)));
    }

    /// Packs the weights again after they were replaced in place. Enqueues.
    void weights_changed(cudaStream_t stream) { layer_.weights_changed(stream); }

    /// y[r] = Σ_j w_j FFN_{id_j}(x_r); rows without a local expert become 0. y [R, H] on the device, one rounding of the float32 sum of
    /// rows rounded to bf16. Enqueues.
    void apply(StandardTokensOf<Config, Quant> const& tokens, Rows<Output> y, cudaStream_t stream) const {
      hopper::LayerCall call{};
      if (!standard_call(tokens, y, call)) return;
      call.x_scales = tokens.scales.data_handle();
      call.x_scale_stride = tokens.scales.stride(0);
      layer_.forward(call, workspace_, stream);
    }

   private:
    static hopper::W4A8Layer make_layer(Shape<Config> const& shape, Weights const& weights, typename Config::Activation const& activation,
                                        Arena<space::cuda>& arena) {
      if (shape.weight_on_input()) {
        throw Error(ErrorCode::unsupported, "hopper_w4a8: the router weight on the input is not supported, use cuda_reference");
      }
      activation::Kind const kind = hopper::kind_of(activation);
      if (!hopper::is_w4_activation(kind)) {
        throw Error(ErrorCode::unsupported,
                    text("hopper_w4a8: the activation ", activation::name(kind), " is not built in, use cuda_reference"));
      }
      check_weights<Quant>(weights, shape.hidden(), shape.intermediate(), true);
      hopper::LocalShape const sizes{static_cast<int>(weights.w13.codes.extent(0)), static_cast<int>(shape.hidden()),
                                     static_cast<int>(shape.intermediate()), shape.topk()};
      return {sizes, detail::stored_weights(weights), hopper::w4_activation(kind, activation.constants),
              arena.template take<char>(hopper::W4A8Layer::packed_bytes(sizes))};
    }

    hopper::W4A8Layer layer_;
    char* workspace_ = nullptr;
  };
};

}  // namespace moe::experts
