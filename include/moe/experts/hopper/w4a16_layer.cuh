// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4a16_layer.cuh: the definitions of W4A16Layer: packs 4- or 8-bit weights and launches the aligning and reducing kernels
// around the layer kernel of experts/hopper/w4/launch.cuh. Include it in one translation unit compiled for sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/align_launch.cuh"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/w4/arguments.cuh"
#include "moe/experts/hopper/w4/check_scales.cuh"
#include "moe/experts/hopper/w4/layout.cuh"
#include "moe/experts/hopper/w4/pack.cuh"
#include "moe/experts/hopper/w4/rounded_call.cuh"
#include "moe/experts/hopper/w4a16_layer.hpp"

namespace moe::fix {
[[gnu::used]] inline void include_moe_experts_hopper_w4a16_cuh_or_link_a_library_of_moe_add_hopper_kernels() {}
}  // namespace moe::fix

namespace moe::hopper {

namespace w4 {

/// Enqueues the packing of one matrix of every expert. `largest`: the largest exponent of the only expert, if not negative.
template <W4Scheme S>
inline void pack_matrix(W4PackArgs const& a, int experts, cudaStream_t stream, int largest = -1) {
  if (has_exponents(S) && largest >= 0) {
    check_cuda(cudaMemcpyAsync(a.largest, &largest, sizeof(largest), cudaMemcpyHostToDevice, stream), "cudaMemcpyAsync");
  } else if constexpr (has_exponents(S)) {
    find_largest_exponent<S><<<experts, 1024, 0, stream>>>(a);
    check_cuda(cudaGetLastError(), "find_largest_exponent");
  } else if constexpr (scales_sums(S)) {
    launch_row_factors<S, false>(a, experts, stream);
  }
  pack_bricks<S><<<dim3(a.packed_cols / kBrickDepth, a.packed_rows / kBrickRows, experts), 128, 0, stream>>>(a);
  check_cuda(cudaGetLastError(), "pack_bricks");
}

/// Calls operator() with the scheme as its template argument.
template <class Call>
void with_scheme(W4Scheme scheme, Call const& call) {
  switch (scheme) {
    case W4Scheme::int4: return call.template operator()<W4Scheme::int4>();
    case W4Scheme::int4_zero: return call.template operator()<W4Scheme::int4_zero>();
    case W4Scheme::mxfp4: return call.template operator()<W4Scheme::mxfp4>();
    case W4Scheme::int4_32: return call.template operator()<W4Scheme::int4_32>();
    case W4Scheme::int4_32_zero: return call.template operator()<W4Scheme::int4_32_zero>();
    case W4Scheme::nvfp4: return call.template operator()<W4Scheme::nvfp4>();
    case W4Scheme::int8: return call.template operator()<W4Scheme::int8>();
    case W4Scheme::fp8: return call.template operator()<W4Scheme::fp8>();
    case W4Scheme::mxfp8: return call.template operator()<W4Scheme::mxfp8>();
  }
}

}  // namespace w4

struct W4A16Layer::State {
  LocalShape shape;
  W4Scheme scheme;
  W4Weights weights;
  W4Activation activation;
  ActivationParams any;  ///< of kernels of any activation
  bool gated = true;
  bool weight_on_input = false;
  bool takes_one_token = false;  ///< the launcher has the kernel for one token
  W4Rows rows{};                 ///< the launcher is that of one product, unless they are bf16
  W4Launcher launcher = nullptr;
  int workers = 0;
  std::uint8_t* packed[2] = {nullptr, nullptr};
  float* factor[2] = {nullptr, nullptr};
  int* largest = nullptr;
  int* split_counters = nullptr;
  w4::Constants constants{};  ///< arguments of the kernel that are the same in every call

