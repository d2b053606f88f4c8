// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4a16_layer.cuh: the definitions of W4A16Layer: packs 4-bit weights and launches the aligning and reducing kernels around
// the layer kernel of experts/hopper/w4/launch.cuh. Include it in one translation unit compiled for sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/align.cuh"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/common/reduce.cuh"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/pack.cuh"
#include "moe/experts/hopper/w4a16_layer.hpp"

namespace moe::hopper {

namespace w4 {

/// Enqueues the packing of one matrix of every expert.
template <W4Scheme S>
inline void pack_matrix(W4PackArgs const& a, int experts, cudaStream_t stream) {
  find_largest_scale<S><<<experts, 1024, 0, stream>>>(a);
  check_cuda(cudaGetLastError(), "find_largest_scale");
  pack_bricks<S><<<dim3(a.packed_cols / kBrickDepth, a.packed_rows / kBrickRows, experts), 128, 0, stream>>>(a);
  check_cuda(cudaGetLastError(), "pack_bricks");
}

}  // namespace w4

struct W4A16Layer::State {
  LocalShape shape;
  W4Scheme scheme;
  W4Weights weights;
  W4Activation activation;
  W4Launcher launcher = nullptr;
  int workers = 0;
  std::uint8_t* packed[2] = {nullptr, nullptr};
  float* factor[2] = {nullptr, nullptr};
  int* largest = nullptr;
  int* bad_zeros = nullptr;
  int* split_counters = nullptr;

