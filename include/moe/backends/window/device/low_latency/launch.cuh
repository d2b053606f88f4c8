// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/launch.cuh: how the kernels of the low-latency exchange are started. Include it in one translation
// unit: its functions are emitted there even if nothing in that file calls them, so that other files of the program need no nvcc.
#pragma once

#include "moe/backends/window/device/common/launch.cuh"
#include "moe/backends/window/device/low_latency/calls.hpp"
#include "moe/backends/window/device/low_latency/coded.cuh"
#include "moe/backends/window/device/low_latency/combine.cuh"
#include "moe/backends/window/device/low_latency/masks.cuh"

namespace moe::detail {

[[gnu::used]] inline LowLatencyCalls::LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape,
                                                      ExchangeOptions const& options)
    : window_(window), shape_(shape), at_(shape, options.begin), options_(options) {
  shape.check();
  if (options.weight_on_input && shape.topk != 1) {
    throw Error(ErrorCode::argument, "apply_router_weight_on_input requires topk == 1");
  }
  if (options_.num_ids == 0) {
    options_.num_ids = shape.num_experts;
  }
  shared_ = low_latency_dispatch_shared(shape);
  for (auto* kernel : {&low_latency_dispatch<true, true>, &low_latency_dispatch<true, false>, &low_latency_dispatch<false, true>,
                       &low_latency_dispatch<false, false>}) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_)),
               "cudaFuncSetAttribute");
    expect_resident(kernel, "low_latency", shape.blocks, kLowLatencyThreads, shared_);
  }
}

[[gnu::used]] inline void LowLatencyCalls::dispatch(ExchangeTokens const& in, std::int32_t* expert_num_tokens, int parity,
                                                    cudaStream_t stream, bool send, bool receive, std::uint32_t refused) const {
  if (shape_.masks && !send) {
    LowLatencyCollect c;
    c.window = window_;
    c.at = at_;
    c.blocks = shape_.blocks;
    c.max_tokens = shape_.max_tokens;
    c.num_experts = shape_.num_experts;
    c.local_experts = shape_.local_experts();
    c.capacity = shape_.capacity();
    c.tag = shape_.tag();
    c.parity = parity;
    c.expert_num_tokens = expert_num_tokens;
    c.expert_totals = options_.expert_totals;
    launch_exchange(&low_latency_collect, "low_latency_collect", 1, kMaskThreads, 0, options_.programmatic, stream, c);
    return;
  }
  LowLatencyDispatch a;
  a.window = window_;
  a.at = at_;
  a.tokens_bound = in.tokens;
  a.tokens_device = in.tokens_device;
  a.pieces = LowLatencyPieces(in.tokens, shape_.hidden, shape_.blocks, kDispatchUnit);
  a.max_tokens = shape_.max_tokens;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.num_experts = shape_.num_experts;
  a.local_experts = shape_.local_experts();
  a.capacity = shape_.capacity();
  a.tag = shape_.tag();
  a.parity = parity;
  a.amax_floor = options_.scales.amax_floor;
  a.pow2_scales = options_.scales.pow2;
  a.send = send;
  a.receive = receive && !shape_.masks;
  a.expert_place = options_.expert_place;
  a.num_ids = options_.num_ids;
  a.weight_on_input = options_.weight_on_input;
  a.masks = shape_.masks;
  a.refused = refused;
  a.expert_totals = options_.expert_totals;
  a.x = in.x;
  a.x_stride = in.x_stride;
  a.ids = in.ids;
  a.weights = in.weights;
  a.expert_num_tokens = expert_num_tokens;
  auto* const kernel = shape_.fp8 ? (shape_.per_rank ? &low_latency_dispatch<true, true> : &low_latency_dispatch<true, false>)
                                  : (shape_.per_rank ? &low_latency_dispatch<false, true> : &low_latency_dispatch<false, false>);
  launch_exchange(kernel, "low_latency_dispatch", shape_.blocks, kLowLatencyThreads, shared_, options_.programmatic, stream, a);
  if (shape_.masks && receive) {
    dispatch(in, expert_num_tokens, parity, stream, false, true);
  }
}

