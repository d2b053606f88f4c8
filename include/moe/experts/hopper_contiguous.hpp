// SPDX-License-Identifier: Apache-2.0
// experts/hopper_contiguous.hpp: the MoE layer's experts on one Hopper GPU (sm_90a), standard and batched formats, at most three launches.
#pragma once

#include <cstdint>
#include <memory>

#include "moe/experts/hopper/problem.hpp"

struct CUstream_st;

namespace moe::hopper {

/// Weights of one layer in device memory; borrowed for the layer's lifetime, 16-byte aligned.
struct LayerWeights {
  void const* w13 = nullptr;          ///< [E, 2I, H], gate rows before up rows
  void const* w2 = nullptr;           ///< [E, H, I]
  float const* w13_scales = nullptr;  ///< fp8_block: [E, 2I / 128, H / 128]; fp8_row: [E, 2I]
  float const* w2_scales = nullptr;   ///< fp8_block: [E, H / 128, I / 128]; fp8_row: [E, H]
};

/// The tile choice for that many tokens; `rows` is the expected rows of one expert.
constexpr Tuning choose_tuning(LayerShape const& shape, Scheme scheme, int max_tokens) {
  Tuning t{};
  long long const slots = static_cast<long long>(max_tokens) * shape.topk;
  long long const rows = slots / (shape.num_experts > 0 ? shape.num_experts : 1);
  if (max_tokens <= 16) {
    t.tile_rows = max_tokens <= 8 ? 8 : 16;
    t.stages = 6;
  } else if (rows <= 40) {
    t.tile_rows = 64;
    t.stages = 5;
  } else {
    t.tile_rows = most_rows(scheme);
    t.stages = scheme == Scheme::fp8_block ? 5 : 4;
    t.cluster = rows >= 1024 ? 2 : 1;
  }
  t.self_align = slots <= 128 && shape.num_experts <= 384 && t.tile_rows <= 64 &&
                 (!is_fp8(scheme) || static_cast<long long>(max_tokens) * shape.hidden <= 32768);
  return t;
}

/// One layer's experts with SwiGLU. forward() enqueues at most three kernels, allocates nothing, never synchronises, and can be captured.
/// One forward of an object at a time: it owns counters that a forward leaves as it found them.
class ContiguousLayer {
 public:
  /// E_UNSUPPORTED without a Hopper device; E_CONFIG if a size does not fit the tiles; E_ARG on misaligned weights.
  ContiguousLayer(LayerShape shape, Scheme scheme, LayerWeights weights);
  ~ContiguousLayer();
  ContiguousLayer(ContiguousLayer&&) noexcept;
  ContiguousLayer& operator=(ContiguousLayer&&) noexcept;

  /// Bytes of workspace (device memory, 1024-byte aligned, any contents) for at most that many tokens.
  std::int64_t workspace_bytes(int max_tokens) const;
  /// E_ARG on null or misaligned pointers.
  void forward(LayerCall const& call, void* workspace, CUstream_st* stream) const;
  /// The same with a tile choice of the caller's.
  void forward(LayerCall const& call, Tuning const& tuning, void* workspace, CUstream_st* stream) const;

  /// Batched format: x and out are [E, capacity, H], counts[e] rows of expert e are valid (device memory); no router weights.
  /// `expected_rows` of an expert is a hint for the tile. The workspace is of E·capacity slots.
  void forward_batched(void const* x, std::int32_t const* counts, int capacity, int expected_rows, void* out, void* workspace,
                       CUstream_st* stream) const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace moe::hopper
