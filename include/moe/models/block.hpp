// SPDX-License-Identifier: Apache-2.0
// models/block.hpp: one MoE block of a checkpoint: a ModularKernel in either space inside the frame of its family.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "moe/experts/weights.hpp"
#include "moe/models/block_frame.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/parallel/fingerprint.hpp"
#include "moe/routing/any_router.hpp"

namespace moe::models {

/// Every semantic of io::LayerDescription, for rows [M, H] float32 of this rank in host memory.
/// Weight: element that unquantised expert weights are stored in (float, or bf16 to keep a bf16 checkpoint's size). Act: element of the
/// layer's activations; rows are rounded to it on the way in. Loaded: element of the weights as they were read.
template <class Quant, class Backend, class Experts, class Weight = float, class Act = float, class Loaded = Weight>
class Block {
 public:
  using Config = RuntimeLayer<Act, Weight>;
  using Space = typename Experts::Space;
  using Layer = ModularKernel<Config, routing::AnyRouter, Quant, Backend, Experts>;
  using Store = experts::WeightStore<Config, Quant, Space>;
  static constexpr bool kOnDevice = Space::kKind == SpaceKind::cuda;
  static constexpr bool kRounds = !std::is_same_v<Act, float>;

  /// Collective over `comm`. `weights` hold the experts that `placement` gives this rank, in its local order; they are moved in.
  /// E_MISMATCH if the ranks' routers have different weights, for example from different versions of a checkpoint.
  Block(typename Backend::Comm& comm, io::HostLayerWeights<Loaded>&& weights, ExpertPlacement const& placement,
        std::int64_t max_tokens_per_rank, Quant const& quant = {}, typename Backend::Params const& backend = {})
      : frame_(agreed_frame(comm, std::move(weights), max_tokens_per_rank)),
        store_(moe::detail::build(comm, [&] { return empty_store(quant); })),
        device_(moe::detail::build(comm, [&] { return DeviceArrays(frame_); })),
        routed_(moe::detail::build(
            comm, [&] { return std::vector<float>(static_cast<std::size_t>(max_tokens_per_rank * d().expert_hidden())); })),
        layer_(comm, moe::detail::build(comm, [&] { return filled_store(); }),
               moe::detail::build(comm, [&] { return layer_params(placement, quant, backend); })) {}

  /// Collective. hidden [M, H] contiguous, token_ids [M] or null (hash routing) → output [M, H] contiguous. Throws before any work if an
  /// argument is wrong (E_ARG, E_CAPACITY); the other ranks then get E_PEER.
  template <class Probe = NoProbe>
  void forward(std::span<float const> hidden, std::int64_t const* token_ids, std::span<float> output, Probe&& probe = {}) {
    std::int64_t rows = 0;
    typename BlockFrame<Loaded>::LayerInput in;
    ForwardOptions options;
    try {
      rows = checked_rows(hidden.size(), output.size());
      probe.begin(Phase::route);
      in = frame_.enter(hidden);
      probe.end(Phase::route);
      ids_.resize(static_cast<std::size_t>(rows * d().router.topk));
      topk_weights_.resize(ids_.size());
      options = bring(in, token_ids, rows);
    } catch (...) {
      layer_.exchange().abandon(Stream<Space>{});  // the other ranks wait in the layer
      throw;
    }
    run_layer(in, options, rows, probe);
    frame_.leave(hidden, in, std::span(routed_).first(in.x.size()), ids_, topk_weights_, output);
  }

  io::LayerDescription const& description() const { return d(); }
  Layer& layer() { return layer_; }
  /// Routing of the last forward(), in host memory: [M, k] logical ids (an id >= num_experts is a zero expert) and weights.
  std::vector<std::int32_t> const& topk_ids() const { return ids_; }
  std::vector<float> const& topk_weights() const { return topk_weights_; }

 private:
  io::LayerDescription const& d() const { return frame_.description(); }

