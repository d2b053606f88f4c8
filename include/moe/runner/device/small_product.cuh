// SPDX-License-Identifier: Apache-2.0
// runner/device/small_product.cuh: y [M, N] = x [M, K] · wᵀ (+ bias) with few columns N, for router gates: one launch at any M. Operands of
// float32 are split into bf16 parts whose products are exact, so that a float32 gate stays one on the tensor cores.
#pragma once

#include <cuda_runtime.h>

#include <bit>
#include <cstdint>
#include <type_traits>

#include "moe/core/cuda_space.hpp"
#include "moe/core/device_facts.hpp"
#include "moe/core/ptx/cluster.cuh"
#include "moe/core/ptx/mma.cuh"
#include "moe/core/types.hpp"
#include "moe/runner/device/small_product.hpp"

namespace moe::runner::device {

/// Arguments of the kernel; arrays are row-major in device memory.
template <class X, class W, class Y>
struct SmallProduct {
  X const* x;
  std::int64_t x_stride;
  W const* w;
  std::int64_t w_stride;
  float const* bias;  ///< [N] or null
  Y* y;
  std::int64_t y_stride;
  int rows;
  int n;
  int k;
  int log_cluster;  ///< of the plan's cluster
};

namespace detail {

/// Parts of bf16 whose sum is a value of T: one for bf16, two for the 11 bits of fp16, three for the 24 of float32.
template <class T>
inline constexpr int kBf16Parts = std::is_same_v<T, bf16>  ? 1
                                  : std::is_same_v<T, f16> ? 2
                                                           : 3;

/// Eight consecutive values of a row as they lie in memory.
template <class T>
struct Octet {
  T value[8];
};
/// The same, each value as its parts.
template <class T>
struct SplitOctet {
  uint4 part[kBf16Parts<T>];
};

/// Values [col, col + 8) of a row; zero from column k on, and for a row that does not exist (null). Wide: the row begins at a multiple of
/// 16 bytes and k is a multiple of 8, so that there is one path, and loads of several octets overlap.
template <bool Wide, class T>
__device__ Octet<T> load_octet(T const* row, int col, int k) {
  Octet<T> out;
  bool const here = row != nullptr && col < k;
  if constexpr (Wide) {
    constexpr int kWords = static_cast<int>(sizeof(Octet<T>) / sizeof(uint4));
    uint4 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      words[i] = make_uint4(0, 0, 0, 0);
      if (here) words[i] = reinterpret_cast<uint4 const*>(row + col)[i];
    }
    memcpy(&out, words, sizeof out);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) out.value[i] = here && col + i < k ? row[col + i] : from_float<T>(0.0F);
  }
  return out;
}

__device__ inline std::uint32_t pack_bf16(bf16 a, bf16 b) {
  return static_cast<std::uint32_t>(__bfloat16_as_ushort(a)) | static_cast<std::uint32_t>(__bfloat16_as_ushort(b)) << 16;
}
template <class T>
__device__ SplitOctet<T> split(Octet<T> const& in) {
  SplitOctet<T> out;
  if constexpr (std::is_same_v<T, bf16>) {
    memcpy(&out, &in, sizeof out);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float a = to_float(in.value[2 * i]);
      float b = to_float(in.value[2 * i + 1]);
#pragma unroll
      for (int p = 0; p < kBf16Parts<T>; ++p) {
        bf16 const ha = __float2bfloat16_rn(a);
        bf16 const hb = __float2bfloat16_rn(b);
        (&out.part[p].x)[i] = pack_bf16(ha, hb);
        a -= __bfloat162float(ha);
        b -= __bfloat162float(hb);
      }
    }
  }
  return out;
}

/// acc [16 x 8] += the products of eight columns a lane: which column of K a lane holds is free, as long as both operands agree.
template <class X, class W>
__device__ void multiply_octets(SplitOctet<X> const& top, SplitOctet<X> const& bottom, SplitOctet<W> const& w, float (&acc)[4]) {
#pragma unroll
  for (int i = kBf16Parts<X> - 1; i >= 0; --i) {
#pragma unroll
    for (int j = kBf16Parts<W> - 1; j >= 0; --j) {
      if (i + j > 2) continue;  // below 2^-24 of the product
      uint4 const& a = top.part[i];
      uint4 const& b = bottom.part[i];
      uint4 const& c = w.part[j];
      std::uint32_t const first[4] = {a.x, b.x, a.y, b.y};
      std::uint32_t const second[4] = {a.z, b.z, a.w, b.w};
      ptx::mma_bf16(acc, first, c.x, c.y);
      ptx::mma_bf16(acc, second, c.z, c.w);
    }
  }
}

/// The sums of a warp's pieces of K, added as a binary tree: those that wait for their neighbour are kept by level.
template <int Levels, int ColTiles>
struct PieceSums {
  float acc[ColTiles][4] = {};  ///< of the open piece; after the last close(), of all
  float waiting[Levels > 0 ? Levels : 1][ColTiles][4];

