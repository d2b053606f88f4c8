// SPDX-License-Identifier: Apache-2.0
// experts/hopper/layer_params.cuh: what the layer kernel is given, and how its shared memory lies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "moe/experts/hopper/align.cuh"
#include "moe/experts/hopper/problem.hpp"
#include "moe/experts/hopper/schedule.cuh"
#include "moe/experts/hopper/wgmma.cuh"

namespace moe::hopper {

/// Compile-time facts of a scheme on the device.
template <Scheme S>
struct SchemeTraits {
  static constexpr bool kFp8 = is_fp8(S);
  static constexpr bool kBlock = S == Scheme::fp8_block;
  static constexpr MmaType kMma = kFp8 ? MmaType::e4m3 : S == Scheme::bf16 ? MmaType::bf16 : MmaType::f16;
  static constexpr int kElementBytes = kFp8 ? 1 : 2;
  static constexpr int kStepElements = 128 / kElementBytes;  ///< of K in one stage
  using Output = std::conditional_t<S == Scheme::f16, __half, __nv_bfloat16>;
};

/// Kernel parameter block. Weights are three-dimensional tensor maps with boxes of 128 bytes of K by 128 rows: w13 as [2E, I, H] (gate
/// of expert e at 2e, up at 2e + 1), w2 as [E, H, I].
template <class Activation>
struct LayerParams {
  CUtensorMap w13;
  CUtensorMap w2;
  UnitSpace space;
  int hidden;
  int intermediate;
  int topk;
  int num_experts;
  int max_tokens;
  int tile_rows;
  int max_tiles;
  int max_units;
  bool standard;            ///< ids given: rows of x are tokens; else the batched format
  void const* x;            ///< rows of codes
  float const* x_scales;    ///< fp8: [M, H / 128] or [M]
  float const* w13_scales;  ///< fp8_block: [E, 2I / 128, H / 128]; fp8_row: [E, 2I]
  float const* w2_scales;   ///< fp8_block: [E, H / 128, I / 128]; fp8_row: [E, H]
  std::int32_t const* ids;
  std::int32_t const* num_tokens;
  Control* control;
  int* next_unit;
  int* exits;       ///< CTAs that are done, where the kernel plans for itself and must leave its counters zero
  int* finished;    ///< there also: units done per weight tile of phase 1 and warpgroup
  void* out;        ///< [M, H]; there also the sums over the slots go, if topk is over 1
  bool self_align;  ///< no aligning kernel ran: plan with `align`, whose counters are zero on entry
  AlignArgs align;
  TokenTile const* tiles;
  int* counters;
  SortedRow const* sorted_rows;
  void* inter;          ///< [slots, I] codes
  float* inter_scales;  ///< fp8: [slots, I / 128]
  void* rows_out;       ///< rows addressed by slot: out itself if topk is 1
  float* partials;
  Activation activation;
};

inline constexpr int kConsumerThreads = 256;
inline constexpr int kLayerThreads = 384;
inline constexpr int kGatherWarps = 3;      ///< one alone cannot feed the products: 74% of the tensor rate where three give 85%
inline constexpr int kUnitSlots = 8;        ///< more than a ring's stages: one CTA of a cluster is never so many units ahead of the other
inline constexpr int kMaxSplitRows = 64;    ///< K is split only in kernels of at most so many rows per tile
inline constexpr int kWeightBytes = 32768;  ///< 256 rows of 128 bytes of K

/// Rows that go through a warpgroup's staging buffer at a time.
template <Scheme S>
inline constexpr int kPassRows = is_fp8(S) ? 32 : 64;

/// Byte offsets in dynamic shared memory, from a 1024-byte aligned base.
template <Scheme S, int Stages, int MaxRows>
struct SmemLayout {
  static constexpr int kMaxRows = MaxRows;
  static constexpr int kRowBytes = MaxRows * 128;
  static constexpr int kScaleBytes = SchemeTraits<S>::kBlock ? 1024 : 0;  ///< [MaxRows] row scales, then at 512 two weight scales
  static constexpr int kStageBytes = kWeightBytes + (kRowBytes + 1023) / 1024 * 1024 + kScaleBytes;
  static constexpr int kStaging = Stages * kStageBytes;  ///< rows of 128 bytes, one buffer per consumer warpgroup
  static constexpr int kStagingRows = MaxRows < kPassRows<S> ? MaxRows : kPassRows<S>;
  static constexpr int kStagingBytes = kStagingRows * 128;
  static constexpr int kTargets = kStaging + 2 * kStagingBytes;  ///< per warpgroup: MaxRows target rows
  static constexpr int kWeights = kTargets + 2 * MaxRows * 4;    ///< per warpgroup: MaxRows router weights
  static constexpr int kUnits = (kWeights + 2 * MaxRows * 4 + 15) / 16 * 16;
  static constexpr int kBarriers = kUnits + kUnitSlots * static_cast<int>(sizeof(Unit));
  static constexpr int kFlags = kBarriers + (2 * Stages + 3 * kUnitSlots) * 8;  ///< one word per warpgroup, one for the CTA
  static constexpr int kControl = (kFlags + 12 + 15) / 16 * 16;
  static constexpr int kNumbers = kControl + static_cast<int>(sizeof(Control));  ///< unit numbers that the cluster's first CTA drew
  static constexpr int kBytes = kNumbers + kUnitSlots * 4 + 1024;                ///< with room to align the base
  static_assert(kBytes <= 232448, "the tile does not fit in the shared memory of one multiprocessor; use fewer stages");
};

/// The ring position of one role: all roles walk the same sequence of stages.
template <int Stages>
struct RingState {
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

/// Pointers into shared memory.
template <class Layout, int Stages>
struct Shared {
  char* base;
  __device__ char* stage(int s) const { return base + s * Layout::kStageBytes; }
  __device__ std::uint64_t* full(int s) const { return reinterpret_cast<std::uint64_t*>(base + Layout::kBarriers) + s; }
  __device__ std::uint64_t* empty(int s) const { return full(Stages + s); }
  __device__ std::uint64_t* unit_full(int s) const { return full(2 * Stages + s); }
  __device__ std::uint64_t* unit_empty(int s) const { return full(2 * Stages + kUnitSlots + s); }
  __device__ std::uint64_t* number_full(int s) const { return full(2 * Stages + 2 * kUnitSlots + s); }
  __device__ int* number(int s) const { return reinterpret_cast<int*>(base + Layout::kNumbers) + s; }
  __device__ Control* control() const { return reinterpret_cast<Control*>(base + Layout::kControl); }
  __device__ Unit* unit(int s) const { return reinterpret_cast<Unit*>(base + Layout::kUnits) + s; }
};

}  // namespace moe::hopper