  int intermediate() const { return padded_intermediate(shape.intermediate); }
  /// Rows of the packed w13.
  int w13_rows() const { return (gated ? 2 : 1) * intermediate(); }
  /// Divides the memory of the packed weights.
  void lay_out(char* memory);
  template <W4Scheme S>
  void pack(cudaStream_t stream) const;
  void pack(cudaStream_t stream) const {
    w4::with_scheme(scheme, [&]<W4Scheme S>() { pack<S>(stream); });
  }
  w4::Constants make_constants() const;
  /// Enqueues the layer. `codes`: the rows, unless they are bf16.
  void enqueue(Request const& request, W4Tuning const& tuning, W4Codes const& codes, cudaStream_t stream) const;
  /// The same of quantised rows.
  void enqueue_rounded(Request const& request, W4Tuning const& tuning, W4Codes const& codes, cudaStream_t stream) const;
  void enqueue_batched(BatchedCall const& batch, W4Codes const& codes, void* workspace, cudaStream_t stream) const;
  w4::AnyParams layer_params(Request const& request, W4Workspace const& space, W4Tuning const& tuning, AlignArgs const& align) const;
};

inline void W4A16Layer::State::lay_out(char* memory) {
  factor[0] = reinterpret_cast<float*>(memory);
  factor[1] = factor[0] + 1024;
  largest = reinterpret_cast<int*>(memory) + 2 * 1024;
  split_counters = largest + 1024;
  if (weights.packed.given()) {
    std::copy_n(weights.packed.bricks, 2, packed);
    std::copy_n(weights.packed.factor, 2, factor);
    return;
  }
  packed[0] = reinterpret_cast<std::uint8_t*>(memory) + kHeadBytes;
  packed[1] = packed[0] + shape.num_experts * hopper::packed_bytes(scheme, w13_rows(), shape.hidden);
  if (!has_row_factors(scheme)) return;
  factor[0] = reinterpret_cast<float*>(packed[0] + shape.num_experts * bricks_bytes(scheme, w13_rows(), shape.hidden));
  factor[1] = reinterpret_cast<float*>(packed[1] + shape.num_experts * bricks_bytes(scheme, shape.hidden, intermediate()));
}

template <W4Scheme S>
inline void W4A16Layer::State::pack(cudaStream_t stream) const {
  for (int i = 0; i < 2; ++i) {
    W4PackArgs a = w4::pack_args(shape, gated, i == 1, weights);
    a.packed_rows = i == 0 ? w13_rows() : shape.hidden;
    a.packed_cols = i == 0 ? shape.hidden : intermediate();
    a.largest = largest;
    a.factor = factor[i];
    a.packed = packed[i];
    w4::pack_matrix<S>(a, shape.num_experts, stream);
  }
}

[[gnu::used]] inline W4A16Layer::W4A16Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4Activation const& activation,
                                            void* packed, W4Launcher launcher)
    : state_(std::make_unique<State>()) {
  state_->activation = activation;
  state_->takes_one_token = true;
  open(shape, scheme, weights, packed, launcher);
}
[[gnu::used]] inline W4A16Layer::W4A16Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4AnyActivation const& activation,
                                            void* packed, W4Launcher launcher)
    : state_(std::make_unique<State>()) {
  activation::validate(activation.kind, activation.constants);
  state_->any = activation_params(activation.kind, activation.constants);
  state_->gated = state_->any.gated;
  state_->weight_on_input = activation.weight_on_input;
  open(shape, scheme, weights, packed, launcher);
}

[[gnu::used]] inline W4A16Layer::W4A16Layer(LocalShape shape, W4Scheme scheme, W4Weights const& weights, W4AnyActivation const& activation,
                                            W4Rows const& rows, void* packed, W4Launcher launcher)
    : W4A16Layer((w4::check_rows(policy_name(scheme), shape, rows), shape), scheme, weights, activation, packed, launcher) {
  state_->rows = rows;
}

[[gnu::used]] inline void W4A16Layer::open(LocalShape const& shape, W4Scheme scheme, W4Weights const& weights, void* packed,
                                           W4Launcher launcher) {
  check_w4(shape, scheme, weights);
  w4::check_packed(packed);
  state_->workers = detail::hopper_multiprocessors();
  state_->shape = shape;
  state_->scheme = scheme;
  state_->weights = weights;
  state_->launcher = launcher;
  state_->lay_out(static_cast<char*>(packed));
  state_->constants = state_->make_constants();
  check_cuda(cudaMemset(packed, 0, kHeadBytes), "cudaMemset");
  if (!weights.packed.given()) {
    w4::with_scheme(scheme, [&]<W4Scheme S>() {
      w4::check_scales<S>(policy_name(S), shape, weights, state_->gated, reinterpret_cast<unsigned long long*>(state_->largest));
    });
    state_->pack(nullptr);
  }
  check_cuda(cudaStreamSynchronize(nullptr), "packing");
}
[[gnu::used]] inline W4A16Layer::~W4A16Layer() = default;
[[gnu::used]] inline W4A16Layer::W4A16Layer(W4A16Layer&&) noexcept = default;
[[gnu::used]] inline W4A16Layer& W4A16Layer::operator=(W4A16Layer&&) noexcept = default;

