// SPDX-License-Identifier: Apache-2.0
// backends/window/device/low_latency/launch.cuh: launches the kernels of the low-latency exchange. Include it in one translation unit: its
// functions are emitted there even if no code in that file calls them, so that other files of the program need no nvcc.
#pragma once

#include "moe/backends/window/device/common/launch.cuh"
#include "moe/backends/window/device/low_latency/calls.hpp"
#include "moe/backends/window/device/low_latency/coded.cuh"
#include "moe/backends/window/device/low_latency/combine.cuh"
#include "moe/backends/window/device/low_latency/dispatch.cuh"
#include "moe/backends/window/device/low_latency/masks.cuh"

namespace moe::detail {

[[gnu::used, gnu::noinline,
  gnu::noclone]] inline LowLatencyCalls::LowLatencyCalls(comm::WindowView const& window, LowLatencyShape const& shape,
                                                         ExchangeOptions const& options, LowLatencyFixed const* fixed)
    : shape_(shape), options_(options), params_(window, shape, options), counters_(shape, params_.at.bytes) {
  shared_ = low_latency_dispatch_shared(shape);
  for (auto* kernel : {&low_latency_dispatch<true, true>, &low_latency_dispatch<true, false>, &low_latency_dispatch<false, true>,
                       &low_latency_dispatch<false, false>}) {
    allow_dynamic_shared(kernel, shared_);
    expect_resident(kernel, "low_latency", shape.blocks, kLowLatencyThreads, shared_);
  }
  if (shape.arriving) {
    for (auto* kernel : {&low_latency_dispatch_arriving<true>, &low_latency_dispatch_arriving<false>}) {
      allow_dynamic_shared(kernel, shared_);
      expect_resident(kernel, "low_latency", shape.blocks, kLowLatencyThreads, shared_);
    }
  }
  if (fixed != nullptr && fixed->fit(shape)) {
    fixed->prepare(shape, shared_);
    fixed_ = fixed;
  }
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void LowLatencyCalls::dispatch(ExchangeTokens const& in, std::int32_t* expert_num_tokens,
                                                                                 int parity, cudaStream_t stream, bool send, bool receive,
                                                                                 std::uint32_t refused) const {
  if (shape_.masks && !send) {
    LowLatencyCollect const c{params_, parity, expert_num_tokens, options_.expert_totals};
    launch_exchange(&low_latency_collect, "low_latency_collect", 1, kMaskThreads, 0, options_.programmatic, stream, c);
    return;
  }
  LowLatencyPieces const pieces(in.tokens, shape_.hidden, shape_.blocks, kDispatchStep);
  LowLatencyDispatch const a{
      params_, in, pieces, options_.scales, parity, send, receive && !shape_.masks, refused, expert_num_tokens, options_.expert_totals};
  if (shape_.arriving) {
    launch_arriving(a, true, stream);
    return;
  }
  auto* const kernel = shape_.fp8 ? (shape_.per_rank ? &low_latency_dispatch<true, true> : &low_latency_dispatch<true, false>)
                                  : (shape_.per_rank ? &low_latency_dispatch<false, true> : &low_latency_dispatch<false, false>);
  if (fixed_ != nullptr) {
    fixed_->dispatch(a, shared_, options_.programmatic, stream);
  } else {
    launch_exchange(kernel, "low_latency_dispatch", shape_.blocks, kLowLatencyThreads, shared_, options_.programmatic, stream, a);
  }
  if (shape_.masks && receive) {
    dispatch(in, expert_num_tokens, parity, stream, false, true);
  }
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void LowLatencyCalls::launch_arriving(LowLatencyDispatch const& a, bool awaits_rows,
                                                                                        cudaStream_t stream) const {
  auto const p = static_cast<std::size_t>(a.parity);
  launch_exchange(shape_.fp8 ? &low_latency_dispatch_arriving<true> : &low_latency_dispatch_arriving<false>,
                  "low_latency_dispatch_arriving", shape_.blocks, kLowLatencyThreads, shared_, options_.programmatic, stream,
                  LowLatencyArriving{a, counters_.arrived[p], counters_.expected[p], awaits_rows});
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void LowLatencyCalls::dispatch_arriving(ExchangeTokens const& in,
                                                                                          std::int32_t* expert_num_tokens, int parity,
                                                                                          cudaStream_t stream) const {
  if (!shape_.arriving) {
    dispatch(in, expert_num_tokens, parity, stream);
    return;
  }
  LowLatencyPieces const pieces(in.tokens, shape_.hidden, shape_.blocks, kDispatchStep);
  launch_arriving({params_, in, pieces, options_.scales, parity, true, true, 0, expert_num_tokens, options_.expert_totals}, false, stream);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void LowLatencyCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out,
                                                                                std::int64_t out_stride, int parity, cudaStream_t stream,
                                                                                std::uint32_t refused) const {
  if (shape_.masks) {
    LowLatencyMeet const m{params_, refused};
    launch_exchange(&low_latency_meet, "low_latency_meet", 1, comm::kMaxWindowRanks, 0, options_.programmatic, stream, m);
  }
  LowLatencyPieces const pieces(in.tokens, shape_.hidden, shape_.blocks, kCombineStep);
  LowLatencyCombine const a{params_, options_.fenced, refused, parity, in, pieces, out, out_stride};
  if (fixed_ != nullptr) {
    fixed_->combine(a, options_.programmatic, stream);
    return;
  }
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
  LowLatencyReduce const a{params_, parity, y};
  auto* const kernel = shape_.combine == CombineFormat::plain ? &low_latency_reduce<CombineFormat::plain, T>
                       : shape_.combine == CombineFormat::fp8 ? &low_latency_reduce<CombineFormat::fp8, T>
                                                              : &low_latency_reduce<CombineFormat::logfmt, T>;
  launch_exchange(kernel, "low_latency_reduce", blocks, 256, 0, options_.programmatic, stream, a);
}

template <class T>
void LowLatencyCalls::code(T const* y, std::int32_t const* num_rows, int parity, cudaStream_t stream, int batches) const {
  LowLatencyOutputs const a{params_, batches > 0 ? batches : shape_.local_experts(), parity, y, num_rows};
  auto* const kernel = shape_.combine == CombineFormat::plain ? &low_latency_outputs<CombineFormat::plain, T>
                       : shape_.combine == CombineFormat::fp8 ? &low_latency_outputs<CombineFormat::fp8, T>
                                                              : &low_latency_outputs<CombineFormat::logfmt, T>;
  launch_exchange(kernel, "low_latency_outputs", 32 * a.batches, 256, 0, options_.programmatic, stream, a);
}

template void LowLatencyCalls::reduce(__nv_bfloat16 const*, int, int, cudaStream_t) const;
template void LowLatencyCalls::reduce(float const*, int, int, cudaStream_t) const;
template void LowLatencyCalls::code(__nv_bfloat16 const*, std::int32_t const*, int, cudaStream_t, int) const;
template void LowLatencyCalls::code(float const*, std::int32_t const*, int, cudaStream_t, int) const;

[[gnu::used, gnu::noinline, gnu::noclone]] inline void LowLatencyCalls::rank_major(std::int32_t* ids, float* weights, int parity,
                                                                                   cudaStream_t stream) const {
  LowLatencyRankMajor const a{params_, parity, ids, weights};
  int const blocks = std::clamp((shape_.capacity() * shape_.topk + 255) / 256, 1, 64);
  launch_exchange(&low_latency_rank_major, "low_latency_rank_major", blocks, 256, 0, options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void LowLatencyCalls::abandon(cudaStream_t stream) const {
  enqueue_abandon(params_.window, stream);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void LowLatencyCalls::rejoin(cudaStream_t stream) const {
  for (int step = 0; step < 2; ++step) {
    comm::detail::window_barrier<<<1, comm::kMaxWindowRanks, 0, stream>>>(params_.window);
    low_latency_rejoin<<<1, 256, 0, stream>>>(params_.window, params_.at, step);
  }
  comm::detail::window_barrier<<<1, comm::kMaxWindowRanks, 0, stream>>>(params_.window);
  check_launch("low_latency_rejoin");
}

}  // namespace moe::detail
