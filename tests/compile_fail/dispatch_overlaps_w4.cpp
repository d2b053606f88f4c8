// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/dispatch_overlaps_w4.cpp: a layer that asks for dispatch and experts in one schedule, over HighThroughput, which
// counts the rows that arrive, with 4-bit weights, whose kernels do not wait for rows.
// expect: the configuration asks for dispatch and experts in one schedule, which this exchange or these experts cannot run
// prints: HighThroughputExchange
// prints: Kernel
#include "../declared_window.hpp"
#include "moe/backends/window/device/high_throughput/exchange.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/int4_group128.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"

struct Config : moe::LayerDefaults {
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
  static constexpr bool overlap_dispatch = true;
};
#ifdef MOE_FIXED
using Quant = moe::quantization::None;
using Experts = moe::experts::HopperContiguous;
#else
using Quant = moe::quantization::WNa16<4, 128>;
using Experts = moe::experts::HopperW4A16;
#endif
using Layer = moe::ModularKernel<Config, moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>, Quant,
                                 moe::backends::HighThroughput<moe_test::DeclaredWindow>, Experts>;

static_assert(sizeof(Layer) > 0);
