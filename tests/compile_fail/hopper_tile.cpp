// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/hopper_tile.cpp: Hopper experts with a ring of seven stages under tiles of 160 rows.
// expect: the experts kernel's tile needs more shared memory than a thread block can have
// prints: Value<391552>
// prints: Value<232448>
#include "../archetypes.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"

struct Tiles : moe::hopper::DefaultTiles {
#ifndef MOE_FIXED
  static constexpr int large_stages(moe::hopper::Scheme) { return 7; }
#endif
};
struct Config : moe::LayerDefaults {
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
};
using Layer = moe::ModularKernel<Config, moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>, moe::quantization::None,
                                 moe::backends::NoExpertParallel<moe::space::cuda>, moe::experts::HopperContiguousWith<Tiles>>;

static_assert(sizeof(Layer) > 0);
