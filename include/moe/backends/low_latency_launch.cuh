// SPDX-License-Identifier: Apache-2.0
// backends/low_latency_launch.cuh: how the kernels of the low-latency exchange are started.
#pragma once

#include "moe/backends/exchange_launch.cuh"
#include "moe/backends/low_latency_calls.hpp"
#include "moe/backends/low_latency_combine.cuh"

namespace moe::detail {

/// The valid rows of every expert's batch, rounded once. blockIdx.y: expert.
static __global__ void round_batches(float const* y, std::int32_t const* num, int capacity, int hidden, __nv_bfloat16* out) {
  comm::detail::begin_dependent_kernel();
  int const le = static_cast<int>(blockIdx.y);
  for (int i = static_cast<int>(blockIdx.x); i < num[le]; i += static_cast<int>(gridDim.x)) {
    std::size_t const row = (static_cast<std::size_t>(le) * capacity + i) * hidden;
    for (int h = 4 * static_cast<int>(threadIdx.x); h < hidden; h += 4 * static_cast<int>(blockDim.x)) {
      float4 const v = *reinterpret_cast<float4 const*>(y + row + h);
      __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
      *reinterpret_cast<uint2*>(out + row + h) = *reinterpret_cast<uint2 const*>(pair);
    }
  }
}

inline LowLatencyCalls::LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape, bool programmatic,
                                        ScaleRule const& rule)
    : window_(window), shape_(shape), at_(shape), programmatic_(programmatic), rule_(rule) {
  shape.check();
  shared_ = low_latency_dispatch_shared(shape);
  for (auto* kernel : {&low_latency_dispatch<true, true>, &low_latency_dispatch<true, false>, &low_latency_dispatch<false, true>,
                       &low_latency_dispatch<false, false>}) {
    check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_)),
               "cudaFuncSetAttribute");
    expect_resident(kernel, "low_latency", shape.blocks, kLowLatencyThreads, shared_);
  }
}

inline void LowLatencyCalls::dispatch(ExchangeTokens const& in, std::int32_t* expert_num_tokens, int parity, cudaStream_t stream, bool send,
                                      bool receive) const {
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
  a.amax_floor = rule_.amax_floor;
  a.pow2_scales = rule_.pow2;
  a.send = send;
  a.receive = receive;
  a.x = in.x;
  a.x_stride = in.x_stride;
  a.ids = in.ids;
  a.weights = in.weights;
  a.expert_num_tokens = expert_num_tokens;
  auto* const kernel = shape_.fp8 ? (shape_.per_rank ? &low_latency_dispatch<true, true> : &low_latency_dispatch<true, false>)
                                  : (shape_.per_rank ? &low_latency_dispatch<false, true> : &low_latency_dispatch<false, false>);
  launch_exchange(kernel, "low_latency_dispatch", shape_.blocks, kLowLatencyThreads, shared_, programmatic_, stream, a);
}

inline void LowLatencyCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity,
                                     cudaStream_t stream) const {
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
  a.weights = in.weights;
  a.out = out;
  a.out_stride = out_stride;
  launch_exchange(shape_.per_rank ? &low_latency_combine<true> : &low_latency_combine<false>, "low_latency_combine", shape_.blocks,
                  kLowLatencyThreads, 0, programmatic_, stream, a);
}

inline void LowLatencyCalls::reduce(__nv_bfloat16 const* y, int parity, int blocks, cudaStream_t stream) const {
  LowLatencyReduce a;
  a.window = window_;
  a.at = at_;
  a.max_tokens = shape_.max_tokens;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.num_experts = shape_.num_experts;
  a.parity = parity;
  a.y = y;
  launch_exchange(&low_latency_reduce, "low_latency_reduce", blocks, 256, 0, programmatic_, stream, a);
}

inline void LowLatencyCalls::round(float const* y, std::int32_t const* expert_num_tokens, int parity, cudaStream_t stream) const {
  dim3 const grid(32, static_cast<unsigned>(shape_.local_experts()));
  round_batches<<<grid, 256, 0, stream>>>(y, expert_num_tokens, shape_.capacity(), shape_.hidden, outputs(parity));
  check_launch("round_batches");
}

inline void LowLatencyCalls::abandon(cudaStream_t stream) const {
  abandon_exchange<<<1, 32, 0, stream>>>(window_);
  check_launch("abandon_exchange");
}

}  // namespace moe::detail
