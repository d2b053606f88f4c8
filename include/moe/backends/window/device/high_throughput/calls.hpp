// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/calls.hpp: the high-throughput exchange of one rank, as calls that enqueue its kernels. Defined in
// launch.cuh.
#pragma once

#include "moe/backends/window/device/high_throughput/params.hpp"
#include "moe/comm/arrivals.hpp"
#include "moe/comm/completions.hpp"

namespace moe::detail {

/// Sizes that affect speed only.
struct HighThroughputTuning {
  int dispatch_warps = 16;
  int dispatch_piece = 1024;  ///< bytes of a row that are stored to all its ranks before the next piece
  int combine_piece = 2048;   ///< bytes of a row in one stage
  friend constexpr bool operator==(HighThroughputTuning const&, HighThroughputTuning const&) = default;
};

/// The kernels of one rank over one part of a window. Owns no memory.
class HighThroughputCalls {
 public:
  /// `options`: begin, expert_totals and weight_on_input are not used. E_CONFIG, E_UNSUPPORTED for the shape or the device.
  HighThroughputCalls(comm::WindowView const& window, HighThroughputShape const& shape, ExchangeOptions const& options,
                      HighThroughputTuning const& tuning = {});
  HighThroughputCalls(comm::WindowView const& window, HighThroughputShape const& shape, bool programmatic,
                      HighThroughputTuning const& tuning = {}, ScaleRule const& rule = {1e-10F, false})
      : HighThroughputCalls(window, shape, ExchangeOptions{.programmatic = programmatic, .scales = rule}, tuning) {}
  static std::size_t window_bytes(HighThroughputShape const& shape) { return HighThroughputLayout(shape).bytes; }

  /// `routing_parity` >= 0: cached; reuses the row positions of the call that ran with that parity and the same routing. `refused`, 1 +
  /// ErrorCode: only tells the peers that this rank cannot take part; `in` must be empty. An overflow, which all ranks see, leaves no row
  /// on any rank, and combine() then gives zeros.
  void dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream, int routing_parity = -1, std::uint32_t refused = 0) const;
  /// The counts of a dispatch of an arriving shape that is not cached. Such a dispatch is two kernels: the second moves the rows, and a
  /// kernel after it that does not wait for its dependencies runs beside it.
  comm::Arrivals arrivals(int parity) const {
    auto const p = static_cast<std::size_t>(parity);
    return {params_.window, own<std::uint32_t>(params_.at.arrived[p]),
            own<std::uint64_t>(params_.at.counts[p]) + params_.window.rank * shape_.local_experts(), shape_.num_experts + shape_.ranks,
            shape_.local_experts()};
  }
  /// With column blocks: in which words the experts of the last dispatch of this parity tell what is complete.
  comm::Completions completions(int parity) const {
    auto const p = static_cast<std::size_t>(parity);
    return {params_.window,   params_.at.complete[p], own<std::uint32_t>(params_.at.round[p]), shape_.num_column_blocks(),
            shape_.columns(), shape_.blocks};
  }
  /// Reads the rows in outputs(parity) of every rank and sums them in rank order.
  void combine(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream,
               int routing_parity = -1, std::uint32_t refused = 0) const;
  /// With column blocks: combine() that may run beside the experts, the last kernels in `stream`, which tell every block of completions().
  /// Other ranks may run combine() in the same round.
  void combine_completing(ExchangeTokens const& in, __nv_bfloat16* out, std::int64_t out_stride, int parity, cudaStream_t stream,
                          int routing_parity = -1) const;
  /// Sums expert-major outputs [list entries][H] into outputs(parity), before combine(). Needs lists.
  void reduce(__nv_bfloat16 const* y, int parity, int blocks, cudaStream_t stream, int routing_parity = -1) const;
  /// Rounds float32 rows [rows][H] into outputs(parity), before combine().
  void round(float const* y, int parity, cudaStream_t stream, int routing_parity = -1) const;
  /// Tells every rank that this rank gives up: their waits end with E_PEER.
  void abandon(cudaStream_t stream) const;

  /// Sets the number of blocks of the following calls. E_CONFIG, E_UNSUPPORTED if it is not possible.
  void set_blocks(int blocks);
  HighThroughputShape const& shape() const { return shape_; }
  HighThroughputLayout const& layout() const { return params_.at; }
  template <class T>
  T* own(std::size_t offset) const {
    return reinterpret_cast<T*>(params_.window.peer[params_.window.rank] + offset);
  }
  __nv_bfloat16* outputs(int parity) const { return own<__nv_bfloat16>(params_.at.outputs[parity]); }

 private:
  HighThroughputShape shape_;
  std::size_t dispatch_shared_ = 0;
  std::size_t combine_shared_ = 0;
  int dispatch_warps_ = 1;
  int combine_warps_ = 1;
  int combine_stages_ = 1;
  HighThroughputTuning tuning_;
  ExchangeOptions options_;
  HighThroughputKernelParams params_;
};

}  // namespace moe::detail
