// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/calls.hpp: the low-latency exchange of one rank as calls that enqueue its kernels. Defined in
// launch.cuh.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "moe/backends/window/device/low_latency/layout.hpp"

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

/// What a rank may choose for itself.
struct ExchangeOptions {
  bool programmatic = true;  ///< each kernel's blocks are placed while the kernel before it ends; not for ranks that share a GPU
  ScaleRule scales{};
  bool fenced = true;                             ///< combine publishes its ready flag with a fence (comm::detail::announce says why)
  std::int32_t const* expert_place = nullptr;     ///< device [num_ids]: rank * L + local of every id; null: that is the id
  int num_ids = 0;                                ///< ids that have an expert; 0: the shape's num_experts
  bool weight_on_input = false;                   ///< rows are multiplied with their weight before they are quantised; k = 1
  std::int64_t* expert_totals = nullptr;          ///< device [L]: rows received in all calls
  std::size_t begin = comm::kWindowControlBytes;  ///< first byte of the window that is the exchange's
};

/// The kernels of one rank over one part of a window. Holds no memory of its own.
class LowLatencyCalls {
 public:
  /// E_CONFIG, E_UNSUPPORTED for the shape; E_ARG for the router weight on the input with top-k other than 1.
  LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape, ExchangeOptions const& options);
  LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape, bool programmatic, ScaleRule const& rule = {})
      : LowLatencyCalls(window, shape, ExchangeOptions{.programmatic = programmatic, .scales = rule}) {}
  /// Bytes of the window that the exchange needs, those before it included.
  static std::size_t window_bytes(LowLatencyShape const& shape, std::size_t begin = comm::kWindowControlBytes) {
    return LowLatencyLayout(shape, begin).bytes;
  }

  /// Sends the rows, then waits for all of them; either half alone if asked. expert_num_tokens: device [L]. `refused`, 1 + ErrorCode: only
  /// tells the peers that this rank cannot take part; `in` must be empty.
  void dispatch(ExchangeTokens const& in, std::int32_t* expert_num_tokens, int parity, cudaStream_t stream, bool send = true,
                bool receive = true, std::uint32_t refused = 0) const;
  /// Reads and sums the rows that the experts left in outputs(parity).
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream,
               std::uint32_t refused = 0) const;
  /// Per-rank layout: sums expert outputs [L*C][H] into outputs(parity), before combine().
  template <class T>
  void reduce(T const* y, int parity, int blocks, cudaStream_t stream) const;
  /// Expert outputs [L][C][H], bf16 or float, as they travel, into outputs(parity), before combine(). `batches`: other than L.
  template <class T>
  void code(T const* y, std::int32_t const* num_rows, int parity, cudaStream_t stream, int batches = 0) const;
  /// Per-rank layout in standard format: local ids and weights of the received rows, packed [R*T][k]; -1 and 0 where none came.
  void rank_major(std::int32_t* ids, float* weights, int parity, cudaStream_t stream) const;
  /// Tells every rank that this one gives up: their waits end with E_PEER.
  void abandon(cudaStream_t stream) const;
  /// With masks, collective over all ranks: the masked ones are back. Continues at the latest round.
  void rejoin(cudaStream_t stream) const;

  LowLatencyShape const& shape() const { return shape_; }
  LowLatencyLayout const& layout() const { return at_; }
  template <class T>
  T* own(std::size_t offset) const {
    return reinterpret_cast<T*>(window_.peer[window_.rank] + offset);
  }
  /// Where experts may write what combine() reads, if outputs travel plain.
  __nv_bfloat16* outputs(int parity) const { return own<__nv_bfloat16>(at_.outputs[parity]); }

 private:
  comm::WindowView window_;
  LowLatencyShape shape_;
  LowLatencyLayout at_;
  std::size_t shared_ = 0;
  ExchangeOptions options_;
};

}  // namespace moe::detail
