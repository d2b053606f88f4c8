// SPDX-License-Identifier: Apache-2.0
// models/load_runner_host.hpp: moe::load_runner() in the host space, and a block of any checkpoint: models::AnyBlock.
#pragma once

#include "moe/experts/onednn.hpp"
#include "moe/models/load_runner.hpp"
#include "moe/runner/host/primitives.hpp"

namespace moe::models {

template <class Weight>
using HostShared = runner::shared::Separate<experts::OneDnn, Weight>;

/// The block of any checkpoint in the host space, with run-time dimensions: float32 rows; Weight: element of weights that are not
/// quantised.
template <class Quant, class Backend, class Experts = experts::OneDnn, class Weight = float>
using AnyBlock =
    Runner<ModularKernel<RuntimeLayer<float, Weight>, routing::AnyRouter, Quant, Backend, Experts>, AnyParts<Weight, HostShared>>;

}  // namespace moe::models
