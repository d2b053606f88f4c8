// SPDX-License-Identifier: Apache-2.0
// examples/moe/precompiled.hpp: what most sources of the tool include, parsed once for all of them. A source still includes what it uses.
#pragma once

#include <fmt/core.h>

#include <nlohmann/json.hpp>

#ifdef MOE_HAS_CUDA
#include "examples/moe/cuda/run_device_block.hpp"
#else
#include "examples/moe/run_block.hpp"
#endif
