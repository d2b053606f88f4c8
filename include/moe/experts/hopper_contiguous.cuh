// SPDX-License-Identifier: Apache-2.0
// experts/hopper_contiguous.cuh: launches the aligning, layer and reducing kernels. Include in one translation unit compiled for sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/launch.cuh"
#include "moe/experts/hopper/tensor_map.cuh"
#include "moe/experts/hopper_contiguous.hpp"

namespace moe::hopper {

struct ContiguousLayer::State {
  LayerShape shape;
  Scheme scheme;
  LayerWeights weights;
  CUtensorMap w13;
  CUtensorMap w2;
  int workers;
  int* counters = nullptr;  ///< of calls that plan for themselves: next unit, exits, then as in the workspace
  State() = default;
  State(State const&) = delete;
  State& operator=(State const&) = delete;
  ~State() { cudaFree(counters); }

  /// Enqueues the layer; `batch_counts` null: standard format.
  void enqueue(LayerCall const& call, std::int32_t const* batch_counts, int capacity, Tuning const& tuning, void* workspace,
               cudaStream_t stream) const;
  /// Enqueues the sum over the slots of each token.
  template <class Output>
  void enqueue_reduce(LayerCall const& call, void const* rows, cudaStream_t stream) const;
};

namespace detail {

inline constexpr int kStateHead = 32;  ///< ints before the counters
inline constexpr int kStateCounters = kSelfAlignSlots + 2 * Workspace::kMaxSplitUnits;
inline constexpr int kStateFinished = 1024;  ///< two per weight tile of phase 1
inline constexpr int kStateInts = kStateHead + kStateCounters + kStateFinished;

template <class T>
inline T* at(void* workspace, std::int64_t offset) {
  return reinterpret_cast<T*>(static_cast<char*>(workspace) + offset);
}

}  // namespace detail

inline ContiguousLayer::ContiguousLayer(LayerShape shape, Scheme scheme, LayerWeights weights) : state_(std::make_unique<State>()) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  int major = 0;
  int workers = 0;
  check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
  check_cuda(cudaDeviceGetAttribute(&workers, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  if (major != 9) {
    throw Error(ErrorCode::unsupported,
                text("the Hopper experts need compute capability 9.0, device ", device, " has ", major, ".x; use CudaReference"));
  }
  int const unit = is_fp8(scheme) ? 128 : 64;
  if (shape.num_experts < 1 || shape.num_experts > 1024) {
    throw Error(ErrorCode::config, text("num_experts ", shape.num_experts, " is out of range [1, 1024]"));
  }
  if (shape.hidden < unit || shape.hidden % unit != 0 || shape.intermediate < unit || shape.intermediate % unit != 0) {
    throw Error(ErrorCode::config, text("hidden ", shape.hidden, " and intermediate ", shape.intermediate, " must be multiples of ", unit));
  }
  if (shape.topk < 1) throw Error(ErrorCode::config, text("topk ", shape.topk, " must be at least 1"));
  int const bytes = is_fp8(scheme) ? 1 : 2;
  state_->shape = shape;
  state_->scheme = scheme;
  state_->weights = weights;
  state_->workers = workers;
  state_->w13 = make_tensor_map(weights.w13, bytes, 2LL * shape.num_experts, shape.intermediate, shape.hidden, 128);
  state_->w2 = make_tensor_map(weights.w2, bytes, shape.num_experts, shape.hidden, shape.intermediate, 128);
  check_cuda(cudaMalloc(&state_->counters, detail::kStateInts * sizeof(int)), "cudaMalloc");
  check_cuda(cudaMemset(state_->counters, 0, detail::kStateInts * sizeof(int)), "cudaMemset");
  check_cuda(cudaMemcpy(state_->counters, &workers, sizeof(int), cudaMemcpyHostToDevice), "cudaMemcpy");
}
inline ContiguousLayer::~ContiguousLayer() = default;
inline ContiguousLayer::ContiguousLayer(ContiguousLayer&&) noexcept = default;
inline ContiguousLayer& ContiguousLayer::operator=(ContiguousLayer&&) noexcept = default;

inline std::int64_t ContiguousLayer::workspace_bytes(int max_tokens) const {
  return plan_workspace(state_->shape, state_->scheme, max_tokens, 8).bytes;
}

template <class Output>
void ContiguousLayer::State::enqueue_reduce(LayerCall const& call, void const* rows, cudaStream_t stream) const {
  long long const chunks = static_cast<long long>(call.max_tokens) * (shape.hidden / 8);
  int const grid = static_cast<int>(std::min<long long>((chunks + 255) / 256, 8LL * workers));
  detail::launch(reduce_kernel<Output>, grid, 256, 0, 1, stream, static_cast<Output const*>(rows), call.topk_ids, call.num_tokens,
                 call.max_tokens, shape.topk, shape.num_experts, shape.hidden, static_cast<Output*>(call.out));
}

inline void ContiguousLayer::State::enqueue(LayerCall const& call, std::int32_t const* batch_counts, int capacity, Tuning const& wanted,
                                            void* workspace, cudaStream_t stream) const {
  Tuning tuning = wanted;
  tuning.tile_rows = std::min(tuning.tile_rows, most_rows(scheme));
  for (void const* pointer : {call.x, static_cast<void const*>(call.out), static_cast<void const*>(workspace)}) {
    if (pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
      throw Error(ErrorCode::argument, text("address ", pointer, " of x, out or workspace is null or not a multiple of 16 bytes"));
    }
  }
  if (call.max_tokens < 0) throw Error(ErrorCode::argument, text("max_tokens ", call.max_tokens, " is negative"));
  if (call.max_tokens == 0) return;
  bool const batched = batch_counts != nullptr;
  LayerShape rows_shape = shape;
  if (batched) rows_shape.topk = 1;
  Workspace const w = plan_workspace(rows_shape, scheme, call.max_tokens, 8);
  bool const fp8 = is_fp8(scheme);
  int const step = fp8 ? 128 : 64;
  if (tuning.tile_rows < most_rows(scheme)) tuning.cluster = 1;
  int const cluster = tuning.cluster;
  bool const self_align = tuning.self_align && !batched && cluster == 1 && w.slots <= kSelfAlignSlots &&
                          tuning.tile_rows <= kMaxSplitRows && 2 * shape.hidden / kOutputFeatures < detail::kStateFinished - 1;
  UnitSpace const space{{(shape.intermediate + kGateFeatures - 1) / kGateFeatures, (shape.hidden + kOutputFeatures - 1) / kOutputFeatures},
                        {shape.hidden / step, shape.intermediate / step},
                        std::max(1, tuning.raster / cluster)};
  using detail::at;
  AlignArgs a{};
  a.ids = batched ? nullptr : call.topk_ids;
  a.weights = call.topk_weights;
  a.num_tokens = call.num_tokens;
  a.counts = batch_counts;
  a.capacity = capacity;
  a.max_tokens = call.max_tokens;
  a.topk = rows_shape.topk;
  a.num_experts = shape.num_experts;
  a.plan.tile_rows = tuning.tile_rows;
  a.plan.cluster = cluster;
  a.plan.workers = workers / cluster;
  a.plan.max_splits = tuning.tile_rows <= kMaxSplitRows && cluster == 1 ? tuning.max_splits : 1;
  a.plan.max_units =
      static_cast<int>(std::min<long long>(Workspace::kMaxSplitUnits, Workspace::kPartialBytes / 4 / (256LL * tuning.tile_rows)));
  a.plan.space = space;
  a.plan.tiles = at<TokenTile>(workspace, w.tiles);
  a.control = at<Control>(workspace, w.control);
  a.next_unit = self_align ? counters : at<int>(workspace, w.control) + 64;
  a.counters = self_align ? counters + detail::kStateHead : at<int>(workspace, w.counters);
  a.max_tiles = self_align ? kSelfAlignSlots : static_cast<int>(w.max_tiles);
  a.sorted_rows = at<SortedRow>(workspace, w.sorted_rows);
  a.x = call.x;
  a.hidden = shape.hidden;
  a.x_codes = at<std::uint8_t>(workspace, w.x_codes);
  a.x_scales = at<float>(workspace, w.x_scales);
  if (!self_align) {
    static cudaError_t const align_ready =
        cudaFuncSetAttribute(align_kernel<kAlignCluster>, cudaFuncAttributeMaxDynamicSharedMemorySize, align_smem_bytes(1024));
    check_cuda(align_ready, "cudaFuncSetAttribute");
    long long const groups = static_cast<long long>(call.max_tokens) * (shape.hidden / 128);
    int const quantizers = fp8 ? static_cast<int>(std::min<long long>((groups + 127) / 128, workers)) : 0;
    int const grid = kAlignCluster * (1 + (quantizers + kAlignCluster - 1) / kAlignCluster);
    detail::launch(align_kernel<kAlignCluster>, grid, kAlignThreads, align_smem_bytes(shape.num_experts), kAlignCluster, stream, a);
  }

  LayerParams<FastSilu> p{};
  p.w13 = w13;
  p.w2 = w2;
  p.space = space;
  p.hidden = shape.hidden;
  p.intermediate = shape.intermediate;
  p.topk = rows_shape.topk;
  p.num_experts = shape.num_experts;
  p.max_tokens = call.max_tokens;
  p.tile_rows = tuning.tile_rows;
  p.max_tiles = a.max_tiles;
  p.max_units = a.plan.max_units;
  p.standard = !batched;
  p.x = fp8 ? static_cast<void const*>(a.x_codes) : call.x;
  p.x_scales = a.x_scales;
  p.w13_scales = weights.w13_scales;
  p.w2_scales = weights.w2_scales;
  p.ids = a.ids;
  p.num_tokens = call.num_tokens;
  p.control = a.control;
  p.next_unit = a.next_unit;
  p.exits = counters + 1;
  p.finished = counters + detail::kStateHead + detail::kStateCounters;
  p.out = call.out;
  p.self_align = self_align;
  p.align = a;
  p.tiles = a.plan.tiles;
  p.counters = a.counters;
  p.sorted_rows = a.sorted_rows;
  p.inter = at<char>(workspace, w.inter);
  p.inter_scales = at<float>(workspace, w.inter_scales);
  bool const reduce = rows_shape.topk > 1;
  p.rows_out = reduce ? static_cast<void*>(at<char>(workspace, w.slot_rows)) : call.out;
  p.partials = at<float>(workspace, w.partials);
  switch (scheme) {
    case Scheme::bf16: detail::launch_layer_tuned<Scheme::bf16>(p, workers, tuning, stream); break;
    case Scheme::f16: detail::launch_layer_tuned<Scheme::f16>(p, workers, tuning, stream); break;
    case Scheme::fp8_block: detail::launch_layer_tuned<Scheme::fp8_block>(p, workers, tuning, stream); break;
    case Scheme::fp8_row: throw Error(ErrorCode::unsupported, "fp8_row is not built in the contiguous layer");
  }
  if (!reduce || (self_align && !batched)) return;
  if (scheme == Scheme::f16) {
    enqueue_reduce<__half>(call, p.rows_out, stream);
  } else {
    enqueue_reduce<__nv_bfloat16>(call, p.rows_out, stream);
  }
}

inline void ContiguousLayer::forward(LayerCall const& call, Tuning const& tuning, void* workspace, CUstream_st* stream) const {
  if (call.max_tokens > 0 && (call.topk_ids == nullptr || call.topk_weights == nullptr)) {
    throw Error(ErrorCode::argument, "topk_ids or topk_weights is null");
  }
  state_->enqueue(call, nullptr, 0, tuning, workspace, stream);
}
inline void ContiguousLayer::forward(LayerCall const& call, void* workspace, CUstream_st* stream) const {
  forward(call, choose_tuning(state_->shape, state_->scheme, call.max_tokens), workspace, stream);
}

inline void ContiguousLayer::forward_batched(void const* x, std::int32_t const* counts, int capacity, int expected_rows, void* out,
                                             void* workspace, CUstream_st* stream) const {
  LayerShape shape = state_->shape;
  shape.topk = 1;
  LayerCall call{};
  call.x = x;
  call.out = out;
  call.max_tokens = shape.num_experts * capacity;
  Tuning tuning = choose_tuning(shape, state_->scheme, shape.num_experts * std::clamp(expected_rows, 1, std::max(1, capacity)));
  if (expected_rows <= 16) tuning.tile_rows = expected_rows <= 8 ? 8 : 16;
  state_->enqueue(call, counts, capacity, tuning, workspace, stream);
}

}  // namespace moe::hopper
