// SPDX-License-Identifier: Apache-2.0
// models/block.hpp: one MoE block of a checkpoint: gate → layer → shared experts → whatever the family adds. The layer inside is a
// ModularKernel in either space; what is around it runs on the host, one after the other, on each rank's own rows.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/experts/onednn.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/io/router_logits.hpp"
#include "moe/models/registry.hpp"
#include "moe/modular_kernel.hpp"

namespace moe::models {

/// y = norm?( c Σ_e w_e FFN_e(x) + shared(x) ): every semantic of io::LayerDescription, for rows [M, H] float32 of this rank.
/// Weight: element that unquantised expert weights are stored in (float, or bf16 to keep a bf16 checkpoint's size).
template <class Quant, class Backend, class Experts, class Weight = float>
class Block {
 public:
  using Config = registry::RuntimeLayer<float, Weight>;
  using Space = typename Experts::Space;
  using Layer = ModularKernel<Config, routing::AnyRouter, Quant, Backend, Experts>;
  static constexpr bool kOnDevice = Space::kKind == SpaceKind::cuda;

  /// Collective over `comm`. `weights` hold the experts that `placement` gives this rank, in its local order; they are moved in.
  Block(typename Backend::Comm& comm, io::HostLayerWeights<Weight>&& weights, ExpertPlacement const& placement,
        std::int64_t max_tokens_per_rank, Quant const& quant = {})
      : weights_(std::move(weights)),
        max_tokens_(max_tokens_per_rank),
        store_(static_cast<std::int64_t>(weights_.experts.size()), d().expert_hidden(), d().intermediate, d().activation.gated(), quant),
        device_(max_tokens_, weights_),
        layer_(comm, filled_store(), layer_params(placement, quant)),
        routed_(static_cast<std::size_t>(max_tokens_ * d().expert_hidden())) {
    activation::validate(d().activation.kind, d().activation.constants);
    if (d().shared.count > 0) {
      shared_.emplace(weights_, max_tokens_);
    }
  }

  /// Collective. hidden [M, H] contiguous, token_ids [M] or null (hash routing) → output [M, H] contiguous.
  template <class Probe = NoProbe>
  void forward(std::span<float const> hidden, std::int64_t const* token_ids, std::span<float> output, Probe&& probe = {}) {
    std::int64_t const h = d().hidden;
    std::int64_t const inner = d().expert_hidden();
    std::int64_t const rows = static_cast<std::int64_t>(hidden.size()) / h;
    routing::RouterConfig const& r = d().router;

    probe.begin(Phase::route);
    logits_ = io::compute_router_logits(weights_, hidden);
    std::vector<float> projected;
    if (d().latent > 0) {
      projected = product(weights_.latent_in, hidden, rows, h, inner);
    }
    joint_.resize(static_cast<std::size_t>(rows * r.num_joint_shared));
    probe.end(Phase::route);

    std::span<float const> const x = d().latent > 0 ? std::span<float const>(projected) : hidden;
    run_layer(x, token_ids, rows, probe);

    std::span<float> routed = std::span(routed_).first(static_cast<std::size_t>(rows * inner));
    add_zero_experts(x, routed, rows, inner);
    for (float& v : routed) {
      v *= d().output_scaling_factor;
    }
    if (d().latent > 0) {
      std::vector<float> const widened = product(weights_.latent_out, routed, rows, inner, h);
      std::copy(widened.begin(), widened.end(), output.begin());
    } else {
      std::copy(routed.begin(), routed.end(), output.begin());
    }
    if (shared_) {
      shared_->add(*this, hidden, rows, output);
    }
    finish(output, rows);
  }

  io::LayerDescription const& description() const { return weights_.description; }
  Layer& layer() { return layer_; }
  /// Routing of the last forward(), in host memory: [M, k] logical ids (an id >= num_experts is a zero expert) and weights.
  std::vector<std::int32_t> const& topk_ids() const { return ids_; }
  std::vector<float> const& topk_weights() const { return topk_weights_; }
  /// Of the last forward(): [M, num_logits].
  std::vector<float> const& router_logits() const { return logits_; }

 private:
  io::LayerDescription const& d() const { return weights_.description; }

