// SPDX-License-Identifier: Apache-2.0
// tests/install/model_library/export.cpp: the functions of moe.h over the consumer's model library, for a shared library.
#include <consumer_models.hpp>
#include <moe/c/export.hpp>

using Layer = moe::ModularKernel<Config, Router, Quantization, Backend, Experts>;
MOE_C_EXPORT(moe::c::Exported<Layer>)
