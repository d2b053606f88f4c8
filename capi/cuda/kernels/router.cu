// SPDX-License-Identifier: Apache-2.0
// capi/cuda/kernels/router.cu: the routing kernels of a router that is chosen at run time, and those that check a caller's routing.
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"

namespace moe::routing {

template void RowRouter<RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
template void RowRouter<RouterConfig>::select<bf16>(RouteArgs<bf16> const&, Stream<space::cuda>) const;
template void RowRouter<RouterConfig>::select<f16>(RouteArgs<f16> const&, Stream<space::cuda>) const;
template void take_routing<AnyRouter>(AnyRouter const&, CallerRouting const&, Stream<space::cuda>);

}  // namespace moe::routing
