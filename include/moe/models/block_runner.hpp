// SPDX-License-Identifier: Apache-2.0
// models/block_runner.hpp: one MoE block of a checkpoint: the weights as they were read, the experts' store, and a Runner over them. Rows
// are float32 in host memory, in either space of the layer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/core/rule.hpp"
#include "moe/experts/weights.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/models/block_parts.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/on_host.hpp"

namespace moe::rules {
MOE_RULE(HostBlockElement, "moe: a block in the host space has float32 activations. Fix: Act = float (docs/errors.md#block-element)");
}  // namespace moe::rules

namespace moe::models {

/// What a block's runner takes besides its weights.
template <class Parts>
struct BlockRunnerOptions {
  typename Parts::Chunking::Params chunking{};
  typename Parts::DualBatch::Params dual_batch{};
  typename Parts::Parallel::Params parallel{};
  bool overlap_shared = true;                                    ///< as the runner's
  runner::SharedOutput shared = runner::SharedOutput::complete;  ///< whether `weights` have all columns of the shared experts
  routing::ExpertMapping mapping{};                              ///< as the layer's, for a placement with replicas
  routing::LoadRecorder load{};
};

/// Weight: element that unquantised expert weights are stored in (float, or bf16 to keep a bf16 checkpoint's size). Act: element of the
/// layer's activations; rows are rounded to it on the way in. Loaded: element of the weights as they were read. Parts: BlockParts, or with
/// chunks and as a rank of a grid.
template <class Quant, class Backend, class Experts, class Weight = float, class Act = float, class Loaded = Weight,
          class PartsT = BlockParts<Loaded>>
class BlockRunner {
 public:
  using Config = RuntimeLayer<Act, Weight>;
  using Space = typename Experts::Space;
  static constexpr bool kOnDevice = Space::kKind == SpaceKind::cuda;
  static_assert(sizeof(MetRule<rules::HostBlockElement, kOnDevice || std::is_same_v<Act, float>, Act>) == 1);
  using Layer = ModularKernel<Config, routing::AnyRouter, Quant, Backend, Experts>;
  using HostLayer = typename std::conditional_t<kOnDevice, std::type_identity<runner::OnHost<Layer>>, std::type_identity<Layer>>::type;
  using Parts = PartsT;
  using Runner = moe::Runner<HostLayer, Parts>;
  using Store = experts::WeightStore<Config, Quant, Space>;

  /// Collective over `comm`. `weights` hold the experts that `placement` gives this rank, in its local order; they are moved in.
  /// `fill`: writes the experts' codes and scales itself; `weights` then have no w13 and w2. E_MISMATCH if the ranks' routers have
  /// different weights, for example from different versions of a checkpoint.
  BlockRunner(typename Backend::Comm& comm, io::HostLayerWeights<Loaded>&& weights, ExpertPlacement const& placement,
              std::int64_t max_tokens_per_rank, Quant const& quant = {}, typename Backend::Params const& backend = {},
              BlockRunnerOptions<Parts> const& options = {}, std::function<void(Store&)> const& fill = {})
      : weights_(checked(comm, std::move(weights))),
        store_(moe::detail::build(comm, [&] { return empty_store(quant); })),
        runner_(comm, moe::detail::build(comm, [&] { return filled_store(fill); }),
                moe::detail::build(comm, [&] { return params(placement, max_tokens_per_rank, quant, backend, options); })) {}

  /// Collective. hidden [M, H] contiguous, token_ids [M] or null (hash routing) → output [M, H] contiguous. sequence_length: as in
  /// ForwardOptions. Throws before any work if an argument is wrong (E_ARG, E_CAPACITY); the other ranks then get E_PEER.
  template <class Probe = NoProbe>
  void forward(std::span<float const> hidden, std::int64_t const* token_ids, std::span<float> output, Probe&& probe = {},
               std::int64_t sequence_length = 0) {
    std::int64_t rows = 0;
    try {
      rows = checked_rows(hidden.size(), output.size());
    } catch (...) {
      runner_.abandon();
      throw;
    }
    runner_.forward(make_rows(hidden.data(), rows, d().hidden), make_rows(output.data(), rows, d().hidden),
                    ForwardOptions{.token_ids = token_ids, .sequence_length = sequence_length}, {}, probe);
  }