  /// Ends piece `piece`, counted from 0; there are 2^Levels.
  __device__ void close(int piece) {
    bool const last = piece == (1 << Levels) - 1;
    bool carries = true;
#pragma unroll
    for (int level = 0; level < Levels; ++level) {
      bool const second = (piece >> level & 1) != 0;
#pragma unroll
      for (int j = 0; j < ColTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (carries && second) acc[j][i] += waiting[level][j][i];
          if (carries && !second) waiting[level][j][i] = acc[j][i];
        }
      }
      carries = carries && second;
    }
    if (last) return;
#pragma unroll
    for (int j = 0; j < ColTiles; ++j) {
#pragma unroll
      for (float& f : acc[j]) f = 0.0F;
    }
  }
};

/// A value of the block `rank` of the cluster, at the address that `local` has here. Before sm_90 a cluster is one block.
__device__ inline float value_of_block(float const* local, [[maybe_unused]] int rank) {
#if __CUDA_ARCH__ >= 900
  return __int_as_float(ptx::load_cluster(reinterpret_cast<int const*>(local), static_cast<std::uint32_t>(rank)));
#else
  return *local;
#endif
}

/// Adds the blocks' parts of a tile in rank order, this block for its share of the tile, and stores them. `tile` is the part of the same
/// place in every block of the cluster.
template <int Rows, int Cols, class X, class W, class Y>
__device__ void store_share(SmallProduct<X, W, Y> const& p, float const* tile, int row0, int col0, int rank) {
  int const cluster = 1 << p.log_cluster;
  int const share = Rows * Cols / cluster;
  for (int i = rank * share + static_cast<int>(threadIdx.x); i < (rank + 1) * share; i += static_cast<int>(blockDim.x)) {
    float sum = 0.0F;
    if (cluster == 1) {
      sum = tile[i];
    } else {
#pragma unroll 4
      for (int r = 0; r < cluster; ++r) sum += value_of_block(tile + i, r);
    }
    int const row = row0 + i / Cols;
    int const col = col0 + i % Cols;
    if (row >= p.rows || col >= p.n) continue;
    if (p.bias != nullptr) sum += p.bias[col];
    p.y[row * p.y_stride + col] = from_float<Y>(sum);
  }
}

}  // namespace detail