  /// Quantises this rank's experts into the store and drops the originals.
  WeightsOf<Config, Quant> filled_store() {
    auto const experts = static_cast<std::int64_t>(weights_.experts.size());
    std::int64_t const n13 = weights_.w13_rows() * d().expert_hidden();
    std::int64_t const n2 = d().expert_hidden() * d().intermediate;
    for (std::int64_t e = 0; e < experts; ++e) {
      store_.set_expert(e, weights_.w13.data() + e * n13, weights_.w2.data() + e * n2);
      if (d().expert_bias) {
        store_.set_bias(e, weights_.w13_bias.data() + e * weights_.w13_rows(), weights_.w2_bias.data() + e * d().expert_hidden());
      }
    }
    weights_.w13 = {};
    weights_.w2 = {};
    return store_.view();
  }
  typename Layer::Params layer_params(ExpertPlacement const& placement, Quant const& quant) const {
    routing::RouterConfig router = io::router_config(weights_);
    device_.move_pointers(router);
    return {.shape = {d().expert_hidden(), d().intermediate, router.num_experts, router.topk, d().weight_on == io::WeightOn::expert_input},
            .max_tokens_per_rank = max_tokens_,
            .placement = placement,
            .router = router,
            .quantization = quant,
            .activation = {d().activation.kind, d().activation.constants}};
  }

  /// What a layer in the CUDA space reads and writes, and the router's tables there; empty for a host layer.
  struct DeviceArrays {
    DeviceArrays(std::int64_t max_tokens, io::HostLayerWeights<Weight> const& w)
        : bias(copy<float>(w.correction_bias)),
          scale(copy<float>(w.per_expert_scale)),
          table(copy<std::int64_t>(w.hash_table)),
          x(sized(max_tokens * w.description.expert_hidden())),
          y(sized(max_tokens * w.description.expert_hidden())),
          logits(sized(max_tokens * w.description.router.num_logits())),
          joint(sized(max_tokens * w.description.router.num_joint_shared)),
          tokens(sized(max_tokens)) {}
    void move_pointers(routing::RouterConfig& r) const {
      if constexpr (kOnDevice) {
        r.correction_bias = bias.data();
        r.per_expert_scale = scale.data();
        r.hash_table = table.data();
      }
    }
    static std::int64_t sized(std::int64_t n) { return kOnDevice ? n : 0; }
    template <class T>
    static Buffer<T, Space> copy(std::vector<T> const& v) {
      Buffer<T, Space> b(sized(static_cast<std::int64_t>(v.size())));
      if (b.size() > 0) {
        b.copy_from_host(v.data());
      }
      return b;
    }
    Buffer<float, Space> bias, scale;
    Buffer<std::int64_t, Space> table;
    Buffer<float, Space> x, y, logits, joint;
    Buffer<std::int64_t, Space> tokens;
  };

  /// x [rows, H'] → routed_ and the routing, through the layer of either space.
  template <class Probe>
  void run_layer(std::span<float const> x, std::int64_t const* token_ids, std::int64_t rows, Probe& probe) {
    routing::RouterConfig const& r = d().router;
    std::int64_t const width = d().expert_hidden();
    ids_.resize(static_cast<std::size_t>(rows * r.topk));
    topk_weights_.resize(ids_.size());
    ForwardOptions options;
    options.token_ids = token_ids;
    if constexpr (!kOnDevice) {
      options.shared_weights = make_rows(joint_.data(), rows, r.num_joint_shared);
      layer_.forward(make_rows(x.data(), rows, width), make_rows(static_cast<float const*>(logits_.data()), rows, r.num_logits()),
                     make_rows(routed_.data(), rows, width), options, HostStream{}, probe);
      std::copy_n(layer_.topk_ids().data_handle(), ids_.size(), ids_.data());
      std::copy_n(layer_.topk_weights().data_handle(), ids_.size(), topk_weights_.data());
    } else {
      auto to_device = [](auto& buffer, auto const* from, std::size_t n) {
        if (n > 0) {
          Memory<Space>::copy_from_host(buffer.data(), from, n * sizeof(*from));
        }
      };
      auto to_host = [](auto& vector, auto const* from, std::size_t n) {
        if (n > 0) {
          Memory<Space>::copy_to_host(vector.data(), from, n * sizeof(*from));
        }
      };
      to_device(device_.x, x.data(), x.size());
      to_device(device_.logits, logits_.data(), logits_.size());
      if (token_ids != nullptr) {
        to_device(device_.tokens, token_ids, static_cast<std::size_t>(rows));
        options.token_ids = device_.tokens.data();
      }
      options.shared_weights = make_rows(device_.joint.data(), rows, r.num_joint_shared);
      layer_.forward(make_rows(static_cast<float const*>(device_.x.data()), rows, width),
                     make_rows(static_cast<float const*>(device_.logits.data()), rows, r.num_logits()),
                     make_rows(device_.y.data(), rows, width), options, Stream<Space>{}, probe);
      to_host(routed_, device_.y.data(), static_cast<std::size_t>(rows * width));
      to_host(ids_, layer_.topk_ids().data_handle(), ids_.size());
      to_host(topk_weights_, layer_.topk_weights().data_handle(), ids_.size());
      to_host(joint_, device_.joint.data(), joint_.size());
    }
  }

