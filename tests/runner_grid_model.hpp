// SPDX-License-Identifier: Apache-2.0
// tests/runner_grid_model.hpp: a small model whose weights all ranks of a grid know, its parts for one rank, and its output on one rank in
// the host space: what the grids of both spaces are compared with.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/experts/weights.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/any_router.hpp"
#include "moe/runner/host/primitives.hpp"
#include "moe/runner/runner.hpp"
#include "numbers.hpp"

namespace moe_test::grid {

using namespace moe;
using moe_test::bf16_numbers;
using runner::SharedOutput;
inline constexpr int kHidden = 64, kLatent = 32, kIntermediate = 32, kShared = 32, kExperts = 8, kZero = 2, kTopK = 3, kMost = 7;

/// Rows [rank · part, …) of both halves of w13 [2 full, cols], and columns of w2 [cols, full].
inline std::vector<float> cut13(std::vector<float> const& w, int full, int cols, int rank, int size) {
  std::vector<float> out;
  int const part = full / size;
  for (int half : {0, full}) out.insert(out.end(), w.begin() + (half + rank * part) * cols, w.begin() + (half + (rank + 1) * part) * cols);
  return out;
}
inline std::vector<float> cut2(std::vector<float> const& w, int full, int cols, int rank, int size) {
  std::vector<float> out;
  int const part = full / size;
  for (int r = 0; r < cols; ++r) out.insert(out.end(), w.begin() + r * full + rank * part, w.begin() + r * full + (rank + 1) * part);
  return out;
}

/// A group of ranks for MPI_Comm_split(): its kind, and which group of this kind this rank is in.
struct GridGroup {
  std::string kind;
  int color;
};
/// The ranks that a rank's layer connects, and its TP group.
inline GridGroup layer_ranks(MoeParallel const& p) {
  if (runner::layer_group(p) == runner::LayerGroup::ep)
    return p.moe_tp_size == 1 ? GridGroup{"ep", 0} : GridGroup{text("ep of ", p.moe_tp_size), p.moe_tp_rank};
  return {text("tokens ", p.tp_size), p.tp_rank};
}
inline GridGroup tp_ranks(MoeParallel const& p) { return {text("tp ", p.tp_size), p.flat_rank / p.tp_size}; }

/// What a block has.
struct Form {
  bool latent, norm;
  SharedOutput shared;
  bool reduce_results = true;
  bool overlap_shared = true;
};

/// Weights that all ranks know.
struct Model {
  Form form;
  int experts = kExperts;
  int zero = kZero;  ///< zero experts
  int hidden = kHidden, latent = kLatent;
  int padding = 0;  ///< columns that the layer has behind the routed path's; its weights there are not zero
  std::vector<float> gate = bf16_numbers(1, (experts + zero) * hidden), in = bf16_numbers(2, latent* hidden),
                     out = bf16_numbers(3, hidden* latent);
  std::vector<float> shared13 = bf16_numbers(4, 2 * kShared * hidden), shared2 = bf16_numbers(5, hidden* kShared),
                     bias = bf16_numbers(6, hidden);
  /// Of the routed path, and of the layer.
  int width() const { return form.latent ? latent : hidden; }
  int layer_width() const { return width() + padding; }
  std::vector<float> w13(int e) const { return bf16_numbers(100 + e, 2 * kIntermediate * width()); }
  std::vector<float> w2(int e) const { return bf16_numbers(200 + e, kIntermediate * width()); }
  /// The same for the layer: [2 kIntermediate, layer_width()] and [layer_width(), kIntermediate].
  std::vector<float> layer_w13(int e) const {
    std::vector<float> const narrow = w13(e), behind = bf16_numbers(300 + e, padding);
    std::vector<float> out;
    for (auto row = narrow.begin(); row != narrow.end(); row += width()) {
      out.insert(out.end(), row, row + width());
      out.insert(out.end(), behind.begin(), behind.end());
    }
    return out;
  }
  std::vector<float> layer_w2(int e) const {
    std::vector<float> out = w2(e);
    std::vector<float> const behind = bf16_numbers(400 + e, padding * kIntermediate);
    out.insert(out.end(), behind.begin(), behind.end());
    return out;
  }
};

/// This rank's experts. Store: a WeightStore of the layer's configuration.
template <class Store>
Store experts_of(Model const& m, ExpertPlacement const& placement, int ep_rank, int tp_rank, int tp_size) {
  auto const mine = placement.local_to_physical(ep_rank);
  Store out(static_cast<std::int64_t>(mine.size()), m.layer_width(), kIntermediate / tp_size, true);
  for (std::size_t l = 0; l < mine.size(); ++l) {
    out.set_expert(static_cast<std::int64_t>(l), cut13(m.layer_w13(mine[l]), kIntermediate, m.layer_width(), tp_rank, tp_size).data(),
                   cut2(m.layer_w2(mine[l]), kIntermediate, m.layer_width(), tp_rank, tp_size).data());
  }
  return out;
}

/// The parameters of a runner but for its grid. shared13, shared2: this rank's part. memory.as(like, values): the values as the runner's
/// parts take them, in its space; like: a pointer to their element.
template <class R, class Memory>
typename R::Params params(Model const& m, ExpertPlacement const& placement, int intermediate, std::vector<float> const& shared13,
                          std::vector<float> const& shared2, Memory&& memory) {
  typename R::Params p{
      .layer = {.shape = {.hidden = m.layer_width(), .intermediate = intermediate, .num_experts = m.experts, .topk = kTopK},
                .max_tokens_per_rank = kMost,
                .placement = placement,
                .router = {.num_experts = m.experts, .topk = kTopK, .num_zero_experts = m.zero}}};
  auto matrix = [&](auto& to, std::vector<float> const& values, int rows, int cols) {
    to = make_rows(memory.as(to.data_handle(), values), rows, cols);
  };
  p.hidden = m.hidden;
  p.expert_hidden = m.width();
  p.overlap_shared = m.form.overlap_shared;
  matrix(p.gate.weight, m.gate, m.experts + m.zero, m.hidden);
  if (m.form.latent) {
    matrix(p.input.weight, m.in, m.latent, m.hidden);
    matrix(p.output.weight, m.out, m.hidden, m.latent);
    p.output.normalise = m.form.norm;
    p.output.eps = 1e-3F;
  }
  p.scaling.routed = 1.5F;
  p.end.bias = memory.as(p.end.bias, m.bias);
  p.end.normalise = m.form.norm;
  p.end.eps = 1e-3F;
  if (m.form.shared != SharedOutput::none) {
    auto const columns = static_cast<std::int64_t>(shared2.size()) / m.hidden;
    p.shared.count = 1;
    p.shared.intermediate = columns;
    auto& w13 = p.shared.weights.w13;
    auto& w2 = p.shared.weights.w2;
    w13 = {make_blocks(memory.as(w13.codes.data_handle(), shared13), 1, 2 * columns, m.hidden),
           make_rows(w13.scales.data_handle(), 1, 0),
           {},
           2 * columns,
           m.hidden};
    w2 = {make_blocks(memory.as(w2.codes.data_handle(), shared2), 1, m.hidden, columns),
          make_rows(w2.scales.data_handle(), 1, 0),
          {},
          m.hidden,
          columns};
    p.shared.sharding = m.form.shared;
    p.shared.average = true;
  }
  return p;
}

/// Weights of the host space: where they are.
struct InPlace {
  float const* as(float const*, std::vector<float> const& values) const { return values.data(); }
};
struct HostConfig : LayerDefaults {
  static constexpr int topk = kTopK;
  using Activation = activation::Silu;
};
/// Everything that a block can have, most of it chosen at run time.
struct HostParts : RunnerDefaults {
  using Gate = runner::gate::Linear<float>;
  using Input = runner::transform::Projection<float>;
  using Output = runner::transform::Projection<float>;
  using Shared = runner::shared::Separate<experts::Reference<float>>;
  using Scaling = runner::scaling::Factor;
  using ZeroExperts = runner::zero_experts::Identity;
  using End = runner::end::BiasNorm;
};
using HostStore = experts::WeightStore<HostConfig, quantization::None>;
template <class Backend>
using HostLayer = ModularKernel<HostConfig, routing::AnyRouter, quantization::None, Backend, experts::Reference<float>>;

/// What one rank computes, and how it routes; without padding.
struct OneRank {
  std::vector<float> out;
  std::vector<std::int32_t> ids;
  std::vector<float> weights;
};
inline OneRank one_rank(Model m, std::vector<float> const& x) {
  m.padding = 0;
  using R = Runner<HostLayer<backends::NoExpertParallel<>>, HostParts>;
  ExpertPlacement const placement(m.experts, 1);
  HostStore const store = experts_of<HostStore>(m, placement, 0, 0, 1);
  comm::Self<> self;
  R runner(self, store.view(), params<R>(m, placement, kIntermediate, m.shared13, m.shared2, InPlace{}));
  std::vector<float> out(x.size());
  auto const rows = static_cast<std::int64_t>(x.size()) / m.hidden;
  runner.forward(make_rows(x.data(), rows, m.hidden), make_rows(out.data(), rows, m.hidden));
  auto const* const ids = runner.topk_ids().data_handle();
  auto const* const weights = runner.topk_weights().data_handle();
  return {out, {ids, ids + rows * kTopK}, {weights, weights + rows * kTopK}};
}
inline std::vector<float> on_one_rank(Model const& m, std::vector<float> const& x) { return one_rank(m, x).out; }

struct Grid {
  int tp, dp, pcp;
  bool ep;
  /// Explicit sizes of the layer, or none.
  std::optional<int> moe_ep{}, moe_tp{};
};
/// A rank's coordinates.
inline MoeParallel parallel_of(Grid const& g, int rank, BackendFacts const& facts) {
  return flatten({.tp_size = g.tp,
                  .tp_rank = rank % g.tp,
                  .pcp_size = g.pcp,
                  .pcp_rank = rank / g.tp % g.pcp,
                  .dp_size = g.dp,
                  .dp_rank = rank / g.tp / g.pcp,
                  .enable_expert_parallel = g.ep,
                  .backend = facts,
                  .moe_ep_size = g.moe_ep,
                  .moe_tp_size = g.moe_tp});
}
/// All grids of n ranks.
inline std::vector<Grid> grids(int n) {
  std::vector<Grid> out;
  for (int tp = 1; tp <= n; ++tp) {
    if (n % tp != 0) continue;
    for (bool ep : {false, true}) {
      out.push_back({tp, n / tp, 1, ep});
      if (n / tp > 1) out.push_back({tp, 1, n / tp, ep});
    }
  }
  return out;
}
/// Tokens of a rank: TP peers hold the same, the others different ones, one none. 5 rows do not divide over 2 or 4 TP ranks.
inline std::vector<float> tokens(MoeParallel const& p, int hidden = kHidden) {
  constexpr int kCounts[] = {5, 3, 0, 1};
  int const at = p.dp_rank * p.pcp_size + p.pcp_rank;
  return bf16_numbers(1000 + at, static_cast<std::int64_t>(kCounts[at]) * hidden);
}

}  // namespace moe_test::grid
