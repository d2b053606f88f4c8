// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/launch_columns.cuh: launches of the layer kernel with blocks of columns. A program may instantiate column_launcher
// once per scheme and activation in separate files, as layer_launcher. Only compositions with overlap_combine name it, so that others do
// not compile its kernels.
#pragma once

#include "moe/experts/hopper/layer/column_blocks.cuh"
#include "moe/experts/hopper/layer/launch.cuh"

namespace moe::hopper {

namespace detail {

/// Whether kFixedGated, which host code reads without the kernels' activations, says what they say.
template <class Activation>
inline constexpr bool kFixedGatedAgrees = kFixedGated<Activation> == (Activation::kFineTiles && Activation::kGating == 1);
static_assert(kFixedGatedAgrees<FastSilu> && kFixedGatedAgrees<AnyActivation> &&
              kFixedGatedAgrees<FixedActivation<activation::Kind::gelu>> &&
              kFixedGatedAgrees<FixedActivation<activation::Kind::silu_no_mul>>);

template <Scheme S, class Activation, class Tiles>
void launch_layer_columns(LayerParams const& p, ColumnBlocks const& columns, int workers, Tuning const& t, cudaStream_t stream) {
  if constexpr (S == Scheme::fp8_block) {
    launch_blocks_tuned<Activation>(WithColumns<BlockParams>{block_params(p), columns}, workers, t.cluster, stream);
  } else {
    WithColumns<LayerParams> const with{p, columns};
    constexpr int kStages = Tiles::large_stages(S);
    if (t.cluster == 1) {
      launch_layer<S, kStages, kMostRows<S>, 1, Activation>(with, workers, stream);
    } else {
      launch_layer<S, kStages, kMostRows<S>, 2, Activation>(with, workers, stream);
    }
  }
}

}  // namespace detail

template <Scheme S, class Activation, class Tiles>
ColumnLauncher column_launcher() {
  static_assert(kHasColumnBlocks<S, Activation>, "blocks of columns: bf16 or fp8_block, and a gated activation that its type fixes");
  static_assert(detail::kFixedGatedAgrees<Activation>);
  return &detail::launch_layer_columns<S, Activation, Tiles>;
}

}  // namespace moe::hopper
