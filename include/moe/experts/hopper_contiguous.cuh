// SPDX-License-Identifier: Apache-2.0
// experts/hopper_contiguous.cuh: launches the aligning, layer and reducing kernels. Include in one translation unit compiled for sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/align.cuh"
#include "moe/experts/hopper/layer_kernel.cuh"
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
};

namespace detail {

/// Launches with programmatic dependent launch: the kernel's prologue overlaps the end of the one before it in the stream.
template <class... Params, class... Args>
inline void launch(void (*kernel)(Params...), int grid, int block, int smem, cudaStream_t stream, Args const&... args) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = static_cast<std::size_t>(smem);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  check_cuda(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), "cudaLaunchKernelEx");
}

template <Scheme S, int Stages, int MaxRows>
inline void launch_layer(LayerParams<FastSilu> const& p, int workers, cudaStream_t stream) {
  constexpr int kSmem = SmemLayout<S, Stages, MaxRows>::kBytes;
  auto* const kernel = layer_kernel<S, Stages, MaxRows, FastSilu>;
  static cudaError_t const ready = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  check_cuda(ready, "cudaFuncSetAttribute");
  launch(kernel, workers, kLayerThreads, kSmem, stream, p);
}

template <Scheme S>
inline void launch_layer_tuned(LayerParams<FastSilu> const& p, int workers, Tuning const& t, cudaStream_t stream) {
  if (t.tile_rows <= 16) {
    launch_layer<S, 6, 16>(p, workers, stream);
  } else if (t.tile_rows <= 64) {
    launch_layer<S, 5, 64>(p, workers, stream);
  } else {
    launch_layer<S, 4, 128>(p, workers, stream);
  }
}

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
  *state_ = State{shape,
                  scheme,
                  weights,
                  make_tensor_map(weights.w13, bytes, 2LL * shape.num_experts, shape.intermediate, shape.hidden, 128),
                  make_tensor_map(weights.w2, bytes, shape.num_experts, shape.hidden, shape.intermediate, 128),
                  workers};
}
inline ContiguousLayer::~ContiguousLayer() = default;
inline ContiguousLayer::ContiguousLayer(ContiguousLayer&&) noexcept = default;
inline ContiguousLayer& ContiguousLayer::operator=(ContiguousLayer&&) noexcept = default;

inline std::int64_t ContiguousLayer::workspace_bytes(int max_tokens) const {
  return plan_workspace(state_->shape, state_->scheme, max_tokens, 8).bytes;
}