[[gnu::used]] inline void LowLatencyCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity,
                                                   cudaStream_t stream, std::uint32_t refused) const {
  if (shape_.masks) {
    LowLatencyMeet m;
    m.window = window_;
    m.at = at_;
    m.refused = refused;
    launch_exchange(&low_latency_meet, "low_latency_meet", 1, comm::kMaxWindowRanks, 0, options_.programmatic, stream, m);
  }
  LowLatencyCombine a;
  a.window = window_;
  a.at = at_;
  a.tokens_bound = in.tokens;
  a.tokens_device = in.tokens_device;
  a.pieces = LowLatencyPieces(in.tokens, shape_.hidden, shape_.blocks, kCombineUnit);
  a.max_tokens = shape_.max_tokens;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.num_experts = shape_.num_experts;
  a.local_experts = shape_.local_experts();
  a.capacity = shape_.capacity();
  a.parity = parity;
  a.ids = in.ids;
  a.expert_place = options_.expert_place;
  a.num_ids = options_.num_ids;
  a.weights = in.weights;
  a.weights_are_one = options_.weight_on_input;
  a.fenced = options_.fenced;
  a.met = shape_.masks;
  a.refused = refused;
  a.out = out;
  a.out_stride = out_stride;
  bool const ranks = shape_.per_rank;
  void (*kernel)(LowLatencyCombine) = ranks ? &low_latency_combine<true> : &low_latency_combine<false>;
  if (shape_.combine == CombineFormat::fp8) {
    kernel = ranks ? &low_latency_combine_coded<CombineFormat::fp8, true> : &low_latency_combine_coded<CombineFormat::fp8, false>;
  } else if (shape_.combine == CombineFormat::logfmt) {
    kernel = ranks ? &low_latency_combine_coded<CombineFormat::logfmt, true> : &low_latency_combine_coded<CombineFormat::logfmt, false>;
  }
  launch_exchange(kernel, "low_latency_combine", shape_.blocks, kLowLatencyThreads, 0, options_.programmatic, stream, a);
}

template <class T>
void LowLatencyCalls::reduce(T const* y, int parity, int blocks, cudaStream_t stream) const {
  LowLatencyReduce a;
  a.window = window_;
  a.at = at_;
  a.max_tokens = shape_.max_tokens;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.parity = parity;
  a.weights_are_one = options_.weight_on_input;
  a.y = y;
  auto* const kernel = shape_.combine == CombineFormat::plain ? &low_latency_reduce<CombineFormat::plain, T>
                       : shape_.combine == CombineFormat::fp8 ? &low_latency_reduce<CombineFormat::fp8, T>
                                                              : &low_latency_reduce<CombineFormat::logfmt, T>;
  launch_exchange(kernel, "low_latency_reduce", blocks, 256, 0, options_.programmatic, stream, a);
}

template <class T>
void LowLatencyCalls::code(T const* y, std::int32_t const* num_rows, int parity, cudaStream_t stream, int batches) const {
  LowLatencyOutputs a;
  a.window = window_;
  a.at = at_;
  a.hidden = shape_.hidden;
  a.capacity = shape_.capacity();
  a.parity = parity;
  a.y = y;
  a.num = num_rows;
  auto* const kernel = shape_.combine == CombineFormat::plain ? &low_latency_outputs<CombineFormat::plain, T>
                       : shape_.combine == CombineFormat::fp8 ? &low_latency_outputs<CombineFormat::fp8, T>
                                                              : &low_latency_outputs<CombineFormat::logfmt, T>;
  a.local_experts = batches > 0 ? batches : shape_.local_experts();
  launch_exchange(kernel, "low_latency_outputs", 32 * a.local_experts, 256, 0, options_.programmatic, stream, a);
}

template void LowLatencyCalls::reduce(__nv_bfloat16 const*, int, int, cudaStream_t) const;
template void LowLatencyCalls::reduce(float const*, int, int, cudaStream_t) const;
template void LowLatencyCalls::code(__nv_bfloat16 const*, std::int32_t const*, int, cudaStream_t, int) const;
template void LowLatencyCalls::code(float const*, std::int32_t const*, int, cudaStream_t, int) const;

[[gnu::used]] inline void LowLatencyCalls::rank_major(std::int32_t* ids, float* weights, int parity, cudaStream_t stream) const {
  LowLatencyRankMajor a;
  a.window = window_;
  a.at = at_;
  a.max_tokens = shape_.max_tokens;
  a.topk = shape_.topk;
  a.capacity = shape_.capacity();
  a.parity = parity;
  a.ids = ids;
  a.weights = weights;
  int const blocks = std::clamp((shape_.capacity() * shape_.topk + 255) / 256, 1, 64);
  launch_exchange(&low_latency_rank_major, "low_latency_rank_major", blocks, 256, 0, options_.programmatic, stream, a);
}

[[gnu::used]] inline void LowLatencyCalls::abandon(cudaStream_t stream) const {
  abandon_exchange<<<1, 32, 0, stream>>>(window_);
  check_launch("abandon_exchange");
}

[[gnu::used]] inline void LowLatencyCalls::rejoin(cudaStream_t stream) const {
  for (int step = 0; step < 2; ++step) {
    comm::detail::window_barrier<<<1, comm::kMaxWindowRanks, 0, stream>>>(window_);
    low_latency_rejoin<<<1, 256, 0, stream>>>(window_, at_, step);
  }
  comm::detail::window_barrier<<<1, comm::kMaxWindowRanks, 0, stream>>>(window_);
  check_launch("low_latency_rejoin");
}

}  // namespace moe::detail
