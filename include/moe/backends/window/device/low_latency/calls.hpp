// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/calls.hpp: the low-latency exchange of one rank, as calls that enqueue its kernels. Defined in
// launch.cuh.
#pragma once

#include "moe/backends/window/device/low_latency/params.hpp"
#include "moe/comm/arrivals.hpp"

namespace moe::detail {

struct LowLatencyDispatch;
struct LowLatencyCombine;

/// Kernels that are compiled for the sizes of one configuration, one row for each (token, expert), outputs in plain bf16.
struct LowLatencyFixed {
  int hidden = 0, topk = 0, num_experts = 0;  ///< of the configuration; a shape with replicas has more experts and does not fit
  bool fp8 = false;
  void (*prepare)(LowLatencyShape const& shape, std::size_t shared) = nullptr;
  void (*dispatch)(LowLatencyDispatch const& a, std::size_t shared, bool programmatic, cudaStream_t stream) = nullptr;
  void (*combine)(LowLatencyCombine const& a, bool programmatic, cudaStream_t stream) = nullptr;

  /// Whether they are for an exchange of this shape.
  bool fit(LowLatencyShape const& s) const {
    return s.hidden == hidden && s.topk == topk && s.num_experts == num_experts && s.fp8 == fp8 && !s.per_rank &&
           s.combine == CombineFormat::plain;
  }
};

/// The kernels for the sizes of Config. Defined in fixed.cuh, instantiated in the library of a configuration that asks for them
/// (kFixedKernels).
template <class Config, bool kFp8>
auto low_latency_fixed() -> LowLatencyFixed const&;

/// The kernels of one rank over one part of a window. Owns no memory.
class LowLatencyCalls {
 public:
  /// E_CONFIG, E_UNSUPPORTED for the shape; E_ARG for the router weight on the input with top-k other than 1. `fixed`: kernels that are
  /// taken if they fit the shape, with the same results; or null.
  LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape, ExchangeOptions const& options,
                  LowLatencyFixed const* fixed = nullptr);
  LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape, bool programmatic, ScaleRule const& rule = {})
      : LowLatencyCalls(window, shape, ExchangeOptions{.programmatic = programmatic, .scales = rule}) {}
  /// Bytes of the window up to the end of the exchange.
  static std::size_t window_bytes(LowLatencyShape const& shape, std::size_t begin = comm::kWindowControlBytes) {
    return LowLatencyCounters(shape, LowLatencyLayout(shape, begin).bytes).bytes;
  }

  /// Sends the rows, then waits for all of them; on request only one half. expert_num_tokens: device [L]. `refused`, 1 + ErrorCode: only
  /// tells the peers that this rank cannot take part; `in` must be empty.
  void dispatch(ExchangeTokens const& in, std::int32_t* expert_num_tokens, int parity, cudaStream_t stream, bool send = true,
                bool receive = true, std::uint32_t refused = 0) const;
  /// dispatch() of both halves of an arriving shape that ends without its rows. They are complete when arrivals(parity) says so.
  void dispatch_arriving(ExchangeTokens const& in, std::int32_t* expert_num_tokens, int parity, cudaStream_t stream) const;
  /// The counts of the rows of a dispatch of that parity; of a shape that is not arriving, of no rank.
  comm::Arrivals arrivals(int parity) const {
    auto const p = static_cast<std::size_t>(parity);
    comm::Arrivals a{params_.window, own<std::uint32_t>(counters_.arrived[p]), own<std::uint64_t>(counters_.expected[p]),
                     shape_.local_experts(), shape_.local_experts()};
    if (!shape_.arriving) a.window.size = 0;
    return a;
  }
  /// Reads and sums the rows in outputs(parity) of the experts' ranks.
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream,
               std::uint32_t refused = 0) const;
  /// Per-rank layout: sums expert outputs [L*C][H] into outputs(parity), before combine().
  template <class T>
  void reduce(T const* y, int parity, int blocks, cudaStream_t stream) const;
  /// Converts expert outputs [L][C][H], bf16 or float, to wire format in outputs(parity), before combine(). `batches`: if not L.
  template <class T>
  void code(T const* y, std::int32_t const* num_rows, int parity, cudaStream_t stream, int batches = 0) const;
  /// Per-rank layout in standard format: local ids and weights of the received rows, packed [R*T][k]; -1 and 0 for missing rows.
  void rank_major(std::int32_t* ids, float* weights, int parity, cudaStream_t stream) const;
  /// Tells every rank that this rank gives up: their waits end with E_PEER.
  void abandon(cudaStream_t stream) const;
  /// With masks, collective over all ranks: clears all masks. Continues at the latest round.
  void rejoin(cudaStream_t stream) const;

  LowLatencyShape const& shape() const { return shape_; }
  LowLatencyLayout const& layout() const { return params_.at; }
  /// The first byte of the window behind this exchange's part.
  std::size_t end() const { return counters_.bytes; }
  template <class T>
  T* own(std::size_t offset) const {
    return reinterpret_cast<T*>(params_.window.peer[params_.window.rank] + offset);
  }
  /// The memory that combine() reads; experts may write there if outputs travel plain.
  __nv_bfloat16* outputs(int parity) const { return own<__nv_bfloat16>(params_.at.outputs[parity]); }

 private:
  void launch_arriving(LowLatencyDispatch const& a, bool awaits_rows, cudaStream_t stream) const;

  LowLatencyShape shape_;
  ExchangeOptions options_;
  LowLatencyKernelParams params_;
  LowLatencyCounters counters_;
  std::size_t shared_ = 0;
  LowLatencyFixed const* fixed_ = nullptr;  ///< kernels that fit the shape, or null
};

}  // namespace moe::detail
