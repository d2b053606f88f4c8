// SPDX-License-Identifier: Apache-2.0
// backends/high_throughput_launch.cuh: the high-throughput exchange of one rank as calls that enqueue its kernels.
#pragma once

#include "moe/backends/high_throughput_combine.cuh"
#include "moe/backends/low_latency_launch.cuh"

namespace moe::detail {

/// Sizes that change speed and nothing else.
struct HighThroughputTuning {
  int dispatch_warps = kHighThroughputWarps;
  int dispatch_piece = 1024;  ///< bytes of a row that go to all its ranks before the next piece
  int combine_piece = 2048;   ///< bytes of a row in one stage
  friend constexpr bool operator==(HighThroughputTuning const&, HighThroughputTuning const&) = default;
};

/// The kernels of one rank over one part of a window. Holds no memory of its own.
class HighThroughputCalls {
 public:
  HighThroughputCalls(comm::WindowView const& window, HighThroughputShape const& shape, bool programmatic, HighThroughputTuning const& tuning = {})
      : window_(window), shape_(shape), at_(shape), programmatic_(programmatic), tuning_(tuning) {
    shape.check();
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
  }
  static std::size_t window_bytes(HighThroughputShape const& shape) { return HighThroughputLayout(shape).bytes; }

  /// `routing_parity` >= 0: cached, the places of the call that ran with that parity and the same routing are used again.
  void dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream, int routing_parity = -1) const {
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
                    shape_.blocks, 32 * dispatch_warps_, dispatch_shared_, programmatic_, stream, a);
  }
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream,
               int routing_parity = -1) const {
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
    a.out = out;
    a.out_stride = out_stride;
    launch_exchange(&high_throughput_combine, "high_throughput_combine", shape_.blocks, 32 * combine_warps_, combine_shared_, programmatic_,
                    stream, a);
  }
  /// Sums expert-major outputs [list entries][H] into outputs(parity), before combine(). Needs lists.
  void reduce(__nv_bfloat16 const* y, int parity, int blocks, cudaStream_t stream, int routing_parity = -1) const {
    HighThroughputReduce a;
    a.window = window_;
    a.at = at_;
    a.hidden = shape_.hidden;
    a.topk = shape_.topk;
    a.parity = parity;
    a.routing_parity = routing_parity >= 0 ? routing_parity : parity;
    a.y = y;
    launch_exchange(&high_throughput_reduce, "high_throughput_reduce", blocks, 256, 0, programmatic_, stream, a);
  }

  HighThroughputShape const& shape() const { return shape_; }
  HighThroughputLayout const& layout() const { return at_; }
  template <class T>
  T* own(std::size_t offset) const {
    return reinterpret_cast<T*>(window_.peer[window_.rank] + offset);
  }
  __nv_bfloat16* outputs(int parity) const { return own<__nv_bfloat16>(at_.outputs[parity]); }

 private:
  comm::WindowView window_;
  HighThroughputShape shape_;
  HighThroughputLayout at_;
  std::size_t dispatch_shared_ = 0;
  std::size_t combine_shared_ = 0;
  int dispatch_warps_ = 1;
  int combine_warps_ = 1;
  int combine_stages_ = 1;
  bool programmatic_;
  HighThroughputTuning tuning_;
};

}  // namespace moe::detail