  /// out [rows, n] = x [rows, k] · wᵀ, w [n, k].
  static std::vector<float> product(std::vector<Weight> const& w, std::span<float const> x, std::int64_t rows, std::int64_t k,
                                    std::int64_t n) {
    std::vector<float> wide(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      wide[i] = to_float(w[i]);
    }
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

  /// An id at or past num_experts is a zero expert: it adds w x (identity), or nothing (skip). Spec 01 §10.
  void add_zero_experts(std::span<float const> x, std::span<float> routed, std::int64_t rows, std::int64_t width) {
    if (d().router.num_zero_experts == 0 || d().zero_expert == io::ZeroExpert::skip) {
      return;
    }
    std::int64_t const k = d().router.topk;
    for (std::int64_t t = 0; t < rows; ++t) {
      float sum = 0.0F;
      for (std::int64_t s = t * k; s < (t + 1) * k; ++s) {
        sum += ids_[static_cast<std::size_t>(s)] >= d().router.num_experts ? topk_weights_[static_cast<std::size_t>(s)] : 0.0F;
      }
      for (std::int64_t i = t * width; i < (t + 1) * width; ++i) {
        routed[static_cast<std::size_t>(i)] += sum * x[static_cast<std::size_t>(i)];
      }
    }
  }

  /// The shared experts are experts that every row visits: the same kernel, ids 0 … S-1, their gate as the weight.
  class Shared {
   public:
    using Policy = std::conditional_t<kOnDevice, experts::OneDnn, Experts>;  // beside a device layer they run on the host
    using Kernel = typename Policy::template Kernel<Config, quantization::None, ActivationFormat::standard>;
    Shared(io::HostLayerWeights<Weight> const& w, std::int64_t max_tokens)
        : count_(w.shared.count),
          hidden_(w.description.hidden),
          store_(count_, hidden_, w.shared.intermediate, w.description.shared.activation.gated()),
          kernel_(Shape<Config>({hidden_, w.shared.intermediate, static_cast<int>(count_), static_cast<int>(count_), false}), filled(w),
                  max_tokens, {}, {w.description.shared.activation.kind, w.description.shared.activation.constants}, {}, arena_),
          ids_(static_cast<std::size_t>(max_tokens * count_)),
          weights_(ids_.size()),
          y_(static_cast<std::size_t>(max_tokens * hidden_)) {
      for (std::size_t i = 0; i < ids_.size(); ++i) {
        ids_[i] = static_cast<std::int32_t>(i % static_cast<std::size_t>(count_));
      }
    }
    /// output += gate · FFN_shared(hidden), or the average of both.
    void add(Block const& block, std::span<float const> hidden, std::int64_t rows, std::span<float> output) {
      io::SharedExperts const& s = block.d().shared;
      for (std::int64_t t = 0; t < rows; ++t) {
        for (std::int64_t i = 0; i < count_; ++i) {
          float weight = 1.0F;
          if (s.gate == io::SharedGate::sigmoid) {
            weight = activation::detail::sigmoid(io::detail::dot(block.weights_.shared.gate.data(), hidden.data() + t * hidden_, hidden_));
          } else if (s.gate == io::SharedGate::routing_weight) {
            weight = block.joint_[static_cast<std::size_t>(t * count_ + i)];
          }
          weights_[static_cast<std::size_t>(t * count_ + i)] = weight;
        }
      }
      kernel_.apply({make_rows(hidden.data(), rows, hidden_), make_rows(static_cast<float const*>(nullptr), rows, 0),
                     make_rows(static_cast<std::int32_t const*>(ids_.data()), rows, count_),
                     make_rows(static_cast<float const*>(weights_.data()), rows, count_)},
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
    std::vector<float> weights_;
    std::vector<float> y_;
  };

  /// What some families do to the sum: a bias vector, RMSNorm.
  void finish(std::span<float> output, std::int64_t rows) const {
    std::int64_t const h = d().hidden;
    for (std::int64_t t = 0; t < rows; ++t) {
      float* row = output.data() + t * h;
      if (!weights_.output_bias.empty()) {
        for (std::int64_t i = 0; i < h; ++i) {
          row[i] += weights_.output_bias[static_cast<std::size_t>(i)];
        }
      }
      if (!weights_.post_norm.empty()) {
        io::detail::rms_normalise(row, h, d().rms_norm_eps, row);
        for (std::int64_t i = 0; i < h; ++i) {
          row[i] *= weights_.post_norm[static_cast<std::size_t>(i)];
        }
      }
    }
  }

  io::HostLayerWeights<Weight> weights_;
  std::int64_t max_tokens_;
  experts::WeightStore<Config, Quant, Space> store_;
  DeviceArrays device_;
  Layer layer_;
  std::vector<float> routed_;
  std::vector<float> logits_;
  std::vector<float> joint_;
  std::vector<std::int32_t> ids_;
  std::vector<float> topk_weights_;
  std::optional<Shared> shared_;
};

}  // namespace moe::models
