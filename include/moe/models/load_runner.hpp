// SPDX-License-Identifier: Apache-2.0
// models/load_runner.hpp: a block of a checkpoint in one call: moe::load_runner<Alias>(directory, layer, group). Include
// models/load_runner_cuda.hpp as well for blocks in the CUDA space.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <filesystem>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/core/host_pool.hpp"
#include "moe/experts/weights.hpp"
#include "moe/io/expert_loader.hpp"
#include "moe/io/layer_weights.hpp"
#include "moe/models/loaded_parts.hpp"
#include "moe/models/preset_match.hpp"
#include "moe/models/shared_store.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/parallel/placement.hpp"
#include "moe/runner/device/product_choices.hpp"
#include "moe/runner/runner.hpp"

namespace moe {

/// A runner with the weights that it borrows. Immovable, as the runner; load_runner() returns it where it is initialised.
template <class RunnerT>
class LoadedRunner {
 public:
  using Runner = RunnerT;
  using Layer = typename Runner::Layer;
  using Space = typename Layer::Space;
  using Act = typename Layer::Act;
  using Comm = typename Layer::Comm;
  using Config = typename Layer::Config;
  using Quant = typename Layer::Quant;

  struct Options {
    std::int64_t max_tokens_per_rank = 0;  ///< the most rows of a forward() on any rank. Required
    /// Which rank has which expert; unset: evenly, in their order. Of as many ranks as the group.
    std::optional<ExpertPlacement> placement{};
    routing::ExpertMapping mapping{};  ///< for a placement whose physical experts are not the logical ones: replicas, load balancing
    Quant quantization{};
    typename Layer::Backend::Params backend{};
    typename Layer::Experts::Params experts{};
    io::Tokens tokens = io::Tokens::all;  ///< which block of a layer that has two: io::from_config()
    int threads = 0;                      ///< that read in the host space; 0: all
    io::LoadProgress progress{};          ///< called while experts are read
    /// Whether shared experts that the checkpoint stores in the runner's scheme are computed in it, where their policy can (Stored), from
    /// half the bytes or less; else they are dense, which was faster where it was measured.
    bool shared_in_scheme = runner::device::kProductChoices.shared_in_scheme;
  };

  /// Collective over `group`. Reads config.json, the weights around the experts and this rank's experts, and constructs the runner. E_ARG
  /// for a checkpoint, layer or tensor that is missing or damaged; E_UNSUPPORTED for a model type or option that is not known; E_CONFIG
  /// where the file and the runner's type differ, naming both values. The other ranks then get E_PEER.
  LoadedRunner(std::filesystem::path const& checkpoint, std::int64_t layer, Comm& group, Options const& options)
      : frame_(moe::detail::build(group, [&] { return read_frame(checkpoint, layer, options); })),
        placement_(moe::detail::build(group, [&] { return checked(options, group.size()); })),
        store_(moe::detail::build(group, [&] { return read_experts(checkpoint, layer, group.rank(), options); })),
        runner_(group, store_.view(), moe::detail::build(group, [&] { return params(options); })) {
    if constexpr (Space::kKind == SpaceKind::cuda) memory_.release(runner_.unread_gate_weight());
  }

  /// Collective; as Runner::forward() with the gate inside.
  void forward(Rows<Act const> hidden, Rows<Act> output, ForwardOptions const& options = {}, Stream<Space> stream = {}) {
    runner_.forward(hidden, output, options, stream);
  }
  /// Collective; as Runner::forward_routed(): gate and router are skipped.
  template <class IdsArg, class WeightsArg>
  void forward_routed(Rows<Act const> hidden, IdsArg const& topk_ids, WeightsArg const& topk_weights, Rows<Act> output,
                      ForwardOptions const& options = {}, Stream<Space> stream = {}) {
    runner_.forward_routed(hidden, topk_ids, topk_weights, output, options, stream);
  }
  Runner& runner() { return runner_; }
  io::LayerDescription const& description() const { return frame_.description; }
  ExpertPlacement const& placement() const { return placement_; }
  /// Whether the experts are the checkpoint's own codes.
  bool direct() const { return direct_; }
  /// Whether the shared experts are, too.
  bool shared_direct() const { return shared_.holds(); }

 private:
  using Weight = models::LoadedElement<typename Runner::Parts>;
  using Frame = io::HostLayerWeights<Weight>;
  using Store = experts::StoreFor<typename Layer::Experts, Config, Quant>;

