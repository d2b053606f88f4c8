// SPDX-License-Identifier: Apache-2.0
// models/block_frame.hpp: what surrounds the layer of one MoE block: gate, projections, zero experts, shared experts, norms. It depends on
// the model family, not on the composition, runs on the host, and sees each rank's own rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "moe/experts/onednn.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/io/router_logits.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/zero_experts.hpp"

namespace moe::models {

/// y = norm?( c (Σ_e w_e FFN_e(x) + zero experts) + shared(x) ), all but the sum over the experts. Rows are float32, contiguous.
template <class Weight>
class BlockFrame {
 public:
  /// Keeps `weights`, whose expert matrices a block moves into its own store.
  BlockFrame(io::HostLayerWeights<Weight>&& weights, std::int64_t max_tokens) : weights_(std::move(weights)), max_tokens_(max_tokens) {
    io::require_computed(d());
    activation::validate(d().activation.kind, d().activation.constants);
    if (d().shared.count > 0) {
      shared_ = std::make_unique<Shared>(weights_, max_tokens);
    }
  }

  io::LayerDescription const& description() const { return weights_.description; }
  io::HostLayerWeights<Weight>& weights() { return weights_; }
  io::HostLayerWeights<Weight> const& weights() const { return weights_; }
  std::int64_t max_tokens() const { return max_tokens_; }

  /// The layer's input, and the router's output for the shared experts.
  struct LayerInput {
    std::span<float const> x;       ///< [M, H'] the experts' input
    std::span<float const> logits;  ///< [M, num_logits]
    std::span<float> joint;         ///< [M, S] out: weights of jointly normalised shared experts
  };

  /// hidden [M, H] → the layer's input; valid until the next call.
  LayerInput enter(std::span<float const> hidden) {
    std::int64_t const rows = static_cast<std::int64_t>(hidden.size()) / d().hidden;
    logits_ = io::compute_router_logits(weights_, hidden);
    joint_.resize(static_cast<std::size_t>(rows * d().router.num_joint_shared));
    if (d().latent > 0) {
      latent_ = product(weights_.latent_in, hidden, rows, d().hidden, d().latent);
      if (d().latent_in_norm) {
        normalise(latent_, rows, d().latent, weights_.latent_in_norm);
      }
    }
    return {d().latent > 0 ? std::span<float const>(latent_) : hidden, logits_, joint_};
  }

  /// routed [M, H'] (overwritten), the routing [M, k] and the block's own input → output [M, H].
  void leave(std::span<float const> hidden, LayerInput const& in, std::span<float> routed, std::span<std::int32_t const> ids,
             std::span<float const> topk_weights, std::span<float> output) {
    std::int64_t const h = d().hidden;
    std::int64_t const rows = static_cast<std::int64_t>(hidden.size()) / h;
    if (d().router.num_zero_experts > 0) {
      std::int64_t const width = d().expert_hidden();
      int const k = d().router.topk;
      routing::add_zero_experts(d().router.num_experts, d().router.zero_expert_kind, k, make_rows(in.x.data(), rows, width),
                                make_rows(ids.data(), rows, k), make_rows(topk_weights.data(), rows, k),
                                make_rows(routed.data(), rows, width));
    }
    for (float& v : routed) {
      v *= d().output_scaling_factor;
    }
    if (d().latent_norm) {
      normalise(routed, rows, d().latent, weights_.latent_norm);
    }
    if (d().latent > 0) {
      std::vector<float> const widened = product(weights_.latent_out, routed, rows, d().latent, h);
      std::copy(widened.begin(), widened.end(), output.begin());
    } else {
      std::copy(routed.begin(), routed.end(), output.begin());
    }
    if (shared_ != nullptr) {
      shared_->add(weights_, joint_, hidden, rows, output);
    }
    finish(output, rows);
  }

 private:
  io::LayerDescription const& d() const { return weights_.description; }

  /// out [rows, n] = x [rows, k] · wᵀ, w [n, k].
  static std::vector<float> product(std::vector<Weight> const& w, std::span<float const> x, std::int64_t rows, std::int64_t k,
                                    std::int64_t n) {
    std::vector<float> wide(w.size());
    std::transform(w.begin(), w.end(), wide.begin(), [](Weight v) { return to_float(v); });
    std::vector<float> out(static_cast<std::size_t>(rows * n));
    std::atomic<int> status{dnnl_success};
    if (rows > 0) {
      experts::detail::gemm_nt(status, rows, n, k, x.data(), k, wide.data(), k, out.data(), n);
    }
    if (status != dnnl_success) {
      throw Error(ErrorCode::internal, text("oneDNN: sgemm failed with status ", status.load()));
    }
    return out;
  }

