// SPDX-License-Identifier: Apache-2.0
// core/contract/concepts.hpp: the contracts between a ModularKernel and its policies, and of those with activations, communicators and
// windows, each in a header of this folder. archetypes.hpp holds the smallest type that models each of them.
//
// A policy is a small struct of constexpr facts, which check.hpp checks, and one member template that is the object a layer owns:
//   Backend::Exchange<Config, Quant, Partial>   moves tokens to the experts and the results back
//   Experts::Kernel<Config, Quant, Format>      computes the experts of this rank
// Routers and quantisations are such objects themselves. Each required member is one concept and one sentence; a policy that lacks it gives
// one error, which names it. Optional members have defaults in facts.hpp, exchange.hpp, params.hpp and communicator.hpp.
#pragma once

#include "moe/core/contract/activation.hpp"
#include "moe/core/contract/backend.hpp"
#include "moe/core/contract/communicator.hpp"
#include "moe/core/contract/experts.hpp"
#include "moe/core/contract/facts.hpp"
#include "moe/core/contract/params.hpp"
#include "moe/core/contract/quantization.hpp"
#include "moe/core/contract/router.hpp"
#include "moe/core/contract/window.hpp"
#include "moe/core/layer_config.hpp"
