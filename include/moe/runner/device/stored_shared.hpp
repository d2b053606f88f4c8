// SPDX-License-Identifier: Apache-2.0
// runner/device/stored_shared.hpp: shared experts on the device in the scheme of the checkpoint where experts compute it, else dense. Plain
// host C++; besides the definitions in dense_shared.cuh it needs the kernels of the experts, RowKernels::quantize of the scheme and
// RowKernels::sigmoid_gate.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "moe/activation/activation.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/tokens.hpp"
#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/side_stream.hpp"
#include "moe/runner/shared_experts.hpp"

namespace moe::runner::shared {

/// Shared experts as Separate<Experts, WeightT, QuantT> where Params::stored has codes, else as Dense<WeightT>: chosen at construction. Few
/// rows run on a side stream either way.
///
/// In a scheme that quantises activations the rows of the shared experts are quantised too, as those of the routed experts. That is what
/// such a checkpoint states (activation_scheme "dynamic": every linear layer of the model that has scales) and what the released model
/// computes. Dense computes the dequantised weights with rows in bf16: nearer to the unquantised model, for twice the
/// bytes.
template <class Experts, class WeightT, class QuantT>
struct Stored {
  static constexpr bool kAbsent = false;
  using InScheme = Separate<Experts, WeightT, QuantT>;
  using Policy = Experts;
  using Weight = WeightT;
  using Quant = QuantT;
  struct Params : Dense<WeightT>::Params {
    ExpertWeights<typename Quant::template WeightCode<WeightT>, typename Quant::WeightScale> stored = {};  ///< in place of `weights`
    Quant scheme{};                                                                                        ///< of `stored`
    std::string choice{};  ///< what was chosen and why, for a log

    bool in_scheme() const { return this->count > 0 && stored.w13.codes.extent(0) > 0; }
  };
  static SharedOutput output_of(Params const& p) { return Dense<WeightT>::output_of(p); }

  template <class Space, class Act>
  class Part {
    using Quantised = typename InScheme::template Part<Space, Act>;
    using Unquantised = typename Dense<WeightT>::template Part<Space, Act>;

   public:
    using Output = Act;
    static_assert(std::is_same_v<typename Quantised::Output, Act>, "shared experts: the experts' output has the rows' element");

    Part(Params const& p, Sizes const& sizes, Arena<Space>& arena)
        : choice_(p.choice), beside_(p.in_scheme() && p.gate != Gate::routing_weight ? p.overlap_rows : 0) {
      if (p.in_scheme()) {
        quantised_ = std::make_unique<Quantised>(scheme_params(p), sizes, arena);
      } else {
        dense_ = std::make_unique<Unquantised>(p, sizes, arena);
      }
    }
    bool active() const { return quantised_ ? quantised_->active() : dense_->active(); }
    /// Whether rows of this number run on the side stream.
    bool overlaps(std::int64_t rows) const { return quantised_ ? beside_.takes(rows) : dense_->overlaps(rows); }
    /// Whether run() can go into a CUDA graph.
    bool capturable() const { return !quantised_ || facts::capturable(*quantised_); }
    bool takes_routing_weights() const { return quantised_ ? quantised_->takes_routing_weights() : dense_->takes_routing_weights(); }
    /// What was chosen and why, in words.
    std::string const& choice() const { return choice_; }
    /// Enqueues output() = Σ gate · FFN(hidden). joint [M, S]: the router's weights, of Gate::routing_weight.
    void run(Rows<Act const> hidden, Rows<float const> joint, Stream<Space> stream) {
      if (!quantised_) return dense_->run(hidden, joint, stream);
      quantised_->run(hidden, joint, beside_.begin(hidden.extent(0), stream));
    }
    std::int64_t rows() const { return quantised_ ? quantised_->rows() : dense_->rows(); }  ///< of output(); enqueues nothing
    /// [M, H] of the last run(), for work that is enqueued on its stream from now on. The caller may change it.
    Rows<Act> output() {
      if (!quantised_) return dense_->output();
      beside_.end();
      return quantised_->output();
    }

   private:
    static typename InScheme::Params scheme_params(Params const& p) {
      typename InScheme::Params out;
      out.count = p.count;
      out.intermediate = p.intermediate;
      out.weights = p.stored;
      out.activation = p.activation;
      out.quantization = p.scheme;
      out.gate = p.gate;
      out.gate_vector = p.gate_vector;
      out.sharding = p.sharding;
      out.average = p.average;
      return out;
    }

    std::string choice_;
    std::unique_ptr<Quantised> quantised_;
    std::unique_ptr<Unquantised> dense_;
    FewRowsBeside<Space> beside_;
  };
};

}  // namespace moe::runner::shared
