// SPDX-License-Identifier: Apache-2.0
// examples/moe/cuda/inside_kernels.cu: the kernels of layers whose experts route inside, besides those of the experts and the router.
#include "moe/backends/collective/device/no_expert_parallel.cuh"
#include "moe/core/contract/monolithic.hpp"
#include "moe/experts/monolithic.cuh"
#include "moe/models/runtime_layer.hpp"
#include "moe/quantization/none.hpp"

using Layer = moe::LogitsRows<moe::models::RuntimeLayer<float, float>>;

template class moe::backends::detail::LocalExchange<moe::space::cuda, Layer, moe::quantization::None, float>;
template void moe::routing::pass_logits<float>(RouteArgs<float> const&, Stream<space::cuda>);
