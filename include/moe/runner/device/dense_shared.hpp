// SPDX-License-Identifier: Apache-2.0
// runner/device/dense_shared.hpp: shared experts on the device as two dense products with the activation between them. Plain host C++;
// needs cuBLAS; the definitions are in dense_shared.cuh.
#pragma once

#include <cstdint>
#include <optional>
#include <type_traits>

#include "moe/activation/activation.hpp"
#include "moe/core/array.hpp"
#include "moe/core/buffer.hpp"
#include "moe/core/cuda_space.hpp"
#include "moe/core/tokens.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/product_choices.hpp"
#include "moe/runner/device/side_stream.hpp"
#include "moe/runner/shared_experts.hpp"

namespace moe::runner {

namespace device {

/// What DenseShared computes. Weights are on the device, borrowed, of the activations' element.
template <class Act>
struct DenseSharedParams {
  ExpertWeights<Act, float> weights;  ///< S experts: w13 [S, 2 I_s or I_s, H], w2 [S, H, I_s]; no scales, no biases
  activation::Any activation{};
  float const* sigmoid_gate = nullptr;  ///< [H]: the output is multiplied by sigmoid(v · x); or null
  bool joint_weights = false;           ///< run() gets a weight per row and shared expert
  Sums sums = Sums::blocked;
};

/// y_t = Σ_s g_ts FFN_s(x_t) for the experts that every row visits, three launches: both products are one for all S experts, and the gate
/// multiplies the activated row, before its one rounding. Act: bf16, f16 or float.
template <class Act>
class DenseShared {
 public:
  /// Takes the memory for max_rows rows. E_ARG for weights of another shape.
  DenseShared(DenseSharedParams<Act> const& params, std::int64_t hidden, std::int64_t max_rows, Arena<space::cuda>& arena);

  /// Enqueues; capturable. hidden [M, H], joint [M, S] or no rows. E_ARG for other sizes.
  void run(Rows<Act const> hidden, Rows<float const> joint, cudaStream_t stream);
  std::int64_t rows() const { return rows_; }  ///< of the last run()
  /// [M, H] of the last run(), gated.
  Rows<Act> output() const { return make_rows(y_, rows_, hidden_); }

 private:
  /// w2 of all experts as one matrix [H, S I_s].
  static Rows<Act const> joined_down(ExpertWeights<Act, float> const& w, Arena<space::cuda>& arena);

  DenseSharedParams<Act> params_;
  std::int64_t hidden_;
  std::int64_t count_;
  std::int64_t intermediate_;
  Act* gate_up_;  // [M, S (2 or 1) I_s]
  Act* inter_;    // [M, S I_s]
  Act* y_;        // [M, H]
  Linear<space::cuda, Act, Act, Act> up_;
  Linear<space::cuda, Act, Act, Act> down_;
  std::int64_t rows_ = 0;
};

}  // namespace device

namespace shared {

/// Shared experts on the device through device::DenseShared, in the model's element: a policy like Separate, with its parameters.
template <class WeightT>
struct Dense {
  static constexpr bool kAbsent = false;
  struct Params : Separate<void, WeightT>::Params {
    /// Up to this many rows run on a side stream, from run() to output(), beside the routed experts: the same bits. 0: never.
    std::int64_t overlap_rows = device::kProductChoices.shared_beside_rows;
  };
  static SharedOutput output_of(Params const& p) { return p.count == 0 ? SharedOutput::none : p.sharding; }

  template <class Space, class Act>
  class Part {
   public:
    static_assert(std::is_same_v<Act, WeightT>, "shared experts: weights and rows have one element type");
    using Output = Act;

    Part(Params const& p, Sizes const& sizes, Arena<Space>& arena)
        : gate_(p.gate), beside_(p.count == 0 || p.gate == Gate::routing_weight ? 0 : p.overlap_rows) {
      if (p.count == 0) return;
      if (p.gate == Gate::sigmoid && p.gate_vector == nullptr) {
        throw Error(ErrorCode::argument, "shared experts: the sigmoid gate has no vector");
      }
      dense_.emplace(device::DenseSharedParams<Act>{.weights = p.weights,
                                                    .activation = p.activation,
                                                    .sigmoid_gate = p.gate == Gate::sigmoid ? p.gate_vector : nullptr,
                                                    .joint_weights = p.gate == Gate::routing_weight},
                     sizes.hidden, sizes.max_rows, arena);
    }
    bool active() const { return dense_.has_value(); }
    /// Whether rows of this number run on the side stream.
    bool overlaps(std::int64_t rows) const { return beside_.takes(rows); }
    bool takes_routing_weights() const { return active() && gate_ == Gate::routing_weight; }
    /// Enqueues output() = Σ gate · FFN(hidden). joint [M, S]: the router's weights, of Gate::routing_weight.
    void run(Rows<Act const> hidden, Rows<float const> joint, Stream<Space> stream) {
      dense_->run(hidden, joint, beside_.begin(hidden.extent(0), stream));
    }
    std::int64_t rows() const { return dense_->rows(); }  ///< of output(); enqueues nothing
    /// [M, H] of the last run(), for work that is enqueued on its stream from now on. The caller may change it.
    Rows<Act> output() {
      beside_.end();
      return dense_->output();
    }

   private:
    Gate gate_;
    std::optional<device::DenseShared<Act>> dense_;
    FewRowsBeside<Space> beside_;
  };
};

}  // namespace shared

}  // namespace moe::runner
