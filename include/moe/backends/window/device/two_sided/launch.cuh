// SPDX-License-Identifier: Apache-2.0
// backends/window/device/two_sided/launch.cuh: launches the kernels of TwoSided.
// Include it in one translation unit: its functions are emitted there even if nothing in that file calls them.
#pragma once

#include "moe/backends/window/device/common/launch.cuh"
#include "moe/backends/window/device/two_sided/move.cuh"
#include "moe/backends/window/device/two_sided/plan.cuh"
#include "moe/backends/window/device/two_sided/sum.cuh"

namespace moe::detail {

[[gnu::used, gnu::noinline, gnu::noclone]] inline TwoSidedCalls::TwoSidedCalls(comm::WindowView const& window, PeerShape const& shape,
                                                                               TwoSidedQueues const& queues, PeerOptions const& options)
    : PeerCalls(window, shape, TwoSidedLayout(shape, queues), options), queues_(queues) {
  expect_peer_device(shape);
  if (queues.depth < 1 || (queues.depth & (queues.depth - 1)) != 0) {
    throw Error(ErrorCode::config, text("queue_depth: ", queues.depth, " must be a power of two"));
  }
  if (int const record = std::max(at_.record_bytes, at_.returned_bytes); queues.entry_bytes < record || queues.entry_bytes % 128 != 0) {
    throw Error(ErrorCode::config,
                text("queue_entry_bytes: ", queues.entry_bytes, " must be a multiple of 128 of at least one record, ", record, " bytes"));
  }
  if (at_.stage_bytes() > 220 * 1024) {
    throw Error(ErrorCode::unsupported, text(shape.name, ": a record of ", at_.stage_bytes(), " bytes does not fit shared memory"));
  }
  int const shared = at_.warps * at_.stage_bytes();
  for (auto* kernel : {&two_sided_move<true>, &two_sided_move<false>}) {
    allow_dynamic_shared(kernel, static_cast<std::size_t>(shared));
    expect_resident(kernel, shape.name, 2 * at_.send_blocks, 32 * at_.warps, static_cast<std::size_t>(shared));
  }
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void TwoSidedCalls::dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream,
                                                                               std::uint32_t refused) const {
  if (refused != 0) {
    enqueue_refusal(window_, at_.planned, 1, kAllRanks, refused, stream);
  }
  comm::HeaderTag const tag =
      shape_.tag().add(static_cast<std::uint64_t>(queues_.depth)).add(static_cast<std::uint64_t>(queues_.entry_bytes));
  TwoSidedPlan const a{params(in, parity), peer_tags(tag, refused)};
  launch_exchange(&two_sided_plan, "two_sided_plan", 1, kPeerThreads, 0, options_.programmatic, stream, a);
  move(in, false, parity, stream);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void TwoSidedCalls::move(ExchangeTokens const& in, bool back, int parity,
                                                                           cudaStream_t stream) const {
  TwoSidedMove const a{params(in, parity), queues_, back};
  launch_exchange(shape_.fp8 ? &two_sided_move<true> : &two_sided_move<false>, "two_sided_move", 2 * at_.send_blocks, 32 * at_.warps,
                  static_cast<std::size_t>(at_.warps) * static_cast<std::size_t>(at_.stage_bytes()), options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void TwoSidedCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out,
                                                                              std::int64_t out_stride, int parity, cudaStream_t stream,
                                                                              std::uint32_t refused) const {
  if (refused != 0) {
    enqueue_refusal(window_, at_.round_of[parity], 0, kAllRanks, refused, stream);
  }
  move(in, true, parity, stream);
  TwoSidedSum const a{params(in, parity), out, out_stride};
  launch_exchange(&two_sided_sum, "two_sided_sum", std::clamp((in.tokens + kQuads - 1) / kQuads, 1, 512), kPeerThreads, 0,
                  options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void TwoSidedCalls::round(float const* y, int parity, cudaStream_t stream) const {
  round_peer_rows<<<1024, 256, 0, stream>>>(y, TwoSidedRowIsUsed{own<std::int32_t>(at_.summary[parity])}, shape_.rows(), shape_.hidden,
                                            outputs(parity));
  check_launch("round_peer_rows");
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void TwoSidedCalls::abandon(cudaStream_t stream) const {
  enqueue_abandon(window_, stream);
}

}  // namespace moe::detail
