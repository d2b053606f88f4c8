// SPDX-License-Identifier: Apache-2.0
// backends/low_latency_launch.cuh: the low-latency exchange of one rank as calls that enqueue its kernels.
#pragma once

#include "moe/backends/low_latency_combine.cuh"
#include "moe/core/cuda_space.hpp"

namespace moe::detail {

/// Launches with or without programmatic dependent launch; E_CUDA if refused.
template <class Args>
void launch_exchange(void (*kernel)(Args), char const* name, int blocks, int threads, std::size_t shared, bool programmatic,
                     cudaStream_t stream, Args const& args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = programmatic ? 1 : 0;
  check_cuda(cudaLaunchKernelEx(&config, kernel, args), name);
}

/// What one call of the exchange works on. Device pointers; rows of 16-byte multiples.
struct ExchangeTokens {
  int tokens = 0;                               ///< M, or its bound
  std::int32_t const* tokens_device = nullptr;  ///< optional: M on the device, at most `tokens`
  __nv_bfloat16 const* x = nullptr;
  std::int64_t x_stride = 0;
  std::int32_t const* ids = nullptr;
  float const* weights = nullptr;
};

/// The kernels of one rank over one part of a window. Holds no memory of its own.
class LowLatencyCalls {
 public:
  LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape, bool programmatic)
      : window_(window), shape_(shape), at_(shape), programmatic_(programmatic) {
    shape.check();
    shared_ = low_latency_dispatch_shared(shape);
    for (auto* kernel : {&low_latency_dispatch<true, true>, &low_latency_dispatch<true, false>, &low_latency_dispatch<false, true>,
                         &low_latency_dispatch<false, false>}) {
      check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_)),
                 "cudaFuncSetAttribute");
    }
  }
  /// Bytes of the window that the exchange needs.
  static std::size_t window_bytes(LowLatencyShape const& shape) { return LowLatencyLayout(shape).bytes; }

  /// Sends the rows, then waits for all of them; either half alone if asked. expert_num_tokens: device [L].
  void dispatch(ExchangeTokens const& in, std::int32_t* expert_num_tokens, int parity, cudaStream_t stream, bool send = true,
                bool receive = true) const {
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
  /// Reads and sums the rows that the experts left in outputs(parity).
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream) const {
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
  /// Per-rank layout: sums expert outputs [L*C][H] into outputs(parity), before combine().
  void reduce(__nv_bfloat16 const* y, int parity, int blocks, cudaStream_t stream) const {
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

  LowLatencyShape const& shape() const { return shape_; }
  LowLatencyLayout const& layout() const { return at_; }
  template <class T>
  T* own(std::size_t offset) const {
    return reinterpret_cast<T*>(window_.peer[window_.rank] + offset);
  }
  __nv_bfloat16* outputs(int parity) const { return own<__nv_bfloat16>(at_.outputs[parity]); }

 private:
  comm::WindowView window_;
  LowLatencyShape shape_;
  LowLatencyLayout at_;
  std::size_t shared_ = 0;
  bool programmatic_;
};

}  // namespace moe::detail