  /// The shared experts are experts that every row visits: the same kernel, ids 0 … S-1, their gate as the weight.
  class Shared {
   public:
    using Config = RuntimeLayer<float, Weight>;
    using Kernel = experts::OneDnn::Kernel<Config, quantization::None, ActivationFormat::standard>;
    Shared(io::HostLayerWeights<Weight> const& w, std::int64_t max_tokens)
        : count_(w.shared.count),
          hidden_(w.description.hidden),
          store_(count_, hidden_, w.shared.intermediate, w.description.shared.activation.gated()),
          kernel_(Shape<Config>({hidden_, w.shared.intermediate, static_cast<int>(count_), static_cast<int>(count_), false}), filled(w),
                  max_tokens, {}, {w.description.shared.activation.kind, w.description.shared.activation.constants}, {}, arena_),
          ids_(static_cast<std::size_t>(max_tokens * count_)),
          gates_(ids_.size()),
          y_(static_cast<std::size_t>(max_tokens * hidden_)) {
      for (std::size_t i = 0; i < ids_.size(); ++i) {
        ids_[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(count_));
      }
    }
    /// output += gate · FFN_shared(hidden), or the average of both.
    void add(io::HostLayerWeights<Weight> const& w, std::vector<float> const& joint, std::span<float const> hidden, std::int64_t rows,
             std::span<float> output) {
      io::SharedExperts const& s = w.description.shared;
      for (std::int64_t t = 0; t < rows; ++t) {
        for (std::int64_t i = 0; i < count_; ++i) {
          auto const at = static_cast<std::size_t>(t * count_ + i);
          switch (s.gate) {
            case io::SharedGate::none: gates_[at] = 1.0F; break;
            case io::SharedGate::sigmoid:
              gates_[at] = activation::detail::sigmoid(io::detail::dot(w.shared.gate.data(), hidden.data() + t * hidden_, hidden_));
              break;
            case io::SharedGate::routing_weight: gates_[at] = joint[at]; break;
          }
        }
      }
      kernel_.apply({make_rows(hidden.data(), rows, hidden_), make_rows(static_cast<float const*>(nullptr), rows, 0),
                     make_rows(static_cast<std::int32_t const*>(ids_.data()), rows, count_),
                     make_rows(static_cast<float const*>(gates_.data()), rows, count_)},
                    make_rows(y_.data(), rows, hidden_), HostStream{});
      float const factor = s.combination == io::Combination::average ? 0.5F : 1.0F;
      for (std::size_t i = 0; i < output.size(); ++i) {
        output[i] = factor * (output[i] + y_[i]);
      }
    }

   private:
    WeightsOf<Config, quantization::None> filled(io::HostLayerWeights<Weight> const& w) {
      std::int64_t const n13 = (w.description.shared.activation.gated() ? 2 : 1) * w.shared.intermediate * hidden_;
      for (std::int64_t i = 0; i < count_; ++i) {
        store_.set_expert(i, w.shared.w13.data() + i * n13, w.shared.w2.data() + i * hidden_ * w.shared.intermediate);
      }
      return store_.view();
    }
    std::int64_t count_;
    std::int64_t hidden_;
    Arena<space::host> arena_;
    experts::WeightStore<Config, quantization::None> store_;
    Kernel kernel_;
    std::vector<std::int32_t> ids_;
    std::vector<float> gates_;
    std::vector<float> y_;
  };

  /// The steps that some families apply to the sum: a bias vector, RMSNorm.
  void finish(std::span<float> output, std::int64_t rows) const {
    std::int64_t const h = d().hidden;
    for (std::int64_t t = 0; t < rows; ++t) {
      float* row = output.data() + t * h;
      for (std::size_t i = 0; i < weights_.output_bias.size(); ++i) {
        row[i] += weights_.output_bias[i];
      }
    }
    if (d().post_norm) {
      normalise(output, rows, h, weights_.post_norm);
    }
  }
  /// RMSNorm of every row [width], times `weight`.
  void normalise(std::span<float> x, std::int64_t rows, std::int64_t width, std::vector<float> const& weight) const {
    for (std::int64_t t = 0; t < rows; ++t) {
      float* row = x.data() + t * width;
      io::detail::rms_normalise(row, width, d().rms_norm_eps, row);
      for (std::size_t i = 0; i < weight.size(); ++i) {
        row[i] *= weight[i];
      }
    }
  }

  io::HostLayerWeights<Weight> weights_;
  std::int64_t max_tokens_;
  std::unique_ptr<Shared> shared_;
  std::vector<float> logits_;
  std::vector<float> latent_;
  std::vector<float> joint_;
};

}  // namespace moe::models
