// SPDX-License-Identifier: Apache-2.0
// experts/hopper/contiguous_layer.cuh: the definitions of ContiguousLayer: enqueues the aligning, layer and reducing kernels. Include
// it in one translation unit compiled for sm_90a, and experts/hopper/layer/launch.cuh where the layer kernels themselves are to be
// compiled. Its functions are emitted there even if nothing in that file calls them, so that other files of the program need no nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/align.cuh"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/common/reduce.cuh"
#include "moe/experts/hopper/common/tensor_map.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "moe/experts/hopper/layer/layer_params.cuh"
#include "moe/experts/hopper/token/token_kernel.cuh"

namespace moe::hopper {

struct ContiguousLayer::State {
  LocalShape shape;
  Scheme scheme;
  LayerWeights weights;
  LayerOptions options;
  ActivationParams activation;
  LayerLauncher launcher;
  CUtensorMap w13;
  CUtensorMap w2;
  MatrixLayout matrix[2];
  int workers;
  int* counters = nullptr;  ///< of calls that plan for themselves: next unit, exits, then as in the workspace
  State() = default;
  State(State const&) = delete;
  State& operator=(State const&) = delete;
  ~State() { cudaFree(counters); }

  /// Enqueues the layer; `batch_counts` null: standard format.
  void enqueue(LayerCall const& call, std::int32_t const* batch_counts, int capacity, Tuning const& tuning, void* workspace,
               cudaStream_t stream) const;
  /// Enqueues the layer for one token, if there is a kernel that takes it.
  bool enqueue_token(LayerCall const& call, void* workspace, cudaStream_t stream) const;
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

[[gnu::used]] inline ContiguousLayer::ContiguousLayer(LocalShape shape, Scheme scheme, LayerWeights weights, LayerOptions const& options,
                                                      LayerLauncher launcher)
    : state_(std::make_unique<State>()) {
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  cudaDeviceProp facts{};
  check_cuda(cudaGetDeviceProperties(&facts, device), "cudaGetDeviceProperties");
  check_device(device, facts.name, facts.major, facts.minor);
  check_sizes(shape, scheme);
  activation::validate(options.activation, options.constants);
  bool const gated = activation::gated(options.activation);
  bool const interleaved = weights.interleaved && gated;
  if (interleaved && scheme == Scheme::fp8_block) {
    throw Error(
        ErrorCode::unsupported,
        "hopper experts: interleaved gate and up rows share scale blocks in fp8_block. De-interleave the weights when loading them");
  }
  if (is_fp8(scheme) && (weights.w13_scales == nullptr || weights.w2_scales == nullptr)) {
    throw Error(ErrorCode::argument, text("hopper experts: w13_scales or w2_scales is null, ", name(scheme), " needs both"));
  }
  for (void const* pointer : {weights.w13, weights.w2}) {
    if (pointer == nullptr) throw Error(ErrorCode::argument, "hopper experts: w13 or w2 is null");
  }
  int const bytes = is_fp8(scheme) ? 1 : 2;
  std::int64_t const experts = shape.num_experts;
  state_->shape = shape;
  state_->scheme = scheme;
  state_->weights = weights;
  state_->options = options;
  state_->activation = activation_params(options.activation, options.constants);
  state_->launcher = launcher;
  state_->workers = options.workers > 0 ? std::min(options.workers, facts.multiProcessorCount) : facts.multiProcessorCount;
  GateUp const order = !gated ? GateUp::ungated : interleaved ? GateUp::interleaved : GateUp::halves;
  state_->matrix[0] = w13_layout(shape, order);
  state_->matrix[1] = w2_layout(shape);
  std::int64_t const slices = order == GateUp::halves ? 2 * experts : experts;
  std::int64_t const columns = order == GateUp::interleaved ? 2LL * shape.hidden : shape.hidden;
  state_->w13 = make_tensor_map(weights.w13, bytes, slices, shape.intermediate, columns, 128);
  state_->w2 = make_tensor_map(weights.w2, bytes, experts, shape.hidden, shape.intermediate, 128);
  check_cuda(cudaMalloc(&state_->counters, detail::kStateInts * sizeof(int)), "cudaMalloc");
  check_cuda(cudaMemset(state_->counters, 0, detail::kStateInts * sizeof(int)), "cudaMemset");
  check_cuda(cudaMemcpy(state_->counters, &state_->workers, sizeof(int), cudaMemcpyHostToDevice), "cudaMemcpy");
}

[[gnu::used]] inline ContiguousLayer::~ContiguousLayer() = default;
[[gnu::used]] inline ContiguousLayer::ContiguousLayer(ContiguousLayer&&) noexcept = default;
[[gnu::used]] inline ContiguousLayer& ContiguousLayer::operator=(ContiguousLayer&&) noexcept = default;

[[gnu::used]] inline std::int64_t ContiguousLayer::workspace_bytes(int max_tokens) const {
  return plan_workspace(state_->shape, state_->scheme, max_tokens, 8).bytes;
}

template <class Output>
void ContiguousLayer::State::enqueue_reduce(LayerCall const& call, void const* rows, cudaStream_t stream) const {
  long long const chunks = static_cast<long long>(call.max_tokens) * (shape.hidden / 8);
  int const grid = static_cast<int>(std::min<long long>((chunks + 255) / 256, 8LL * workers));
  detail::launch(reduce_kernel<Output>, grid, 256, 0, 1, stream, static_cast<Output const*>(rows),
                 SlotIds(call.topk_ids, slot_gap(call.id_stride, shape.topk)), call.num_tokens, call.max_tokens, shape.topk,
                 shape.num_experts, shape.hidden, static_cast<Output*>(call.out));
}

inline bool ContiguousLayer::State::enqueue_token(LayerCall const& call, void* workspace, cudaStream_t stream) const {
  TokenParams p{};
  p.plan = plan_token(shape, scheme, workers);
  bool const plain = !weights.interleaved && !options.weight_on_input && weights.w13_bias == nullptr && weights.w2_bias == nullptr;
  if (shape.topk > kTokenSlots || !activation.gated || !plain || p.plan.warps < 1 || call.x_scales != nullptr ||
      (scheme != Scheme::bf16 && scheme != Scheme::fp8_block)) {
    return false;
  }
  p.shape = shape;
  p.matrix = matrix[0];
  p.w13 = weights.w13;
  p.w2 = weights.w2;
  p.w13_scales = weights.w13_scales;
  p.w2_scales = weights.w2_scales;
  p.scale_floor = options.scale_floor;
  p.activation = activation;
  p.x = call.x;
  p.ids = call.topk_ids;
  p.weights = call.topk_weights;
  p.num_tokens = call.num_tokens;
  p.inter = detail::at<float>(workspace, plan_workspace(shape, scheme, 1, 8).partials);
  p.arrived = counters + 3;
  p.passed = counters + 4;
  p.out = call.out;
  bool const fp8 = scheme == Scheme::fp8_block;
  auto const kernel = fp8 ? token_kernel<Scheme::fp8_block> : token_kernel<Scheme::bf16>;
  static detail::OncePerDevice once[2];
  detail::allow_shared_memory(kernel, kTokenSharedMemory, once[fp8 ? 1 : 0]);
  detail::launch(kernel, workers, p.plan.warps * 32, p.plan.bytes, 1, stream, p);
  return true;
}

inline void ContiguousLayer::State::enqueue(LayerCall const& call, std::int32_t const* batch_counts, int capacity, Tuning const& wanted,
                                            void* workspace, cudaStream_t stream) const {
  Tuning tuning = options.batch_invariant ? invariant(wanted, scheme) : wanted;
  bool const fp8 = is_fp8(scheme);
  bool const quantises = scheme == Scheme::fp8_block && call.x_scales == nullptr;
  bool const blocks = scheme == Scheme::fp8_block && shape.hidden % 128 == 0 && batch_counts == nullptr && launcher.block_kernel &&
                      tuning.tile_rows > most_rows(scheme) && activation.gated && !options.weight_on_input && weights.w13_bias == nullptr &&
                      weights.w2_bias == nullptr;
  if (!blocks && tuning.tile_rows > most_rows(scheme)) {  // the largest tile that there is; its clusters want more rows
    tuning.tile_rows = most_rows(scheme);
    tuning.cluster = 1;
  }
  if (blocks) tuning.tile_rows = kBlockRows;
  for (void const* pointer : {call.x, static_cast<void const*>(call.out), static_cast<void const*>(workspace)}) {
    if (pointer == nullptr || reinterpret_cast<std::uintptr_t>(pointer) % 16 != 0) {
      throw Error(ErrorCode::argument, text("address ", pointer, " of x, out or workspace is null or not a multiple of 16 bytes"));
    }
  }
  if (call.max_tokens < 0) throw Error(ErrorCode::argument, text("max_tokens ", call.max_tokens, " is negative"));
  if (tuning.tile_rows < 8 || tuning.tile_rows % 8 != 0) {
    throw Error(ErrorCode::argument, text("tile_rows ", tuning.tile_rows, " is not a multiple of 8 of at least 8"));
  }
  if (call.max_tokens == 0) return;
  std::int64_t const x_stride = call.x_stride == 0 ? shape.hidden : call.x_stride;
  int const x_bytes = fp8 && !quantises ? 1 : 2;
  int const scale_cols = scheme == Scheme::fp8_block ? (shape.hidden + 127) / 128 : 1;
  std::int64_t const x_scale_stride = call.x_scale_stride == 0 || quantises ? scale_cols : call.x_scale_stride;
  if (x_scale_stride < scale_cols) {
    throw Error(ErrorCode::argument,
                text("hopper experts: rows of x_scales are ", x_scale_stride, " apart, needed are at least ", scale_cols));
  }
  if (x_stride < shape.hidden || x_stride * x_bytes % 16 != 0 || (quantises && (x_stride != shape.hidden || shape.hidden % 128 != 0))) {
    throw Error(ErrorCode::argument,
                text("hopper experts: rows of x are ", x_stride, " elements apart, needed are at least ", shape.hidden,
                     " and multiples of 16 bytes", quantises ? "; packed rows of whole groups of 128, to be quantised here" : ""));
  }
  if (scheme == Scheme::fp8_row && call.x_scales == nullptr && options.static_scale <= 0.0F) {
    throw Error(ErrorCode::argument, "hopper experts: x_scales is null, fp8_row needs quantised rows with a scale each");
  }
  bool const batched = batch_counts != nullptr;
  int const id_gap = slot_gap(call.id_stride, shape.topk);
  int const weight_gap = slot_gap(call.weight_stride, shape.topk);
  if (call.gather != nullptr && (!batched || quantises)) {
    throw Error(ErrorCode::argument,
                "hopper experts: rows are gathered in the batched format only, in fp8 when they are quantised already");
  }
  if (tuning.one_token && call.max_tokens == 1 && !batched && enqueue_token(call, workspace, stream)) return;
  LocalShape rows_shape = shape;
  if (batched) rows_shape.topk = 1;
  Workspace const w = plan_workspace(rows_shape, scheme, call.max_tokens, 8);
  if (w.slots >= std::int64_t{1} << 31) {
    throw Error(ErrorCode::capacity, text("hopper experts: ", w.slots, " slots, at most 2^31 - 1"));
  }
  int const step = fp8 ? 128 : 64;
  bool const clusters = blocks || (!fp8 && tuning.tile_rows == most_rows(scheme));
  tuning.cluster = clusters ? std::min({tuning.cluster, launcher.max_cluster, workers}) : 1;
  int const cluster = tuning.cluster;
  bool const self_align = tuning.self_align && !batched && cluster == 1 && w.slots <= kSelfAlignSlots &&
                          tuning.tile_rows <= kSelfAlignRows && shape.num_experts <= kLayerThreads &&
                          2 * shape.hidden / kOutputFeatures < detail::kStateFinished - 1;
  int const gate_features = activation.gated ? kGateFeatures : kOutputFeatures;
  UnitSpace space{{(shape.intermediate + gate_features - 1) / gate_features, (shape.hidden + kOutputFeatures - 1) / kOutputFeatures},
                  {(shape.hidden + step - 1) / step, (shape.intermediate + step - 1) / step},
                  std::max(1, tuning.raster / cluster),
                  gate_features};
  if (blocks && cluster == 2) {  // as decode_block_unit counts
    for (int& tiles : space.weight_tiles) tiles = (tiles + 1) / 2;
  }
  using detail::at;
  AlignArgs a{};
  a.ids = batched ? nullptr : call.topk_ids;
  a.weights = call.topk_weights;
  a.id_gap = id_gap;
  a.weight_gap = weight_gap;
  a.num_tokens = call.num_tokens;
  a.counts = batch_counts;
  a.capacity = capacity;
  a.max_tokens = call.max_tokens;
  a.topk = rows_shape.topk;
  a.num_experts = shape.num_experts;
  a.plan.tile_rows = tuning.tile_rows;
  a.plan.row_step = blocks ? 64 : 8;
  a.plan.cluster = blocks ? 1 : cluster;
  a.plan.workers = workers / cluster;
  bool const cuts = tuning.tile_rows <= most_split_rows(scheme) && is_column_count(tuning.tile_rows) && cluster == 1;
  a.plan.max_splits = cuts ? tuning.max_splits : 1;
  a.plan.max_units =
      static_cast<int>(std::min<long long>(Workspace::kMaxSplitUnits, Workspace::kPartialBytes / 4 / (256LL * tuning.tile_rows)));
  a.plan.space = space;
  a.plan.tiles = at<TokenTile>(workspace, w.tiles);
  a.control = at<Control>(workspace, w.control);
  a.next_unit = self_align ? counters : at<int>(workspace, w.control) + 64;
  a.counters = self_align ? counters + detail::kStateHead : at<int>(workspace, w.counters);
  a.max_tiles = self_align ? kSelfAlignSlots : static_cast<int>(w.max_tiles);
  a.sorted_rows = at<SortedRow>(workspace, w.sorted_rows);
  bool const prepares = quantises || blocks;  // the products read codes of x that this call makes or moves
  a.x = prepares ? call.x : nullptr;
  a.x_row_bytes = x_stride * x_bytes;
  a.given_scales = call.x_scales;
  a.given_scale_stride = x_scale_stride;
  a.hidden = shape.hidden;
  a.x_codes = at<std::uint8_t>(workspace, w.x_codes);
  a.x_scales = at<float>(workspace, w.x_scales);
  a.positions = blocks ? at<std::int32_t>(workspace, w.positions) : nullptr;
  a.sorted = counters + 2;
  a.scale_stride = static_cast<int>(scale_stride(w.slots));
  if (!self_align) {
    static detail::OncePerDevice once;
    detail::allow_shared_memory(align_kernel<kAlignCluster>, align_smem_bytes(1024), once);
    long long const groups = static_cast<long long>(call.max_tokens) * (shape.hidden / 128);
    // Graphics processing clusters of 16 or 18 multiprocessors hold two clusters of 8 each: more would wait for a second round.
    int const most_clusters = std::max(1, workers / kAlignCluster - 1);
    int const quantizers = prepares ? static_cast<int>(std::min<long long>((groups + 1023) / 1024, most_clusters)) : 0;
    int const grid = kAlignCluster * (1 + quantizers);
    detail::launch(align_kernel<kAlignCluster>, grid, kAlignThreads, align_smem_bytes(shape.num_experts), kAlignCluster, stream, a);
  }

  LayerParams p{};
  p.w13 = w13;
  p.w2 = w2;
  p.space = space;
  p.matrix[0] = matrix[0];
  p.matrix[1] = matrix[1];
  p.hidden = shape.hidden;
  p.intermediate = shape.intermediate;
  p.topk = rows_shape.topk;
  p.num_experts = shape.num_experts;
  p.max_tokens = call.max_tokens;
  p.tile_rows = tuning.tile_rows;
  p.max_tiles = a.max_tiles;
  p.max_units = a.plan.max_units;
  p.standard = !batched;
  p.weight_on_input = options.weight_on_input && !batched;
  p.tensor_scales = weights.tensor_scales;
  p.x = prepares ? static_cast<void const*>(a.x_codes) : call.x;
  p.x_row_bytes = x_stride * (fp8 ? 1 : 2);
  p.gather = call.gather;
  p.x_scales = prepares ? a.x_scales : call.x_scales;
  p.x_scale_stride = x_scale_stride;
  p.w13_scales = weights.w13_scales;
  p.w2_scales = weights.w2_scales;
  p.w13_bias = weights.w13_bias;
  p.w2_bias = weights.w2_bias;
  p.static_scale = options.static_scale;
  p.scale_floor = options.scale_floor;
  p.amax_bound = options.amax_bound;
  p.activation = activation;
  p.ids = a.ids;
  p.id_gap = a.id_gap;
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
  p.inter_wide = at<char>(workspace, w.inter_wide);
  p.inter_scales = at<float>(workspace, w.inter_scales);
  bool const reduce = rows_shape.topk > 1;
  p.rows_out = reduce ? static_cast<void*>(at<char>(workspace, w.slot_rows)) : call.out;
  p.partials = at<float>(workspace, w.partials);
  launcher.enqueue(p, workers, tuning, stream);
  if (!reduce || (self_align && !batched)) return;
  if (scheme == Scheme::f16) {
    enqueue_reduce<__half>(call, p.rows_out, stream);
  } else {
    enqueue_reduce<__nv_bfloat16>(call, p.rows_out, stream);
  }
}

[[gnu::used]] inline void ContiguousLayer::forward(LayerCall const& call, Tuning const& tuning, void* workspace,
                                                   CUstream_st* stream) const {
  if (call.max_tokens > 0 && (call.topk_ids == nullptr || call.topk_weights == nullptr)) {
    throw Error(ErrorCode::argument, "topk_ids or topk_weights is null");
  }
  state_->enqueue(call, nullptr, 0, tuning, workspace, stream);
}
[[gnu::used]] inline void ContiguousLayer::forward(LayerCall const& call, void* workspace, CUstream_st* stream) const {
  bool const quantises = state_->scheme == Scheme::fp8_block && call.x_scales == nullptr;
  forward(call, choose_tuning(state_->shape, state_->scheme, call.max_tokens, quantises), workspace, stream);
}

[[gnu::used]] inline void ContiguousLayer::forward_batched(void const* x, std::int32_t const* counts, int capacity, int expected_rows,
                                                           void* out, void* workspace, CUstream_st* stream, float const* x_scales,
                                                           std::int32_t const* gather) const {
  LocalShape shape = state_->shape;
  shape.topk = 1;
  LayerCall call{};
  call.x = x;
  call.x_scales = x_scales;
  call.gather = gather;
  call.out = out;
  call.max_tokens = shape.num_experts * capacity;
  if (call.max_tokens > 0 && counts == nullptr) throw Error(ErrorCode::argument, "counts is null");
  Tuning tuning = choose_tuning(shape, state_->scheme, shape.num_experts * std::clamp(expected_rows, 1, std::max(1, capacity)));
  // A tile that is a row too small reads an expert's weights twice: room for what a random routing gives nearly every expert.
  double const likely = expected_rows + 2.8 * std::sqrt(static_cast<double>(std::max(expected_rows, 0)));
  if (likely <= 16) tuning.tile_rows = likely <= 8 ? 8 : 16;
  state_->enqueue(call, counts, capacity, tuning, workspace, stream);
}

}  // namespace moe::hopper
