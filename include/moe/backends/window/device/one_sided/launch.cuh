// SPDX-License-Identifier: Apache-2.0
// backends/window/device/one_sided/launch.cuh: launches the kernels of OneSided.
// Include it in one translation unit: its functions are emitted there even if nothing in that file calls them.
#pragma once

#include "moe/backends/window/device/common/launch.cuh"
#include "moe/backends/window/device/one_sided/combine.cuh"
#include "moe/backends/window/device/one_sided/dispatch.cuh"

namespace moe::detail {

[[gnu::used, gnu::noinline, gnu::noclone]] inline OneSidedCalls::OneSidedCalls(comm::WindowView const& window, PeerShape const& shape,
                                                                               PeerOptions const& options)
    : PeerCalls(window, shape, OneSidedLayout(shape), options), active_((std::uint64_t{1} << shape.ranks) - 1) {
  expect_peer_device(shape);
  int const shared = quad_shared(shape);
  for (auto* kernel : {&one_sided_dispatch<true>, &one_sided_dispatch<false>}) {
    allow_dynamic_shared(kernel, static_cast<std::size_t>(shared));
    expect_resident(kernel, shape.name, shape.blocks, kPeerThreads, static_cast<std::size_t>(shared));
  }
  expect_resident(&one_sided_combine, shape.name, shape.blocks, kPeerThreads, 0);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void OneSidedCalls::set_active_ranks(std::uint64_t mask) {
  if (((mask >> window_.rank) & 1U) == 0) {
    throw Error(ErrorCode::argument, text("active ranks: the mask ", mask, " leaves out rank ", window_.rank, " itself"));
  }
  active_ = mask & ((std::uint64_t{1} << shape_.ranks) - 1);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void OneSidedCalls::dispatch(ExchangeTokens const& in, int runtime_max, int parity,
                                                                               cudaStream_t stream, std::uint32_t refused) const {
  if (in.tokens > runtime_max || runtime_max > shape_.max_tokens) {
    throw Error(ErrorCode::capacity,
                text("one_sided: ", in.tokens, " tokens, runtime maximum ", runtime_max, ", max_tokens_per_rank ", shape_.max_tokens));
  }
  if (refused != 0) {
    enqueue_refusal(window_, at_.sent, 1, active_, refused, stream);
  }
  PeerTags const tags = peer_tags(shape_.tag().add(static_cast<std::uint64_t>(runtime_max)), refused);
  OneSidedDispatch const a{params(in, parity), active_, tags, runtime_max};
  launch_exchange(shape_.fp8 ? &one_sided_dispatch<true> : &one_sided_dispatch<false>, "one_sided_dispatch", shape_.blocks, kPeerThreads,
                  static_cast<std::size_t>(quad_shared(shape_)), options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void OneSidedCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out,
                                                                              std::int64_t out_stride, int runtime_max, int parity,
                                                                              cudaStream_t stream, std::uint32_t refused) const {
  if (refused != 0) {
    enqueue_refusal(window_, at_.combined, 1, active_, refused, stream);
  }
  OneSidedCombine const a{params(in, parity), active_, runtime_max, out, out_stride};
  launch_exchange(&one_sided_combine, "one_sided_combine", shape_.blocks, kPeerThreads, 0, options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void OneSidedCalls::round(float const* y, int runtime_max, int parity,
                                                                            cudaStream_t stream) const {
  round_peer_rows<<<1024, 256, 0, stream>>>(y, OneSidedRowIsUsed{own<std::uint64_t>(at_.counts[parity]), runtime_max},
                                            shape_.ranks * runtime_max, shape_.hidden, outputs(parity));
  check_launch("round_peer_rows");
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void OneSidedCalls::abandon(cudaStream_t stream) const {
  enqueue_abandon(window_, stream);
}

}  // namespace moe::detail
