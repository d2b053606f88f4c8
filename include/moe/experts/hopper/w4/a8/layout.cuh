// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4/a8/layout.cuh: the parameters and the shared memory of the layer kernel with 4-bit weights and e4m3 activations.
#pragma once

#include <cstdint>

#include "moe/experts/hopper/w4/a8/problem.hpp"
#include "moe/experts/hopper/w4/layout.cuh"

namespace moe::hopper::w4a8 {

/// x and inter are e4m3 codes. layer.steps and plan.space count bricks of 128 of K; layer.intermediate is a multiple of 128. `any` and
/// `weight_on_input` are for kernels of any activation.
struct Params : w4::AnyParams {
  float const* x_scales;  ///< of rows of x, one per 128 of K
  long long x_scale_stride;
  float* inter_scales;  ///< [slots, scale_blocks], rows sorted by expert
  int scale_blocks;
  int sums;  ///< sums_of() the weights
};

/// As w4::Layout. A row's scales take four floats a step: those of the intermediate come in whole 16 bytes.
template <W4Scheme S, int Sums, int Groups, int Depth, int Stages, int MaxRows, bool Any>
struct Layout {
  static constexpr W4Scheme kScheme = S;
  static constexpr int kSums = Sums;  ///< groups of a row's 128 of K whose sums are scaled apart (sums_of)
  static constexpr bool kAny = Any;
  static constexpr int kMaxRows = MaxRows;
  static constexpr int kScaleGroups = Any ? 2 : 1;  ///< most scale groups of the features of a tile: without gates it has 256
  static constexpr int kStages = Stages;
  static constexpr int kGroups = Groups;
  static constexpr int kDepth = Depth;
  static constexpr int kBricks = kTileBricks / Groups;
  static constexpr int kConsumers = Groups * 128;
  static constexpr int kThreads = kConsumers + w4::kProducerThreads;
  static constexpr int kRowBytes = MaxRows * 128;
  static constexpr int kBrickBytes = stored_brick_bytes(S);
  static constexpr int kPassRows = MaxRows < 32 ? MaxRows : Groups == 4 ? 32 : 64;
  static constexpr int kStagingBytes = kPassRows * 128;
  static constexpr int kStaging = Stages * Depth * kRowBytes;
  static constexpr int kWeights = kStaging + Groups * kStagingBytes;
  static constexpr int kTargets = kWeights + Stages * Depth * kTileBricks * kBrickBytes;
  static constexpr int kFactors = kTargets + Groups * MaxRows * 4;
  static constexpr int kUnits = kFactors + Groups * MaxRows * 4;
  static constexpr int kBarriers = kUnits + kUnitEntries * static_cast<int>(sizeof(Unit));
  static constexpr int kFlag = kBarriers + (2 * Stages + 2 * kUnitEntries) * 8;
  static constexpr int kControl = kFlag + 16;
  static constexpr int kRowScales = (kControl + static_cast<int>(sizeof(Control)) + 127) / 128 * 128;
  static constexpr int kAmax = kRowScales + Stages * Depth * MaxRows * 16;
  static constexpr int kZeros = kAmax + kScaleGroups * MaxRows * 4;
  static constexpr int kBytes = kZeros + (has_zero_points(S) ? 256 : 0) + 1024;
  static_assert(Groups * kPassRows >= kScaleGroups * MaxRows, "the staging buffers together hold 128 codes of every row and scale group");
  static_assert(kBytes <= kSharedMemoryLimit, "the tile does not fit in the shared memory of one multiprocessor; use fewer stages");
};

template <class L>
struct Memory : w4::Memory<L> {
  /// Scales of the rows of step d of a stage: four floats a row.
  __device__ float* row_scales(int stage, int d) const {
    return reinterpret_cast<float*>(this->base + L::kRowScales) + (stage * L::kDepth + d) * (L::kRowBytes / 128) * 4;
  }
  /// Of the rows of each scale group.
  __device__ int* amax() const { return reinterpret_cast<int*>(this->base + L::kAmax); }
  /// With zero points: the values of the 16 codes under each of the 16 zero points, in e4m3.
  __device__ std::uint32_t* zeros() const { return reinterpret_cast<std::uint32_t*>(this->base + L::kZeros); }
};

}  // namespace moe::hopper::w4a8
