// SPDX-License-Identifier: Apache-2.0
// experts/hopper/contiguous_layer.cuh: the definitions of ContiguousLayer: enqueues the aligning, layer and reducing kernels. Include
// it in one translation unit compiled for sm_90a, and experts/hopper/layer/launch.cuh where the layer kernels themselves are to be
// compiled. Its functions are emitted there even if nothing in that file calls them, so that other files of the program need no nvcc.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/align_launch.cuh"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/contiguous_layer.hpp"
#include "moe/experts/hopper/contiguous_setup.cuh"
#include "moe/experts/hopper/layer/column_call.cuh"
#include "moe/experts/hopper/layer/layer_params.cuh"
#include "moe/experts/hopper/layer/self_align.cuh"
#include "moe/experts/hopper/token/launch.cuh"

namespace moe::fix {
[[gnu::used]] inline void include_moe_experts_hopper_contiguous_cuh_or_link_a_library_of_moe_add_hopper_kernels() {}
[[gnu::used]] inline void include_moe_experts_hopper_masked_cuh_or_link_a_library_of_moe_add_hopper_kernels() {}
}  // namespace moe::fix

namespace moe::hopper {

struct ContiguousLayer::State {
  LocalShape shape;
  Scheme scheme;
  LayerOptions options;
  GateUp order;
  void const* weights[2];    ///< w13, w2
  LayerConstants constants;  ///< arguments of the kernels that are the same in every call
  LayerLauncher launcher;
  int multiprocessors;
  int workers;
  int* counters = nullptr;  ///< for kernels that plan for themselves: next unit, exits, then as in the workspace
  State() = default;
  State(State const&) = delete;
  State& operator=(State const&) = delete;
  ~State() { cudaFree(counters); }

  /// The plan of one call.
  struct Plan {
    Tuning tuning;
    Workspace space;
    bool blocks;      ///< the kernel for block-scaled fp8 with many rows per expert
    bool self_align;  ///< no aligning kernel
    bool quantises;   ///< x has 16-bit elements and this call quantises it
    bool prepares;    ///< the products read codes of x that this call writes
    ColumnCut cut;    ///< blocks of columns; no blocks: the kernel without them
    std::int64_t x_stride;
    std::int64_t x_scale_stride;
  };

  bool scaled() const { return is_scaled(scheme); }
  bool has_bias() const { return constants.w13_bias != nullptr || constants.w2_bias != nullptr; }
  /// Whether x has 16-bit elements and the call quantises it.
  bool quantises(LayerCall const& call) const { return scheme == Scheme::fp8_block && call.x_scales == nullptr; }

