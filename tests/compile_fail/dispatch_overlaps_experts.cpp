// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/dispatch_overlaps_experts.cpp: a layer that asks for dispatch and experts in one schedule, over an exchange that
// counts the rows that arrive, with experts that do not take the counts.
// expect: the configuration asks for dispatch and experts in one schedule, which this exchange or these experts cannot run
// prints: Exchange
// prints: Kernel
#include "../archetypes.hpp"

template <class X>
struct Arriving : X {
  using X::X;
  static constexpr bool kArrives = true;
};
using Backend = moe_test::WithExchange<Arriving, moe_test::StatedBackend>;
struct Config : moe_test::Tiny {
  static constexpr bool overlap_dispatch = true;
};
#ifdef MOE_FIXED
using Experts = moe_test::StatedExperts;
#else
using Experts = moe_test::ArchetypeExperts<>;
#endif
using Layer = moe::ModularKernel<Config, moe_test::StatedRouter, moe_test::StatedQuantization, Backend, Experts>;

static_assert(sizeof(Layer) > 0);
