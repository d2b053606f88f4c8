// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/block_parts.cpp: compiles what surrounds a layer in a block on the device, which does not depend on the composition.
#include "moe/core/types.hpp"
#include "moe/runner/device/dense_shared.hpp"
#include "moe/runner/device/linear.hpp"
#include "moe/runner/device/row_kernels.hpp"
#include "moe/runner/runner.hpp"

template class moe::runner::gate::Any::Part<moe::space::cuda, float>;
template class moe::runner::gate::Any::Part<moe::space::cuda, moe::bf16>;
template class moe::runner::transform::Projection<float>::Part<moe::space::cuda, float>;
template class moe::runner::transform::Projection<moe::bf16>::Part<moe::space::cuda, moe::bf16>;
template class moe::runner::shared::Dense<float>::Part<moe::space::cuda, float>;
template class moe::runner::shared::Dense<moe::bf16>::Part<moe::space::cuda, moe::bf16>;
