// SPDX-License-Identifier: Apache-2.0
// io/layer_weights.hpp: finds and reads the weights of one MoE block, from any checkpoint layout into one layout.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "moe/core/error.hpp"
#include "moe/io/block_metadata.hpp"
#include "moe/io/expert_reader.hpp"
#include "moe/io/host_layer_weights.hpp"
#include "moe/io/layer_description.hpp"
#include "moe/io/layer_from_config.hpp"
#include "moe/io/linear_reader.hpp"
#include "moe/io/one_line.hpp"
#include "moe/io/partition.hpp"
#include "moe/io/shared_reader.hpp"
#include "moe/io/tensor_store.hpp"

namespace moe::io {

/// Reads the parts of one MoE block. from_checkpoint() and from_block() find the block; load() reads everything that a rank needs.
class LayerLoader {
 public:
  /// Layer `layer` of a checkpoint. The store must outlive the loader.
  static LayerLoader from_checkpoint(TensorStore const& store, LayerDescription d, std::int64_t layer) {
    std::vector<std::string> prefixes;
    for (char const* p : {"model.layers.", "model.language_model.layers.", "language_model.model.layers.", "language_model.layers.",
                          "layers.", "backbone.layers.", "transformer.blocks.", "transformer.layers.", "model.text_model.layers.",
                          "model.llm.layers.", "model.encoder.layers.", "model.decoder.layers.", "model.encoder.language_model.layers.",
                          "blocks.", "encoder.layer.", "backbone.encoder.layer."}) {
      prefixes.push_back(text(p, layer, '.'));
    }
    prefixes.push_back(text("encoder.block.", layer, ".layer.1."));
    // Qwen3-Omni holds two language models.
    prefixes.push_back(text(d.model_type == "qwen3_omni_moe_talker_text" ? "talker" : "thinker", ".model.layers.", layer, '.'));
    return {store, std::move(d), prefixes, layer};
  }
  /// The block of a block file.
  static LayerLoader from_block(TensorStore const& store, LayerDescription d) {
    auto const at = store.metadata().find("tensor_prefix");
    if (at == store.metadata().end())
      throw Error(ErrorCode::config, one_line("'", store.label(), "': metadata field 'tensor_prefix' is missing"));
    return {store, std::move(d), {at->second}, 0};
  }

  LayerDescription const& description() const { return d_; }
  /// The routed experts of the block.
  ExpertReader experts() const { return {store_, d_, root_, layer_}; }
  /// The shared experts of the block. The loader must outlive it.
  SharedReader shared() const { return {store_, d_, layer_prefix_, block_.empty() ? root_ : block_, layer_}; }
  /// Prefix of the block's tensors.
  std::string const& root() const { return root_; }

  /// Everything that a rank needs. Throws E_ARG on a missing tensor, a wrong shape or an expert out of range, E_CONFIG if tp_size does
  /// not divide the intermediate size.
  template <class T>
  HostLayerWeights<T> load(LoadOptions const& options = {}) const {
    HostLayerWeights<T> w;
    w.description = d_;
    auto check_rank = [](int rank, int size) {
      if (size >= 1 && rank >= 0 && rank < size) return;
      throw Error(ErrorCode::argument, one_line("tp_rank ", rank, " is out of range [0, ", size, ")"));
    };
    auto const [shared_rank, shared_size] = options.shared_split();
    check_rank(options.tp_rank, options.tp_size);
    check_rank(shared_rank, shared_size);
    if (d_.intermediate % options.tp_size != 0 || (d_.shared.count > 0 && d_.shared.intermediate % shared_size != 0)) {
      throw Error(ErrorCode::config,
                  one_line("tp_size ", std::max(options.tp_size, shared_size), " does not divide the intermediate sizes ", d_.intermediate,
                           " and ", d_.shared.intermediate));
    }
    if (d_.expert_norm && options.tp_size > 1) {
      throw Error(ErrorCode::unsupported, one_line("tp_size ", options.tp_size,
                                                   ": an expert's output is normalised as a whole, so no part of an expert can be used"));
    }
    w.intermediate = d_.intermediate / options.tp_size;
    load_router(w);
    load_experts(w, options);
    SharedReader const reader = shared();
    if (options.shared && d_.shared.count > 0) reader.load(w.shared, options);
    if (d_.shared.count == 0) reader.refuse_any();
    std::int64_t const h = d_.hidden;
    if (d_.latent > 0) {
      constexpr std::array<std::array<char const*, 2>, 3> kNames{{{"fc1_latent_proj", "fc2_latent_proj"},
                                                                  {"routed_expert_down_proj", "routed_expert_up_proj"},
                                                                  {"pre_expert_proj", "post_expert_proj"}}};
      auto const found = std::ranges::find_if(kNames, [&](auto const& names) { return has_linear(store_, root_ + names[0]); });
      auto const& [in, out] = found == kNames.end() ? kNames[0] : *found;
      w.latent_in = linear<T>(root_ + in, d_.latent, h);
      w.latent_out = linear<T>(root_ + out, h, d_.latent);
    }
    if (d_.latent_in_norm) w.latent_in_norm = centred(root_ + "pre_expert_norm.weight", d_.latent);
    if (d_.expert_norm) w.expert_norm = centred(root_ + "experts.post_expert_norm.weight", d_.expert_hidden());
    if (d_.latent_norm) w.latent_norm = vector(root_ + "routed_expert_norm.weight", d_.latent);
    if (d_.output_bias) w.output_bias = vector(root_ + "bias", h);
    if (d_.post_norm) w.post_norm = vector(layer_prefix_ + "post_mlp_layernorm.weight", h);
    return w;
  }