  static BlockFrame<Loaded> agreed_frame(typename Backend::Comm& comm, io::HostLayerWeights<Loaded>&& weights, std::int64_t max_tokens) {
    auto frame = moe::detail::build(comm, [&] { return BlockFrame<Loaded>(std::move(weights), max_tokens); });
    io::HostLayerWeights<Loaded> const& w = frame.weights();
    std::uint64_t hash = fnv1a({});
    auto add = [&](auto const& v) { hash = fnv1a({reinterpret_cast<char const*>(v.data()), v.size() * sizeof v[0]}, hash); };
    io::RouterMlp const& mlp = w.router_mlp;
    for (auto const* v : {&w.router_weight, &w.router_bias, &w.correction_bias, &w.per_expert_scale, &w.router_scale, &mlp.down,
                          &mlp.down_bias, &mlp.norm, &mlp.fc1, &mlp.fc1_bias, &mlp.fc2, &mlp.fc2_bias, &mlp.out}) {
      add(*v);
    }
    add(w.hash_table);
    moe::detail::agree_on_fingerprint(comm, Fingerprint().add("the router's weights (hash)", hash));
    return frame;
  }

  /// M. E_ARG, E_CAPACITY.
  std::int64_t checked_rows(std::size_t hidden_size, std::size_t output_size) const {
    auto const width = static_cast<std::size_t>(d().hidden);
    if (hidden_size % width != 0) {
      throw Error(ErrorCode::argument, text("hidden_states: ", hidden_size, " values are not a multiple of the width ", width));
    }
    auto const rows = static_cast<std::int64_t>(hidden_size / width);
    if (rows > frame_.max_tokens()) {
      throw Error(ErrorCode::capacity, text("hidden_states: ", rows, " rows exceed max_tokens_per_rank ", frame_.max_tokens()));
    }
    if (output_size != hidden_size) {
      throw Error(ErrorCode::argument, text("output: ", output_size, " values, expected ", hidden_size));
    }
    return rows;
  }
  Store empty_store(Quant const& quant) const {
    return Store(static_cast<std::int64_t>(frame_.weights().experts.size()), d().expert_hidden(), d().intermediate, d().activation.gated(),
                 quant);
  }
  /// Quantises this rank's experts into the store and drops the originals.
  WeightsOf<Config, Quant> filled_store() {
    io::HostLayerWeights<Loaded>& w = frame_.weights();
    std::int64_t const n13 = w.w13_rows() * d().expert_hidden();
    std::int64_t const n2 = d().expert_hidden() * d().intermediate;
    for (std::int64_t e = 0; e < store_.num_local(); ++e) {
      store_.set_expert(e, w.w13.data() + e * n13, w.w2.data() + e * n2);
      if (d().expert_bias) {
        store_.set_bias(e, w.w13_bias.data() + e * w.w13_rows(), w.w2_bias.data() + e * d().expert_hidden());
      }
    }
    w.w13 = {};
    w.w2 = {};
    return store_.view();
  }
  typename Layer::Params layer_params(ExpertPlacement const& placement, Quant const& quant, typename Backend::Params const& backend) const {
    routing::RouterConfig router = io::router_config(frame_.weights());
    device_.move_pointers(router);
    return {.shape = {d().expert_hidden(), d().intermediate, router.num_experts, router.topk, d().weight_on == io::WeightOn::expert_input},
            .max_tokens_per_rank = frame_.max_tokens(),
            .placement = placement,
            .router = router,
            .quantization = quant,
            .activation = {d().activation.kind, d().activation.constants},
            .backend = backend};
  }

  /// The arrays that a layer in the CUDA space reads and writes, and the router's tables there; empty for a host layer.
  struct DeviceArrays {
    explicit DeviceArrays(BlockFrame<Loaded> const& frame) {
      if constexpr (kOnDevice) {
        io::LayerDescription const& d = frame.description();
        fill(bias, frame.weights().correction_bias);
        fill(scale, frame.weights().per_expert_scale);
        fill(table, frame.weights().hash_table);
        x = Buffer<Act, Space>(frame.max_tokens() * d.expert_hidden());
        y = Buffer<Act, Space>(frame.max_tokens() * d.expert_hidden());
        logits = Buffer<float, Space>(frame.max_tokens() * d.router.num_logits());
        joint = Buffer<float, Space>(frame.max_tokens() * d.router.num_joint_shared);
        tokens = Buffer<std::int64_t, Space>(frame.max_tokens());
      }
    }
    void move_pointers(routing::RouterConfig& r) const {
      if constexpr (kOnDevice) {
        r.correction_bias = bias.data();
        r.per_expert_scale = scale.data();
        r.hash_table = table.data();
      }
    }
    template <class T>
    static void fill(Buffer<T, Space>& to, std::vector<T> const& from) {
      to = Buffer<T, Space>(static_cast<std::int64_t>(from.size()));
      if (!from.empty()) {
        to.copy_from_host(from.data());
      }
    }
    Buffer<float, Space> bias, scale;
    Buffer<std::int64_t, Space> table;
    Buffer<Act, Space> x, y;
    Buffer<float, Space> logits, joint;
    Buffer<std::int64_t, Space> tokens;
  };

