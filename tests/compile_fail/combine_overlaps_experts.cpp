// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/combine_overlaps_experts.cpp: a layer that asks for dispatch, experts and combine in one schedule, with experts that
// take the counts of rows and the words of columns, but not both in one call.
// expect: the configuration asks for experts and combine in one schedule, which this exchange or these experts cannot run
// prints: Exchange
// prints: Kernel
#include "../archetypes.hpp"

template <class X>
struct InOneSchedule : X {
  using X::X;
  static constexpr bool kArrives = true;
  static constexpr bool kCompletes = true;
};
using Backend = moe_test::WithExchange<InOneSchedule, moe_test::StatedBackend>;
template <class K>
struct OneOfTheTwo : K {
  using K::K;
  template <class Tokens>
  void apply(Tokens const& tokens, moe::Rows<float> y, moe::HostStream stream) const {
    K::apply(tokens, y, stream);
  }
  template <class Tokens, class Told>
  void apply(Tokens const& tokens, moe::Rows<float> y, Told const& told, moe::HostStream stream) const {
    K::apply(tokens, y, told, stream);
  }
};
struct Config : moe_test::Tiny {
  static constexpr bool overlap_dispatch = true;
  static constexpr bool overlap_combine = true;
};
#ifdef MOE_FIXED
using Experts = moe_test::StatedExperts;
#else
using Experts = moe_test::WithKernel<OneOfTheTwo, moe_test::StatedExperts>;
#endif
using Layer = moe::ModularKernel<Config, moe_test::StatedRouter, moe_test::StatedQuantization, Backend, Experts>;

static_assert(sizeof(Layer) > 0);