/// Grid: cluster · column tiles along x (blocks of a cluster are consecutive), row tiles along y. A block's part of K has eight pieces,
/// whose sums are added as a binary tree: in a warp as far as it has several, then between warps. So an output has the same bits however
/// many rows there are.
template <class X, class W, class Y, int RowTiles, int ColTiles, bool Wide>
__global__ void __launch_bounds__(32 * kSmallProductWarps) small_product_kernel(SmallProduct<X, W, Y> p) {
  constexpr int kParts = kSmallProductWarps / RowTiles;
  constexpr int kLevels = RowTiles == 8 ? 3 : RowTiles == 4 ? 2 : RowTiles == 2 ? 1 : 0;  // of the tree in a warp
  constexpr int kAhead = ColTiles * sizeof(W) > 8 ? 2 : 4;                                // steps whose operands are on their way
  constexpr int kRows = 16 * RowTiles;
  constexpr int kCols = 8 * ColTiles;
  __shared__ float parts[kParts][kRows * kCols];
  int const warp = static_cast<int>(threadIdx.x) / 32;
  int const lane = static_cast<int>(threadIdx.x) % 32;
  int const rank = static_cast<int>(blockIdx.x) & ((1 << p.log_cluster) - 1);
  int const col0 = (static_cast<int>(blockIdx.x) >> p.log_cluster) * kCols;
  int const row0 = static_cast<int>(blockIdx.y) * kRows;
  int const row_tile = warp % RowTiles;
  int const part = warp / RowTiles;

  int const top_row = row0 + 16 * row_tile + lane / 4;
  X const* const top = top_row < p.rows ? p.x + top_row * p.x_stride : nullptr;
  X const* const bottom = top_row + 8 < p.rows ? p.x + (top_row + 8) * p.x_stride : nullptr;
  W const* w[ColTiles];
#pragma unroll
  for (int j = 0; j < ColTiles; ++j) {
    int const col = col0 + 8 * j + lane / 4;
    w[j] = col < p.n ? p.w + col * p.w_stride : nullptr;
  }

  // This warp's pieces of K, one after the other, with the operands of the next steps under way.
  std::int64_t const steps = (p.k + kSmallProductDepth - 1) / kSmallProductDepth;
  int const first_piece = rank * kSmallProductWarps + part * RowTiles;
  auto const piece_end = [&](int piece) {  // eight pieces a block: a shift divides
    return static_cast<int>(steps * (first_piece + piece + 1) >> (p.log_cluster + 3));
  };
  int const begin = piece_end(-1);
  int const end = row0 + 16 * row_tile < p.rows ? piece_end(RowTiles - 1) : begin;
  int const lane_col = 8 * (lane % 4);
  detail::PieceSums<kLevels, ColTiles> sums;
  detail::Octet<X> a[kAhead], b[kAhead];
  detail::Octet<W> c[kAhead][ColTiles];
#pragma unroll
  for (int d = 0; d < kAhead; ++d) {
    int const col = begin + d < end ? (begin + d) * kSmallProductDepth + lane_col : p.k;
    a[d] = detail::load_octet<Wide>(top, col, p.k);
    b[d] = detail::load_octet<Wide>(bottom, col, p.k);
#pragma unroll
    for (int j = 0; j < ColTiles; ++j) c[d][j] = detail::load_octet<Wide>(w[j], col, p.k);
  }
  int piece = 0;
  int open_end = piece_end(0);
  for (int group = begin; group < end; group += kAhead) {
#pragma unroll
    for (int d = 0; d < kAhead; ++d) {
      int const step = group + d;
      if (step >= end) break;
      while (step >= open_end) {
        sums.close(piece++);
        open_end = piece_end(piece);
      }
      auto const x_top = detail::split(a[d]);
      auto const x_bottom = detail::split(b[d]);
      int const col = step + kAhead < end ? (step + kAhead) * kSmallProductDepth + lane_col : p.k;
      a[d] = detail::load_octet<Wide>(top, col, p.k);
      b[d] = detail::load_octet<Wide>(bottom, col, p.k);
#pragma unroll
      for (int j = 0; j < ColTiles; ++j) {
        detail::multiply_octets(x_top, x_bottom, detail::split(c[d][j]), sums.acc[j]);
        c[d][j] = detail::load_octet<Wide>(w[j], col, p.k);
      }
    }
  }
  while (piece < RowTiles) sums.close(piece++);
#pragma unroll
  for (int j = 0; j < ColTiles; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      int const row = 16 * row_tile + lane / 4 + 8 * (i / 2);
      parts[part][row * kCols + 8 * j + 2 * (lane % 4) + i % 2] = sums.acc[j][i];
    }
  }
  __syncthreads();

  // The block's warps as a tree, then the cluster's blocks in order.
  for (int i = static_cast<int>(threadIdx.x); kParts > 1 && i < kRows * kCols; i += static_cast<int>(blockDim.x)) {
    float of_warp[kParts];
#pragma unroll
    for (int q = 0; q < kParts; ++q) of_warp[q] = parts[q][i];
#pragma unroll
    for (int gap = 1; gap < kParts; gap *= 2) {
#pragma unroll
      for (int q = 0; q + gap < kParts; q += 2 * gap) of_warp[q] += of_warp[q + gap];
    }
    parts[0][i] = of_warp[0];
  }
  if (p.log_cluster == 0) {
    __syncthreads();
  } else {
    ptx::cluster_arrive_release();
    ptx::cluster_wait();
  }
  detail::store_share<kRows, kCols>(p, parts[0], row0, col0, rank);
  if (p.log_cluster > 0) {  // other blocks read this block's shared memory until here
    ptx::cluster_arrive_relaxed();
    ptx::cluster_wait();
  }
}

namespace detail {

template <int RowTiles, int ColTiles, bool Wide, class X, class W, class Y>
void launch_small_product(SmallProduct<X, W, Y> const& p, cudaStream_t stream) {
  unsigned const cluster = 1U << p.log_cluster;
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = cluster;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>((p.n + 8 * ColTiles - 1) / (8 * ColTiles)) * cluster,
                        static_cast<unsigned>((p.rows + 16 * RowTiles - 1) / (16 * RowTiles)));
  config.blockDim = dim3(32 * kSmallProductWarps);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = cluster > 1 ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, &small_product_kernel<X, W, Y, RowTiles, ColTiles, Wide>, p), "small_product_kernel");
}

}  // namespace detail

/// Enqueues the product. Deterministic; capturable. A device without clusters (before sm_90) takes one block for each of the plan's.
template <class X, class W, class Y>
void small_product(SmallProduct<X, W, Y> p, SmallProductPlan const& plan, cudaStream_t stream) {
  auto const aligned = [](auto const* data, std::int64_t stride) {
    return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && stride * static_cast<std::int64_t>(sizeof(*data)) % 16 == 0;
  };
  p.log_cluster = plan.cluster > 1 && device_facts().has_clusters ? std::countr_zero(static_cast<unsigned>(plan.cluster)) : 0;
  if (p.k % 8 != 0 || !aligned(p.x, p.x_stride) || !aligned(p.w, p.w_stride)) {
    return detail::launch_small_product<1, 2, false>(p, stream);
  }
  switch (plan.row_tiles) {
    case 1:
      return plan.col_tiles == 1 ? detail::launch_small_product<1, 1, true>(p, stream)
                                 : detail::launch_small_product<1, 2, true>(p, stream);
    case 2: return detail::launch_small_product<2, 2, true>(p, stream);
    case 4: return detail::launch_small_product<4, 2, true>(p, stream);
    default:
      return plan.col_tiles == 4 ? detail::launch_small_product<8, 4, true>(p, stream)
                                 : detail::launch_small_product<8, 2, true>(p, stream);
  }
}

}  // namespace moe::runner::device
