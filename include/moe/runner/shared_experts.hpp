// SPDX-License-Identifier: Apache-2.0
// runner/shared_experts.hpp: experts that every row visits, beside the routed ones.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "moe/activation/activation.hpp"
#include "moe/backends/common/exchange_common.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/monolithic.hpp"
#include "moe/core/error.hpp"
#include "moe/core/layer_config.hpp"
#include "moe/core/tokens.hpp"
#include "moe/quantization/format/facts.hpp"
#include "moe/quantization/format/granularity.hpp"
#include "moe/quantization/none.hpp"
#include "moe/runner/primitives.hpp"
#include "moe/runner/reduction.hpp"

namespace moe::runner::shared {

/// There are none.
struct None {
  static constexpr bool kAbsent = true;
  struct Params {};
};

/// What multiplies a shared expert's output.
enum class Gate : std::uint8_t {
  none,
  sigmoid,         ///< sigmoid(v · x)
  routing_weight,  ///< a weight that the router gives it, normalised with those of the chosen experts (RouterConfig::num_joint_shared)
};

/// Whether shared experts may run beside a backend's exchange on the device: one that exchanges rows in a single call has kernels that wait
/// for their peers and need the multiprocessors.
template <class Backend>
constexpr bool may_overlap() {
  return !facts::follows_routing<Backend>() || facts::is_asynchronous<Backend>();
}

/// Whether the weights of a policy have a scheme whose scales belong to parts of a matrix or of a row. With one scale for a whole tensor,
/// the scale in the scheme's parameters is that of the routed experts; the shared experts have another.
template <class Policy>
concept InAScheme =
    requires { typename Policy::Quant; } && facts::weight_granularity<typename Policy::Quant>() != quantization::ScaleGranularity::none &&
    facts::weight_granularity<typename Policy::Quant>() != quantization::ScaleGranularity::per_tensor &&
    facts::act_granularity<typename Policy::Quant>() != quantization::ScaleGranularity::per_tensor;

/// The layer that the shared experts make.
template <class ActT, class WeightT>
struct ConfigOf : LayerDefaults {
  using Act = ActT;
  using Weight = WeightT;
  using Activation = activation::Any;
};

/// S experts of one width through the kernel of `Experts`, which must take the standard format: each row visits all, with its gate as the
/// weight. count 0: there are none. Quant: their scheme, of weights and rows; WeightT: the element of unquantised weights.
template <class Experts, class WeightT = float, class QuantT = quantization::None>
struct Separate {
  static constexpr bool kAbsent = false;
  using Policy = Experts;
  using Weight = WeightT;
  using Quant = QuantT;
  struct Params {
    int count = 0;                  ///< S
    std::int64_t intermediate = 0;  ///< I_s, on this rank
    /// [S, 2 I_s or I_s, H], [S, H, I_s]
    ExpertWeights<typename Quant::template WeightCode<WeightT>, typename Quant::WeightScale> weights = {};
    activation::Any activation{};
    Quant quantization{};
    Gate gate = Gate::none;
    float const* gate_vector = nullptr;  ///< [H] v of Gate::sigmoid
    /// Each TP rank has a part of the columns (partial), or all have all of them (complete).
    SharedOutput sharding = SharedOutput::complete;
    bool average = false;  ///< the block's output is the mean of routed and shared output, not their sum
  };
  static SharedOutput output_of(Params const& p) { return p.count == 0 ? SharedOutput::none : p.sharding; }

  template <class Space, class Act>
  class Part {
   public:
    using LayerConfig = ConfigOf<Act, WeightT>;
    using Kernel = typename Experts::template Kernel<LayerConfig, Quant, ActivationFormat::standard>;
    using Output = typename Kernel::Output;

