// SPDX-License-Identifier: Apache-2.0
// tests/compile_fail/block_element.cpp: a checkpoint's block in the host space with bfloat16 rows.
// expect: moe: a block in the host space has float32 activations
// prints: bf16 | bfloat16 | Act
#include "moe/backends/no_expert_parallel.hpp"
#include "moe/experts/reference.hpp"
#include "moe/models/block_runner.hpp"
#include "moe/quantization/none.hpp"

#ifdef MOE_FIXED
using Act = float;
#else
using Act = moe::bf16;
#endif
using Block = moe::models::BlockRunner<moe::quantization::None, moe::backends::NoExpertParallel<>, moe::experts::Reference<Act>, Act, Act>;

static_assert(sizeof(Block) > 0);
