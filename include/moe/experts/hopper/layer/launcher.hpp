// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/launcher.hpp: the kernels of one scheme and activation as a function pointer, so that a layer is plain host C++ and
// compiles only the kernels that its composition names.
#pragma once

#include <type_traits>

#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/layer/smem_layout.hpp"

struct CUstream_st;

namespace moe::hopper {

struct LayerParams;
struct ColumnBlocks;

/// Enqueues the layer kernel with the most rows a tile, with blocks of columns and the sums over the slots, which no kernel then follows.
using ColumnLauncher = void (*)(LayerParams const& params, ColumnBlocks const& columns, int workers, Tuning const& tuning,
                                CUstream_st* stream);

/// The kernels of one scheme and activation.
struct LayerLauncher {
  /// Enqueues the layer kernel that `tuning` selects on `workers` multiprocessors.
  void (*enqueue)(LayerParams const& params, int workers, Tuning const& tuning, CUstream_st* stream);
  ColumnLauncher enqueue_columns;  ///< column_launcher(), or null: calls have no blocks of columns
  int max_cluster;                 ///< largest Tuning::cluster with a kernel
  bool block_kernel;               ///< has tiles of kBlockRows rows in fp8_block
};

/// The launcher of one scheme, one activation of experts/hopper/common/activation.hpp and one set of tiles. Defined in launch.cuh.
template <Scheme S, class Activation, class Tiles = DefaultTiles>
LayerLauncher layer_launcher();

/// Whether an activation is fixed by its type, and gated.
template <class Activation>
inline constexpr bool kFixedGated = std::is_same_v<Activation, FastSilu>;
template <activation::Kind K>
inline constexpr bool kFixedGated<FixedActivation<K>> = activation::gated(K);
/// Whether a scheme and activation have kernels with blocks of columns.
template <Scheme S, class Activation>
inline constexpr bool kHasColumnBlocks = (S == Scheme::bf16 || S == Scheme::fp8_block) && kFixedGated<Activation>;
/// Their launcher, with kHasColumnBlocks. Defined in launch_columns.cuh.
template <Scheme S, class Activation, class Tiles = DefaultTiles>
ColumnLauncher column_launcher();

}  // namespace moe::hopper
