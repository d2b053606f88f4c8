// SPDX-License-Identifier: Apache-2.0
// models/device_block.hpp: one MoE block of a checkpoint that runs on the device from its input to its output: gate, layer, projections,
// shared experts and the sum, with all weights in device memory. Plain host C++; the kernels come from a .cu (runner/device/*.cuh).
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "moe/core/cuda_space.hpp"
#include "moe/experts/weights.hpp"
#include "moe/io/host_layer_weights.hpp"
#include "moe/models/block_parts.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/support.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/product_choices.hpp"
#include "moe/runner/device/row_kernels.hpp"
#include "moe/runner/runner.hpp"

namespace moe::models {

/// The parts of any block on the device. The gate has float32 weights and logits; projections and shared experts have the activations'
/// element.
template <class Act>
struct DeviceBlockParts : RunnerDefaults {
  using Gate = runner::gate::Any;
  using Input = runner::transform::Projection<Act>;
  using Output = runner::transform::Projection<Act>;
  using Shared = runner::shared::Dense<Act>;
  using Scaling = runner::scaling::Factor;
  using ZeroExperts = runner::zero_experts::Identity;
  using End = runner::end::BiasNorm;
};

namespace detail {

/// Copies of host arrays in device memory, kept together.
class DeviceCopies {
 public:
  /// The copy of `from`, each value rounded to T; null if it is empty.
  template <class T, class From>
  T const* copy(std::vector<From> const& from) {
    if (from.empty()) return nullptr;
    std::vector<T> values(from.size());
    std::transform(from.begin(), from.end(), values.begin(), [](From v) {
      if constexpr (std::is_integral_v<From>) {
        return static_cast<T>(v);
      } else {
        return from_float<T>(to_float(v));
      }
    });
    std::size_t const bytes = values.size() * sizeof(T);
    memory_.emplace_back(static_cast<std::int64_t>(bytes));
    Memory<space::cuda>::copy_from_host(memory_.back().data(), values.data(), bytes);
    return reinterpret_cast<T const*>(memory_.back().data());
  }
  template <class T, class From>
  Rows<T const> matrix(std::vector<From> const& from, std::int64_t rows, std::int64_t cols) {
    return make_rows(copy<T>(from), from.empty() ? 0 : rows, cols);
  }
  /// Frees the copy at p, if there is one.
  void release(void const* p) {
    std::erase_if(memory_, [p](auto const& buffer) { return buffer.data() == p; });
  }

 private:
  std::vector<Buffer<std::byte, space::cuda>> memory_;
};

}  // namespace detail

/// What a block's runner takes besides its weights.
template <class Parts>
struct DeviceBlockOptions {
  /// Up to this many rows the shared experts run on a side stream beside the routed ones, unless the backend exchanges rows in one call
  /// (one_sided, two_sided): the same bits. 0: never.
  std::int64_t shared_overlap_rows = runner::device::kProductChoices.shared_beside_rows;
  bool overlap_shared = true;  ///< as the runner's
  /// E_UNSUPPORTED if the experts would emulate the quantisation on this device (facts::support_on()).
  bool refuse_emulation = false;
  typename Parts::Chunking::Params chunking{};
  typename Parts::DualBatch::Params dual_batch{};
  typename Parts::Parallel::Params parallel{};
  runner::SharedOutput shared = runner::SharedOutput::complete;  ///< whether `weights` have all columns of the shared experts
  routing::ExpertMapping mapping{};                              ///< as the layer's, for a placement with replicas
  routing::LoadRecorder load{};
};

/// Rows are float32, bf16 or fp16 (Act) in device memory, as are weights that are not quantised. Loaded: element of the weights as read.
/// Parts: DeviceBlockParts, or with chunks, in two halves and as a rank of a grid.
template <class Quant, class Backend, class Experts, class Act = bf16, class Loaded = float, class PartsT = DeviceBlockParts<Act>>
class DeviceBlock {
 public:
  using Config = RuntimeLayer<Act, Act>;
  using Layer = ModularKernel<Config, routing::AnyRouter, Quant, Backend, Experts>;
  using Parts = PartsT;
  using Runner = moe::Runner<Layer, Parts>;
  using Store = experts::StoreFor<Experts, Config, Quant>;
  using Options = DeviceBlockOptions<Parts>;

