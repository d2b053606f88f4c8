// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer/layer_params.cuh: the parameters of the layer kernel, and its roles' pointers into shared memory.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "moe/comm/arrivals.cuh"
#include "moe/core/ptx/wgmma.cuh"
#include "moe/core/ptx/wgmma_int8.cuh"
#include "moe/experts/hopper/common/activation.cuh"
#include "moe/experts/hopper/common/align_args.cuh"
#include "moe/experts/hopper/common/matrix_layout.hpp"
#include "moe/experts/hopper/common/problem.hpp"
#include "moe/experts/hopper/common/roles.cuh"
#include "moe/experts/hopper/common/schedule.cuh"
#include "moe/experts/hopper/common/slots.cuh"
#include "moe/experts/hopper/layer/smem_layout.hpp"

namespace moe::hopper {

/// Compile-time facts of a scheme on the device.
template <Scheme S>
struct SchemeTraits {
  static constexpr bool kFp8 = is_fp8(S);
  static constexpr bool kBlock = S == Scheme::fp8_block;
  static constexpr bool kRowScaled = is_row_scaled(S);
  static constexpr bool kInt8 = S == Scheme::int8_row;
  static constexpr int kElementBytes = element_bytes(S);
  using Sum = std::conditional_t<kInt8, int, float>;         ///< accumulators, until the scales
  static constexpr int kStepElements = 128 / kElementBytes;  ///< of K in one stage
  using Output = std::conditional_t<S == Scheme::f16, __half, __nv_bfloat16>;
};

/// A layer's part of the parameters, the same at every call. Weights are three-dimensional tensor maps with boxes of 128 bytes of K by 128
/// rows: w13 as [2E, I, H] (gate of expert e at 2e, up at 2e + 1), interleaved as [E, I, 2H], ungated as [E, I, H]; w2 as [E, H, I].
struct LayerConstants {
  CUtensorMap w13;
  CUtensorMap w2;
  MatrixLayout matrix[2];  ///< of w13 and of w2
  int intermediate;
  bool tensor_scales;       ///< row-scaled: w13_scales and w2_scales are [E]
  float const* w13_scales;  ///< fp8_block: [E, rows / 128, H / 128]; row-scaled: [E, rows]
  float const* w2_scales;   ///< fp8_block: [E, H / 128, I / 128]; row-scaled: [E, H]
  float const* w13_bias;    ///< [E, rows] or null
  float const* w2_bias;     ///< [E, H] or null
  float static_scale;       ///< row-scaled: if positive, the scale of x and of the intermediate
  float scale_floor;        ///< of the intermediate
  float amax_bound;
  ActivationParams activation;
};

/// The rows that GEMM1 multiplies.
struct InputRows {
  void const* rows;
  long long row_bytes;         ///< from a row to the next
  std::int32_t const* gather;  ///< batched: the row of a slot, or null: row = slot
  float const* scales;         ///< fp8_block: [M, H / 128]; row-scaled: [M], or null: static_scale
  long long scale_stride;      ///< from a row of scales to the next
};

/// The intermediate, from GEMM1 to GEMM2.
struct IntermediateRows {
  void* rows;     ///< [slots, I] codes
  void* wide;     ///< row-scaled: [slots, I] bf16 (int8_row: float32), quantised into `rows` once a tile's rows are complete
  float* scales;  ///< fp8_block: [slots, I / 128]; row-scaled: [slots]
  // Row-scaled, given here because values that the consumers compute stay in registers during the products.
  int lane_chunks;    ///< chunks of 16 bytes of a wide row that each lane of one warp has
  int rows_together;  ///< rows that a warp quantises at a time; 0: a warpgroup works on one row
};

/// Kernel parameter block.
struct LayerParams {
  LayerConstants layer;
  AlignArgs align;  ///< the slots and the work list
  InputRows input;
  IntermediateRows inter;
  bool standard;         ///< ids given: rows of x are tokens; else the batched format
  bool weight_on_input;  ///< the router weight multiplies GEMM1's sums, not GEMM2's
  bool self_align;       ///< no aligning kernel ran: plan with `align`, whose counters are zero on entry
  int* exits;            ///< kernels that plan for themselves, or beside the dispatch: CTAs that have finished; the last clears counters
  int* finished;         ///< likewise: units finished per weight tile of phase 1 and warpgroup
  void* rows_out;        ///< rows addressed by slot: out itself if topk is 1
  void* out;             ///< [M, H]; a kernel that plans for itself also writes the sums over the slots here if topk is over 1
  float* partials;       ///< sums of parts of K
};

/// The row of the input that a slot reads.
__device__ inline long long input_row(LayerParams const& p, int slot) { return input_row(p.input.gather, slot, p.align.per_token); }

/// fp8_block: the scales along K of weight box `box` (0 or 1) of a unit; a row of blocks has `blocks` of them.
__device__ inline float const* box_scales(float const* scales, MatrixLayout const& matrix, Unit const& unit, int box, int blocks) {
  int const out_blocks = (matrix.rows + 127) / 128;
  int const block = min(unit.feature / 128 + (box == 0 ? 0 : matrix.half_step / 128), out_blocks - 1);  // past the last feature: zeros
  return scales + (static_cast<long long>(unit.expert) * out_blocks + block) * blocks + unit.k_begin;
}

/// d[64 x N] (+)= A[64 x k] * B[N x k]^T in the elements of a scheme.
template <Scheme S, int N>
struct ProductOf {
  using type = Wgmma<is_fp8(S) ? MmaType::e4m3 : S == Scheme::bf16 ? MmaType::bf16 : MmaType::f16, N>;
};
template <int N>
struct ProductOf<Scheme::int8_row, N> {
  using type = WgmmaInt8<N>;
};
/// Whether the products have this many columns.
template <Scheme S, int N>
inline constexpr bool kHasColumns = S != Scheme::int8_row || N == 8 || N % 16 == 0;

inline constexpr int kConsumerThreads = 256;
inline constexpr int kLayerThreads = 384;
inline constexpr int kGatherWarps = 3;     ///< one warp is too slow: 74% of the tensor rate, three give 85%
inline constexpr int kSelfAlignRows = 64;  ///< only kernels with at most this many rows per tile plan for themselves
/// K is split only in tiles of at most this many rows: in larger ones the sums of the parts cost as much as the better balance gains.
constexpr int most_split_rows(Scheme s) { return is_fp8(s) ? 64 : 96; }
static_assert(sizeof(Unit) == kUnitBytes && sizeof(Control) == kControlBytes);

/// Pointers into shared memory.
template <class Layout, int Stages>
struct Shared {
  char* base;
  __device__ char* stage(int s) const { return base + s * Layout::kStageBytes; }
  __device__ std::uint64_t* full(int s) const { return reinterpret_cast<std::uint64_t*>(base + Layout::kBarriers) + s; }
  __device__ std::uint64_t* empty(int s) const { return full(Stages + s); }
  __device__ std::uint64_t* unit_full(int s) const { return full(2 * Stages + s); }
  __device__ std::uint64_t* unit_empty(int s) const { return full(2 * Stages + kUnitEntries + s); }
  __device__ std::uint64_t* number_full(int s) const { return full(2 * Stages + 2 * kUnitEntries + s); }
  __device__ std::uint64_t* stored(int s) const { return full(2 * Stages + 3 * kUnitEntries + s); }  ///< block kernel only
  __device__ int* number(int s) const { return reinterpret_cast<int*>(base + Layout::kNumbers) + s; }
  __device__ Control* control() const { return reinterpret_cast<Control*>(base + Layout::kControl); }
  __device__ Unit* unit(int s) const { return reinterpret_cast<Unit*>(base + Layout::kUnits) + s; }
};

}  // namespace moe::hopper
