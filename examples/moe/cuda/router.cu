// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/router.cu: the routing kernels of a checkpoint's router.
#include "moe/routing/any_router.hpp"
#include "moe/routing/device/route.cuh"

template void moe::routing::RowRouter<moe::routing::RouterConfig>::select<float>(RouteArgs<float> const&, Stream<space::cuda>) const;
