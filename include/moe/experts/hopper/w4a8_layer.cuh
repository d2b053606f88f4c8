// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4a8_layer.cuh: the definitions of W4A8Layer: packs 4-bit weights and launches the aligning and reducing kernels around
// the layer kernel of experts/hopper/w4/a8/kernel.cuh. Include it in one translation unit compiled for sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/align_launch.cuh"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/w4/a8/layout.cuh"
#include "moe/experts/hopper/w4/a8/pack.cuh"
#include "moe/experts/hopper/w4/arguments.cuh"
#include "moe/experts/hopper/w4/check_scales.cuh"
#include "moe/experts/hopper/w4a8_layer.hpp"

namespace moe::fix {
[[gnu::used]] inline void include_moe_experts_hopper_w4a8_cuh_or_link_a_library_of_moe_add_hopper_kernels() {}
}  // namespace moe::fix

namespace moe::hopper {

namespace w4a8 {

/// Calls function with the scheme, which check() has accepted, as its template argument.
template <class Function>
void with_scheme(W4Scheme scheme, Function const& function) {
  switch (scheme) {
    case W4Scheme::int4: return function.template operator()<W4Scheme::int4>();
    case W4Scheme::int4_zero: return function.template operator()<W4Scheme::int4_zero>();
    case W4Scheme::int4_32: return function.template operator()<W4Scheme::int4_32>();
    case W4Scheme::int4_32_zero: return function.template operator()<W4Scheme::int4_32_zero>();
    default: return function.template operator()<W4Scheme::mxfp4>();
  }
}

/// Enqueues the packing of one matrix of every expert.
template <W4Scheme S>
inline void pack_matrix(W4PackArgs const& a, int experts, cudaStream_t stream) {
  if constexpr (has_row_factors(S)) launch_row_factors<S, true>(a, experts, stream);
  dim3 const grid(static_cast<unsigned>(a.packed_cols / kDepth), static_cast<unsigned>(a.packed_rows / kBrickRows),
                  static_cast<unsigned>(experts));
  w4a8::pack_bricks<S><<<grid, 128, 0, stream>>>(a);
  check_cuda(cudaGetLastError(), "w4a8::pack_bricks");
}

}  // namespace w4a8

struct W4A8Layer::State {
  LocalShape shape;
  W4Scheme scheme = W4Scheme::mxfp4;
  W4Weights weights;
  W4Activation activation;
  ActivationParams any;
  bool gated = true;
  bool weight_on_input = false;
  w4a8::Launcher launcher = nullptr;
  bool any_activation = false;  ///< kernels of any activation
  int workers = 0;
  std::uint8_t* packed[2] = {nullptr, nullptr};
  float* factor[2] = {nullptr, nullptr};
  w4::Constants constants{};

