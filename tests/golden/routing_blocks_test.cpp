// SPDX-License-Identifier: Apache-2.0
// tests/golden/routing_blocks_test.cpp: the routing of every model family's own code (tests/routing_golden.hpp) on the host.
// moe-alone: its suite is in routing_golden.hpp, and it defines a function that is declared there.
#include "routing_golden.hpp"

void moe_test::select_batch(moe::routing::RouterConfig const& config, moe::routing::RouteArgs<float> const& args) {
  moe::routing::AnyRouter(config).select(args);
}
