// SPDX-License-Identifier: Apache-2.0
// c/routing.hpp: moe_route() over AnyRouter.
#pragma once

#include <cstdint>

#include "moe/c/config.hpp"
#include "moe/c/stream.hpp"
#include "moe/c/tensor.hpp"
#include "moe/moe.h"
#include "moe/routing/any_router.hpp"

namespace moe::c {

namespace detail {

template <class L>
void route_as(routing::AnyRouter const& router, Device device, DLTensor const* logits, DLTensor const* token_ids, DLTensor const* topk_ids,
              DLTensor const* topk_weights, [[maybe_unused]] void* stream) {
  Rows<L const> const rows = rows_of<L>("logits", logits, device);
  if (std::int64_t const width = router.resolved().num_logits(); rows.extent(1) != width) {
    refuse_shape("logits", *logits, text("[", rows.extent(0), ", ", width, "]"));
  }
  routing::RouteArgs<L> args{.logits = rows,
                             .num_valid_rows = rows.extent(0),
                             .topk_ids = rows_of<std::int32_t>("topk_ids", topk_ids, device),
                             .topk_weights = rows_of<float>("topk_weights", topk_weights, device)};
  if (token_ids != nullptr) args.token_ids = vector_of<std::int64_t>("token_ids", token_ids, rows.extent(0), device);
  if (device.space == SpaceKind::host) {
    stream_of<space::host>(stream, device);
    router.select(args);
    return;
  }
#ifdef MOE_C_ROUTES_ON_DEVICE
  OnDevice<space::cuda> const current(device);
  routing::check_args(router.resolved(), args);
  router.select(args, stream_of<space::cuda>(stream, device));
#else
  throw Error(ErrorCode::unsupported, text("logits: device is ", describe(device), ", this library routes on cpu alone"));
#endif
}

}  // namespace detail

inline void route_any(moe_router_config const& config, DLTensor const* logits, DLTensor const* token_ids, DLTensor const* topk_ids,
                      DLTensor const* topk_weights, void* stream) {
  DLTensor const& l = *not_null("logits", logits);
  Device const device = device_of("logits", l);
  routing::AnyRouter const router(router_of(config, device, 0, 0));
  auto const route = [&]<class L>(L) { detail::route_as<L>(router, device, logits, token_ids, topk_ids, topk_weights, stream); };
  if (same(l.dtype, dl_type<bf16>())) return route(bf16{});
  if (same(l.dtype, dl_type<f16>())) return route(f16{});
  if (same(l.dtype, dl_type<float>())) return route(float{});
  detail::refuse("logits", text("dtype is ", describe(l.dtype)), "float32, bfloat16 or float16");
}

}  // namespace moe::c
