// SPDX-License-Identifier: Apache-2.0
// tests/link_fail/kernels.cpp: a program that names every kind of experts on the device and a router there, and neither includes nor links
// a kernel. The linker's message says what is missing.
// undefined: moe::fix::include_moe_experts_cuda_reference_cuh_or_link_a_model_library()
// undefined: moe::fix::include_moe_experts_cublas_grouped_cuh_or_link_a_model_library()
// undefined: moe::fix::include_moe_experts_hopper_contiguous_cuh_or_link_a_library_of_moe_add_hopper_kernels()
// undefined: moe::fix::include_moe_experts_hopper_masked_cuh_or_link_a_library_of_moe_add_hopper_kernels()
// undefined: moe::fix::include_moe_experts_hopper_w4a16_cuh_or_link_a_library_of_moe_add_hopper_kernels()
// undefined: moe::fix::include_moe_routing_device_route_cuh_or_link_a_model_library()
#include "moe/activation/activation.hpp"
#include "moe/backends/collective/device/no_expert_parallel.hpp"
#include "moe/experts/cublas_grouped.hpp"
#include "moe/experts/cuda_reference.hpp"
#include "moe/experts/hopper_contiguous.hpp"
#include "moe/experts/hopper_masked.hpp"
#include "moe/experts/hopper_w4a16.hpp"
#include "moe/modular_kernel.hpp"
#include "moe/quantization/mxfp4.hpp"
#include "moe/quantization/none.hpp"
#include "moe/routing/softmax_topk.hpp"

using namespace moe;

struct Config : LayerDefaults {
  using Act = bf16;
  using Weight = bf16;
  using Activation = activation::Silu;
};

template <class Experts, class Quant, ActivationFormat Format>
void construct(WeightsOf<Config, Quant> const& weights, Arena<space::cuda>& arena) {
  typename Experts::template Kernel<Config, Quant, Format> const kernel(Shape<Config>({64, 64, 4, 2, false}), weights, 1, {}, {}, {},
                                                                        arena);
}

int main() {
  WeightsOf<Config, quantization::None> const weights{};
  Arena<space::cuda> arena;
  construct<experts::CublasGrouped, quantization::None, ActivationFormat::standard>(weights, arena);
  construct<experts::HopperContiguous, quantization::None, ActivationFormat::standard>(weights, arena);
  construct<experts::HopperMasked, quantization::None, ActivationFormat::batched>(weights, arena);
  construct<experts::HopperW4A16, quantization::Mxfp4W4A16<>, ActivationFormat::standard>({}, arena);

  using Layer = ModularKernel<Config, routing::SoftmaxTopK<routing::Renormalize::yes>, quantization::None,
                              backends::NoExpertParallel<space::cuda>, experts::CudaReference>;
  comm::Self<space::cuda> self;
  Layer layer(self, weights, {.shape = {64, 64, 4, 2, false}, .max_tokens_per_rank = 1, .placement = ExpertPlacement(4, 1)});
  bf16* const rows = nullptr;
  layer.forward(make_rows(static_cast<bf16 const*>(rows), 0, 64), make_rows(static_cast<float const*>(nullptr), 0, 4),
                make_rows(rows, 0, 64));
}
