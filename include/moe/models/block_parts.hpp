// SPDX-License-Identifier: Apache-2.0
// models/block_parts.hpp: the parts of any block that io::LayerDescription describes, chosen at run time, over the weights of a checkpoint.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "moe/experts/onednn.hpp"
#include "moe/io/host_layer_weights.hpp"
#include "moe/io/one_line.hpp"
#include "moe/parallel/construction.hpp"
#include "moe/parallel/fingerprint.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"

namespace moe::models {

/// Weight: element of projections and shared experts as they were read.
template <class Weight>
struct BlockParts : RunnerDefaults {
  using Gate = runner::gate::Any;
  using Input = runner::transform::Projection<Weight>;
  using Output = runner::transform::Projection<Weight>;
  using Shared = runner::shared::Separate<experts::OneDnn, Weight>;
  using Scaling = runner::scaling::Factor;
  using ZeroExperts = runner::zero_experts::Identity;
  using End = runner::end::BiasNorm;
};

/// The same as one rank of a grid, in batches of any size. Host space.
template <class Weight, class Comm>
struct GridBlockParts : BlockParts<Weight> {
  using Chunking = runner::chunking::Lockstep;
  using Parallel = runner::parallel::Groups<Comm>;
};

namespace detail {

template <class T>
T const* pointer(std::vector<T> const& v) {
  return v.empty() ? nullptr : v.data();
}
template <class T>
Rows<T const> matrix(std::vector<T> const& v, std::int64_t rows, std::int64_t cols) {
  return make_rows(pointer(v), v.empty() ? 0 : rows, cols);
}

}  // namespace detail

/// Collective over `comm`. E_UNSUPPORTED, E_CONFIG for a layer that no block computes; E_MISMATCH if the ranks' routers have different
/// weights, for example from different versions of a checkpoint.
template <class Comm, class Weight>
void check_block(Comm& comm, io::HostLayerWeights<Weight> const& w) {
  moe::detail::build(comm, [&] { activation::validate(w.description.activation.kind, w.description.activation.constants); });
  io::RouterMlp const& mlp = w.router_mlp;
  std::uint64_t hash = fnv1a({});
  auto add = [&](auto const& v) { hash = fnv1a({reinterpret_cast<char const*>(v.data()), v.size() * sizeof v[0]}, hash); };
  for (auto const* v : {&w.router_weight, &w.router_bias, &w.correction_bias, &w.per_expert_scale, &w.router_scale, &mlp.down,
                        &mlp.down_bias, &mlp.norm, &mlp.fc1, &mlp.fc1_bias, &mlp.fc2, &mlp.fc2_bias, &mlp.out}) {
    add(*v);
  }
  add(w.hash_table);
  Fingerprint weights;
  weights.add("the router's weights (hash)", hash);
  if (w.description.expert_norm) {
    hash = fnv1a({});
    add(w.expert_norm);
    weights.add("the norm of the experts' outputs (hash)", hash);
  }
  moe::detail::agree_on_fingerprint(comm, weights);
}

/// Views of the weights, which must outlive them.
template <class Weight>
runner::gate::Any::Params gate_params(io::HostLayerWeights<Weight> const& w) {
  using Input = runner::gate::Any::Input;
  io::LayerDescription const& d = w.description;
  runner::gate::Any::Params p;
  p.eps = d.rms_norm_eps;
  p.weight = detail::matrix(w.router_weight, d.router.num_logits(), d.hidden);
  p.bias = detail::pointer(w.router_bias);
  if (d.router_input == io::RouterInput::scaled_rms_norm) {
    p.input = Input::scaled_rms_norm;
    p.scale = detail::pointer(w.router_scale);
  }
  if (d.router_input == io::RouterInput::mlp) {
    io::RouterMlp const& m = w.router_mlp;
    p.input = Input::mlp;
    p.weight = detail::matrix(m.out, d.router.num_logits(), m.width);
    p.bias = nullptr;
    p.mlp = {detail::matrix(m.down, m.width, d.hidden),
             detail::pointer(m.down_bias),
             detail::pointer(m.norm),
             detail::matrix(m.fc1, m.width, m.width),
             detail::pointer(m.fc1_bias),
             detail::matrix(m.fc2, m.width, m.width),
             detail::pointer(m.fc2_bias)};
  }
  return p;
}

template <class Weight>
typename BlockParts<Weight>::Shared::Params shared_params(io::HostLayerWeights<Weight> const& w) {
  io::LayerDescription const& d = w.description;
  typename BlockParts<Weight>::Shared::Params p;
  if (d.shared.count == 0) return p;
  std::int64_t const count = w.shared.count;
  std::int64_t const width = w.shared.intermediate;
  p.count = static_cast<int>(count);
  p.intermediate = width;
  p.activation = {d.shared.activation.kind, d.shared.activation.constants};
  auto set = [&](auto& m, std::vector<Weight> const& values, std::int64_t rows, std::int64_t cols) {
    m.codes = make_blocks(values.data(), count, rows, cols);
    m.scales = make_rows(m.scales.data_handle(), count, 0);
    m.rows = rows;
    m.cols = cols;
  };
  set(p.weights.w13, w.shared.w13, (d.shared.activation.gated() ? 2 : 1) * width, d.hidden);
  set(p.weights.w2, w.shared.w2, d.hidden, width);
  p.gate = d.shared.gate == io::SharedGate::sigmoid          ? runner::shared::Gate::sigmoid
           : d.shared.gate == io::SharedGate::routing_weight ? runner::shared::Gate::routing_weight
                                                             : runner::shared::Gate::none;
  p.gate_vector = detail::pointer(w.shared.gate);
  p.average = d.shared.combination == io::Combination::average;
  return p;
}

/// The runner's parameters but for its layer's.
template <class Params, class Weight>
void set_part_params(Params& p, io::HostLayerWeights<Weight> const& w) {
  io::LayerDescription const& d = w.description;
  p.hidden = d.hidden;
  p.expert_hidden = d.expert_hidden();
  p.gate = gate_params(w);
  p.shared = shared_params(w);
  p.input = {.weight = detail::matrix(w.latent_in, d.latent, d.hidden),
             .normalise_result = d.latent_in_norm,
             .result_norm = detail::pointer(w.latent_in_norm),
             .eps = d.rms_norm_eps};
  p.output = {.weight = detail::matrix(w.latent_out, d.hidden, d.latent),
              .normalise = d.latent_norm,
              .norm = detail::pointer(w.latent_norm),
              .eps = d.rms_norm_eps};
  p.scaling = {.routed = d.output_scaling_factor, .beside_weights = true};  // a description has one factor, or two that differ
  p.end = {detail::pointer(w.output_bias), d.post_norm, detail::pointer(w.post_norm), d.rms_norm_eps};
}

/// Logits [rows, num_logits] of hidden states [rows, H] (contiguous, host), as a block's gate computes them: before soft-capping, scoring
/// and selection bias. E_ARG if the number of elements is not a multiple of H.
template <class Weight>
std::vector<float> compute_router_logits(io::HostLayerWeights<Weight> const& w, std::span<float const> hidden) {
  auto const total = static_cast<std::int64_t>(hidden.size());
  std::int64_t const h = w.description.hidden;
  if (total % h != 0) throw Error(ErrorCode::argument, io::one_line("hidden: ", total, " elements are not a multiple of hidden_size ", h));
  Arena<space::host> arena;
  runner::gate::Any::Part<space::host, float> gate(gate_params(w), {h, h, total / h}, arena);
  auto const logits = gate.logits(make_rows(hidden.data(), total / h, h), {});
  return {logits.data_handle(), logits.data_handle() + logits.size()};
}

}  // namespace moe::models