  io::LayerDescription const& description() const { return d(); }
  Runner& runner() { return runner_; }
  Layer& layer() {
    if constexpr (kOnDevice) {
      return runner_.layer().device();
    } else {
      return runner_.layer();
    }
  }
  /// Routing of the last forward(), in host memory: [M, k] logical ids (an id >= num_experts is a zero expert) and weights.
  std::vector<std::int32_t> topk_ids() { return values(runner_.topk_ids()); }
  std::vector<float> topk_weights() { return values(runner_.topk_weights()); }

 private:
  io::LayerDescription const& d() const { return weights_.description; }

  template <class View>
  static auto values(View const& view) {
    return std::vector<typename View::value_type>(view.data_handle(), view.data_handle() + view.size());
  }

  static io::HostLayerWeights<Loaded> checked(typename Backend::Comm& comm, io::HostLayerWeights<Loaded>&& weights) {
    check_block(comm, weights);
    return std::move(weights);
  }

  /// M. E_ARG.
  std::int64_t checked_rows(std::size_t hidden_size, std::size_t output_size) const {
    auto const width = static_cast<std::size_t>(d().hidden);
    if (hidden_size % width != 0) {
      throw Error(ErrorCode::argument, text("hidden_states: ", hidden_size, " values are not a multiple of the width ", width));
    }
    if (output_size != hidden_size) {
      throw Error(ErrorCode::argument, text("output: ", output_size, " values, expected ", hidden_size));
    }
    return static_cast<std::int64_t>(hidden_size / width);
  }
  Store empty_store(Quant const& quant) const {
    return Store(static_cast<std::int64_t>(weights_.experts.size()), d().expert_hidden(), weights_.intermediate, d().activation.gated(),
                 quant);
  }
  /// Fills the store, or quantises this rank's experts into it and drops the originals.
  WeightsOf<Config, Quant> filled_store(std::function<void(Store&)> const& fill) {
    io::HostLayerWeights<Loaded>& w = weights_;
    std::int64_t const n13 = w.w13_rows() * d().expert_hidden();
    std::int64_t const n2 = d().expert_hidden() * w.intermediate;
    if (fill) fill(store_);
    for (std::int64_t e = 0; e < store_.num_local(); ++e) {
      if (!fill) store_.set_expert(e, w.w13.data() + e * n13, w.w2.data() + e * n2);
      if (d().expert_bias) {
        store_.set_bias(e, w.w13_bias.data() + e * w.w13_rows(), w.w2_bias.data() + e * d().expert_hidden());
      }
    }
    if (d().expert_norm) store_.set_norm(w.expert_norm.data(), d().expert_norm_eps);
    w.w13 = {};
    w.w2 = {};
    return store_.view();
  }
  typename Runner::Params params(ExpertPlacement const& placement, std::int64_t max_tokens, Quant const& quant,
                                 typename Backend::Params const& backend, BlockRunnerOptions<Parts> const& options) const {
    routing::RouterConfig const router = io::router_config(weights_);
    typename Runner::Params p{.layer = {.shape = {d().expert_hidden(), weights_.intermediate, router.num_experts + router.num_fused_shared,
                                                  router.num_slots(), d().weight_on == io::WeightOn::expert_input},
                                        .max_tokens_per_rank = max_tokens,
                                        .placement = placement,
                                        .router = router,
                                        .quantization = quant,
                                        .activation = {d().activation.kind, d().activation.constants},
                                        .backend = backend}};
    set_part_params(p, weights_);
    p.shared.sharding = options.shared;
    p.layer.mapping = options.mapping;
    p.layer.load = options.load;
    p.overlap_shared = options.overlap_shared;
    p.chunking = options.chunking;
    p.dual_batch = options.dual_batch;
    p.parallel = options.parallel;
    return p;
  }

  io::HostLayerWeights<Loaded> weights_;
  Store store_;
  Runner runner_;
};

}  // namespace moe::models