  /// Copies the layer's input to where the layer reads it.
  ForwardOptions bring(typename BlockFrame<Loaded>::LayerInput const& in, std::int64_t const* token_ids, std::int64_t rows) {
    ForwardOptions options;
    options.token_ids = token_ids;
    rounded_.assign(kRounds ? in.x.size() : 0, Act{});
    if constexpr (kRounds) std::transform(in.x.begin(), in.x.end(), rounded_.begin(), [](float v) { return from_float<Act>(v); });
    if constexpr (!kOnDevice) {
      static_assert(!kRounds, "a block in the host space has float32 activations");
      options.shared_weights = make_rows(in.joint.data(), rows, d().router.num_joint_shared);
    } else {
      auto to_device = [](auto& buffer, auto const* from, std::size_t n) {
        if (n > 0) {
          Memory<Space>::copy_from_host(buffer.data(), from, n * sizeof(*from));
        }
      };
      if constexpr (kRounds) {
        to_device(device_.x, rounded_.data(), rounded_.size());
      } else {
        to_device(device_.x, in.x.data(), in.x.size());
      }
      to_device(device_.logits, in.logits.data(), in.logits.size());
      if (token_ids != nullptr) {
        to_device(device_.tokens, token_ids, static_cast<std::size_t>(rows));
        options.token_ids = device_.tokens.data();
      }
      options.shared_weights = make_rows(device_.joint.data(), rows, d().router.num_joint_shared);
    }
    return options;
  }

  /// in → routed_ and the routing, through the layer of either space.
  template <class Probe>
  void run_layer(typename BlockFrame<Loaded>::LayerInput const& in, ForwardOptions const& options, std::int64_t rows, Probe& probe) {
    std::int64_t const width = d().expert_hidden();
    int const num_logits = d().router.num_logits();
    if constexpr (!kOnDevice) {
      layer_.forward(make_rows(in.x.data(), rows, width), make_rows(in.logits.data(), rows, num_logits),
                     make_rows(routed_.data(), rows, width), options, HostStream{}, probe);
      std::copy_n(layer_.topk_ids().data_handle(), ids_.size(), ids_.data());
      std::copy_n(layer_.topk_weights().data_handle(), ids_.size(), topk_weights_.data());
    } else {
      auto to_host = [](auto* to, auto const* from, std::size_t n) {
        if (n > 0) {
          Memory<Space>::copy_to_host(to, from, n * sizeof(*from));
        }
      };
      layer_.forward(make_rows(static_cast<Act const*>(device_.x.data()), rows, width),
                     make_rows(static_cast<float const*>(device_.logits.data()), rows, num_logits),
                     make_rows(device_.y.data(), rows, width), options, Stream<Space>{}, probe);
      if constexpr (requires { layer_.exchange().wait(Stream<Space>{}); }) {
        layer_.exchange().wait(Stream<Space>{});  // a copy to the host would wait for a dead rank for ever
      } else if constexpr (requires { layer_.exchange().check(); }) {
        Memory<Space>::synchronize(Stream<Space>{});  // kernels that wait for peers have a deadline
        layer_.exchange().check();
      }
      if constexpr (kRounds) {
        to_host(rounded_.data(), device_.y.data(), rounded_.size());
        std::transform(rounded_.begin(), rounded_.end(), routed_.begin(), [](Act v) { return to_float(v); });
      } else {
        to_host(routed_.data(), device_.y.data(), static_cast<std::size_t>(rows * width));
      }
      to_host(ids_.data(), layer_.topk_ids().data_handle(), ids_.size());
      to_host(topk_weights_.data(), layer_.topk_weights().data_handle(), ids_.size());
      to_host(in.joint.data(), device_.joint.data(), in.joint.size());
    }
  }

  BlockFrame<Loaded> frame_;
  Store store_;
  DeviceArrays device_;
  std::vector<float> routed_;
  Layer layer_;
  std::vector<Act> rounded_;  // only where Act is not float
  std::vector<std::int32_t> ids_;
  std::vector<float> topk_weights_;
};

}  // namespace moe::models
