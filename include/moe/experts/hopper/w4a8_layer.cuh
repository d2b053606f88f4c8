// SPDX-License-Identifier: Apache-2.0
// experts/hopper/w4a8_layer.cuh: the definitions of W4A8Layer: packs mxfp4 weights and launches the aligning and reducing kernels around
// the layer kernel. Include it in one translation unit compiled for sm_90a.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "moe/core/error.hpp"
#include "moe/experts/hopper/common/align_launch.cuh"
#include "moe/experts/hopper/common/enqueue.cuh"
#include "moe/experts/hopper/w4/a8/kernel.cuh"
#include "moe/experts/hopper/w4/a8/pack.cuh"
#include "moe/experts/hopper/w4a8_layer.hpp"

namespace moe::fix {
[[gnu::used]] inline void include_moe_experts_hopper_w4a8_cuh_or_link_a_library_of_moe_add_hopper_kernels() {}
}  // namespace moe::fix

namespace moe::hopper {

struct W4A8Layer::State {
  LocalShape shape;
  W4Weights weights;
  int workers = 0;
  std::uint8_t* packed[2] = {nullptr, nullptr};
  float* factor[2] = {nullptr, nullptr};
  int* bad = nullptr;  ///< of w13, of w2
  w4::Constants constants{};

  int hidden() const { return w4a8::padded(shape.hidden); }
  int intermediate() const { return w4a8::padded(shape.intermediate); }
  void place(char* memory, W4Activation const& activation);
  void pack(cudaStream_t stream) const;
  void enqueue(Request const& request, W4Tuning const& tuning, cudaStream_t stream) const;
};

inline void W4A8Layer::State::place(char* memory, W4Activation const& activation) {
  factor[0] = reinterpret_cast<float*>(memory);
  factor[1] = factor[0] + 1024;
  bad = reinterpret_cast<int*>(memory) + 3 * 1024;
  packed[0] = reinterpret_cast<std::uint8_t*>(memory) + kHeadBytes;
  packed[1] = packed[0] + shape.num_experts * w4a8::packed_bytes(2LL * intermediate(), hidden());
  w4::Constants& c = constants;
  for (int i = 0; i < 2; ++i) {
    c.weights[i] = packed[i];
    c.bias[i] = i == 0 ? weights.b13 : weights.b2;
    c.factor[i] = factor[i];
  }
  c.bricks[0] = 2 * intermediate() / kBrickRows;
  c.bricks[1] = shape.hidden / kBrickRows;
  c.steps[0] = hidden() / w4a8::kDepth;
  c.steps[1] = intermediate() / w4a8::kDepth;
  c.intermediate = intermediate();
  c.bias_width = shape.intermediate;
  c.split_counters = bad + 1024;
  c.activation = activation;
}

inline void W4A8Layer::State::pack(cudaStream_t stream) const {
  for (int i = 0; i < 2; ++i) {
    W4PackArgs a{};
    a.codes = i == 0 ? weights.w13 : weights.w2;
    a.scales = i == 0 ? weights.w13_scales : weights.w2_scales;
    a.rows = i == 0 ? 2 * shape.intermediate : shape.hidden;
    a.cols = i == 0 ? shape.hidden : shape.intermediate;
    a.packed_rows = i == 0 ? 2 * intermediate() : shape.hidden;
    a.packed_cols = i == 0 ? hidden() : intermediate();
    a.group = 32;
    a.gate_up = i == 0;
    a.factor = factor[i];
    a.bad = bad + i;
    a.packed = packed[i];
    w4a8::pack_bricks<<<dim3(static_cast<unsigned>(a.packed_cols / w4a8::kDepth), static_cast<unsigned>(a.packed_rows / kBrickRows),
                             static_cast<unsigned>(shape.num_experts)),
                        128, 0, stream>>>(a);
    check_cuda(cudaGetLastError(), "w4a8::pack_bricks");
  }
}

[[gnu::used]] inline W4A8Layer::W4A8Layer(LocalShape shape, W4Weights const& weights, W4Activation const& activation, void* packed)
    : state_(std::make_unique<State>()) {
  w4a8::check(shape, weights);
  if (packed == nullptr || reinterpret_cast<std::uintptr_t>(packed) % 16 != 0) {
    throw Error(ErrorCode::argument, text("address ", packed, " of the packed weights is null or not a multiple of 16 bytes"));
  }
  state_->workers = detail::hopper_multiprocessors();
  state_->shape = shape;
  state_->weights = weights;
  state_->place(static_cast<char*>(packed), activation);
  check_cuda(cudaMemset(packed, 0, kHeadBytes), "cudaMemset");
  state_->pack(nullptr);
  int bad[2] = {0, 0};
  check_cuda(cudaMemcpy(bad, state_->bad, sizeof(bad), cudaMemcpyDeviceToHost), "cudaMemcpy");
  if (bad[0] != 0 || bad[1] != 0) {
    throw Error(ErrorCode::unsupported, text("hopper_w4a8: ", bad[0] != 0 ? "w13" : "w2", " has a scale byte over ", w4a8::kMostExponent,
                                             ", under which a weight is not finite"));
  }
}
[[gnu::used]] inline W4A8Layer::~W4A8Layer() = default;
[[gnu::used]] inline W4A8Layer::W4A8Layer(W4A8Layer&&) noexcept = default;
[[gnu::used]] inline W4A8Layer& W4A8Layer::operator=(W4A8Layer&&) noexcept = default;

[[gnu::used]] inline void W4A8Layer::weights_changed(CUstream_st* stream) { state_->pack(stream); }

[[gnu::used]] inline std::int64_t W4A8Layer::workspace_bytes(int max_tokens) const {
  return w4a8::plan_workspace(state_->shape, max_tokens).bytes;
}

inline void W4A8Layer::State::enqueue(Request const& request, W4Tuning const& tuning, cudaStream_t stream) const {
  LayerCall const& call = request.call;
  detail::check_request(request);
  long long const x_stride = call.x_stride != 0 ? call.x_stride : shape.hidden;
  if (x_stride < shape.hidden || x_stride % 16 != 0) {
    throw Error(ErrorCode::argument, text("x_stride ", x_stride, " is not a multiple of 16 of at least ", shape.hidden));
  }
  int const blocks = hidden() / w4a8::kDepth;
  long long const scale_stride = call.x_scale_stride != 0 ? call.x_scale_stride : blocks;
  if (call.max_tokens > 0 && (call.x_scales == nullptr || scale_stride < blocks)) {
    throw Error(ErrorCode::argument,
                text("x_scales ", call.x_scales, " with row stride ", scale_stride, ", expected scales of rows of ", blocks, " groups"));
  }
  if (tuning.tile_rows < 8 || tuning.tile_rows > w4a8::kMostRows || tuning.tile_rows % 8 != 0) {
    throw Error(ErrorCode::argument, text("tile_rows ", tuning.tile_rows, " is not a multiple of 8 in [8, ", w4a8::kMostRows, "]"));
  }
  if (call.max_tokens == 0) return;
  W4Workspace const space = w4a8::plan_workspace(shape, call.max_tokens);
  if (space.slots >= std::int64_t{1} << 31) {
    throw Error(ErrorCode::capacity, text("hopper_w4a8: ", space.slots, " slots, at most 2^31 - 1"));
  }

  w4::Constants const& c = constants;
  AlignArgs align = detail::align_args(request, shape, space, tuning.tile_rows);
  align.plan.row_step = 1;
  align.plan.cluster = 1;
  align.plan.workers = workers;
  align.plan.max_splits = 1;  // the layer kernel chooses the parts of K itself
  align.plan.space = {{(c.bricks[0] + kTileBricks - 1) / kTileBricks, (c.bricks[1] + kTileBricks - 1) / kTileBricks},
                      {(c.steps[0] + w4::kCoarse - 1) / w4::kCoarse, (c.steps[1] + w4::kCoarse - 1) / w4::kCoarse},
                      std::max(1, tuning.raster),
                      kGateFeatures};
  detail::launch_align(align, 0, stream);

  w4a8::Params p{};
  p.layer = constants;
  p.align = align;
  p.max_splits = tuning.tile_rows <= 16 ? tuning.max_splits : 1;
  p.standard = true;
  p.x = call.x;
  p.x_stride = x_stride;
  p.x_scales = call.x_scales;
  p.x_scale_stride = scale_stride;
  p.inter = detail::at<char>(request.workspace, space.inter);
  p.scale_blocks = w4a8::scale_blocks(intermediate());
  p.inter_scales = detail::at<float>(request.workspace, space.inter + space.slots * intermediate());
  p.rows_out = align.topk > 1 ? static_cast<void*>(detail::at<char>(request.workspace, space.slot_rows)) : call.out;
  p.out = call.out;
  p.partials = detail::at<float>(request.workspace, space.partials);
  w4a8::launch_layer(p, workers, stream);
  if (align.topk > 1) detail::launch_reduce<__nv_bfloat16>(align, p.rows_out, call.out, workers, stream);
}

[[gnu::used]] inline void W4A8Layer::forward(LayerCall const& call, W4Tuning const& tuning, void* workspace, CUstream_st* stream) const {
  detail::check_routing(call);
  state_->enqueue({call, nullptr, 0, workspace}, tuning, stream);
}
[[gnu::used]] inline void W4A8Layer::forward(LayerCall const& call, void* workspace, CUstream_st* stream) const {
  forward(call, w4a8::choose_tuning(state_->shape, call.max_tokens), workspace, stream);
}

}  // namespace moe::hopper
