// SPDX-License-Identifier: Apache-2.0
// tests/routing_batch.hpp: the interface of a space for the routing tests that run in both spaces.
#pragma once

#include "moe/routing/row/route_args.hpp"
#include "moe/routing/row/router_config.hpp"

namespace moe_test {

/// Routes a batch with the router under test; the arrays of `args` and of `config`, `bias` [E + Z] and `table` among them, are in host
/// memory.
void select_batch(moe::routing::RouterConfig const& config, moe::routing::RouteArgs<float> const& args);

}  // namespace moe_test
