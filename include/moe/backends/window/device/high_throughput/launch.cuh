// SPDX-License-Identifier: Apache-2.0
// backends/window/device/high_throughput/launch.cuh: launches the kernels of the high-throughput exchange. Include it in one translation
// unit: its functions are emitted there even if no code in that file calls them, so that other files of the program need no nvcc.
#pragma once

#include "moe/backends/window/device/common/launch.cuh"
#include "moe/backends/window/device/high_throughput/calls.hpp"
#include "moe/backends/window/device/high_throughput/combine_columns.cuh"
#include "moe/backends/window/device/high_throughput/rows.cuh"

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

static inline auto high_throughput_dispatch_kernel(bool fp8, bool columns) -> void (*)(HighThroughputDispatch) {
  if (columns) {
    return fp8 ? &high_throughput_dispatch<true, true> : &high_throughput_dispatch<false, true>;
  }
  return fp8 ? &high_throughput_dispatch<true, false> : &high_throughput_dispatch<false, false>;
}

[[gnu::used,
  gnu::noinline]] inline HighThroughputCalls::HighThroughputCalls(comm::WindowView const& window, HighThroughputShape const& shape,
                                                                  ExchangeOptions const& options, HighThroughputTuning const& tuning)
    : shape_(shape), tuning_(tuning), options_(options), params_(window, shape, options) {
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
  for (bool const columns : {true, false}) {
    for (bool const fp8 : {true, false}) {
      check_cuda(cudaFuncSetAttribute(high_throughput_dispatch_kernel(fp8, columns), kAttribute, kHighThroughputShared),
                 "cudaFuncSetAttribute");
    }
  }
  check_cuda(cudaFuncSetAttribute(&high_throughput_rows<true>, kAttribute, kHighThroughputShared), "cudaFuncSetAttribute");
  check_cuda(cudaFuncSetAttribute(&high_throughput_rows<false>, kAttribute, kHighThroughputShared), "cudaFuncSetAttribute");
  check_cuda(cudaFuncSetAttribute(&high_throughput_combine, kAttribute, kHighThroughputShared), "cudaFuncSetAttribute");
  check_cuda(cudaFuncSetAttribute(&high_throughput_combine_columns, kAttribute, kHighThroughputShared), "cudaFuncSetAttribute");
  set_blocks(shape.blocks);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void HighThroughputCalls::set_blocks(int blocks) {
  HighThroughputShape changed = shape_;
  changed.blocks = blocks;
  changed.check();
  bool const columns = changed.column_blocks > 0;
  expect_resident(high_throughput_dispatch_kernel(true, columns), "high_throughput", blocks, 32 * dispatch_warps_, dispatch_shared_);
  expect_resident(&high_throughput_combine, "high_throughput", blocks, 32 * combine_warps_, combine_shared_);
  if (columns) {
    expect_resident(&high_throughput_combine_columns, "high_throughput", blocks, 32 * combine_warps_, combine_shared_);
  }
  shape_ = changed;
  params_.set_shape(changed);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void HighThroughputCalls::dispatch(ExchangeTokens const& in, int parity,
                                                                                     cudaStream_t stream, int routing_parity,
                                                                                     std::uint32_t refused) const {
  auto const half = HighThroughputParity::of(parity, routing_parity);
  HighThroughputDispatch const a{params_,
                                 in,
                                 options_.scales,
                                 half,
                                 tuning_.dispatch_piece,
                                 routing_parity >= 0,
                                 refused,
                                 shape_.arriving,
                                 shape_.arriving && routing_parity < 0};
  launch_exchange(high_throughput_dispatch_kernel(shape_.fp8, shape_.column_blocks > 0), "high_throughput_dispatch", shape_.blocks,
                  32 * dispatch_warps_, dispatch_shared_, options_.programmatic, stream, a);
  if (a.arriving) {
    launch_exchange(shape_.fp8 ? &high_throughput_rows<true> : &high_throughput_rows<false>, "high_throughput_rows", shape_.blocks,
                    32 * dispatch_warps_, dispatch_shared_, options_.programmatic, stream, a);
  }
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void HighThroughputCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out,
                                                                                    std::int64_t out_stride, int parity,
                                                                                    cudaStream_t stream, int routing_parity,
                                                                                    std::uint32_t refused) const {
  auto const half = HighThroughputParity::of(parity, routing_parity);
  HighThroughputColumns const a{
      {params_, in, half, tuning_.combine_piece, combine_stages_, shape_.arriving, options_.fenced, refused, out, out_stride},
      shape_.columns(),
      shape_.num_column_blocks(),
      false};
  if (shape_.column_blocks > 0) {
    launch_exchange(&high_throughput_combine_columns, "high_throughput_combine", shape_.blocks, 32 * combine_warps_, combine_shared_,
                    options_.programmatic, stream, a);
    return;
  }
  launch_exchange<HighThroughputCombine>(&high_throughput_combine, "high_throughput_combine", shape_.blocks, 32 * combine_warps_,
                                         combine_shared_, options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void HighThroughputCalls::combine_completing(ExchangeTokens const& in, __nv_bfloat16* out,
                                                                                               std::int64_t out_stride, int parity,
                                                                                               cudaStream_t stream,
                                                                                               int routing_parity) const {
  auto const half = HighThroughputParity::of(parity, routing_parity);
  HighThroughputColumns const a{
      {params_, in, half, tuning_.combine_piece, combine_stages_, shape_.arriving, options_.fenced, 0, out, out_stride},
      shape_.columns(),
      shape_.num_column_blocks(),
      true};
  launch_exchange(&high_throughput_combine_columns, "high_throughput_combine", shape_.blocks, 32 * combine_warps_, combine_shared_,
                  options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void HighThroughputCalls::reduce(__nv_bfloat16 const* y, int parity, int blocks,
                                                                                   cudaStream_t stream, int routing_parity) const {
  HighThroughputReduce const a{params_, HighThroughputParity::of(parity, routing_parity), false, y};
  launch_exchange(&high_throughput_reduce, "high_throughput_reduce", blocks, 256, 0, options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void HighThroughputCalls::round(float const* y, int parity, cudaStream_t stream,
                                                                                  int routing_parity) const {
  int const routing = HighThroughputParity::of(parity, routing_parity).routing;
  round_rows<<<1024, 256, 0, stream>>>(y, own<std::int32_t>(params_.at.summary[routing]), shape_.hidden, outputs(parity));
  check_launch("round_rows");
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void HighThroughputCalls::abandon(cudaStream_t stream) const {
  enqueue_abandon(params_.window, stream);
}

}  // namespace moe::detail