 private:
  LayerLoader(TensorStore const& store, LayerDescription d, std::vector<std::string> const& prefixes, std::int64_t layer)
      : store_(store), d_(std::move(d)), layer_(layer) {
    constexpr std::array kRoots{"", "mlp.", "block_sparse_moe.", "feed_forward.", "ffn.", "mixer.", "moe.", "moe_block."};
    constexpr std::array kRouters{"gate",        "router",        "router.layer", "router.gate", "gate.wg", "router.classifier",
                                  "router.proj", "gate.down_proj"};
    for (std::string const& prefix : prefixes) {
      if (d_.tokens != Tokens::all && find_set(prefix)) return;
      if (d_.expert_of_id && store.contains(prefix + "mlp.experts.0.weight")) {
        layer_prefix_ = prefix;
        root_ = prefix + "mlp.";
        return;
      }
      if (d_.tokens != Tokens::all || d_.expert_of_id) continue;
      for (char const* root : kRoots) {
        for (char const* router : kRouters) {
          if (!has_linear(store, prefix + root + router) && !store.contains(prefix + root + router + "_weight")) continue;
          layer_prefix_ = prefix;
          root_ = prefix + root;
          router_ = root_ + router;
          return;
        }
      }
    }
    throw Error(ErrorCode::argument, one_line("layer ", layer, ": no ", d_.expert_of_id ? "expert" : "router", " weight under '",
                                              prefixes.front(), "' or similar prefixes in '", store.label(), "'"));
  }
  /// The block of d_.tokens in a layer that has two.
  bool find_set(std::string const& prefix) {
    bool const image = d_.tokens == Tokens::image;
    std::string const block = prefix + "mlp.", own = block + (image ? "vision_moe." : "text_moe.");
    bool const apart = has_linear(store_, own + "gate");
    if (!apart && !store_.contains(block + "gate.weight_1")) return false;
    layer_prefix_ = prefix;
    block_ = block;
    root_ = apart ? own : block;
    router_ = apart ? own + "gate" : block + (image ? "gate.weight_1" : "gate.weight");
    return true;
  }

  // Small tensors

  template <class T>
  std::vector<T> linear(std::string const& base, std::int64_t n, std::int64_t k) const {
    if (!check_linear(store_, base, n, k)) {
      throw Error(ErrorCode::argument, one_line("layer ", layer_, ": tensor '", base, ".weight' is missing in '", store_.label(), "'"));
    }
    std::vector<T> out(detail::at(n * k));
    read_linear(store_, base, n, k, d_.quantization, out.data());
    return out;
  }
  /// A vector of n elements; leading dimensions of 1 are dropped ([1, E] of ERNIE).
  std::vector<float> vector(std::string const& tensor, std::int64_t n) const {
    auto const t = store_.find(tensor);
    if (!t) throw Error(ErrorCode::argument, one_line("layer ", layer_, ": tensor '", tensor, "' is missing in '", store_.label(), "'"));
    auto const& shape = t->shape();
    bool const fits = !shape.empty() && shape.back() == n && t->info->elements() == n;
    if (!fits) throw Error(ErrorCode::argument, one_line(t->where(), ": shape ", t->info->shape_text(), ", expected [", n, "]"));
    return t->file->template read<float>(*t->info);
  }

  /// The weights of a norm that are stored as their difference from one.
  std::vector<float> centred(std::string const& tensor, std::int64_t n) const {
    std::vector<float> out = vector(tensor, n);
    std::ranges::for_each(out, [](float& v) { v += 1.0F; });
    return out;
  }

