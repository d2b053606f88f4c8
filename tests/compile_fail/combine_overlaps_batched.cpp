// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/combine_overlaps_batched.cpp: a layer that asks for experts and combine in one schedule, over LowLatency, which has
// no such combine.
// expect: the configuration asks for experts and combine in one schedule, which this exchange or these experts cannot run
// prints: LowLatencyExchange
// prints: Kernel
#include "../declared_window.hpp"
#include "moe/backends/window/device/low_latency/exchange.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/fp8_block128.hpp"
#include "moe/routing/softmax_topk.hpp"

struct Config : moe::LayerDefaults {
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
#ifdef MOE_FIXED
  static constexpr bool overlap_dispatch = true;
#else
  static constexpr bool overlap_combine = true;
#endif
};
using Layer = moe::ModularKernel<Config, moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>, moe::quantization::Fp8Block<>,
                                 moe::backends::LowLatency<moe_test::DeclaredWindow>, moe::experts::HopperMasked>;

static_assert(sizeof(Layer) > 0);