  Frame read_frame(std::filesystem::path const& checkpoint, std::int64_t layer, Options const& o) {
    io::LayerDescription const d = io::from_config(io::HfConfig::from_file(checkpoint), layer, o.tokens);
    activation::validate(d.activation.kind, d.activation.constants);
    models::match_config<Config>(d, checkpoint.string());
    models::match_parts<typename Runner::Parts>(d, checkpoint.string());
    io::TensorStore const store(checkpoint);
    io::LayerLoader const loader = io::LayerLoader::from_checkpoint(store, d, layer);
    shared_.read(store, loader, o.quantization, o.shared_in_scheme);
    return loader.template load<Weight>({.experts = std::vector<int>{}, .shared_matrices = !shared_.holds()});
  }
  ExpertPlacement checked(Options const& o, int ranks) const {
    if (o.max_tokens_per_rank < 1) throw Error(ErrorCode::argument, text("max_tokens_per_rank: ", o.max_tokens_per_rank, ", at least 1"));
    int const experts = frame_.description.router.num_experts;
    ExpertPlacement const p = o.placement ? *o.placement : ExpertPlacement(experts, ranks);
    if (p.num_logical() != experts || p.ep_size() != ranks) {
      throw Error(ErrorCode::argument, text("placement: of ", p.num_logical(), " experts on ", p.ep_size(), " ranks, the checkpoint has ",
                                            experts, " and the group ", ranks));
    }
    return p;
  }

  Store read_experts(std::filesystem::path const& checkpoint, std::int64_t layer, int rank, Options const& o) {
    io::LayerDescription const& d = frame_.description;
    for (std::int32_t physical : placement_.local_to_physical(rank)) frame_.experts.push_back(placement_.logical(physical));
    io::TensorStore const tensors(checkpoint);
    io::ExpertReader const reader = io::LayerLoader::from_checkpoint(tensors, d, layer).experts();
    io::ExpertLoader<Quant, typename Config::Weight> const loader(tensors, d, reader, o.quantization);
    direct_ = loader.direct();
    auto const count = static_cast<std::int64_t>(frame_.experts.size());
    Store store(count, d.expert_hidden(), d.intermediate, d.activation.gated(), o.quantization);
    models::read_into<Space>(store, loader, frame_.experts, o.threads, o.progress);
    if (d.expert_bias) {
      std::vector<float> b13(static_cast<std::size_t>(d.w13_rows())), b2(static_cast<std::size_t>(d.expert_hidden()));
      for (std::int64_t l = 0; l < count; ++l) {
        reader.read_bias(frame_.experts[static_cast<std::size_t>(l)], b13.data(), b2.data());
        store.set_bias(l, b13.data(), b2.data());
      }
    }
    if (d.expert_norm) store.set_norm(frame_.expert_norm.data(), d.expert_norm_eps);
    return store;
  }

  typename Runner::Params params(Options const& o) {
    io::LayerDescription const& d = frame_.description;
    routing::RouterConfig router = io::router_config(frame_);
    router.correction_bias = memory_.copy(frame_.correction_bias);
    router.per_expert_scale = memory_.copy(frame_.per_expert_scale);
    router.hash_table = memory_.copy(frame_.hash_table);
    typename Runner::Params p{.layer = {.max_tokens_per_rank = o.max_tokens_per_rank,
                                        .placement = placement_,
                                        .router = models::matched_router<Config, typename Layer::RouterType>(router, d.model_type),
                                        .quantization = o.quantization,
                                        .backend = o.backend,
                                        .experts = o.experts,
                                        .mapping = o.mapping}};
    p.layer.shape = {d.expert_hidden(), d.intermediate, router.num_experts, router.topk, d.weight_on == io::WeightOn::expert_input};
    if constexpr (facts::chooses_kind<decltype(p.layer.activation)>()) p.layer.activation.kind = d.activation.kind;
    p.layer.activation.constants = d.activation.constants;
    models::set_loaded_parts<Runner, Weight>(p, frame_, memory_);
    if constexpr (runner::detail::kPresent<typename Runner::Parts::Shared>) shared_.set(p.shared);
    return p;
  }

  bool direct_ = false;
  models::PartMemory<Space> memory_;
  models::SharedStore<typename Runner::Parts::Shared, Space, Act> shared_;
  Frame frame_;
  ExpertPlacement placement_;
  Store store_;
  Runner runner_;
};

/// The block of layer `layer` of a Hugging Face checkpoint directory, as the runner type Alias: one of a model library, models::AnyBlock,
/// or a moe::Runner of the program's own with a gate inside. Collective over `group`.
template <class Alias>
LoadedRunner<Alias> load_runner(std::filesystem::path const& checkpoint, std::int64_t layer, typename Alias::Layer::Comm& group,
                                typename LoadedRunner<Alias>::Options const& options) {
  return LoadedRunner<Alias>(checkpoint, layer, group, options);
}

}  // namespace moe