  /// Collective over `comm`. `weights` hold the experts that `placement` gives this rank, in its local order; all are copied to the device.
  /// `fill`: writes the experts' codes and scales itself; `weights` then have no w13 and w2. E_MISMATCH if the ranks' routers have
  /// different weights. E_UNSUPPORTED if the experts do not compute Quant on this device.
  DeviceBlock(typename Backend::Comm& comm, io::HostLayerWeights<Loaded> const& weights, ExpertPlacement const& placement,
              std::int64_t max_tokens_per_rank, Quant const& quant = {}, typename Backend::Params const& backend = {},
              Options const& options = {}, std::function<void(Store&)> const& fill = {})
      : description_(checked(comm, weights, options)),
        options_(options),
        store_(moe::detail::build(comm, [&] { return filled_store(weights, quant, fill); })),
        runner_(comm, store_.view(),
                moe::detail::build(comm, [&] { return params(weights, placement, max_tokens_per_rank, quant, backend); })) {
    copies_.release(runner_.unread_gate_weight());
  }

  /// Collective. hidden [M, H], token_ids [M] or null (hash routing) → output [M, H], all on the device. Enqueues; options as the runner's.
  template <class Probe = NoProbe>
  void forward(Rows<Act const> hidden, Rows<Act> output, ForwardOptions const& options, cudaStream_t stream, Probe&& probe = {}) {
    runner_.forward(hidden, output, options, stream, probe);
  }
  io::LayerDescription const& description() const { return description_; }
  Runner& runner() { return runner_; }

 private:
  static io::LayerDescription const& checked(typename Backend::Comm& comm, io::HostLayerWeights<Loaded> const& weights,
                                             Options const& options) {
    check_block(comm, weights);
    moe::detail::build(comm, [&] { quantization::check_support<Quant, Experts>(device_architecture(), options.refuse_emulation); });
    return weights.description;
  }
  static Store filled_store(io::HostLayerWeights<Loaded> const& w, Quant const& quant, std::function<void(Store&)> const& fill) {
    io::LayerDescription const& d = w.description;
    Store store(static_cast<std::int64_t>(w.experts.size()), d.expert_hidden(), w.intermediate, d.activation.gated(), quant);
    std::int64_t const n13 = w.w13_rows() * d.expert_hidden();
    std::int64_t const n2 = d.expert_hidden() * w.intermediate;
    if (fill) fill(store);
    for (std::int64_t e = 0; e < store.num_local(); ++e) {
      if (!fill) store.set_expert(e, w.w13.data() + e * n13, w.w2.data() + e * n2);
      if (d.expert_bias) store.set_bias(e, w.w13_bias.data() + e * w.w13_rows(), w.w2_bias.data() + e * d.expert_hidden());
    }
    if (d.expert_norm) store.set_norm(w.expert_norm.data(), d.expert_norm_eps);
    return store;
  }

