// SPDX-License-Identifier: Apache-2.0
// backends/low_latency_calls.hpp: the low-latency exchange of one rank as calls that enqueue its kernels. Defined in
// low_latency_launch.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "moe/backends/low_latency_layout.hpp"

namespace moe::detail {

/// What one call of the exchange works on. Device pointers; rows of 16-byte multiples.
struct ExchangeTokens {
  int tokens = 0;                               ///< M, or its bound
  std::int32_t const* tokens_device = nullptr;  ///< optional: M on the device, at most `tokens`
  __nv_bfloat16 const* x = nullptr;
  std::int64_t x_stride = 0;
  std::int32_t const* ids = nullptr;
  float const* weights = nullptr;
};

/// How the scale of 128 values follows from the largest of them.
struct ScaleRule {
  float amax_floor = 1e-4F;  ///< amax is at least this: 1e-4 in the transport's own cast, 1e-10 in group quantisation
  bool pow2 = false;         ///< scales are rounded up to powers of two
};

/// The kernels of one rank over one part of a window. Holds no memory of its own.
class LowLatencyCalls {
 public:
  /// `programmatic`: each kernel's blocks are placed while the kernel before it ends; not for ranks that share a GPU.
  LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape, bool programmatic, ScaleRule const& rule = {});
  /// Bytes of the window that the exchange needs.
  static std::size_t window_bytes(LowLatencyShape const& shape) { return LowLatencyLayout(shape).bytes; }

  /// Sends the rows, then waits for all of them; either half alone if asked. expert_num_tokens: device [L].
  void dispatch(ExchangeTokens const& in, std::int32_t* expert_num_tokens, int parity, cudaStream_t stream, bool send = true,
                bool receive = true) const;
  /// Reads and sums the rows that the experts left in outputs(parity).
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream) const;
  /// Per-rank layout: sums expert outputs [L*C][H] into outputs(parity), before combine().
  void reduce(__nv_bfloat16 const* y, int parity, int blocks, cudaStream_t stream) const;
  /// Per-expert layout: rounds float32 expert outputs [L][C][H] into outputs(parity), before combine().
  void round(float const* y, std::int32_t const* expert_num_tokens, int parity, cudaStream_t stream) const;
  /// Tells every rank that this one gives up: their waits end with E_PEER.
  void abandon(cudaStream_t stream) const;

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
  ScaleRule rule_;
};

}  // namespace moe::detail
