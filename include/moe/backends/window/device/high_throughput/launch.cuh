// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/launch.cuh: how the kernels of the high-throughput exchange are started. Include it in one
// translation unit: its functions are emitted there even if nothing in that file calls them, so that other files of the program need no
// nvcc.
#pragma once

#include "moe/backends/window/device/high_throughput/calls.hpp"
#include "moe/backends/window/device/high_throughput/combine.cuh"
#include "moe/backends/window/device/low_latency/launch.cuh"

namespace moe::detail {

/// The received rows, rounded once.
static __global__ void round_rows(float const* y, std::int32_t const* num_rows, int hidden, __nv_bfloat16* out) {
  comm::detail::begin_dependent_kernel();
  for (std::size_t i = blockIdx.x; i < static_cast<std::size_t>(*num_rows); i += gridDim.x) {
    for (int h = 4 * static_cast<int>(threadIdx.x); h < hidden; h += 4 * static_cast<int>(blockDim.x)) {
      float4 const v = *reinterpret_cast<float4 const*>(y + i * hidden + h);
      __nv_bfloat162 pair[2] = {__floats2bfloat162_rn(v.x, v.y), __floats2bfloat162_rn(v.z, v.w)};
      *reinterpret_cast<uint2*>(out + i * hidden + h) = *reinterpret_cast<uint2 const*>(pair);
    }
  }
}

[[gnu::used]] inline HighThroughputCalls::HighThroughputCalls(comm::WindowView const& window, HighThroughputShape const& shape,
                                                              ExchangeOptions const& options, HighThroughputTuning const& tuning)
    : window_(window), shape_(shape), at_(shape), tuning_(tuning), options_(options) {
  shape.check();
  if (options_.num_ids == 0) {
    options_.num_ids = shape.num_experts;
  }
  if (int const sm = device_architecture(); sm < 90) {
    throw Error(ErrorCode::unsupported, text("high_throughput: the device is sm_", sm, ", sm_90 or newer is needed for its copy engine"));
  }
  int const piece_bytes = tuning.combine_piece;
  dispatch_shared_ = high_throughput_dispatch_shared(shape);
  dispatch_warps_ = std::min(tuning.dispatch_warps, high_throughput_dispatch_warps(shape));
  combine_warps_ = high_throughput_combine_warps(shape, piece_bytes);
  combine_stages_ = high_throughput_combine_stages(shape, combine_warps_, piece_bytes);
  combine_shared_ = high_throughput_combine_shared(shape, combine_warps_, combine_stages_, piece_bytes);
  constexpr auto kAttribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
  check_cuda(cudaFuncSetAttribute(&high_throughput_dispatch<true>, kAttribute, kHighThroughputShared), "cudaFuncSetAttribute");
  check_cuda(cudaFuncSetAttribute(&high_throughput_dispatch<false>, kAttribute, kHighThroughputShared), "cudaFuncSetAttribute");
  check_cuda(cudaFuncSetAttribute(&high_throughput_combine, kAttribute, kHighThroughputShared), "cudaFuncSetAttribute");
  set_blocks(shape.blocks);
}

[[gnu::used]] inline void HighThroughputCalls::set_blocks(int blocks) {
  HighThroughputShape changed = shape_;
  changed.blocks = blocks;
  changed.check();
  expect_resident(&high_throughput_dispatch<true>, "high_throughput", blocks, 32 * dispatch_warps_, dispatch_shared_);
  expect_resident(&high_throughput_combine, "high_throughput", blocks, 32 * combine_warps_, combine_shared_);
  shape_ = changed;
}

[[gnu::used]] inline void HighThroughputCalls::dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream, int routing_parity,
                                                        std::uint32_t refused) const {
  HighThroughputDispatch a;
  a.window = window_;
  a.at = at_;
  a.tokens_bound = in.tokens;
  a.tokens_device = in.tokens_device;
  a.max_tokens = shape_.max_tokens;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.num_experts = shape_.num_experts;
  a.local_experts = shape_.local_experts();
  a.capacity = shape_.rows();
  a.alignment = shape_.alignment;
  a.amax_floor = options_.scales.amax_floor;
  a.pow2_scales = options_.scales.pow2;
  a.expert_place = options_.expert_place;
  a.num_ids = options_.num_ids;
  a.refused = refused;
  a.lists = shape_.lists;
  a.piece_bytes = tuning_.dispatch_piece;
  a.tag = shape_.tag();
  a.parity = parity;
  a.cached = routing_parity >= 0;
  a.routing_parity = a.cached ? routing_parity : parity;
  a.x = in.x;
  a.x_stride = in.x_stride;
  a.ids = in.ids;
  a.weights = in.weights;
  launch_exchange(shape_.fp8 ? &high_throughput_dispatch<true> : &high_throughput_dispatch<false>, "high_throughput_dispatch",
                  shape_.blocks, 32 * dispatch_warps_, dispatch_shared_, options_.programmatic, stream, a);
}

[[gnu::used]] inline void HighThroughputCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity,
                                                       cudaStream_t stream, int routing_parity, std::uint32_t refused) const {
  HighThroughputCombine a;
  a.window = window_;
  a.at = at_;
  a.tokens_bound = in.tokens;
  a.tokens_device = in.tokens_device;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.parity = parity;
  a.routing_parity = routing_parity >= 0 ? routing_parity : parity;
  a.piece_bytes = tuning_.combine_piece;
  a.stages = combine_stages_;
  a.fenced = options_.fenced;
  a.refused = refused;
  a.out = out;
  a.out_stride = out_stride;
  launch_exchange(&high_throughput_combine, "high_throughput_combine", shape_.blocks, 32 * combine_warps_, combine_shared_,
                  options_.programmatic, stream, a);
}

[[gnu::used]] inline void HighThroughputCalls::reduce(__nv_bfloat16 const* y, int parity, int blocks, cudaStream_t stream,
                                                      int routing_parity) const {
  HighThroughputReduce a;
  a.window = window_;
  a.at = at_;
  a.hidden = shape_.hidden;
  a.topk = shape_.topk;
  a.parity = parity;
  a.routing_parity = routing_parity >= 0 ? routing_parity : parity;
  a.y = y;
  launch_exchange(&high_throughput_reduce, "high_throughput_reduce", blocks, 256, 0, options_.programmatic, stream, a);
}

[[gnu::used]] inline void HighThroughputCalls::round(float const* y, int parity, cudaStream_t stream, int routing_parity) const {
  int const routing = routing_parity >= 0 ? routing_parity : parity;
  round_rows<<<1024, 256, 0, stream>>>(y, own<std::int32_t>(at_.summary[routing]), shape_.hidden, outputs(parity));
  check_launch("round_rows");
}

[[gnu::used]] inline void HighThroughputCalls::abandon(cudaStream_t stream) const {
  abandon_exchange<<<1, 32, 0, stream>>>(window_);
  check_launch("abandon_exchange");
}

}  // namespace moe::detail