    Part(Params const& p, Sizes const& sizes, Arena<Space>& arena) : params_(p), hidden_(sizes.hidden) {
      if (p.count == 0) return;
      if (p.gate == Gate::sigmoid && p.gate_vector == nullptr)
        throw Error(ErrorCode::argument, "shared experts: the sigmoid gate has no vector");
      activation::validate(p.activation.kind, p.activation.constants);
      kernel_.emplace(Shape<LayerConfig>({hidden_, p.intermediate, p.count, p.count, false}), p.weights, sizes.max_rows, p.quantization,
                      p.activation, typename Experts::Params{}, arena);
      std::int64_t const slots = sizes.max_rows * p.count;
      ids_ = arena.template take<std::int32_t>(slots);
      gates_ = arena.template take<float>(slots);
      y_ = arena.template take<Output>(sizes.max_rows * hidden_);
      if (quantizes()) {
        payload_ = arena.template take<Payload>(sizes.max_rows * Quant::payload_cols(hidden_));
        scales_ = arena.template take<Scale>(sizes.max_rows * Quant::scale_cols(hidden_));
      }
      std::vector<std::int32_t> ids(static_cast<std::size_t>(slots));
      for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(p.count));
      std::vector<float> const ones(ids.size(), 1.0F);
      if (slots > 0) {
        Memory<Space>::copy_from_host(ids_, ids.data(), ids.size() * sizeof(std::int32_t));
        Memory<Space>::copy_from_host(gates_, ones.data(), ones.size() * sizeof(float));
      }
    }
    bool active() const { return kernel_.has_value(); }
    bool takes_routing_weights() const { return active() && params_.gate == Gate::routing_weight; }
    /// Whether run() can go into a CUDA graph.
    bool capturable() const
      requires(facts::may_not_capture<Kernel const>())
    {
      return !active() || kernel_->capturable();
    }

    /// Enqueues output() = Σ gate · FFN(hidden). joint [M, S]: the router's weights, of Gate::routing_weight.
    void run(Rows<Act const> hidden, Rows<float const> joint, Stream<Space> stream) {
      std::int64_t const m = hidden.extent(0);
      rows_ = m;
      if (params_.gate == Gate::sigmoid) {
        RowKernels<Space>::sigmoid_gate(hidden, params_.gate_vector, make_rows(gates_, m, params_.count), stream);
      }
      Rows<float const> const weights = takes_routing_weights() ? joint : make_rows(static_cast<float const*>(gates_), m, params_.count);
      auto const ids = make_rows(static_cast<std::int32_t const*>(ids_), m, params_.count);
      if constexpr (std::is_same_v<Payload, Act>) {
        if (!quantizes()) {
          auto const none = make_rows(static_cast<Scale const*>(nullptr), m, 0);
          kernel_->apply(StandardTokensOf<LayerConfig, Quant>{hidden, none, ids, weights}, make_rows(y_, m, hidden_), stream);
          return;
        }
      }
      if constexpr (facts::quantizes_activations<Quant>()) {
        auto const payload = make_rows(payload_, m, Quant::payload_cols(hidden_));
        auto const scales = make_rows(scales_, m, Quant::scale_cols(hidden_));
        RowKernels<Space>::quantize(params_.quantization, hidden, payload, scales, stream);
        kernel_->apply(
            StandardTokensOf<LayerConfig, Quant>{make_rows(static_cast<Payload const*>(payload_), m, payload.extent(1)),
                                                 make_rows(static_cast<Scale const*>(scales_), m, scales.extent(1)), ids, weights},
            make_rows(y_, m, hidden_), stream);
      }
    }
    std::int64_t rows() const { return rows_; }  ///< of output()
    /// [M, H] of the last run(); the caller may change it.
    Rows<Output> output() { return make_rows(y_, rows_, hidden_); }

   private:
    using Payload = typename Quant::template Payload<Act>;
    using Scale = typename Quant::Scale;
    bool quantizes() const { return !moe::detail::stores_rows_unchanged<Quant, Act>(hidden_); }

    Params params_;
    std::int64_t hidden_;
    std::int64_t rows_ = 0;
    std::optional<Kernel> kernel_;
    std::int32_t* ids_ = nullptr;
    float* gates_ = nullptr;
    Payload* payload_ = nullptr;
    Scale* scales_ = nullptr;
    Output* y_ = nullptr;
  };
};

}  // namespace moe::runner::shared