  /// Enqueues the layer, and tells the completions of a call whose kernels do not.
  void enqueue(Request const& request, Tuning const& tuning, cudaStream_t stream) const;
  /// Enqueues the layer. Whether its kernel tells the completions.
  bool compute(Request const& request, Tuning const& tuning, cudaStream_t stream) const;
  /// E_ARG for a call that the kernels cannot read.
  void check(Request const& request, Plan const& plan) const;
  /// The kernel and its tiles, limited to those that the layer has.
  Plan choose_kernel(Request const& request, Tuning const& wanted) const;
  /// The rest of the plan; E_CAPACITY for too many slots.
  void complete(Request const& request, Plan& plan) const;
  AlignArgs align_args(Request const& request, Plan const& plan) const;
  LayerParams layer_params(Request const& request, Plan const& plan, AlignArgs const& align) const;
  /// Clusters of the aligning kernel that quantise or move x.
  int quantizers(AlignArgs const& align) const;
  /// Whether the kernel for one token takes this call; its parameters.
  bool takes_token(LayerCall const& call, TokenPlan const& plan) const;
  TokenParams token_params(LayerCall const& call, TokenPlan const& plan, void* workspace) const;
};

namespace detail {

inline constexpr int kStateHead = 32;  ///< ints before the counters
inline constexpr int kStateCounters = kSelfAlignSlots + 2 * Workspace::kMaxSplitUnits;
inline constexpr int kStateFinished = 1024;  ///< two per weight tile of phase 1
inline constexpr int kStateInts = kStateHead + kStateCounters + kStateFinished;

}  // namespace detail

[[gnu::used]] inline ContiguousLayer::ContiguousLayer(LocalShape shape, Scheme scheme, LayerWeights weights, LayerOptions const& options,
                                                      LayerLauncher launcher)
    : state_(std::make_unique<State>()) {
  int const multiprocessors = detail::hopper_multiprocessors();
  check_sizes(shape, scheme);
  activation::validate(options.activation, options.constants);
  bool const gated = activation::gated(options.activation);
  bool const interleaved = weights.interleaved && gated;
  detail::check_weights(weights, scheme, interleaved);
  state_->shape = shape;
  state_->scheme = scheme;
  state_->options = options;
  state_->order = !gated ? GateUp::ungated : interleaved ? GateUp::interleaved : GateUp::halves;
  state_->weights[0] = weights.w13;
  state_->weights[1] = weights.w2;
  state_->constants = detail::layer_constants(shape, scheme, weights, options, state_->order);
  state_->launcher = launcher;
  state_->multiprocessors = multiprocessors;
  state_->workers = options.workers > 0 ? std::min(options.workers, multiprocessors) : multiprocessors;
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

inline bool ContiguousLayer::State::takes_token(LayerCall const& call, TokenPlan const& plan) const {
  return shape.topk <= kTokenSlots && order == GateUp::halves && !options.weight_on_input && !has_bias() && plan.warps > 0 &&
         call.x_scales == nullptr && (scheme == Scheme::bf16 || scheme == Scheme::fp8_block);
}

inline TokenParams ContiguousLayer::State::token_params(LayerCall const& call, TokenPlan const& plan, void* workspace) const {
  TokenParams p{};
  p.shape = shape;
  p.plan = plan;
  p.matrix = constants.matrix[0];
  p.w13 = weights[0];
  p.w2 = weights[1];
  p.w13_scales = constants.w13_scales;
  p.w2_scales = constants.w2_scales;
  p.scale_floor = constants.scale_floor;
  p.activation = constants.activation;
  p.x = call.x;
  p.ids = call.topk_ids;
  p.weights = call.topk_weights;
  p.num_tokens = call.num_tokens;
  p.inter = detail::at<float>(workspace, plan_workspace(shape, scheme, 1, 8).partials);
  p.arrived = counters + 3;
  p.passed = counters + 4;
  p.out = call.out;
  return p;
}

inline ContiguousLayer::State::Plan ContiguousLayer::State::choose_kernel(Request const& r, Tuning const& wanted) const {
  Plan plan{};
  plan.tuning = options.batch_invariant ? invariant(wanted, scheme) : wanted;
  plan.quantises = quantises(r.call);
  plan.blocks = scheme == Scheme::fp8_block && shape.hidden % 128 == 0 && !r.batched() && launcher.block_kernel &&
                plan.tuning.tile_rows > most_rows(scheme) && constants.activation.gated && !options.weight_on_input && !has_bias();
  plan.prepares = plan.quantises || plan.blocks;
  if (plan.blocks) {
    plan.tuning.tile_rows = kBlockRows;
  } else if (plan.tuning.tile_rows > most_rows(scheme)) {  // the largest tile available; its clusters need more rows
    plan.tuning.tile_rows = most_rows(scheme);
    plan.tuning.cluster = 1;
  }
  int const scale_columns = scheme == Scheme::fp8_block ? (shape.hidden + 127) / 128 : 1;
  plan.x_stride = r.call.x_stride == 0 ? shape.hidden : r.call.x_stride;
  plan.x_scale_stride = r.call.x_scale_stride == 0 || plan.quantises ? scale_columns : r.call.x_scale_stride;
  return plan;
}

inline void ContiguousLayer::State::check(Request const& r, Plan const& plan) const {
  detail::check_request(r);
  if (plan.tuning.tile_rows < 8 || plan.tuning.tile_rows % 8 != 0) {
    throw Error(ErrorCode::argument, text("tile_rows ", plan.tuning.tile_rows, " is not a multiple of 8 of at least 8"));
  }
  if (r.call.max_tokens == 0) return;
  int const scale_columns = scheme == Scheme::fp8_block ? (shape.hidden + 127) / 128 : 1;
  if (plan.x_scale_stride < scale_columns) {
    throw Error(ErrorCode::argument,
                text("hopper experts: rows of x_scales are ", plan.x_scale_stride, " apart, needed are at least ", scale_columns));
  }
  int const x_bytes = plan.quantises ? 2 : element_bytes(scheme);
  if (plan.x_stride < shape.hidden || plan.x_stride * x_bytes % 16 != 0 ||
      (plan.quantises && (plan.x_stride != shape.hidden || shape.hidden % 128 != 0))) {
    throw Error(ErrorCode::argument,
                text("hopper experts: rows of x are ", plan.x_stride, " elements apart, needed are at least ", shape.hidden,
                     " and multiples of 16 bytes", plan.quantises ? "; packed rows of whole groups of 128, to be quantised here" : ""));
  }
  if (is_row_scaled(scheme) && r.call.x_scales == nullptr && options.static_scale <= 0.0F) {
    throw Error(ErrorCode::argument, text("hopper experts: x_scales is null, ", name(scheme), " needs quantised rows with a scale each"));
  }
  if (r.call.arrivals != nullptr && (plan.quantises || (scaled() && scheme != Scheme::fp8_block))) {
    throw Error(ErrorCode::argument,
                text("hopper experts: rows may arrive late in 16-bit elements or as codes of fp8_block with x_scales only. These kernels "
                     "are ",
                     name(scheme)));
  }
  slot_gap(r.call.id_stride, shape.topk);
  slot_gap(r.call.weight_stride, shape.topk);
  if (r.call.gather != nullptr && (!r.batched() || plan.quantises)) {
    throw Error(ErrorCode::argument,
                "hopper experts: rows are gathered in the batched format only, and quantised already where the scheme quantises them");
  }
}

inline void ContiguousLayer::State::complete(Request const& r, Plan& plan) const {
  plan.space = plan_workspace(r.rows_of(shape), scheme, r.call.max_tokens, 8);
  detail::check_slots("hopper experts", plan.space.slots);
  Tuning& t = plan.tuning;
  bool const clusters = plan.blocks || (!scaled() && t.tile_rows == most_rows(scheme));
  t.cluster = clusters ? std::min({t.cluster, launcher.max_cluster, workers}) : 1;
  plan.self_align = t.self_align && r.call.arrivals == nullptr && !r.batched() && t.cluster == 1 && plan.space.slots <= kSelfAlignSlots &&
                    t.tile_rows <= kSelfAlignRows && shape.num_experts <= kLayerThreads &&
                    2 * shape.hidden / kOutputFeatures < detail::kStateFinished - 1;
  bool const largest = plan.blocks || (!scaled() && t.tile_rows > 64);
  if (largest && launcher.enqueue_columns != nullptr && !r.batched()) plan.cut = detail::cut_of(r.call, t, shape);
}

inline AlignArgs ContiguousLayer::State::align_args(Request const& r, Plan const& plan) const {
  Tuning const& t = plan.tuning;
  Workspace const& w = plan.space;
  AlignArgs a = detail::align_args(r, shape, w, t.tile_rows);
  if (plan.self_align) {
    a.next_unit = counters;
    a.counters = counters + detail::kStateHead;
    a.max_tiles = kSelfAlignSlots;
  }

  int const step = 128 / element_bytes(scheme);
  int const gate_features = constants.activation.gated ? kGateFeatures : kOutputFeatures;
  a.plan.space = {{(shape.intermediate + gate_features - 1) / gate_features, (shape.hidden + kOutputFeatures - 1) / kOutputFeatures},
                  {(shape.hidden + step - 1) / step, (shape.intermediate + step - 1) / step},
                  std::max(1, t.raster / t.cluster),
                  gate_features};
  if (plan.blocks && t.cluster == 2) {  // counted as in decode_block_unit
    for (int& tiles : a.plan.space.weight_tiles) tiles = (tiles + 1) / 2;
  }
  bool const cuts = t.tile_rows <= most_split_rows(scheme) && is_column_count(t.tile_rows) && t.cluster == 1;
  a.plan.row_step = plan.blocks ? 64 : 8;
  a.plan.cluster = plan.blocks ? 1 : t.cluster;
  a.plan.workers = workers / t.cluster;
  a.plan.max_splits = cuts ? t.max_splits : 1;

  a.x = plan.prepares ? r.call.x : nullptr;
  a.x_row_bytes = plan.x_stride * (plan.quantises ? 2 : element_bytes(scheme));
  a.given_scales = r.call.x_scales;
  a.given_scale_stride = plan.x_scale_stride;
  a.x_codes = detail::at<std::uint8_t>(r.workspace, w.x_codes);
  a.x_scales = detail::at<float>(r.workspace, w.x_scales);
  a.beside_dispatch = r.call.arrivals != nullptr;
  if (plan.blocks) {  // arriving rows are copied without positions; a tile has at least one slot, so the tiles' counters fit there
    (a.beside_dispatch ? a.copied : a.positions) = detail::at<std::int32_t>(r.workspace, w.positions);
  }
  if (a.beside_dispatch) a.arrivals = *r.call.arrivals;
  a.sorted = counters + 2;
  a.scale_stride = static_cast<int>(scale_stride(w.slots));
  return a;
}

inline LayerParams ContiguousLayer::State::layer_params(Request const& r, Plan const& plan, AlignArgs const& a) const {
  Workspace const& w = plan.space;
  LayerParams p{};
  p.layer = constants;
  p.align = a;
  p.input.rows = plan.prepares ? static_cast<void const*>(a.x_codes) : r.call.x;
  p.input.row_bytes = plan.x_stride * element_bytes(scheme);
  p.input.gather = r.call.gather;
  p.input.scales = plan.prepares ? a.x_scales : r.call.x_scales;
  p.input.scale_stride = plan.x_scale_stride;
  p.inter.rows = detail::at<char>(r.workspace, w.inter);
  p.inter.wide = detail::at<char>(r.workspace, w.inter_wide);
  p.inter.scales = detail::at<float>(r.workspace, w.inter_scales);
  if (scheme == Scheme::fp8_row) detail::divide_rows<Scheme::fp8_row>(shape.intermediate, p.inter);
  if (scheme == Scheme::int8_row) detail::divide_rows<Scheme::int8_row>(shape.intermediate, p.inter);
  p.standard = !r.batched();
  p.weight_on_input = options.weight_on_input && !r.batched();
  p.self_align = plan.self_align;
  p.exits = counters + 1;
  p.finished = counters + detail::kStateHead + detail::kStateCounters;
  p.rows_out = a.topk > 1 ? static_cast<void*>(detail::at<char>(r.workspace, w.slot_rows)) : r.call.out;
  p.out = r.call.out;
  p.partials = detail::at<float>(r.workspace, w.partials);
  return p;
}

inline int ContiguousLayer::State::quantizers(AlignArgs const& a) const {
  if (a.x == nullptr) return 0;
  long long const groups = static_cast<long long>(a.max_tokens) * (shape.hidden / 128);
  // Graphics processing clusters of 16 or 18 multiprocessors hold two clusters of 8 each: more clusters would need a second wave.
  int const most = a.copied != nullptr ? kArrivingClusters : std::max(1, workers / kAlignCluster - 1);
  return static_cast<int>(std::min<long long>((groups + 1023) / 1024, most));
}

inline void ContiguousLayer::State::enqueue(Request const& request, Tuning const& wanted, cudaStream_t stream) const {
  LayerCall const& call = request.call;
  detail::check_columns(call, wanted, shape.hidden, launcher.enqueue_columns != nullptr);
  bool const nothing = call.max_tokens == 0 && call.completions != nullptr;
  if (!nothing && compute(request, wanted, stream)) return;
  if (call.completions != nullptr) detail::launch_tell(*call.completions, stream);
}

inline bool ContiguousLayer::State::compute(Request const& request, Tuning const& wanted, cudaStream_t stream) const {
  LayerCall const& call = request.call;
  Plan plan = choose_kernel(request, wanted);
  check(request, plan);
  if (call.max_tokens == 0) return false;

  if (plan.tuning.one_token && call.max_tokens == 1 && call.arrivals == nullptr && !request.batched()) {
    TokenPlan const token = plan_token(shape, scheme, workers);
    if (takes_token(call, token)) {
      launch_token(token_params(call, token, request.workspace), scheme, workers, stream);
      return false;
    }
  }

  complete(request, plan);
  AlignArgs const align = align_args(request, plan);
  if (!plan.self_align) {
    AlignArgs sort = align;
    if (request.batched() && align.beside_dispatch) {  // counts are complete at the end of the dispatch, whose rows may come later
      sort.beside_dispatch = false;
      sort.positions = detail::at<std::int32_t>(request.workspace, plan.space.positions);
    }
    detail::launch_align(sort, quantizers(sort), stream);
  }
  LayerParams const params = layer_params(request, plan, align);
  if (plan.cut.blocks > 0) {
    int const cluster = plan.tuning.cluster;
    int const grid = workers / cluster * cluster;
    ColumnBlocks const columns = detail::column_blocks(call, plan.cut, align, {grid, cluster, multiprocessors - grid});
    launcher.enqueue_columns(params, columns, workers, plan.tuning, stream);
    return true;
  }
  launcher.enqueue(params, workers, plan.tuning, stream);
  if (align.topk == 1 || plan.self_align) return false;
  if (scheme == Scheme::f16) {
    detail::launch_reduce<__half>(align, params.rows_out, call.out, workers, stream);
  } else {
    detail::launch_reduce<__nv_bfloat16>(align, params.rows_out, call.out, workers, stream);
  }
  return false;
}

[[gnu::used]] inline void ContiguousLayer::forward(LayerCall const& call, Tuning const& tuning, void* workspace,
                                                   CUstream_st* stream) const {
  detail::check_routing(call);
  state_->enqueue({call, nullptr, 0, workspace}, tuning, stream);
}
[[gnu::used]] inline void ContiguousLayer::forward(LayerCall const& call, void* workspace, CUstream_st* stream) const {
  forward(call, choose_tuning(state_->shape, state_->scheme, call.max_tokens, state_->quantises(call)), workspace, stream);
}

[[gnu::used]] inline void ContiguousLayer::forward_batched(void const* x, std::int32_t const* counts, int capacity, int expected_rows,
                                                           void* out, void* workspace, CUstream_st* stream, float const* x_scales,
                                                           std::int32_t const* gather, comm::Arrivals const* arrivals) const {
  LocalShape shape = state_->shape;
  shape.topk = 1;
  LayerCall call{};
  call.x = x;
  call.x_scales = x_scales;
  call.gather = gather;
  call.arrivals = arrivals;
  call.out = out;
  call.max_tokens = shape.num_experts * capacity;
  if (call.max_tokens > 0 && counts == nullptr) throw Error(ErrorCode::argument, "counts is null");
  state_->enqueue({call, counts, capacity, workspace}, choose_batched_tuning(shape, state_->scheme, expected_rows, capacity), stream);
}

}  // namespace moe::hopper
