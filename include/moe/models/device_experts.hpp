// SPDX-License-Identifier: Apache-2.0
// models/device_experts.hpp: a block on the device with the first experts of a list that compute it on the GPU that is there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <type_traits>
#include <variant>

#include "moe/core/contract/check.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/experts/hopper_w4a8.hpp"
#include "moe/experts/hopper_w8a16.hpp"
#include "moe/models/device_block.hpp"
#include "moe/models/experts_obstacle.hpp"

namespace moe::models {

/// Experts policies, the preferred ones first.
template <class... Experts>
struct ExpertsList {};
/// The Hopper experts; the reference for what they do not take. A program links the kernels of those that its scheme and format leave.
using DeviceExperts = ExpertsList<experts::HopperContiguous, experts::HopperMasked, experts::HopperW4A16, experts::HopperW8A16,
                                  experts::HopperW4A8, experts::CudaReference>;

namespace detail {

/// Whether experts take the types of a block: rows, scheme, format.
template <class Experts, class Quant, class Backend, class Act>
constexpr bool takes_types() {
  return Experts::reads(Backend::kFormat) && Experts::template supports_element<Act, Act>() &&
         Experts::template supports_quantization<Quant>() && Experts::template supports_activation<activation::Any>();
}
template <class Quant, class Backend, class Act, class Taken, class List>
struct Taking;
template <class Quant, class Backend, class Act, class... Taken>
struct Taking<Quant, Backend, Act, ExpertsList<Taken...>, ExpertsList<>> {
  using type = ExpertsList<Taken...>;
};
template <class Quant, class Backend, class Act, class... Taken, class First, class... Rest>
struct Taking<Quant, Backend, Act, ExpertsList<Taken...>, ExpertsList<First, Rest...>>
    : Taking<Quant, Backend, Act,
             std::conditional_t<takes_types<First, Quant, Backend, Act>(), ExpertsList<Taken..., First>, ExpertsList<Taken...>>,
             ExpertsList<Rest...>> {};

}  // namespace detail

/// Those of a list that take the block's types.
template <class Quant, class Backend, class Act, class List = DeviceExperts>
using ExpertsFor = typename detail::Taking<Quant, Backend, Act, ExpertsList<>, List>::type;

template <class Quant, class Backend, class Act, class Loaded, class List>
class ChosenBlock;

/// A DeviceBlock whose experts are the first of a list that compute the checkpoint's layer on this device: an alternative of a variant,
/// chosen once, at construction. All ranks must choose alike, so their devices must be of one architecture.
template <class Quant, class Backend, class Act, class Loaded, class... Experts>
class ChosenBlock<Quant, Backend, Act, Loaded, ExpertsList<Experts...>> {
 public:
  static_assert(sizeof...(Experts) > 0,
                "moe: no experts of the list take this scheme, format and element. Fix: add experts::CudaReference");
  template <class E>
  using Block = DeviceBlock<Quant, Backend, E, Act, Loaded>;

  /// Collective; as DeviceBlock's. E_UNSUPPORTED with the reasons if no experts of the list compute the layer.
  ChosenBlock(typename Backend::Comm& comm, io::HostLayerWeights<Loaded> const& weights, ExpertPlacement const& placement,
              std::int64_t max_tokens_per_rank, Quant const& quant = {}, typename Backend::Params const& backend = {},
              DeviceBlockOptions<DeviceBlockParts<Act>> const& options = {}) {
    io::LayerDescription const& d = weights.description;
    ExpertsNeeds const needs{.architecture = moe::detail::build(comm, [] { return device_architecture(); }),
                             .hidden = d.expert_hidden(),
                             .intermediate = weights.intermediate,
                             .activation = d.activation.kind,
                             .weight_on_input = d.weight_on == io::WeightOn::expert_input,
                             .expert_norm = d.expert_norm,
                             .refuse_emulation = options.refuse_emulation};
    bool const found = (... || choose<Experts>(needs, comm, weights, placement, max_tokens_per_rank, quant, backend, options));
    if (!found) moe::detail::build(comm, [&] { throw Error(ErrorCode::unsupported, text("no experts compute this block: ", note_)); });
  }

  /// As DeviceBlock's.
  void forward(Rows<Act const> hidden, Rows<Act> output, ForwardOptions const& options, cudaStream_t stream) {
    visit([&](auto& block) { block.forward(hidden, output, options, stream); });
  }
  /// call(block) with the DeviceBlock.
  template <class Call>
  void visit(Call&& call) {
    std::visit(
        [&](auto& block) {
          if constexpr (!std::is_same_v<std::decay_t<decltype(block)>, std::monostate>) call(block);
        },
        block_);
  }
  /// Name of the experts, and why those before them in the list were not chosen (empty: they are the first).
  char const* experts() const { return experts_; }
  std::string const& note() const { return note_; }

 private:
  template <class E, class... Arguments>
  bool choose(ExpertsNeeds const& needs, Arguments&&... arguments) {
    if (std::string const why = experts_obstacle<E, Quant, Act>(needs); !why.empty()) {
      note_ += text(note_.empty() ? "" : "; ", why);
      return false;
    }
    block_.template emplace<Block<E>>(arguments...);
    experts_ = E::kName;
    return true;
  }

  char const* experts_ = "";
  std::string note_;
  std::variant<std::monostate, Block<Experts>...> block_;
};

/// The block of a checkpoint with the best experts for its scheme, sizes and device.
template <class Quant, class Backend, class Act = bf16, class Loaded = float, class List = DeviceExperts>
using BestDeviceBlock = ChosenBlock<Quant, Backend, Act, Loaded, ExpertsFor<Quant, Backend, Act, List>>;

}  // namespace moe::models