[[gnu::used]] inline void W4A16Layer::weights_changed(CUstream_st* stream) {
  if (!state_->weights.packed.given()) state_->pack(stream);
}
[[gnu::used]] inline void W4A16Layer::pack(LocalShape const& whole, W4Scheme scheme, bool gated, W4StagedMatrix const& m,
                                           W4Packed const& to) {
  LocalShape const shape = w4::staged_shape(whole, m);
  W4PackArgs a = w4::pack_args(shape, gated, m, to);
  a.packed_rows = m.down ? shape.hidden : (gated ? 2 : 1) * padded_intermediate(shape.intermediate);
  a.packed_cols = m.down ? padded_intermediate(shape.intermediate) : shape.hidden;
  w4::with_scheme(scheme, [&]<W4Scheme S>() {
    w4::check_staged<S>(policy_name(S), shape, m, gated);
    w4::pack_matrix<S>(a, m.experts, nullptr, m.part.given() ? m.largest : -1);
  });
  check_cuda(cudaStreamSynchronize(nullptr), "packing");
}

[[gnu::used]] inline void W4A16Layer::limit_workers(int most) { state_->workers = w4::workers_of(policy_name(state_->scheme), most); }

[[gnu::used]] inline W4Tuning W4A16Layer::tuning(int max_tokens) const {
  return choose_w4_tuning(state_->shape, state_->scheme, max_tokens);
}
[[gnu::used]] inline std::int64_t W4A16Layer::workspace_bytes(int max_tokens) const {
  W4Workspace const space = plan_w4_workspace(state_->shape, max_tokens);
  if (state_->rows.format == RowFormat::bf16) return space.bytes;
  return w4::plan_rounded_workspace(space.bytes, max_tokens, space.slots, state_->shape.hidden, state_->intermediate()).bytes;
}

inline w4::Constants W4A16Layer::State::make_constants() const {
  w4::Constants c{};
  for (int i = 0; i < 2; ++i) {
    c.weights[i] = packed[i];
    c.bias[i] = i == 0 ? weights.b13 : weights.b2;
    c.factor[i] = factor[i];
  }
  c.bricks[0] = w13_rows() / kBrickRows;
  c.bricks[1] = shape.hidden / kBrickRows;
  c.steps[0] = shape.hidden / kBrickDepth;
  c.steps[1] = intermediate() / kBrickDepth;
  c.intermediate = intermediate();
  c.bias_width = shape.intermediate;
  c.split_counters = split_counters;
  c.activation = activation;
  return c;
}

inline w4::AnyParams W4A16Layer::State::layer_params(Request const& r, W4Workspace const& space, W4Tuning const& tuning,
                                                     AlignArgs const& align) const {
  w4::AnyParams p{};
  bool const splits = tuning.tile_rows <= medium_rows(scheme) && is_column_count(tuning.tile_rows);
  w4::set_params(p, r, shape, constants, space, align, splits ? tuning.max_splits : 1);
  p.any = any;
  p.weight_on_input = weight_on_input && !r.batched();
  return p;
}