  int intermediate() const { return padded_intermediate(shape.intermediate); }
  /// Divides the memory of the packed weights.
  void place(char* memory);
  template <W4Scheme S>
  void pack(cudaStream_t stream) const;
  void pack(cudaStream_t stream) const {
    switch (scheme) {
      case W4Scheme::int4: return pack<W4Scheme::int4>(stream);
      case W4Scheme::int4_zero: return pack<W4Scheme::int4_zero>(stream);
      case W4Scheme::mxfp4: return pack<W4Scheme::mxfp4>(stream);
    }
  }
  /// Enqueues the layer; `batch_counts` null: standard format.
  void enqueue(LayerCall const& call, std::int32_t const* batch_counts, int capacity, W4Tuning const& tuning, void* workspace,
               cudaStream_t stream) const;
};

inline void W4A16Layer::State::place(char* memory) {
  factor[0] = reinterpret_cast<float*>(memory);
  factor[1] = factor[0] + 1024;
  largest = reinterpret_cast<int*>(memory) + 2 * 1024;
  bad_zeros = largest + 1024;
  split_counters = bad_zeros + 1024;
  packed[0] = reinterpret_cast<std::uint8_t*>(memory) + kHeadBytes;
  packed[1] = packed[0] + shape.num_experts * hopper::packed_bytes(scheme, 2LL * intermediate(), shape.hidden);
}

template <W4Scheme S>
inline void W4A16Layer::State::pack(cudaStream_t stream) const {
  for (int i = 0; i < 2; ++i) {
    W4PackArgs a{};
    a.codes = i == 0 ? weights.w13 : weights.w2;
    a.scales = i == 0 ? weights.w13_scales : weights.w2_scales;
    a.rows = i == 0 ? 2 * shape.intermediate : shape.hidden;
    a.cols = i == 0 ? shape.hidden : shape.intermediate;
    a.packed_rows = i == 0 ? 2 * intermediate() : shape.hidden;
    a.packed_cols = i == 0 ? shape.hidden : intermediate();
    a.group = i == 0 ? weights.w13_group : weights.w2_group;
    a.gate_up = i == 0;
    a.largest = largest;
    a.factor = factor[i];
    a.bad_zeros = bad_zeros;
    a.packed = packed[i];
    w4::pack_matrix<S>(a, shape.num_experts, stream);
  }
}

[[gnu::used]] inline W4A16Layer::W4A16Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4Activation const& activation,
                                            void* packed, W4Launcher launcher)
    : state_(std::make_unique<State>()) {
  check_w4(shape, scheme, weights);
  if (packed == nullptr || reinterpret_cast<std::uintptr_t>(packed) % 16 != 0) {
    throw Error(ErrorCode::argument, text("address ", packed, " of the packed weights is null or not a multiple of 16 bytes"));
  }
  int device = 0;
  cudaDeviceProp properties{};
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
  check_device(device, properties.name, properties.major, properties.minor);
  state_->workers = properties.multiProcessorCount;
  state_->shape = shape;
  state_->scheme = scheme;
  state_->weights = weights;
  state_->activation = activation;
  state_->launcher = launcher;
  state_->place(static_cast<char*>(packed));
  check_cuda(cudaMemset(packed, 0, kHeadBytes), "cudaMemset");
  state_->pack(nullptr);
  int bad_zeros = 0;
  check_cuda(cudaMemcpy(&bad_zeros, state_->bad_zeros, sizeof(int), cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (bad_zeros != 0) {
    throw Error(ErrorCode::unsupported, "hopper_w4a16: a zero point is not an integer of 0 to 15, use cuda_reference");
  }
}
[[gnu::used]] inline W4A16Layer::~W4A16Layer() = default;
[[gnu::used]] inline W4A16Layer::W4A16Layer(W4A16Layer&&) noexcept = default;
[[gnu::used]] inline W4A16Layer& W4A16Layer::operator=(W4A16Layer&&) noexcept = default;

[[gnu::used]] inline void W4A16Layer::weights_changed(CUstream_st* stream) { state_->pack(stream); }

[[gnu::used]] inline std::int64_t W4A16Layer::workspace_bytes(int max_tokens) const {
  return plan_w4_workspace(state_->shape, max_tokens).bytes;
}

inline void W4A16Layer::State::enqueue(LayerCall const& call, std::int32_t const* batch_counts, int capacity, W4Tuning const& tuning,
                                       void* workspace, cudaStream_t stream) const {
  for (void const* pointer : {call.x, static_cast<void const*>(call.out), static_cast<void const*>(workspace)}) {
    if (pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
      throw Error(ErrorCode::argument, text("address ", pointer, " of x, out or workspace is null or not a multiple of 16 bytes"));
    }
  }
  long long const x_stride = call.x_stride != 0 ? call.x_stride : shape.hidden;
  if (x_stride < shape.hidden || x_stride % 8 != 0) {
    throw Error(ErrorCode::argument, text("x_stride ", x_stride, " is not a multiple of 8 of at least ", shape.hidden));
  }
  if (call.max_tokens < 0) throw Error(ErrorCode::argument, text("max_tokens ", call.max_tokens, " is negative"));
  if (tuning.tile_rows < 8 || tuning.tile_rows > most_rows(scheme) || tuning.tile_rows % 8 != 0) {
    throw Error(ErrorCode::argument, text("tile_rows ", tuning.tile_rows, " is not a multiple of 8 in [8, ", most_rows(scheme), "]"));
  }
  if (call.max_tokens == 0) return;
  bool const batched = batch_counts != nullptr;
  LocalShape rows_shape = shape;
  if (batched) rows_shape.topk = 1;
  W4Workspace const w = plan_w4_workspace(rows_shape, call.max_tokens);
  if (w.slots >= std::int64_t{1} << 31) {
    throw Error(ErrorCode::capacity, text("hopper_w4a16: ", w.slots, " slots, at most 2^31 - 1"));
  }
  auto const at = [workspace](std::int64_t offset) { return static_cast<char*>(workspace) + offset; };

  w4::Params p{};
  for (int i = 0; i < 2; ++i) {
    p.weights[i] = packed[i];
    p.bias[i] = i == 0 ? weights.b13 : weights.b2;
    p.factor[i] = factor[i];
  }
  p.bricks[0] = 2 * intermediate() / kBrickRows;
  p.bricks[1] = shape.hidden / kBrickRows;
  p.steps[0] = shape.hidden / kBrickDepth;
  p.steps[1] = intermediate() / kBrickDepth;
  p.space = UnitSpace{{(p.bricks[0] + kTileBricks - 1) / kTileBricks, (p.bricks[1] + kTileBricks - 1) / kTileBricks},
                      {(p.steps[0] + w4::kCoarse - 1) / w4::kCoarse, (p.steps[1] + w4::kCoarse - 1) / w4::kCoarse},
                      std::max(1, tuning.raster),
                      kGateFeatures};

  AlignArgs a{};
  a.ids = batched ? nullptr : call.topk_ids;
  a.weights = call.topk_weights;
  a.id_gap = slot_gap(call.id_stride, shape.topk);
  a.weight_gap = slot_gap(call.weight_stride, shape.topk);
  a.num_tokens = call.num_tokens;
  a.counts = batch_counts;
  a.capacity = capacity;
  a.max_tokens = call.max_tokens;
  a.topk = rows_shape.topk;
  a.num_experts = shape.num_experts;
  a.plan.tile_rows = tuning.tile_rows;
  a.plan.row_step = 1;  // the kernels' numbers of columns lie too far apart to round to one of them
  a.plan.cluster = 1;
  a.plan.workers = workers;
  a.plan.max_splits = 1;  // the layer kernel splits by a rule of its own
  a.plan.max_units =
      static_cast<int>(std::min<long long>(W4Workspace::kMaxSplitUnits, W4Workspace::kPartialBytes / 4 / (256LL * tuning.tile_rows)));
  a.plan.space = p.space;
  a.plan.tiles = reinterpret_cast<TokenTile*>(at(w.tiles));
  a.control = reinterpret_cast<Control*>(at(w.control));
  a.next_unit = reinterpret_cast<int*>(at(w.control)) + 64;
  a.counters = reinterpret_cast<int*>(at(w.counters));
  a.max_tiles = static_cast<int>(w.max_tiles);
  a.sorted_rows = reinterpret_cast<SortedRow*>(at(w.sorted_rows));
  a.hidden = shape.hidden;
  static hopper::detail::OncePerDevice once;
  hopper::detail::allow_shared_memory(align_kernel<kAlignCluster>, align_smem_bytes(1024), once);
  hopper::detail::launch(align_kernel<kAlignCluster>, kAlignCluster, kAlignThreads, align_smem_bytes(shape.num_experts), kAlignCluster,
                         stream, a);

  bool const reduce = rows_shape.topk > 1;
  p.hidden = shape.hidden;
  p.intermediate = intermediate();
  p.bias_width = shape.intermediate;
  p.topk = rows_shape.topk;
  p.num_experts = shape.num_experts;
  p.max_tokens = call.max_tokens;
  p.tile_rows = tuning.tile_rows;
  p.max_tiles = a.max_tiles;
  p.max_units = a.plan.max_units;
  p.standard = !batched;
  p.x = call.x;
  p.x_stride = x_stride;
  p.ids = a.ids;
  p.id_gap = a.id_gap;
  p.gather = batched ? call.gather : nullptr;
  p.num_tokens = call.num_tokens;
  p.control = a.control;
  p.next_unit = a.next_unit;
  p.tiles = a.plan.tiles;
  p.counters = a.counters;
  p.sorted_rows = a.sorted_rows;
  p.inter = at(w.inter);
  p.split_counters = split_counters;
  p.workers = workers;
  p.max_splits = tuning.tile_rows <= medium_rows(scheme) && is_column_count(tuning.tile_rows) ? tuning.max_splits : 1;
  p.rows_out = reduce ? static_cast<void*>(at(w.slot_rows)) : call.out;
  p.out = call.out;
  p.partials = reinterpret_cast<float*>(at(w.partials));
  p.activation = activation;
  launcher(p, workers, stream);
  if (!reduce) return;
  long long const chunks = static_cast<long long>(call.max_tokens) * (shape.hidden / 8);
  int const grid = static_cast<int>(std::min<long long>((chunks + 255) / 256, 8LL * workers));
  hopper::detail::launch(reduce_kernel<__nv_bfloat16>, grid, 256, 0, 1, stream, static_cast<__nv_bfloat16 const*>(p.rows_out),
                         SlotIds(call.topk_ids, a.id_gap), call.num_tokens, call.max_tokens, shape.topk, shape.num_experts, shape.hidden,
                         static_cast<__nv_bfloat16*>(call.out));
}

[[gnu::used]] inline void W4A16Layer::forward(LayerCall const& call, W4Tuning const& tuning, void* workspace, CUstream_st* stream) const {
  if (call.max_tokens > 0 && (call.topk_ids == nullptr || call.topk_weights == nullptr)) {
    throw Error(ErrorCode::argument, "topk_ids or topk_weights is null");
  }
  state_->enqueue(call, nullptr, 0, tuning, workspace, stream);
}
[[gnu::used]] inline void W4A16Layer::forward(LayerCall const& call, void* workspace, CUstream_st* stream) const {
  forward(call, choose_w4_tuning(state_->shape, state_->scheme, call.max_tokens), workspace, stream);
}

[[gnu::used]] inline void W4A16Layer::forward_batched(void const* x, std::int32_t const* counts, int capacity, int expected_rows, void* out,
                                                      void* workspace, CUstream_st* stream, std::int32_t const* gather) const {
  LocalShape shape = state_->shape;
  shape.topk = 1;
  LayerCall call{};
  call.x = x;
  call.out = out;
  call.max_tokens = shape.num_experts * capacity;
  call.gather = gather;
  if (call.max_tokens > 0 && counts == nullptr) throw Error(ErrorCode::argument, "counts is null");
  W4Tuning const tuning = choose_w4_tuning(shape, state_->scheme, shape.num_experts * std::clamp(expected_rows, 1, std::max(1, capacity)));
  state_->enqueue(call, counts, capacity, tuning, workspace, stream);
}

}  // namespace moe::hopper