namespace detail {

/// Enqueues the layer. `counts` null: standard format.
inline void enqueue(LayerShape const& shape, Scheme scheme, LayerWeights const& weights, CUtensorMap const& w13, CUtensorMap const& w2,
                    int workers, LayerCall const& call, std::int32_t const* counts, int capacity, Tuning const& tuning, void* workspace,
                    cudaStream_t stream) {
  for (void const* pointer : {call.x, static_cast<void const*>(call.out), static_cast<void const*>(workspace)}) {
    if (pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
      throw Error(ErrorCode::argument, text("address ", pointer, " of x, out or workspace is null or not a multiple of 16 bytes"));
    }
  }
  if (call.max_tokens < 0) throw Error(ErrorCode::argument, text("max_tokens ", call.max_tokens, " is negative"));
  if (call.max_tokens == 0) return;
  Workspace const w = plan_workspace(shape, scheme, call.max_tokens, 8);
  bool const fp8 = is_fp8(scheme);
  int const step = fp8 ? 128 : 64;
  UnitSpace const space{
      {(shape.intermediate + 127) / 128, (shape.hidden + 255) / 256}, {shape.hidden / step, shape.intermediate / step}, tuning.raster};
  int const max_tiles = static_cast<int>(w.max_tiles);

  AlignArgs a{};
  a.ids = counts == nullptr ? call.topk_ids : nullptr;
  a.weights = call.topk_weights;
  a.num_tokens = call.num_tokens;
  a.counts = counts;
  a.capacity = capacity;
  a.max_tokens = call.max_tokens;
  a.topk = shape.topk;
  a.num_experts = shape.num_experts;
  a.tile_rows = tuning.tile_rows;
  a.workers = workers;
  a.max_splits = tuning.tile_rows <= kMaxSplitRows ? tuning.max_splits : 1;
  a.max_units = Workspace::kMaxSplitUnits;
  a.partial_floats = Workspace::kPartialBytes / 4;
  a.space = space;
  a.control = at<Control>(workspace, w.control);
  a.tiles = at<TokenTile>(workspace, w.tiles);
  a.counters = at<int>(workspace, w.counters);
  a.max_tiles = max_tiles;
  a.source_row = at<std::int32_t>(workspace, w.source_row);
  a.target_row = at<std::int32_t>(workspace, w.target_row);
  a.row_weight = at<float>(workspace, w.row_weight);
  a.x = call.x;
  a.hidden = shape.hidden;
  a.x_codes = at<std::uint8_t>(workspace, w.x_codes);
  a.x_scales = at<float>(workspace, w.x_scales);
  int const align_smem = align_smem_bytes(shape.num_experts);
  static cudaError_t const align_ready =
      cudaFuncSetAttribute(align_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, align_smem_bytes(1024));
  check_cuda(align_ready, "cudaFuncSetAttribute");
  long long const groups = static_cast<long long>(call.max_tokens) * (shape.hidden / 128);
  int const quantizers = fp8 ? static_cast<int>(std::min<long long>((groups + 63) / 64, workers - 1)) : 0;
  launch(align_kernel, 1 + quantizers, kAlignThreads, align_smem, stream, a);

  LayerParams<FastSilu> p{};
  p.w13 = w13;
  p.w2 = w2;
  p.space = space;
  p.hidden = shape.hidden;
  p.intermediate = shape.intermediate;
  p.topk = shape.topk;
  p.num_experts = shape.num_experts;
  p.max_tokens = call.max_tokens;
  p.tile_rows = tuning.tile_rows;
  p.max_tiles = max_tiles;
  p.max_units = Workspace::kMaxSplitUnits;
  p.standard = counts == nullptr;
  p.x = fp8 ? static_cast<void const*>(a.x_codes) : call.x;
  p.x_scales = a.x_scales;
  p.w13_scales = weights.w13_scales;
  p.w2_scales = weights.w2_scales;
  p.ids = a.ids;
  p.num_tokens = call.num_tokens;
  p.control = a.control;
  p.tiles = a.tiles;
  p.counters = a.counters;
  p.source_row = a.source_row;
  p.target_row = a.target_row;
  p.row_weight = a.row_weight;
  p.inter = at<char>(workspace, w.inter);
  p.inter_scales = at<float>(workspace, w.inter_scales);
  p.rows_out = shape.topk > 1 && counts == nullptr ? static_cast<void*>(at<char>(workspace, w.slot_rows)) : call.out;
  p.partials = at<float>(workspace, w.partials);
  switch (scheme) {
    case Scheme::bf16: launch_layer_tuned<Scheme::bf16>(p, workers, tuning, stream); break;
    case Scheme::f16: launch_layer_tuned<Scheme::f16>(p, workers, tuning, stream); break;
    case Scheme::fp8_block: launch_layer_tuned<Scheme::fp8_block>(p, workers, tuning, stream); break;
    case Scheme::fp8_row: throw Error(ErrorCode::unsupported, "fp8_row is not built in the contiguous layer");
  }
  if (shape.topk > 1 && counts == nullptr) {
    long long const chunks = static_cast<long long>(call.max_tokens) * (shape.hidden / 8);
    int const grid = static_cast<int>(std::min<long long>((chunks + 255) / 256, 8LL * workers));
    auto const reduce = [&](auto* rows, auto* out) {
      using Output = std::remove_pointer_t<decltype(out)>;
      launch(reduce_kernel<Output>, grid, 256, 0, stream, static_cast<Output const*>(rows), a.ids, call.num_tokens, call.max_tokens,
             shape.topk, shape.num_experts, shape.hidden, out);
    };
    if (scheme == Scheme::f16) {
      reduce(static_cast<__half*>(p.rows_out), static_cast<__half*>(call.out));
    } else {
      reduce(static_cast<__nv_bfloat16*>(p.rows_out), static_cast<__nv_bfloat16*>(call.out));
    }
  }
}

}  // namespace detail

inline void ContiguousLayer::forward(LayerCall const& call, Tuning const& tuning, void* workspace, CUstream_st* stream) const {
  if (call.max_tokens > 0 && (call.topk_ids == nullptr || call.topk_weights == nullptr)) {
    throw Error(ErrorCode::argument, "topk_ids or topk_weights is null");
  }
  detail::enqueue(state_->shape, state_->scheme, state_->weights, state_->w13, state_->w2, state_->workers, call, nullptr, 0, tuning,
                  workspace, stream);
}
inline void ContiguousLayer::forward(LayerCall const& call, void* workspace, CUstream_st* stream) const {
  forward(call, choose_tuning(state_->shape, state_->scheme, call.max_tokens), workspace, stream);
}

inline void ContiguousLayer::forward_batched(void const* x, std::int32_t const* counts, int capacity, void* out, void* workspace,
                                             CUstream_st* stream) const {
  LayerShape shape = state_->shape;
  shape.topk = 1;
  LayerCall call{};
  call.x = x;
  call.out = out;
  call.max_tokens = shape.num_experts * capacity;
  detail::enqueue(shape, state_->scheme, state_->weights, state_->w13, state_->w2, state_->workers, call, counts, capacity,
                  choose_tuning(shape, state_->scheme, call.max_tokens), workspace, stream);
}

}  // namespace moe::hopper
