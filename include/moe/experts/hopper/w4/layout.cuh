// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/layout.cuh: the parameters and the shared memory of the layer kernel.
#pragma once

#include <cstdint>
#include <type_traits>

#include "moe/experts/hopper/common/activation.hpp"
#include "moe/experts/hopper/common/align_args.cuh"
#include "moe/experts/hopper/common/roles.cuh"
#include "moe/experts/hopper/w4/problem.hpp"
#include "moe/experts/hopper/w4/token_plan.hpp"

namespace moe::hopper::w4 {

static_assert(kGateFeatures == 32 * kTileBricks && kOutputFeatures == kBrickRows * kTileBricks, "a weight tile is four bricks");

inline constexpr int kProducerThreads = 128;  ///< one warp draws units and copies weights, three gather rows
inline constexpr int kGatherWarps = 3;
inline constexpr int kMostSplitRows = 64;  ///< K is split only in kernels of at most this many rows per tile
inline constexpr int kCoarse = 4;          ///< bricks of K in one step of the plan, which counts in steps of 32 KiB of weights

/// A layer's part of the parameters, the same at every call. Index 0: w13, phase 0; 1: w2, phase 1.
struct Constants {
  std::uint8_t const* weights[2];
  float const* bias[2];    ///< [E, 2I] (ungated [E, I]) and [E, H], or null
  float const* factor[2];  ///< [E]; of has_row_factors() [E, 64 · bricks]
  int bricks[2];           ///< along the rows of one expert's matrix
  int steps[2];            ///< bricks along K
  int intermediate;        ///< a multiple of 64
  int bias_width;          ///< features that have a bias: the layer's own intermediate width
  int* split_counters;     ///< finished parts of each tile whose K is split; zero before and after
  W4Activation activation;
};

/// Kernel parameter block.
struct Params {
  Constants layer;
  AlignArgs align;             ///< the slots and the work list; plan.space counts K in steps of kCoarse bricks
  int max_splits;              ///< most parts of K; the aligning kernel does not split K
  bool standard;               ///< ids given: rows of x are tokens; else the batched format
  void const* x;               ///< [M, H] bf16
  long long x_stride;          ///< elements between rows of x
  std::int32_t const* gather;  ///< batched format: rows of x by slot, or null
  void* inter;                 ///< [slots, I] bf16, rows sorted by expert
  void* rows_out;              ///< rows addressed by slot: out itself if topk is 1
  void* out;
  float* partials;
  PackedTokenPlan token;  ///< of the kernel for one token; no warps: another kernel runs
};

/// The parameters of kernels of any activation, which take them as Params.
struct AnyParams : Params {
  ActivationParams any;
  bool weight_on_input;  ///< the router weight multiplies GEMM1's sums, not GEMM2's
};

/// Shared memory of a kernel with `Groups` consumer warpgroups and ring stages of `Depth` bricks along K, from a 1024-byte aligned base.
template <W4Scheme S, int Groups, int Depth, int Stages, int MaxRows, bool Any = false>
struct Layout {
  using KernelParams = std::conditional_t<Any, AnyParams, Params>;
  static constexpr W4Scheme kScheme = S;
  static constexpr bool kAny = Any;  ///< any activation; a brick of w13 may be 64 features without gates
  static constexpr int kMaxRows = MaxRows;
  static constexpr int kStages = Stages;
  static constexpr int kGroups = Groups;
  static constexpr int kDepth = Depth;
  static constexpr int kBricks = kTileBricks / Groups;  ///< of one warpgroup, side by side
  static constexpr int kConsumers = Groups * 128;
  static constexpr int kThreads = kConsumers + kProducerThreads;
  static constexpr int kRowBytes = MaxRows * 128;  ///< 64 columns of a tile's rows
  static constexpr int kBrickBytes = brick_bytes(S);
  static constexpr int kPassRows = MaxRows < 32 ? MaxRows : Groups == 4 ? 32 : 64;  ///< rows that are staged at a time
  static constexpr int kStagingBytes = kPassRows * 128;
  static constexpr int kStaging = Stages * Depth * kRowBytes;  ///< one buffer per warpgroup
  static constexpr int kWeights = kStaging + Groups * kStagingBytes;
  static constexpr int kTargets = kWeights + Stages * Depth * kTileBricks * kBrickBytes;  ///< per warpgroup: slots of the tile's rows
  static constexpr int kFactors = kTargets + Groups * MaxRows * 4;                        ///< their router weights
  static constexpr int kUnits = kFactors + Groups * MaxRows * 4;
  static constexpr int kBarriers = kUnits + kUnitEntries * static_cast<int>(sizeof(Unit));
  static constexpr int kFlag = kBarriers + (2 * Stages + 2 * kUnitEntries) * 8;
  static constexpr int kControl = kFlag + 16;
  static constexpr int kBytes = kControl + static_cast<int>(sizeof(Control)) + 1024;  ///< with room to align the base
  static_assert(kBytes <= kSharedMemoryLimit, "the tile does not fit in the shared memory of one multiprocessor; use fewer stages");
};

template <class L>
struct Memory {
  char* base;
  __device__ char* rows(int stage) const { return base + stage * (L::kDepth * L::kRowBytes); }
  __device__ char* bricks(int stage) const { return base + L::kWeights + stage * (L::kDepth * kTileBricks * L::kBrickBytes); }
  __device__ char* staging(int group) const { return base + L::kStaging + group * L::kStagingBytes; }
  __device__ int* targets(int group, int max_rows) const { return reinterpret_cast<int*>(base + L::kTargets) + group * max_rows; }
  __device__ float* factors(int group, int max_rows) const { return reinterpret_cast<float*>(base + L::kFactors) + group * max_rows; }
  __device__ Unit* unit(int s) const { return reinterpret_cast<Unit*>(base + L::kUnits) + s; }
  __device__ std::uint64_t* full(int s) const { return reinterpret_cast<std::uint64_t*>(base + L::kBarriers) + s; }
  __device__ std::uint64_t* empty(int s) const { return full(L::kStages + s); }
  __device__ std::uint64_t* unit_full(int s) const { return full(2 * L::kStages + s); }
  __device__ std::uint64_t* unit_empty(int s) const { return full(2 * L::kStages + kUnitEntries + s); }
  __device__ Control* control() const { return reinterpret_cast<Control*>(base + L::kControl); }
  __device__ int* flag() const { return reinterpret_cast<int*>(base + L::kFlag); }
};

/// Parts of K for `tiles` tiles of `steps` steps of the plan, tried by the 32 lanes of one warp; all lanes return the choice. Converting
/// codes limits a CTA, so a step takes as long on an idle device as on a busy one. Hence the number of whole waves of units decides; a
/// part costs `kPartSteps` more for its sum.
__device__ inline int choose_parts(int tiles, int steps, int workers, int max_splits, int max_units) {
  constexpr float kPartSteps = 1.5F;
  int const splits = (thread_index() & 31) + 1;
  unsigned cost = 0xFFFFFFFFu;
  if (splits == 1 || (splits <= max_splits && splits <= steps && tiles < 2 * workers && tiles * splits <= max_units)) {
    float const waves = static_cast<float>((tiles * splits + workers - 1) / workers);
    float const length = static_cast<float>((steps + splits - 1) / splits) + (splits > 1 ? kPartSteps : 0.0F);
    cost = (static_cast<unsigned>(waves * length * 256.0F) << 5) | static_cast<unsigned>(splits - 1);
  }
  return static_cast<int>(__reduce_min_sync(0xFFFFFFFFu, cost) & 31u) + 1;
}

/// The plan with this kernel's parts of K, for one whole warp.
__device__ inline Control split_plan(Params const& p) {
  Control control = *p.align.control;
#pragma unroll
  for (int phase = 0; phase < 2; ++phase) {
    int const tiles = control.token_tiles * p.align.plan.space.weight_tiles[phase];
    control.splits[phase] =
        choose_parts(tiles, p.align.plan.space.k_steps[phase], p.align.plan.workers, p.max_splits, p.align.plan.max_units);
    control.units[phase] = tiles * control.splits[phase];
  }
  return control;
}

/// A unit's bricks: the part of K, and the number of bricks side by side from the first.
struct Span {
  int k_begin;
  int k_count;
  int first;
  int side;
};
template <class L, class P>
__device__ inline Span span_of(P const& p, Unit const& unit) {
  Span s{};
  int const phase = unit.phase;
  s.k_begin = unit.k_begin * kCoarse;
  s.k_count = min((unit.k_begin + unit.k_count) * kCoarse, phase == 0 ? p.layer.steps[0] : p.layer.steps[1]) - s.k_begin;
  if constexpr (L::kAny) {
    s.first = unit.feature / (phase == 0 && static_cast<AnyParams const&>(p).any.gated ? 32 : kBrickRows);
  } else {
    s.first = unit.feature / (phase == 0 ? 32 : kBrickRows);
  }
  s.side = min(kTileBricks, (phase == 0 ? p.layer.bricks[0] : p.layer.bricks[1]) - s.first);
  return s;
}

}  // namespace moe::hopper::w4
