// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/launcher.hpp: the kernels of one scheme and activation as a function pointer, so that a layer is plain host C++ and
// compiles only the kernels that its composition names.
#pragma once

#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/layer/smem_layout.hpp"

struct CUstream_st;

namespace moe::hopper {

struct LayerParams;
struct ColumnBlocks;

/// The kernels of one scheme and activation.
struct LayerLauncher {
  /// Enqueues the layer kernel that `tuning` selects on `workers` multiprocessors.
  void (*enqueue)(LayerParams const& params, int workers, Tuning const& tuning, CUstream_st* stream);
  /// Likewise the kernel with the most rows a tile, with blocks of columns and the sums over the slots, which no kernel then follows. Null:
  /// there is none.
  void (*enqueue_columns)(LayerParams const& params, ColumnBlocks const& columns, int workers, Tuning const& tuning, CUstream_st* stream);
  int max_cluster;    ///< largest Tuning::cluster with a kernel
  bool block_kernel;  ///< has tiles of kBlockRows rows in fp8_block
};

/// The launcher of one scheme, one activation of experts/hopper/common/activation.hpp and one set of tiles. Defined in launch.cuh.
template <Scheme S, class Activation, class Tiles = DefaultTiles>
LayerLauncher layer_launcher();

}  // namespace moe::hopper