  template <class T>
  void load_router(HostLayerWeights<T>& w) const {
    routing::RouterConfig const& r = d_.router;
    std::int64_t const n = r.num_logits(), h = d_.hidden;
    if (d_.expert_of_id) {                                                // equal scores, so that a chosen expert's weight is 1
      for (int e = 0; e < r.num_experts; ++e) experts().check_shapes(e);  // before allocating the sizes that the configuration states
      w.router_weight.assign(detail::at(n * h), 0.0F);
      w.vocabulary = n;
      w.hash_table.resize(detail::at(n));
      std::iota(w.hash_table.begin(), w.hash_table.end(), std::int64_t{0});
      return;
    }
    if (d_.router_input == RouterInput::mlp) {
      if (store_.contains(root_ + "gate.router_states_scale")) {  // Zaya's later layers
        throw Error(ErrorCode::unsupported, one_line("layer ", layer_, ": its router adds the router states of layer ", layer_ - 1, " ('",
                                                     root_, "gate.router_states_scale'), which a layer alone does not have"));
      }
      load_router_mlp(w.router_mlp);
    } else {
      w.router_weight = router_weight(n, h);
      std::ranges::for_each(w.router_weight, [&](float& v) { v *= d_.router_logit_scale; });
    }
    if (d_.router_bias) w.router_bias = vector(router_ + ".bias", n);
    if (d_.router_input == RouterInput::scaled_rms_norm) w.router_scale = vector(root_ + "router.scale", h);
    if (d_.per_expert_scale) w.per_expert_scale = vector(root_ + "router.per_expert_scale", r.num_experts);
    if (r.num_joint_shared > 0) w.global_scale = vector(root_ + "gate.global_scale", 1)[0];
    if (d_.correction_bias && detail::in_one_list(d_, root_)) {
      StoredTensor const t = store_.at(root_ + "moe_statics.e_score_correction_bias");
      require_shape(t, {2, n});
      w.correction_bias.resize(detail::at(n));
      t.file->read_elements(*t.info, d_.tokens == Tokens::image ? n : 0, n, w.correction_bias.data());
    } else if (d_.correction_bias) {
      constexpr std::array kNames{"gate.e_score_correction_bias",
                                  "e_score_correction_bias",
                                  "moe_statics.e_score_correction_bias",
                                  "gate.moe_statics.e_score_correction_bias",
                                  "experts.e_score_correction_bias",
                                  "router.e_score_correction_bias",
                                  "expert_bias",
                                  "router.expert_bias",
                                  "gate.balancing_biases",
                                  "router_bias",
                                  "gate.bias",
                                  "gate.expert_bias"};
      auto const found = std::ranges::find_if(kNames, [&](char const* name_) { return store_.contains(root_ + name_); });
      std::string const beside = layer_prefix_ + "moe.router.expert_bias";  // Kolibri-1
      if (found == kNames.end() && !store_.contains(beside)) {
        throw Error(ErrorCode::argument, one_line("layer ", layer_, ": tensor '", root_, kNames[0],
                                                  "' (the selection bias) is missing in '", store_.label(), "'"));
      }
      w.correction_bias = vector(found == kNames.end() ? beside : root_ + *found, r.num_experts + r.num_zero_experts);
    }
    if (r.selection == routing::Selection::hash_table) {
      StoredTensor const t = store_.at(root_ + "gate.tid2eid");
      if (t.shape().size() != 2 || t.shape()[1] != r.topk) {
        throw Error(ErrorCode::argument, one_line(t.where(), ": shape ", t.info->shape_text(), ", expected [vocabulary, ", r.topk, "]"));
      }
      w.vocabulary = t.shape()[0];
      w.hash_table = t.file->template read<std::int64_t>(*t.info);
      for (std::int64_t id : w.hash_table) {
        if (id < 0 || id >= r.num_experts)
          throw Error(ErrorCode::argument, one_line(t.where(), ": expert ", id, " is out of range [0, ", r.num_experts, ")"));
      }
    }
  }
  /// [n, H], as a linear layer or, in the image encoder of dots3-note and in ERNIE-4.5-VL (transposed), as a tensor of its own.
  std::vector<float> router_weight(std::int64_t n, std::int64_t h) const {
    if (detail::in_one_list(d_, root_)) {
      StoredTensor const t = store_.at(router_);
      require_shape(t, {h, n});
      auto const stored = t.file->template read<float>(*t.info);
      std::vector<float> out(stored.size());
      detail::transpose(stored.data(), h, n, out.data());
      return out;
    }
    auto const t = store_.find(router_ + "_weight");
    if (!t) return linear<float>(router_, n, h);
    require_shape(*t, {n, h});
    return t->file->template read<float>(*t->info);
  }
  void load_router_mlp(RouterMlp& m) const {
    std::string const base = root_ + "gate.";
    StoredTensor const down = store_.at(base + "down_proj.weight");
    if (down.shape().size() != 2)
      throw Error(ErrorCode::argument,
                  one_line(down.where(), ": shape ", down.info->shape_text(), ", expected [router width, ", d_.hidden, "]"));
    std::int64_t const r = m.width = down.shape()[0];
    m.down = linear<float>(base + "down_proj", r, d_.hidden);
    m.down_bias = vector(base + "down_proj.bias", r);
    m.norm = vector(base + "router_mlp.norm.weight", r);
    m.fc1 = linear<float>(base + "router_mlp.fc1", r, r);
    m.fc1_bias = vector(base + "router_mlp.fc1.bias", r);
    m.fc2 = linear<float>(base + "router_mlp.fc2", r, r);
    m.fc2_bias = vector(base + "router_mlp.fc2.bias", r);
    m.out = linear<float>(base + "router_mlp.out_proj", d_.router.num_logits(), r);
  }

