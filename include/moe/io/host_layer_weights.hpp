// SPDX-License-Identifier: Apache-2.0
// io/host_layer_weights.hpp: the weights of one MoE block in host memory, and which part of them a rank requests.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "moe/io/layer_description.hpp"
#include "moe/routing/row/router_config.hpp"

namespace moe::io {

/// The router of Zaya: h = down x + b; r = RMSNorm(h) norm; r = gelu(fc1 r + b); r = gelu(fc2 r + b); logits = out r. R: router width.
struct RouterMlp {
  std::int64_t width = 0;              ///< R
  std::vector<float> down, down_bias;  ///< [R, H], [R]
  std::vector<float> norm;             ///< [R]
  std::vector<float> fc1, fc1_bias;    ///< [R, R], [R]
  std::vector<float> fc2, fc2_bias;    ///< [R, R], [R]
  std::vector<float> out;              ///< [logits, R]
};

/// Weights of the shared experts, S blocks of width I_s (one block unless each has a routing weight of its own).
template <class T>
struct SharedWeights {
  std::int64_t count = 0;         ///< S; 0: none
  std::int64_t intermediate = 0;  ///< I_s
  std::vector<T> w13;             ///< [S, 2 I_s, H] gate rows first, or [S, I_s, H]
  std::vector<T> w2;              ///< [S, H, I_s]
  std::vector<float> gate;        ///< [H] of SharedGate::sigmoid, else empty
};

/// The weights of one MoE block for the experts that one rank owns. All host memory, row-major, linear weights [out, in]; what the
/// description does not have is empty. H' is the experts' width: the latent width where there is one, else H.
template <class T>
struct HostLayerWeights {
  LayerDescription description;
  std::vector<int> experts;              ///< [L] logical experts, in the order of w13 and w2
  std::int64_t intermediate = 0;         ///< I of this partition
  std::vector<float> router_weight;      ///< [num_logits, H]
  std::vector<float> router_bias;        ///< [num_logits]
  std::vector<float> correction_bias;    ///< [E + Z]
  std::vector<float> per_expert_scale;   ///< [E]
  std::vector<float> router_scale;       ///< [H] of RouterInput::scaled_rms_norm
  RouterMlp router_mlp;                  ///< of RouterInput::mlp
  float global_scale = 1.0F;             ///< multiplies the routed and shared weights (Inkling); router_config() folds it in
  std::vector<std::int64_t> hash_table;  ///< [vocabulary, k]
  std::int64_t vocabulary = 0;
  std::vector<T> w13;                    ///< [L, 2I, H'] gate rows first, or [L, I, H'] without a gate
  std::vector<T> w2;                     ///< [L, H', I]
  std::vector<float> w13_bias, w2_bias;  ///< [L, 2I], [L, H']
  std::vector<T> latent_in, latent_out;  ///< [H', H], [H, H']
  std::vector<float> latent_norm;        ///< [H']
  std::vector<float> latent_in_norm;     ///< [H']
  std::vector<float> expert_norm;        ///< [H'] multiplies an expert's output before it is normalised
  std::vector<float> output_bias;        ///< [H]
  std::vector<float> post_norm;          ///< [H]
  SharedWeights<T> shared;

  /// Rows of one expert's w13 on this partition.
  std::int64_t w13_rows() const { return (description.activation.gated() ? 2 : 1) * intermediate; }
};

/// The router's configuration with its pointers set into the weights. Valid as long as the weights are.
template <class T>
routing::RouterConfig router_config(HostLayerWeights<T> const& w) {
  auto const pointer = [](auto const& v) { return v.empty() ? nullptr : v.data(); };
  routing::RouterConfig r = w.description.router;
  r.correction_bias = pointer(w.correction_bias);
  r.per_expert_scale = pointer(w.per_expert_scale);
  r.hash_table = pointer(w.hash_table);
  r.vocabulary = w.vocabulary;
  r.routed_scaling_factor *= w.global_scale;
  return r;
}

/// The parts of a layer to load.
struct LoadOptions {
  std::optional<std::vector<int>> experts{};  ///< logical experts of this rank; nothing: all of them
  int tp_rank = 0;                            ///< this rank takes rows (w13) and columns (w2) tp_rank I/tp_size … of every expert
  int tp_size = 1;
  std::optional<std::pair<int, int>> shared_tp{};  ///< rank and size for the shared experts, if they differ
  bool matrices = true;                            ///< false: of the routed experts the biases alone; w13 and w2 are read elsewhere
  bool shared = true;                              ///< load the shared experts
  bool shared_matrices = true;                     ///< false: their number, width and gate without w13 and w2, which are read elsewhere
  std::function<void(std::int64_t done, std::int64_t total)> progress{};  ///< called after each expert with bytes in memory

  /// Rank and size that the columns of the shared experts are split by.
  std::pair<int, int> shared_split() const { return shared_tp.value_or(std::pair<int, int>(tp_rank, tp_size)); }
};

}  // namespace moe::io
