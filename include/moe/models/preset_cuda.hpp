// SPDX-License-Identifier: Apache-2.0
// models/preset_cuda.hpp: presets in the CUDA space, on Hopper: bf16 rows; the experts follow from the quantisation and from the format
// that the backend delivers. Plain host C++: the kernels are in libraries (cmake/MoePresetLibrary.cmake).
#pragma once

#include <type_traits>

#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/models/preset.hpp"
#include "moe/models/shared_policy.hpp"
#include "moe/routing/fixed_sizes.hpp"
#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/row_kernels.hpp"

namespace moe::models {

namespace detail {

/// SwiGLU has kernels of its own, with every tile size. The other activations share the kernels of a run-time one, so that one library
/// of kernels serves all presets. `fixed_kernels`: exchanges take kernels that are compiled for the model's sizes, where there are such
/// kernels; the preset's own library holds them.
template <class Model, bool IsSilu = std::is_same_v<typename Model::Activation, activation::Silu>>
struct HopperConfig : Model {
  static constexpr bool fixed_kernels = Model::hidden > 0 && Model::num_experts > 0 && Model::topk > 0;
};
template <class Model>
struct HopperConfig<Model, false> : HopperConfig<Model, true> {
  using Activation = activation::Any;
  static constexpr activation::Kind activation_kind = Model::Activation::kKind;
};

}  // namespace detail

template <>
struct PresetSpace<space::cuda> {
  template <class Model>
  using Config = detail::HopperConfig<Model>;
  /// The routing kernel is compiled for the model's sizes, in the preset's own library (docs/log/routing.md has what that gives).
  template <class Model>
  using Router = routing::FixedWherePossible<typename Model::Router, Model>;
  template <class Quant, class Backend>
  using Experts =
      std::conditional_t<experts::HopperW4A16::supports_quantization<Quant>(), experts::HopperW4A16,
                         std::conditional_t<experts::HopperW8A16::supports_quantization<Quant>(), experts::HopperW8A16,
                                            std::conditional_t<experts::HopperW4A8::supports_quantization<Quant>(), experts::HopperW4A8,
                                                               std::conditional_t<Backend::kFormat == ActivationFormat::batched,
                                                                                  experts::HopperMasked, experts::HopperContiguous>>>>;
  /// Dense, or in the model's scheme if the caller of load_runner() asks for it (shared_in_scheme) and checkpoint and kernels allow it.
  template <class Weight, class Quant, class Backend>
  using Shared = typename DeviceSharedFor<Quant, Experts<Quant, Backend>>::template Policy<Weight>;
};

}  // namespace moe::models
