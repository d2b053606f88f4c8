// SPDX-License-Identifier: Apache-2.0
// models/preset.hpp: from a model's name to its layer and its block: what moe_add_model_library(NAME MODEL …) instantiates. Which backend
// and quantisation a model takes by default is in models/preset_choice.hpp; preset_host.hpp and preset_cuda.hpp add the policies of a
// space.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "moe/activation/activation.hpp"
#include "moe/layer/schedule_choice.hpp"
#include "moe/models/preset_choice.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/runner/runner.hpp"

namespace moe::models {

/// What a space brings to every preset: `Config<Model>`, the layer's configuration; `Router<Model>`; `Experts<Quant, Backend>`;
/// `Shared<Weight, Quant, Backend>`, the policy of shared experts. Defined in models/preset_host.hpp and models/preset_cuda.hpp.
template <class Space>
struct PresetSpace;

/// The layer's configuration: the model's, with the element types and the activation that the space computes with.
template <class Model, class Space>
using PresetConfig = typename PresetSpace<Space>::template Config<Model>;

/// The model's router; in the CUDA space with the model's sizes compiled in.
template <class Model, class Space>
using PresetRouter = typename PresetSpace<Space>::template Router<Model>;

template <class Quant, class Backend>
using PresetExperts = typename PresetSpace<typename Backend::Space>::template Experts<Quant, Backend>;

namespace detail {

constexpr std::size_t rank_of(BackendOrder const& order, std::string_view backend) {
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i] == backend) return i;
  }
  return order.size();
}

/// The phase that a model's layers over a backend are for: the one whose order has it earlier; prefill if both have it in the same place.
template <class Model, class Backend>
constexpr Phase phase_of() {
  using Choice = PresetChoice<Model>;
  return rank_of(Choice::kDecode, Backend::kName) < rank_of(Choice::kPrefill, Backend::kName) ? Phase::decode : Phase::prefill;
}

template <class Model, class Quant, class Backend>
constexpr LayerSchedule preset_schedule() {
  constexpr LayerSchedule kSchedule =
      measured_schedule<Backend, PresetExperts<Quant, Backend>, Quant>(tokens_of(phase_of<Model, Backend>()));
  static_assert(!kSchedule.combine, "moe: libraries of models have no kernels with blocks of columns (cmake/MoePresetLibrary.cmake)");
  return kSchedule;
}

}  // namespace detail

/// The schedule that was the fastest for the tokens of the phase that prefers the backend: a library has one layer of a backend for both.
template <class Model, class Quant, class Backend>
inline constexpr LayerSchedule kPresetSchedule = detail::preset_schedule<Model, Quant, Backend>();

/// PresetConfig in that schedule: PresetConfig itself where the schedule is the plain one.
template <class Model, class Quant, class Backend>
using PresetLayerConfig = WithSchedule<PresetConfig<Model, typename Backend::Space>, kPresetSchedule<Model, Quant, Backend>.dispatch,
                                       kPresetSchedule<Model, Quant, Backend>.combine>;

/// The composition of a model with a quantisation and a backend: the model's router, the experts of the backend's space.
template <class Model, class Quant, class Backend>
using PresetComposition = Composition<PresetLayerConfig<Model, Quant, Backend>, PresetRouter<Model, typename Backend::Space>, Quant,
                                      Backend, PresetExperts<Quant, Backend>>;
template <class Model, class Quant, class Backend>
using PresetLayer = ModularKernel<PresetLayerConfig<Model, Quant, Backend>, PresetRouter<Model, typename Backend::Space>, Quant, Backend,
                                  PresetExperts<Quant, Backend>>;

/// The parts of the model's block around its layer: a float32 gate inside, and what the model's constants state. What a model does not have
/// is absent, so that the layer of a model without shared experts writes the block's output itself.
template <class Model, class Quant, class Backend>
struct PresetParts : RunnerDefaults {
  using Space = typename Backend::Space;
  using Weight = typename PresetConfig<Model, Space>::Weight;
  static constexpr bool kProjects = Model::block_hidden > 0;
  using Projection = std::conditional_t<kProjects, runner::transform::Projection<Weight>, runner::transform::None>;

  using Gate = runner::gate::Linear<float>;
  using Input = Projection;
  using Output = Projection;
  using Shared = typename std::conditional_t<(Model::num_shared_experts > 0),
                                             std::type_identity<typename PresetSpace<Space>::template Shared<Weight, Quant, Backend>>,
                                             std::type_identity<runner::shared::None>>::type;
  using ZeroExperts = std::conditional_t<(Model::num_zero_experts > 0), runner::zero_experts::Identity, runner::zero_experts::None>;
};

/// The block: gate, layer, projections, shared experts, zero experts. Its Layer is PresetLayer.
template <class Model, class Quant, class Backend>
using PresetRunner = Runner<PresetLayer<Model, Quant, Backend>, PresetParts<Model, Quant, Backend>>;

namespace detail {

/// The index of the runner that the preset of Model prefers: its quantisation first, then its order of backends.
template <class Model, Phase P, class... Runners>
constexpr std::size_t preferred() {
  using Choice = PresetChoice<Model>;
  constexpr std::array<std::size_t, sizeof...(Runners)> kBackend{
      rank_of(P == Phase::decode ? Choice::kDecode : Choice::kPrefill, Runners::Layer::Backend::kName)...};
  constexpr std::array<bool, sizeof...(Runners)> kQuantization{
      std::is_same_v<typename Runners::Layer::Quant, typename Choice::Quantization>...};
  std::size_t best = 0;
  for (std::size_t i = 1; i < sizeof...(Runners); ++i) {
    if (kQuantization[i] != kQuantization[best] ? kQuantization[i] : kBackend[i] < kBackend[best]) best = i;
  }
  return best;
}

}  // namespace detail

/// The one of a library's runners that the preset takes for a phase.
template <class Model, Phase P, class... Runners>
using ChosenRunner = typename std::tuple_element<detail::preferred<Model, P, Runners...>(), std::tuple<Runners...>>::type;

}  // namespace moe::models