  int most_rows() const { return w4a8::most_tile_rows(scheme, any_activation); }
  int hidden() const { return w4a8::padded(shape.hidden); }
  int intermediate() const { return w4a8::padded(shape.intermediate); }
  /// Rows of w13, of the stored and of the packed one.
  int w13_rows(int intermediate) const { return (gated ? 2 : 1) * intermediate; }
  /// Divides the memory of the packed weights.
  void lay_out(char* memory);
  void set_constants(int* split_counters);
  void pack(cudaStream_t stream) const;
  /// Elements between the scales of two rows of x.
  long long scale_stride(LayerCall const& call) const { return call.x_scale_stride != 0 ? call.x_scale_stride : hidden() / w4a8::kDepth; }
  /// Enqueues the layer.
  void enqueue(Request const& request, W4Tuning const& tuning, cudaStream_t stream) const;
  /// E_ARG for a call that the kernels cannot read.
  void check(Request const& request, W4Tuning const& tuning) const;
  w4a8::Params layer_params(Request const& request, W4Workspace const& space, W4Tuning const& tuning, AlignArgs const& align) const;
};

inline void W4A8Layer::State::lay_out(char* memory) {
  factor[0] = reinterpret_cast<float*>(memory);
  factor[1] = factor[0] + 1024;
  packed[0] = reinterpret_cast<std::uint8_t*>(memory) + kHeadBytes;
  if (weights.packed.given()) {
    std::copy_n(weights.packed.bricks, 2, packed);
    std::copy_n(weights.packed.factor, 2, factor);
    return set_constants(reinterpret_cast<int*>(memory) + 2 * 1024);
  }
  packed[1] = packed[0] + shape.num_experts * w4a8::packed_bytes(scheme, w13_rows(intermediate()), hidden());
  if (has_row_factors(scheme)) {
    factor[0] = reinterpret_cast<float*>(packed[0] + shape.num_experts * w4a8::bricks_bytes(scheme, w13_rows(intermediate()), hidden()));
    factor[1] = reinterpret_cast<float*>(packed[1] + shape.num_experts * w4a8::bricks_bytes(scheme, shape.hidden, intermediate()));
  }
  set_constants(reinterpret_cast<int*>(memory) + 2 * 1024);
}

inline void W4A8Layer::State::set_constants(int* split_counters) {
  w4::Constants& c = constants;
  for (int i = 0; i < 2; ++i) {
    c.weights[i] = packed[i];
    c.bias[i] = i == 0 ? weights.b13 : weights.b2;
    c.factor[i] = factor[i];
  }
  c.bricks[0] = w13_rows(intermediate()) / kBrickRows;
  c.bricks[1] = shape.hidden / kBrickRows;
  c.steps[0] = hidden() / w4a8::kDepth;
  c.steps[1] = intermediate() / w4a8::kDepth;
  c.intermediate = intermediate();
  c.bias_width = shape.intermediate;
  c.split_counters = split_counters;
  c.activation = activation;
}

inline void W4A8Layer::State::pack(cudaStream_t stream) const {
  for (int i = 0; i < 2; ++i) {
    W4PackArgs a = w4::pack_args(shape, gated, i == 1, weights);
    a.packed_rows = i == 0 ? w13_rows(intermediate()) : shape.hidden;
    a.packed_cols = i == 0 ? hidden() : intermediate();
    a.factor = factor[i];
    a.packed = packed[i];
    w4a8::with_scheme(scheme, [&]<W4Scheme S>() { w4a8::pack_matrix<S>(a, shape.num_experts, stream); });
  }
}

[[gnu::used]] inline W4A8Layer::W4A8Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4Activation const& activation,
                                          void* packed, w4a8::Launcher launcher)
    : state_(std::make_unique<State>()) {
  state_->activation = activation;
  open(shape, scheme, weights, packed, launcher);
}
[[gnu::used]] inline W4A8Layer::W4A8Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4AnyActivation const& activation,
                                          void* packed, w4a8::Launcher launcher)
    : state_(std::make_unique<State>()) {
  activation::validate(activation.kind, activation.constants);
  state_->any = activation_params(activation.kind, activation.constants);
  state_->gated = state_->any.gated;
  state_->weight_on_input = activation.weight_on_input;
  state_->any_activation = true;
  open(shape, scheme, weights, packed, launcher);
}

[[gnu::used]] inline void W4A8Layer::open(LocalShape const& shape, W4Scheme scheme, W4Weights const& weights, void* packed,
                                          w4a8::Launcher launcher) {
  w4a8::check(shape, scheme, weights);
  w4::check_packed(packed);
  state_->workers = detail::hopper_multiprocessors();
  state_->shape = shape;
  state_->scheme = scheme;
  state_->weights = weights;
  state_->launcher = launcher;
  state_->lay_out(static_cast<char*>(packed));
  check_cuda(cudaMemset(packed, 0, kHeadBytes), "cudaMemset");
  if (!weights.packed.given()) {
    // The factors are written by pack().
    auto* const first = reinterpret_cast<unsigned long long*>(state_->factor[0]);
    w4a8::with_scheme(scheme, [&]<W4Scheme S>() { w4::check_scales<S>("hopper_w4a8", shape, weights, state_->gated, first); });
    state_->pack(nullptr);
  }
  check_cuda(cudaStreamSynchronize(nullptr), "packing");
}
[[gnu::used]] inline W4A8Layer::~W4A8Layer() = default;
[[gnu::used]] inline W4A8Layer::W4A8Layer(W4A8Layer&&) noexcept = default;
[[gnu::used]] inline W4A8Layer& W4A8Layer::operator=(W4A8Layer&&) noexcept = default;

