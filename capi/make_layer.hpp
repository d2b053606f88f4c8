// SPDX-License-Identifier: Apache-2.0
// capi/make_layer.hpp: the layers of libmoe: run-time dimensions, router and activation. Each of host_*.cpp, mpi_*.cpp and cuda/*.cpp
// instantiates a few, so that they compile side by side.
#pragma once

#include <memory>

#include "moe/c/layer_runner.hpp"
#include "moe/models/runtime_layer.hpp"
#include "moe/routing/any_router.hpp"

namespace moe_c {

template <class Act, class Quant, class Backend, class Experts>
std::unique_ptr<moe::c::Runner> make_layer(moe::c::Request const& request, bool& told) {
  using Layer = moe::ModularKernel<moe::models::RuntimeLayer<Act, Act>, moe::routing::AnyRouter, Quant, Backend, Experts>;
  return std::make_unique<moe::c::LayerRunner<Layer, float, moe::bf16, moe::f16>>(request, told);
}

}  // namespace moe_c