inline void W4A16Layer::State::enqueue(Request const& request, W4Tuning const& tuning, W4Codes const& codes, cudaStream_t stream) const {
  LayerCall const& call = request.call;
  if (rows.format != RowFormat::bf16) return enqueue_rounded(request, tuning, codes, stream);
  w4::check_call(request, shape, tuning, 8, most_rows(scheme));
  if (call.max_tokens == 0) return;
  W4Workspace const space = plan_w4_workspace(request.rows_of(shape), call.max_tokens);
  detail::check_slots(policy_name(scheme), space.slots);

  AlignArgs const align = w4::align_args(request, shape, constants, space, tuning, workers, gated ? kGateFeatures : kOutputFeatures);
  w4::AnyParams params = layer_params(request, space, tuning, align);
  if (takes_one_token && tuning.one_token && call.max_tokens == 1 && !request.batched()) {
    params.token = w4::plan_packed_token(shape, scheme, workers);
    if (params.token.warps > 0) return launcher(params, workers, stream);
  }
  detail::launch_align(align, 0, stream);
  launcher(params, workers, stream);
  if (align.topk > 1) detail::launch_reduce<__nv_bfloat16>(align, params.rows_out, call.out, workers, stream);
}

inline void W4A16Layer::State::enqueue_rounded(Request const& request, W4Tuning const& tuning, W4Codes const& codes,
                                               cudaStream_t stream) const {
  LayerCall const given = request.call;
  W4Workspace const space = plan_w4_workspace(request.rows_of(shape), given.max_tokens);
  w4::RoundedWorkspace const rounded = w4::plan_rounded_workspace(space.bytes, given.max_tokens, space.slots, shape.hidden, intermediate());
  // The kernels read the widened rows, which lie in the order of the tokens or slots.
  LayerCall call = given;
  call.x = detail::at<char>(request.workspace, rounded.x);
  call.x_stride = shape.hidden;
  call.gather = nullptr;
  Request const inner{call, request.batch_counts, request.capacity, request.workspace};
  w4::check_call(inner, shape, tuning, 8, most_rows(scheme));
  if (given.max_tokens == 0) return;
  w4::check_codes(rows, shape, codes);
  detail::check_slots(policy_name(scheme), space.slots);

  AlignArgs const align = w4::align_args(inner, shape, constants, space, tuning, workers, gated ? kGateFeatures : kOutputFeatures);
  w4::RoundedParams params{};
  static_cast<w4::AnyParams&>(params) = layer_params(inner, space, tuning, align);
  w4::set_rounded(params, rows, rounded, request.workspace);
  w4::widen_rows(request, rows, codes, params, workers, stream);
  detail::launch_align(align, 0, stream);
  launcher(w4::only_phase(params, 0), workers, stream);
  w4::round_rows(rows, params, shape.intermediate, workers, stream);
  launcher(w4::only_phase(params, 1), workers, stream);
  if (align.topk > 1) detail::launch_reduce<__nv_bfloat16>(align, params.rows_out, given.out, workers, stream);
}

inline void W4A16Layer::State::enqueue_batched(BatchedCall const& batch, W4Codes const& codes, void* workspace, cudaStream_t stream) const {
  LocalShape const slots = w4::of_slots(shape);
  W4Tuning const tuning = choose_w4_tuning(slots, scheme, w4::expected_tokens(slots, batch));
  LayerCall const call = w4::call_of(slots, batch);
  enqueue({call, batch.counts, batch.capacity, workspace}, tuning, codes, stream);
}

[[gnu::used]] inline void W4A16Layer::forward(LayerCall const& call, W4Tuning const& tuning, void* workspace, CUstream_st* stream) const {
  detail::check_routing(call);
  state_->enqueue({call, nullptr, 0, workspace}, tuning, {}, stream);
}
[[gnu::used]] inline void W4A16Layer::forward(LayerCall const& call, void* workspace, CUstream_st* stream) const {
  forward(call, tuning(call.max_tokens), workspace, stream);
}
[[gnu::used]] inline void W4A16Layer::forward(LayerCall const& call, W4Codes const& codes, void* workspace, CUstream_st* stream) const {
  detail::check_routing(call);
  state_->enqueue({call, nullptr, 0, workspace}, tuning(call.max_tokens), codes, stream);
}

[[gnu::used]] inline void W4A16Layer::forward_batched(BatchedCall const& batch, void* workspace, CUstream_st* stream) const {
  state_->enqueue_batched(batch, {}, workspace, stream);
}
[[gnu::used]] inline void W4A16Layer::forward_batched(BatchedCall const& batch, W4Codes const& codes, void* workspace,
                                                      CUstream_st* stream) const {
  state_->enqueue_batched(batch, codes, workspace, stream);
}

}  // namespace moe::hopper