  typename Runner::Params params(io::HostLayerWeights<Loaded> const& w, ExpertPlacement const& placement, std::int64_t max_tokens,
                                 Quant const& quant, typename Backend::Params const& backend) {
    io::LayerDescription const& d = w.description;
    routing::RouterConfig router = io::router_config(w);
    router.correction_bias = copies_.copy<float>(w.correction_bias);
    router.per_expert_scale = copies_.copy<float>(w.per_expert_scale);
    router.hash_table = copies_.copy<std::int64_t>(w.hash_table);
    typename Runner::Params p{.layer = {.shape = {d.expert_hidden(), w.intermediate, router.num_experts + router.num_fused_shared,
                                                  router.num_slots(), d.weight_on == io::WeightOn::expert_input},
                                        .max_tokens_per_rank = max_tokens,
                                        .placement = placement,
                                        .router = router,
                                        .quantization = quant,
                                        .activation = {d.activation.kind, d.activation.constants},
                                        .backend = backend,
                                        .mapping = options_.mapping,
                                        .load = options_.load}};
    p.hidden = d.hidden;
    p.expert_hidden = d.expert_hidden();
    p.gate = gate(w);
    p.shared = shared(w);
    p.input = {.weight = copies_.matrix<Act>(w.latent_in, d.latent, d.hidden),
               .normalise_result = d.latent_in_norm,
               .result_norm = copies_.copy<float>(w.latent_in_norm),
               .eps = d.rms_norm_eps};
    p.output = {.weight = copies_.matrix<Act>(w.latent_out, d.hidden, d.latent),
                .normalise = d.latent_norm,
                .norm = copies_.copy<float>(w.latent_norm),
                .eps = d.rms_norm_eps};
    p.scaling = {.routed = d.output_scaling_factor, .beside_weights = true};  // a description has one factor, or two that differ
    p.end = {copies_.copy<float>(w.output_bias), d.post_norm, copies_.copy<float>(w.post_norm), d.rms_norm_eps};
    p.overlap_shared = options_.overlap_shared;
    p.chunking = options_.chunking;
    p.dual_batch = options_.dual_batch;
    p.parallel = options_.parallel;
    return p;
  }

  runner::gate::Any::Params gate(io::HostLayerWeights<Loaded> const& w) {
    runner::gate::Any::Params p = gate_params(w);  // what there is; then where it is
    p.bias = p.bias == nullptr ? nullptr : copies_.copy<float>(w.router_bias);
    p.scale = p.scale == nullptr ? nullptr : copies_.copy<float>(w.router_scale);
    io::RouterMlp const& m = w.router_mlp;
    if (p.input != runner::gate::Any::Input::mlp) {
      p.weight = copies_.matrix<float>(w.router_weight, p.weight.extent(0), p.weight.extent(1));
      return p;
    }
    p.weight = copies_.matrix<float>(m.out, p.weight.extent(0), p.weight.extent(1));
    p.mlp = {copies_.matrix<float>(m.down, m.width, w.description.hidden),
             copies_.copy<float>(m.down_bias),
             copies_.copy<float>(m.norm),
             copies_.matrix<float>(m.fc1, m.width, m.width),
             copies_.copy<float>(m.fc1_bias),
             copies_.matrix<float>(m.fc2, m.width, m.width),
             copies_.copy<float>(m.fc2_bias)};
    return p;
  }

  typename runner::shared::Dense<Act>::Params shared(io::HostLayerWeights<Loaded> const& w) {
    auto const host = shared_params(w);
    typename runner::shared::Dense<Act>::Params p;
    p.count = host.count;
    if (p.count == 0) return p;
    p.intermediate = host.intermediate;
    p.activation = host.activation;
    p.gate = host.gate;
    p.average = host.average;
    p.sharding = options_.shared;
    p.gate_vector = copies_.copy<float>(w.shared.gate);
    p.overlap_rows = runner::shared::may_overlap<Backend>() ? options_.shared_overlap_rows : 0;
    auto set = [&](auto& to, auto const& from, std::vector<Loaded> const& values) {
      to.codes = make_blocks(copies_.copy<Act>(values), from.codes.extent(0), from.rows, from.cols);
      to.rows = from.rows;
      to.cols = from.cols;
    };
    set(p.weights.w13, host.weights.w13, w.shared.w13);
    set(p.weights.w2, host.weights.w2, w.shared.w2);
    return p;
  }

  io::LayerDescription description_;
  Options options_;
  detail::DeviceCopies copies_;
  Store store_;
  Runner runner_;
};

}  // namespace moe::models
