// SPDX-License-Identifier: Apache-2.0
// backends/window/device/pplx/launch.cuh: launches the kernels of Pplx.
// Include it in one translation unit: its functions are emitted there even if nothing in that file calls them.
#pragma once

#include "moe/backends/window/device/common/launch.cuh"
#include "moe/backends/window/device/pplx/combine.cuh"
#include "moe/backends/window/device/pplx/dispatch.cuh"

namespace moe::detail {

[[gnu::used, gnu::noinline, gnu::noclone]] inline PplxCalls::PplxCalls(comm::WindowView const& window, PeerShape const& shape,
                                                                       PplxGroup const& group, PeerOptions const& options)
    : PeerCalls(window, shape, PplxLayout(shape, group), options), group_(group) {
  expect_peer_device(shape);
  int const shared = quad_shared(shape);
  for (auto* kernel : {&pplx_dispatch<true>, &pplx_dispatch<false>}) {
    allow_dynamic_shared(kernel, static_cast<std::size_t>(shared));
    expect_resident(kernel, shape.name, shape.blocks, kPeerThreads, static_cast<std::size_t>(shared));
  }
  expect_resident(&pplx_combine, shape.name, shape.blocks, kPeerThreads, 0);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void PplxCalls::dispatch(ExchangeTokens const& in, int parity, cudaStream_t stream,
                                                                           bool send, bool receive, std::uint32_t refused) const {
  if (refused != 0) {
    enqueue_refusal(window_, at_.sent, 1, kAllRanks, refused, stream);
  }
  PplxMove const a{params(in, parity), group_, peer_tags(tag(), refused), send, receive};
  launch_exchange(shape_.fp8 ? &pplx_dispatch<true> : &pplx_dispatch<false>, "pplx_dispatch", shape_.blocks, kPeerThreads,
                  static_cast<std::size_t>(quad_shared(shape_)), options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void PplxCalls::combine(ExchangeTokens const& in, __nv_bfloat16* out,
                                                                          std::int64_t out_stride, int parity, cudaStream_t stream,
                                                                          bool send, bool receive) const {
  PplxMove const a{params(in, parity), group_, peer_tags(tag(), 0), send, receive, out, out_stride};
  launch_exchange(&pplx_combine, "pplx_combine", shape_.blocks, kPeerThreads, 0, options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void PplxCalls::refuse_combine(int parity, cudaStream_t stream,
                                                                                 std::uint32_t code) const {
  enqueue_refusal(window_, at_.round_of[parity], 0, kAllRanks, code, stream);
  PplxMove const a{params({}, parity), group_, peer_tags(tag(), 0), true, false};
  launch_exchange(&pplx_combine, "pplx_combine", shape_.blocks, kPeerThreads, 0, options_.programmatic, stream, a);
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void PplxCalls::round(float const* y, int parity, cudaStream_t stream) const {
  round_peer_rows<<<1024, 256, 0, stream>>>(y, PplxRowIsUsed{own<std::int32_t>(at_.num_tokens[parity]), at_.capacity},
                                            shape_.local_experts() * at_.capacity, shape_.hidden, outputs(parity));
  check_launch("round_peer_rows");
}

[[gnu::used, gnu::noinline, gnu::noclone]] inline void PplxCalls::abandon(cudaStream_t stream) const { enqueue_abandon(window_, stream); }

}  // namespace moe::detail