[[gnu::used]] inline void W4A8Layer::weights_changed(CUstream_st* stream) {
  if (!state_->weights.packed.given()) state_->pack(stream);
}
[[gnu::used]] inline void W4A8Layer::pack(LocalShape const& whole, W4Scheme scheme, bool gated, W4StagedMatrix const& m,
                                          W4Packed const& to) {
  LocalShape const shape = w4::staged_shape(whole, m);
  W4PackArgs a = w4::pack_args(shape, gated, m, to);
  a.packed_rows = m.down ? shape.hidden : (gated ? 2 : 1) * w4a8::padded(shape.intermediate);
  a.packed_cols = w4a8::padded(a.cols);
  w4a8::with_scheme(scheme, [&]<W4Scheme S>() {
    w4::check_staged<S>("hopper_w4a8", shape, m, gated);
    w4a8::pack_matrix<S>(a, m.experts, nullptr);
  });
  check_cuda(cudaStreamSynchronize(nullptr), "packing");
}

[[gnu::used]] inline void W4A8Layer::limit_workers(int most) { state_->workers = w4::workers_of("hopper_w4a8", most); }

[[gnu::used]] inline W4Tuning W4A8Layer::tuning(int max_tokens) const {
  return w4a8::choose_tuning(state_->shape, max_tokens, state_->most_rows());
}
[[gnu::used]] inline std::int64_t W4A8Layer::workspace_bytes(int max_tokens) const {
  return w4a8::plan_workspace(state_->shape, max_tokens).bytes;
}

inline void W4A8Layer::State::check(Request const& r, W4Tuning const& tuning) const {
  w4::check_call(r, shape, tuning, 16, most_rows());
  int const groups = hidden() / w4a8::kDepth;
  if (r.call.max_tokens > 0 && (r.call.x_scales == nullptr || scale_stride(r.call) < groups)) {
    throw Error(ErrorCode::argument, text("x_scales ", r.call.x_scales, " with row stride ", scale_stride(r.call),
                                          ", expected scales of rows of ", groups, " groups"));
  }
}

inline w4a8::Params W4A8Layer::State::layer_params(Request const& r, W4Workspace const& space, W4Tuning const& tuning,
                                                   AlignArgs const& align) const {
  w4a8::Params p{};
  w4::set_params(p, r, shape, constants, space, align, tuning.tile_rows <= 16 ? tuning.max_splits : 1);
  p.any = any;
  p.weight_on_input = weight_on_input && !r.batched();
  p.x_scales = r.call.x_scales;
  p.x_scale_stride = scale_stride(r.call);
  p.inter_scales = detail::at<float>(r.workspace, space.inter + space.slots * intermediate());
  p.scale_blocks = w4a8::scale_blocks(intermediate());
  p.sums = w4a8::sums_of(scheme, weights.w13_group, weights.w2_group);
  return p;
}

inline void W4A8Layer::State::enqueue(Request const& request, W4Tuning const& tuning, cudaStream_t stream) const {
  LayerCall const& call = request.call;
  check(request, tuning);
  if (call.max_tokens == 0) return;
  W4Workspace const space = w4a8::plan_workspace(request.rows_of(shape), call.max_tokens);
  detail::check_slots("hopper_w4a8", space.slots);

  AlignArgs const align = w4::align_args(request, shape, constants, space, tuning, workers, gated ? kGateFeatures : kOutputFeatures);
  detail::launch_align(align, 0, stream);
  w4a8::Params const params = layer_params(request, space, tuning, align);
  launcher(params, workers, stream);
  if (align.topk > 1) detail::launch_reduce<__nv_bfloat16>(align, params.rows_out, call.out, workers, stream);
}

[[gnu::used]] inline void W4A8Layer::forward(LayerCall const& call, W4Tuning const& tuning, void* workspace, CUstream_st* stream) const {
  detail::check_routing(call);
  state_->enqueue({call, nullptr, 0, workspace}, tuning, stream);
}
[[gnu::used]] inline void W4A8Layer::forward(LayerCall const& call, void* workspace, CUstream_st* stream) const {
  forward(call, tuning(call.max_tokens), workspace, stream);
}

[[gnu::used]] inline void W4A8Layer::forward_batched(BatchedCall const& batch, void* workspace, CUstream_st* stream) const {
  LocalShape const shape = w4::of_slots(state_->shape);
  LayerCall const call = w4::call_of(shape, batch);
  W4Tuning const tuning = w4a8::choose_tuning(shape, w4::expected_tokens(shape, batch), state_->most_rows());
  state_->enqueue({call, batch.counts, batch.capacity, workspace}, tuning, stream);
}

}  // namespace moe::hopper
