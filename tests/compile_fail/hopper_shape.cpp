// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/hopper_shape.cpp: Hopper experts with an intermediate width of 100, rows of 200 bytes.
// expect: hidden or intermediate is not a multiple of the experts kernel's tile
// prints: experts::HopperContiguousWith | experts::HopperContiguous
// prints: Value<128>
// prints: MultipleOf<8>
// prints: Value<100>
// prints: MultipleOf<8>
#include "../archetypes.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"

struct Config : moe::LayerDefaults {
  static constexpr int hidden = 128;
#ifdef MOE_FIXED
  static constexpr int intermediate = 104;
#else
  static constexpr int intermediate = 100;
#endif
  using Act = moe::bf16;
  using Weight = moe::bf16;
  using Activation = moe::activation::Silu;
};
using Layer = moe::ModularKernel<Config, moe::routing::SoftmaxTopK<moe::routing::Renormalize::yes>, moe::quantization::None,
                                 moe::backends::NoExpertParallel<moe::space::cuda>, moe::experts::HopperContiguous>;

static_assert(sizeof(Layer) > 0);