  // Experts

  template <class T>
  void load_experts(HostLayerWeights<T>& w, LoadOptions const& options) const {
    if (options.experts) {
      w.experts = *options.experts;
    } else {
      w.experts.resize(detail::at(d_.router.num_experts));
      std::iota(w.experts.begin(), w.experts.end(), 0);
    }
    LayerDescription stored = d_;
    stored.quantization.split = options.tp_size > 1;
    ExpertReader const reader(store_, stored, root_, layer_);
    std::int64_t const h = d_.expert_hidden(), full = d_.intermediate, part = w.intermediate, rows = w.w13_rows();
    auto const count = static_cast<std::int64_t>(w.experts.size());
    bool const gated = d_.activation.gated(), whole = options.tp_size == 1;
    for (int e : w.experts) reader.check_shapes(e);  // before allocating the sizes that the configuration states
    if (options.matrices) {
      w.w13.resize(detail::at(count * rows * h));
      w.w2.resize(detail::at(count * h * part));
    }
    std::vector<T> full13, full2;
    if (!whole && options.matrices) {
      full13.resize(detail::at(d_.w13_rows() * h));
      full2.resize(detail::at(h * full));
    }
    if (d_.expert_bias) {
      w.w13_bias.resize(detail::at(count * rows));
      w.w2_bias.resize(detail::at(count * h));
    }
    std::int64_t const first = part * options.tp_rank;
    auto const read_matrices = [&](int e, T* out13, T* out2) {
      if (whole) return reader.read(e, out13, out2);
      reader.read(e, full13.data(), full2.data());
      detail::cut(full13, full2, h, full, part, first, gated, out13, out2);
    };
    for (std::int64_t l = 0; l < count; ++l) {
      int const e = w.experts[detail::at(l)];
      if (options.matrices) read_matrices(e, w.w13.data() + l * rows * h, w.w2.data() + l * h * part);
      if (d_.expert_bias) {
        std::vector<float> b13(detail::at(d_.w13_rows())), b2(detail::at(h));
        reader.read_bias(e, b13.data(), b2.data());
        float* const to = w.w13_bias.data() + l * rows;
        std::copy_n(b13.data() + first, part, to);
        if (gated) std::copy_n(b13.data() + full + first, part, to + part);
        // The partitions' outputs are summed, so only one of them may add the bias.
        if (options.tp_rank == 0) std::ranges::copy(b2, w.w2_bias.data() + l * h);
      }
      std::int64_t const bytes = (rows * h + h * part) * static_cast<std::int64_t>(sizeof(T));
      if (options.progress && options.matrices) options.progress((l + 1) * bytes, count * bytes);
    }
  }

  TensorStore const& store_;
  LayerDescription d_;
  std::int64_t layer_;
  std::string layer_prefix_, root_, router_;
  std::string block_;  ///< of two sets of experts: the prefix of what they share; else empty
};

/// Layer `layer` of a Hugging Face checkpoint directory: config.json describes the computation; the tensors of the requested experts are
/// read. `tokens`: as in from_config().
template <class T>
HostLayerWeights<T> load_checkpoint_layer(std::filesystem::path const& directory, std::int64_t layer, LoadOptions const& options = {},
                                          Tokens tokens = Tokens::all) {
  LayerDescription d = from_config(HfConfig::from_file(directory), layer, tokens);
  TensorStore const store(directory);
  return LayerLoader::from_checkpoint(store, std::move(d), layer).load<T>(options);
}

/// The block of a block file, described by its metadata.
template <class T>
HostLayerWeights<T> load_block(TensorStore const& store, LoadOptions const& options = {}) {
  return LayerLoader::from_block(store, from_block_metadata(store.metadata(), store.label())).load<T>(options);
}

}  // namespace moe::io
